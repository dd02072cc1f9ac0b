"""One walk finds what torch's own walks find, and refuses what has to be refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sordino.errors import InputError, Refused
from sordino.gradients.survey import checked_parameters, survey


class Nested(nn.Module):
    """Tied weights, a module in two places, frozen parameters, an absent bias, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.block = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Sequential(nn.ReLU(), nn.Linear(4, 4)))
        self.again = self.block[1]
        self.out = nn.Linear(4, 7)
        self.out.weight = self.table.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.norm = nn.BatchNorm1d(4).eval()
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.register_buffer("nothing", None)
        self.block[0].weight.requires_grad_(False)


def test_it_finds_what_torch_finds_in_the_same_order() -> None:
    model = Nested()
    found = survey(model)
    expected = [(n, id(p)) for n, p in model.named_parameters() if p.requires_grad]
    assert [(n, id(p)) for n, p in found.parameters.items()] == expected
    assert {(held.name, id(held.tensor)) for held in found.state} >= {(n, id(b)) for n, b in model.named_buffers()}
    assert checked_parameters(model).keys() == found.parameters.keys()


def test_the_bytes_of_a_record_leave_trained_tables_out() -> None:
    model = Nested()
    everything = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    assert survey(model).dense_bytes == everything - 4 * 7 * 4


def test_a_batchnorm_in_training_is_named_and_an_untrained_model_is_an_error() -> None:
    model = Nested().train()
    with pytest.raises(Refused, match="norm: BatchNorm in training mode"):
        survey(model)
    with pytest.raises(InputError, match="no trainable parameter"):
        survey(nn.Sequential(nn.ReLU()))


def test_a_scripted_or_compiled_module_inside_is_named() -> None:
    inside = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(Refused, match="1: a scripted module"):
        survey(inside)
    compiled = nn.Linear(2, 2)
    compiled.compile(backend="eager")
    with pytest.raises(Refused, match=r"0: torch\.compile hides"):
        survey(nn.Sequential(compiled))
    with pytest.raises(Refused, match=r"the model: torch\.compile hides"):
        survey(torch.compile(nn.Linear(2, 2), backend="eager"))


def test_a_lazy_layer_is_named_before_its_first_run_and_trained_after() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    for walk in (survey, checked_parameters):
        with pytest.raises(InputError, match=r"^0.weight: a lazy layer.*run the model once"):
            walk(model)
    model(torch.zeros(1, 4))
    assert survey(model).parameters["0.weight"].shape == (3, 4)
