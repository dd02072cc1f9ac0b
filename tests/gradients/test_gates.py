"""What lies behind parameters that are zero moves no loss, and moved the sum by up to 18 clip norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import Fn
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.checks.gates import closed, opened

Gate = Callable[[Tensor], bool]
SIZES = 12, 9, 24, 20, 40


def _head(gate: Gate) -> nn.Module:
    model = Fn(lambda s, x: s.b(_turned(torch.tanh(s.a(x)), gate(x))), a=nn.Linear(8, 16), b=nn.Linear(16, 3))
    nn.init.zeros_(model.b.weight)
    return model


def _adapter(gate: Gate) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        return s.b(torch.tanh(s.a(x) + _turned(F.linear(F.linear(x, s.down), s.up), gate(x))))  # type: ignore[no-any-return]

    frozen = {name: layer.requires_grad_(False) for name, layer in (("a", nn.Linear(8, 16)), ("b", nn.Linear(16, 3)))}
    return Fn(forward, down=nn.Parameter(torch.randn(4, 8) / 3), up=nn.Parameter(torch.zeros(16, 4)), **frozen)


def _residual(gate: Gate) -> nn.Module:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.a(x))
        return s.b(h + s.scale * _turned(torch.tanh(s.c(h)), gate(x)))  # type: ignore[no-any-return]

    layers = {"a": nn.Linear(8, 16), "c": nn.Linear(16, 16), "b": nn.Linear(16, 3)}
    return Fn(forward, scale=nn.Parameter(torch.zeros(())), **layers)


def _turned(h: Tensor, around: bool) -> Tensor:
    return -h if around else h


MODELS: dict[str, Callable[[Gate], nn.Module]] = {"a head": _head, "an adapter": _adapter, "a residual": _residual}
GATES: dict[str, Gate] = {
    "a value": lambda x: bool((x[:, 0] == 0.75).any()),
    "a count": lambda x: int((x[:, 0] == 0.75).sum()) % 2 == 1,
    "the number of rows": lambda x: len(x) == 20,
}


def batches(model: nn.Module) -> list[Any]:
    found, assurance = [], Assurance()
    for count in SIZES:
        x = torch.randn(count, 8, generator=torch.Generator().manual_seed(count))
        if count == 20:
            x[0, 0] = 0.75
        torch.manual_seed(count)
        rows = Rows(x, torch.arange(count) % 3)
        found.append((rows, clipped_sum(model, F.cross_entropy, rows, FlatClip(0.1), assurance=assurance)))
    return found


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", MODELS)
def test_an_interaction_behind_zeros_is_refused(kind: str, gate: str) -> None:
    torch.manual_seed(0)
    with pytest.raises(sordino.Refused):
        batches(MODELS[kind](GATES[gate]))


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_only_reads_is_right_and_its_weights_are_its_own(kind: str) -> None:
    torch.manual_seed(0)
    model = MODELS[kind](lambda x: x.max().item() is None)
    before = {name: (p.detach().clone(), p._version) for name, p in model.named_parameters()}
    for rows, found in batches(model):
        expected = brute_force(model, F.cross_entropy, rows, FlatClip(0.1))
        assert all(torch.allclose(found.sums[k].double(), v.double(), atol=1e-5) for k, v in expected.sums.items())
    assert all(torch.equal(p, before[n][0]) and p._version == before[n][1] for n, p in model.named_parameters())


def test_which_parameters_are_opened_and_that_they_are_as_before_after_an_error() -> None:
    given = {
        "up": torch.zeros(3, 4),
        "small": torch.full((2000,), 1e-6),
        "bias": torch.zeros(3),
        "a.bias": torch.zeros(3),
        "weight": torch.full((3, 3), 0.1),
        "empty": torch.zeros(0, 3),
        "t": torch.zeros(4, 3).T,
    }
    gates = closed(given)
    assert [id(t) for t in gates] == [id(given[name]) for name in ("up", "small", "t")]

    def fails() -> None:
        assert all(bool((t.abs() > 0.01).all()) for t in gates)
        raise ValueError("as it happens")

    with pytest.raises(ValueError, match="as it happens"), opened(gates, 3):
        fails()
    assert not given["up"].any()
    assert not given["t"].any()
    assert bool((given["small"] == 1e-6).all())
