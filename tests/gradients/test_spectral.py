"""Spectral normalisation: the passes write to no buffer, and a step moves the vectors once, whatever it draws."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from gradients.cases import matches, noise, squared
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.spectral import advance, frozen, power_iterations
from sordino.records.gradients import record_gradients
from sordino.sampling import LogicalBatch

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh()), (4,)),
    "convolution": (lambda: parametrizations.spectral_norm(nn.Conv1d(3, 2, 2)), (3, 4)),
    "vector": (lambda: parametrizations.spectral_norm(nn.LayerNorm(4)), (4,)),
    "hook": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), (4,)),
    "hook, convolution": (lambda: nn.utils.spectral_norm(nn.Conv1d(3, 2, 2)), (3, 4)),
}


def vectors(model: nn.Module) -> list[Tensor]:
    return [b.clone() for b in model.buffers()]


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_vectors_as_they_are(name: str) -> None:
    make, shape = MODELS[name]
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        model = make().double()
        before = vectors(model)
        with frozen(power_iterations(model)):  # the loop's own passes would iterate
            matches(model, noise(rows, *shape), rows=rows)
        clipped_sum(model, squared, Rows(noise(rows, *shape), noise(rows)), FlatClip(1.0))
        assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("name", ["linear", "hook", "convolution"])
def test_a_step_iterates_as_one_plain_pass_does(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, plain = make(), make()
    plain.load_state_dict(model.state_dict())
    advance(model)
    plain(torch.randn(2, *shape))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), plain.buffers(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(model.buffers(), make().buffers(), strict=True))
    model.eval()
    before = vectors(model)
    advance(model)
    assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))


@pytest.mark.parametrize("name", ["linear", "hook"])
def test_the_vectors_do_not_tell_how_many_records_were_drawn(name: str) -> None:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model = make()
    start = {k: v.clone() for k, v in model.state_dict().items()}
    for key in (k for k in start if k.endswith("u")):  # torch's own have converged after its first iterations
        start[key] = torch.ones_like(start[key]) / start[key].norm(p=0).sqrt()
    data = torch.utils.data.TensorDataset(torch.randn(40, *shape), torch.randn(40))
    found = []
    for drawn in (0, 1, 40):
        model.load_state_dict(start)
        gradients = record_gradients(model, squared, data, FlatClip(1.0))
        gradients(LogicalBatch(0, torch.arange(drawn), 16))
        found.append(vectors(model))
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
    assert not torch.equal(found[0][0], start[next(k for k in start if k.endswith("u"))])
