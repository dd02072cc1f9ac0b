"""Closed-form coefficients against autograd, and the polynomial against the objective it expands."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_nets import layer as make_layer
from torch import Tensor

from sordino.features.moment import from_triangle, triangle
from sordino.methods.dp_mac.network import ACTIVATIONS, Layer
from sordino.methods.dp_mac.taylor import expand, paper_form

CASES = [(name, None) for name in ACTIVATIONS] + [("linear", "squared"), ("linear", "sigmoid")]
seeds = st.integers(0, 2**31)


def objective(layer: Layer, matrix: Tensor, z: Tensor, target: Tensor, mu: float) -> Tensor:
    """The layer's objective on one record as a function of its weights (bias in the last column), by definition."""
    weight = matrix[:, : z.shape[0]]
    a = weight @ z + (matrix[:, -1] if layer.bias is not None else 0.0)
    if layer.output == "sigmoid":
        return torch.nn.functional.binary_cross_entropy_with_logits(a, target, reduction="sum")
    miss = target - layer.activation.value(a)
    return 0.5 * (mu if layer.output is None else 1.0) * miss.square().sum()


def matrix_of(layer: Layer) -> Tensor:
    return layer.weight if layer.bias is None else torch.cat([layer.weight, layer.bias[:, None]], 1)


def some_records(seed: int, output: str | None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(3, 3, generator=generator, dtype=torch.float64)
    target = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    return z, target.sigmoid() if output == "sigmoid" else target


@pytest.mark.parametrize(("activation", "output"), CASES)
@pytest.mark.parametrize("bias", [True, False])
@settings(max_examples=4, deadline=None)
@given(seed=seeds, mu=st.floats(0.1, 10.0))
def test_closed_form_is_what_autograd_finds(
    activation: str, output: str | None, bias: bool, seed: int, mu: float
) -> None:
    layer = make_layer(activation, output, bias, seed)
    z, target = some_records(seed, output)
    terms, matrix = expand(layer, z, target, mu), matrix_of(layer)
    one = torch.ones(1, dtype=torch.float64)
    for n in range(len(z)):

        def of(m: Tensor, n: int = n) -> Tensor:
            return objective(layer, m, z[n], target[n], mu)

        part = type(terms)(*(getattr(terms, f)[n : n + 1] for f in terms.__dataclass_fields__))
        value, gradient = of(matrix), torch.func.grad(of)(matrix)
        hessian = torch.func.hessian(of)(matrix)  # (out, in, out, in)
        blocks = torch.stack([hessian[h, :, h, :] for h in range(4)])
        torch.testing.assert_close(part.value[0], value, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(part.gradient_sum(one), gradient, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(from_triangle(part.curvature_sum(one, "full")), blocks / 2, rtol=1e-8, atol=1e-8)
        diagonals = blocks.diagonal(dim1=1, dim2=2) / 2
        torch.testing.assert_close(part.curvature_sum(one, "diagonal"), diagonals, rtol=1e-8, atol=1e-8)
        for h in range(4):  # units do not interact
            others = [g for g in range(4) if g != h]
            assert hessian[h][:, others].abs().max() < 1e-12
        torch.testing.assert_close(part.gradient_norms()[0], gradient.norm(), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(part.curvature_norms("full")[0], blocks.norm() / 2, rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(part.curvature_norms("diagonal")[0], diagonals.norm(), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(("activation", "output"), [("softplus", None), ("linear", "sigmoid")])
@settings(max_examples=25, deadline=None)
@given(seed=seeds)
def test_the_second_order_objective_is_within_its_taylor_error(activation: str, output: str | None, seed: int) -> None:
    """The remainder is cubic: at a tenth of the displacement it is about a thousandth."""
    layer = make_layer(activation, output, True, seed)
    z, target = some_records(seed, output)
    terms, matrix = expand(layer, z, target), matrix_of(layer)
    ones = torch.ones(len(z), dtype=torch.float64)
    slope, bend = terms.gradient_sum(ones), from_triangle(terms.curvature_sum(ones, "full"))
    direction = torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    direction /= direction.norm()

    def remainder(size: float) -> float:
        d = size * direction
        exact = sum(objective(layer, matrix + d, z[n], target[n], 1.0) for n in range(len(z)))
        model = terms.value.sum() + (slope * d).sum() + torch.einsum("hi,hij,hj->", d, bend, d)
        return abs(float(exact - model))

    # |t'''| ≤ f‴(f−z) + 3f′f″ + … along a unit direction: 3 records, ‖ũ‖³ ≤ (1 + ‖z‖²)^1.5, |f − z| ≤ 12 here
    cube = float((terms.inputs.norm(dim=1) ** 3).sum())
    assert remainder(0.1) <= (12 * 0.1 + 3 * 0.25) / 6 * cube * 0.1**3
    assert remainder(0.01) <= remainder(0.1) / 50 + 1e-10


@settings(max_examples=30, deadline=None)
@given(seed=seeds)
def test_the_papers_coefficients_give_the_same_polynomial(seed: int) -> None:
    layer = make_layer("softplus", None, True, seed)
    z, target = some_records(seed, None)
    terms, matrix = expand(layer, z, target), matrix_of(layer)
    a, b, c = paper_form(terms, matrix)
    other = matrix + 0.3 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ones, d = torch.ones(len(z), dtype=torch.float64), other - matrix
    ours = terms.value.sum() + (terms.gradient_sum(ones) * d).sum()
    ours = ours + torch.einsum("hi,hij,hj->", d, from_triangle(terms.curvature_sum(ones, "full")), d)
    theirs = a.sum() + (b.sum(0) * other).sum() + torch.einsum("hi,hij,hj->", other, c.sum(0), other)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(seed=seeds, size=st.integers(1, 6))
def test_the_triangle_is_an_isometry(seed: int, size: int) -> None:
    root = torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    matrix = root + root.mT
    torch.testing.assert_close(triangle(matrix).norm(), matrix.norm())
    torch.testing.assert_close(from_triangle(triangle(matrix)), matrix)


def test_a_record_that_is_not_finite_becomes_zero_and_is_counted() -> None:
    layer = make_layer("softplus", None)
    z, target = some_records(0, None)
    z[1, 0], target[2, 2] = torch.nan, torch.inf
    terms, bad = expand(layer, z, target).finite()
    assert bad.tolist() == [False, True, True]
    assert torch.isfinite(terms.gradient_sum(torch.ones(3, dtype=torch.float64))).all()
    assert terms.gradient_norms()[bad].tolist() == [0.0, 0.0]
