"""Each analytic sensitivity against adversaries: random records, gradient ascent, and the printed formulas."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_nets import layer as make_layer
from torch import Tensor

from sordino.methods.dp_mac import printed
from sordino.methods.dp_mac.bounds import Radii, Sensitivities, sensitivities
from sordino.methods.dp_mac.network import ACTIVATIONS, Layer
from sordino.methods.dp_mac.taylor import Terms, expand
from sordino.methods.dp_mac.zsteps import into_ball

CASES = [(name, None) for name in ACTIVATIONS] + [("linear", "squared"), ("linear", "sigmoid")]
RECORDS = 100_000


def measured(layer: Layer, terms: Terms) -> dict[str, Tensor]:
    """Every coefficient's norm, record by record."""
    a = terms.value - (terms.slope * terms.pre).sum(1) + 0.5 * (terms.curvature * terms.pre.square()).sum(1)
    b = (terms.slope - terms.curvature * terms.pre).norm(dim=1) * terms.inputs.norm(dim=1)
    return {
        "value": terms.value.abs(),
        "gradient": terms.gradient_norms(),
        "curvature": terms.curvature_norms("full"),
        "diagonal": terms.curvature_norms("diagonal"),
        "a": a.abs(),
        "b": b,
    }


def admissible(layer: Layer, z: Tensor, target: Tensor, radii: Radii) -> tuple[Tensor, Tensor]:
    inside = into_ball(target, radii.targets) if layer.output != "sigmoid" else target.clamp(0, 1)
    return into_ball(z, radii.inputs), inside


def ascend(layer: Layer, radii: Radii, size: Callable[[Terms], Tensor], starts: int = 32, steps: int = 40) -> float:
    """The largest coefficient that projected gradient ascent from random records finds."""
    generator = torch.Generator().manual_seed(1)
    units, inputs = layer.weight.shape
    z = torch.randn(starts, inputs, generator=generator, dtype=torch.float64) * radii.inputs
    target = torch.randn(starts, units, generator=generator, dtype=torch.float64) * max(radii.targets, 1.0)
    best = 0.0
    for _ in range(steps):
        z, target = (t.detach().requires_grad_() for t in admissible(layer, z, target, radii))
        found = size(expand(layer, z, target))
        best = max(best, float(found.detach().max()))
        slopes = torch.autograd.grad(found.sum(), (z, target), allow_unused=True)
        with torch.no_grad():
            z, target = (
                t if g is None else t + 0.3 * g / g.norm(dim=1, keepdim=True).clamp_min(1e-12)
                for t, g in zip((z, target), slopes, strict=True)
            )
    return best


