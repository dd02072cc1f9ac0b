"""W-steps on noisy polynomials: what conjugate gradients find, and that they are bounded below whatever the noise."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mac_nets import network

from sordino.errors import InputError
from sordino.methods.dp_mac.coefficients import Polynomial
from sordino.methods.dp_mac.optimise import WSteps, convex, minimiser, slope, w_step

seeds = st.integers(0, 2**31)


def polynomial(seed: int, full: bool, noise: float = 0.3) -> Polynomial:
    """A positive semi-definite curvature and a lot of symmetric noise."""
    generator = torch.Generator().manual_seed(seed)
    root = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64)
    gradient = torch.randn(3, 5, generator=generator, dtype=torch.float64)
    wobble = torch.randn(3, 5, 5, generator=generator, dtype=torch.float64) * noise
    matrix = 0.1 * root @ root.mT + (wobble + wobble.mT) / 2
    return Polynomial(gradient, matrix if full else matrix.diagonal(dim1=1, dim2=2).clone(), None, noise)


@pytest.mark.parametrize("full", [True, False])
@settings(max_examples=40, deadline=None)
@given(seed=seeds, floor=st.floats(0.1, 3.0))
def test_a_noisy_quadratic_is_made_bounded_below(full: bool, seed: int, floor: float) -> None:
    made = convex(polynomial(seed, full), floor)
    assert made.curvature is not None
    values = torch.linalg.eigvalsh(made.curvature) if full else made.curvature
    level = floor * 0.3 * ((2 * 5) ** 0.5 if full else 3.0)
    assert float(values.min()) >= level * (1 - 1e-9)


@pytest.mark.parametrize("full", [True, False])
@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_conjugate_gradients_find_the_minimum(full: bool, seed: int) -> None:
    made = convex(polynomial(seed, full))
    d = minimiser(made, 30)
    assert float(slope(made, d).abs().max()) < 1e-8


def test_what_is_convex_enough_already_stays_as_it_is() -> None:
    steep = Polynomial(torch.ones(1, 2), torch.diag_embed(torch.tensor([[5.0, 7.0]])), None, 0.1)
    found = convex(steep)
    assert found.curvature is not None
    torch.testing.assert_close(found.curvature, steep.curvature)
    assert convex(Polynomial(torch.ones(1, 2))).curvature is None


def test_first_order_adam_is_adam_on_the_gradient() -> None:
    """One step down a linear polynomial is what torch's Adam makes of that gradient."""
    ours, theirs = network(), network()
    parts = [Polynomial(torch.randn(w, i + 1, dtype=torch.float64)) for i, w in ((6, 5), (5, 4), (4, 3))]
    settings_ = WSteps("adam", 0.05)
    w_step(ours, parts, settings_, settings_.make(ours))
    reference = torch.optim.Adam(theirs.parameters(), lr=0.05)
    for layer, part in zip(theirs.layers, parts, strict=True):
        layer.weight.grad, layer.bias.grad = part.gradient[:, :-1].contiguous(), part.gradient[:, -1].contiguous()
    reference.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_conjugate_gradients_jump_to_the_minimum_and_sgd_creeps_there() -> None:
    """lr = 1: the weights after one W-step minimise the polynomial; several steps of SGD come near."""
    parts = [polynomial(k, True) for k in range(2)]
    shaped = [Polynomial(p.gradient[:, :5], p.curvature, None, p.noise) for p in parts]
    jump, creep = network((4, 3, 3)), network((4, 3, 3))
    shaped[1] = Polynomial(shaped[1].gradient[:, :4], torch.eye(4, dtype=torch.float64).expand(3, 4, 4), None, 0.0)
    start = [torch.cat([layer.weight, layer.bias[:, None]], 1).detach().clone() for layer in jump.layers]
    for net, how in ((jump, WSteps("cg", 1.0, steps=30)), (creep, WSteps("sgd", 0.1, steps=400))):
        w_step(net, shaped, how, how.make(net))
        for layer, at, part in zip(net.layers, start, shaped, strict=True):
            d = torch.cat([layer.weight, layer.bias[:, None]], 1).detach() - at
            assert float(slope(convex(part), d).abs().max()) < 1e-3


def test_a_linear_polynomial_has_no_minimum() -> None:
    with pytest.raises(InputError, match="no minimum"):
        minimiser(Polynomial(torch.ones(1, 2)), 3)
    with pytest.raises(InputError, match="momentum"):
        WSteps("adam", momentum=0.9)


@pytest.mark.parametrize("momentum", [float("nan"), float("inf"), -0.1, 1.0])
def test_a_momentum_that_is_no_fraction_is_refused(momentum: float) -> None:
    with pytest.raises(InputError, match="momentum"):
        WSteps("sgd", momentum=momentum)
