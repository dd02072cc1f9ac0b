"""A public vector subtracted from every record's gradient before it is clipped: exact, and never beyond the bound."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.clipping import AutomaticClip, Clipping, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.brute_force import _clip
from sordino.gradients.engine import layers, per_record_gradients
from sordino.gradients.survey import checked_parameters

CLIPPINGS = [FlatClip(0.5), AutomaticClip(1.0, gamma=1.0), NormalisedClip(1.0), PerLayerClip(0.7), L1Clip(0.5)]
CLIPPINGS += [L2LinfClip(0.5, p=4.0)]  # type: ignore[list-item]


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4), nn.Tanh(), nn.Linear(4, 2)
    return nn.Sequential(*layers)


def rows(count: int = 7) -> Rows:
    generator = torch.Generator().manual_seed(1)
    return Rows(torch.randn(count, 1, 6, 6, generator=generator), torch.arange(count) % 2)


def centre_of(model: nn.Module, size: float = 0.1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {name: size * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def by_hand(model: nn.Module, data: Rows, clipping: Clipping, centre: dict[str, Tensor]) -> dict[str, Tensor]:
    """Record by record: the gradient, minus the centre, clipped."""
    every, _ = per_record_gradients(model, nn.functional.cross_entropy, data)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(data.targets)):
        difference = {name: value[i] - centre[name] for name, value in every.items()}
        _, kept = _clip(difference, clipping, layers(checked_parameters(model)))
        assert kept is not None
        total = {name: value + kept[name] for name, value in total.items()}
    return total


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: c.name)
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_clipped_sum_of_differences_is_that_of_a_loop(clipping: Clipping, chunk: int | None) -> None:
    model, data = network(), rows()
    centre = centre_of(model)
    found = clipped_sum(model, nn.functional.cross_entropy, data, clipping, chunk=chunk, centre=centre)
    for name, value in by_hand(model, data, clipping, centre).items():
        torch.testing.assert_close(found.sums[name], value.double(), rtol=1e-4, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(length=st.floats(1.0, 1e5), apart=st.floats(1e-4, 1.0), seed=st.integers(0, 1000))
def test_a_record_close_to_the_centre_stays_within_the_bound(length: float, apart: float, seed: int) -> None:
    """g ≈ v, ‖g − v‖ far above the bound and far below ‖g‖: ‖g‖² − 2⟨g, v⟩ + ‖v‖² in single precision is noise here."""
    generator = torch.Generator().manual_seed(seed)
    model, clipping = nn.Linear(20, 1, bias=False), FlatClip(apart / 100)
    inputs = torch.randn(1, 20, generator=generator)
    inputs *= length / inputs.norm()
    data = Rows(inputs, torch.zeros(1))
    step = torch.randn(1, 20, generator=generator)
    centre = {"weight": inputs + step * (apart / step.norm())}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[:, 0]

    found = clipped_sum(model, loss, data, clipping, centre=centre)
    assert float(found.sums["weight"].double().norm()) <= clipping.clip_norm * (1 + 1e-5)


def test_the_usual_expansion_would_break_the_bound() -> None:
    """What the module's note says: the same norm by inner products is wrong by a factor here."""
    generator = torch.Generator().manual_seed(0)
    g = 1e4 * torch.randn(1000, generator=generator)
    v = g + 0.5 * torch.randn(1000, generator=generator)
    true = (g - v).double().norm()
    expanded = (g @ g - 2 * (g @ v) + v @ v).clamp_min(0).sqrt()
    assert abs(float(expanded) / float(true) - 1) > 0.5


def test_a_record_that_is_not_finite_contributes_nothing_and_not_minus_the_centre() -> None:
    model, data = network(), rows()
    centre, clipping = centre_of(model), FlatClip(1.0)
    data.inputs[3] = torch.nan
    kept = torch.tensor([0, 1, 2, 4, 5, 6])
    found = clipped_sum(model, nn.functional.cross_entropy, data, clipping, centre=centre)
    without = clipped_sum(
        model, nn.functional.cross_entropy, Rows(data.inputs[kept], data.targets[kept]), clipping, centre=centre
    )
    assert found.dropped == 1
    for name, value in without.sums.items():
        torch.testing.assert_close(found.sums[name], value.double(), rtol=1e-4, atol=1e-6)


def test_a_parameter_that_the_loss_does_not_reach_counts_with_minus_its_centre() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out

    model = Idle()
    centre = {name: torch.full_like(p, 10.0) for name, p in model.named_parameters()}
    found = clipped_sum(
        model, nn.functional.cross_entropy, Rows(torch.randn(1, 3), torch.tensor([1])), FlatClip(1.0), centre=centre
    )
    assert float(torch.cat([v.flatten() for v in found.sums.values()]).norm()) == pytest.approx(1.0, rel=1e-5)
    assert float(found.sums["idle.weight"].abs().min()) > 0.1


def test_no_records_contribute_nothing() -> None:
    model = network()
    empty = Rows(torch.zeros(0, 1, 6, 6), torch.zeros(0, dtype=torch.int64))
    found = clipped_sum(model, nn.functional.cross_entropy, empty, FlatClip(1.0), centre=centre_of(model))
    assert all(float(value.abs().sum()) == 0 for value in found.sums.values())