@pytest.mark.parametrize(("activation", "output"), CASES)
@pytest.mark.parametrize("bias", [True, False])
def test_no_record_of_a_hundred_thousand_exceeds_a_bound(activation: str, output: str | None, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    for seed, radii in enumerate((Radii(0.3, 0.3), Radii(1.0, 2.0), Radii(4.0, 1.5))):
        layer = make_layer(activation, output, bias, seed)
        z = torch.randn(RECORDS // 3 + 1, 3, generator=generator, dtype=torch.float64) * 3 * radii.inputs
        target = torch.randn(len(z), 4, generator=generator, dtype=torch.float64) * 3 * max(radii.targets, 1.0)
        terms = expand(layer, *admissible(layer, z, target, radii))
        bound = sensitivities(layer, radii)
        for name, norms in measured(layer, terms).items():
            assert float(norms.max()) <= getattr(bound, name) * (1 + 1e-12), name


@pytest.mark.parametrize(("activation", "output"), CASES)
@pytest.mark.parametrize("name", ["value", "gradient", "curvature", "diagonal", "a", "b"])
def test_gradient_ascent_does_not_get_past_a_bound(activation: str, output: str | None, name: str) -> None:
    for seed, radii in enumerate((Radii(0.5, 0.5), Radii(2.0, 1.0))):
        layer = make_layer(activation, output, True, seed)
        found = ascend(layer, radii, lambda terms, layer=layer: measured(layer, terms)[name])
        bound = getattr(sensitivities(layer, radii), name)
        assert found <= bound * (1 + 1e-12)
        if name == "gradient":  # not vacuous: within a factor of three of what is attained
            assert found >= bound / 3


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    case=st.sampled_from(CASES),
    radius=st.floats(1e-3, 30.0),
    target=st.floats(1e-3, 30.0),
    scale=st.floats(0.01, 20.0),
    mu=st.floats(0.01, 100.0),
)
def test_the_bounds_hold_for_any_weights_and_radii(
    seed: int, case: tuple[str, str | None], radius: float, target: float, scale: float, mu: float
) -> None:
    """500 records each: 10⁵ in all, with weights, radii and μ of any size."""
    made = make_layer(*case, bias=seed % 2 == 0, seed=seed)
    layer = Layer(made.weight * scale, None if made.bias is None else made.bias * scale, made.activation, made.output)
    radii = Radii(radius, target)
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(500, 3, generator=generator, dtype=torch.float64) * radius
    z[:8] = layer.weight.repeat(2, 1)[:8] * 1e3 * torch.tensor([1.0] * 4 + [-1.0] * 4)[:, None]  # worst pre-activations
    goal = torch.randn(500, 4, generator=generator, dtype=torch.float64) * max(target, 1.0)
    terms = expand(layer, *admissible(layer, z, goal, radii), mu)
    bound = sensitivities(layer, radii, mu)
    for name, norms in measured(layer, terms).items():
        assert float(norms.max()) <= getattr(bound, name) * (1 + 1e-9) + 1e-12, name


@cache
def one_unit(size: float) -> Layer:
    weight = torch.tensor([[size]], dtype=torch.float64)
    return Layer(weight, None, ACTIVATIONS["softplus"], None)


def at(layer: Layer, z: float, target: float) -> dict[str, float]:
    """The coefficients of T = 2t of one record of one unit."""
    terms = expand(layer, torch.tensor([[z]], dtype=torch.float64), torch.tensor([[target]], dtype=torch.float64))
    return {name: 2 * float(norm) for name, norm in measured(layer, terms).items()}


def twice(bound: Sensitivities, name: str) -> float:
    return 2 * float(getattr(bound, name))


def test_the_printed_value_bound_is_exceeded() -> None:
    """Slip 1: Δa_{k1} has ‖β‖² where ‖α‖² belongs. A short radius shows it."""
    layer, radius = one_unit(1.0), 0.01
    found = at(layer, radius, -radius)["value"]
    assert found > 1.8 * printed.hidden_value(layer.weight, radius)
    assert found <= twice(sensitivities(layer, Radii(radius, radius)), "value")


def test_the_printed_gradient_bound_is_exceeded() -> None:
    """Slip 2: the square of 2(f − z)f′z has the factor 4, not 2."""
    layer, radius = one_unit(5.0), 2.0
    found = at(layer, radius, -radius)["gradient"]
    assert found > 1.4 * printed.hidden_gradient(layer.weight, radius)
    assert found <= twice(sensitivities(layer, Radii(radius, radius)), "gradient")


def test_the_printed_b_bound_is_exceeded() -> None:
    """Slip 3: ‖x − y‖² ≤ ‖x‖² + ‖y‖² lacks the cross term, and Δb_{k2} lost a factor 4."""
    layer, radius = one_unit(0.01), 0.01
    found = at(layer, radius, -radius)["b"]
    assert found > 1.4 * printed.hidden_b(layer.weight, radius)
    assert found <= twice(sensitivities(layer, Radii(radius, radius)), "b")


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), radius=st.floats(0.1, 5.0))
def test_the_printed_curvature_bounds_hold_and_ours_are_smaller(seed: int, radius: float) -> None:
    hidden = make_layer("softplus", None, False, seed)
    ours = sensitivities(hidden, Radii(radius, radius))
    assert twice(ours, "curvature") <= printed.hidden_curvature(hidden.weight, radius) * (1 + 1e-12)
    last = make_layer("linear", "sigmoid", False, seed)
    ours = sensitivities(last, Radii(radius, radius))
    assert ours.curvature <= printed.output_curvature(last.weight, radius) * (1 + 1e-12)
    assert ours.b <= printed.output_b(last.weight, radius) * (1 + 1e-12)
