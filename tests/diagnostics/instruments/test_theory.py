"""Theorems 3.1 and 3.2 of Xiao et al. 2023 on problems where the bias of clipping is known in closed form."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.clipping import Clipping, FlatClip, NormalisedClip
from sordino.diagnostics.instruments import Reading, measure
from sordino.diagnostics.instruments.theory import (
    PRINTED_FLOOR,
    clipped_bound,
    normalised_bound,
    printed_left_side,
    step_size,
)

TWO = torch.tensor([[1.0], [-3.0]], dtype=torch.float64)  # section 3.1: f_i(w) = (w − s_i)², F their mean
TAU = 4.0  # |f_1' − f_2'|/2 = |s_1 − s_2|, for every w


class Point(nn.Module):
    """f(w, x) = scale·‖w − x‖²."""

    def __init__(self, start: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(start.double().clone())
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * (self.w[None] - x).square().sum(1)


def outputs(values: Tensor, targets: Tensor) -> Tensor:
    return values


def descend(start: Tensor, samples: Tensor, clipping: Clipping, step: float, steps: int, scale: float = 1.0) -> Reading:
    """Full-batch clipped descent on the mean of scale·‖w − x‖², by hand; then the instruments where it ends."""
    w, points = start.double().numpy().copy(), samples.numpy()
    for _ in range(steps):
        gradients = 2 * scale * (w - points)
        norms = np.linalg.norm(gradients, axis=1, keepdims=True)
        factors = clipping.factors(torch.from_numpy(norms)).numpy()
        w -= step * (gradients * factors).mean(0)
    rows = (samples, torch.zeros(len(samples)))
    return measure(Point(torch.from_numpy(w), scale), outputs, rows, clipping, public="made up")


@pytest.mark.parametrize("start", [0.0, -2.5, 0.9])
def test_the_two_sample_example_normalised_descent_does_not_move_between_the_samples(start: float) -> None:
    found = descend(torch.tensor([start]), TWO, NormalisedClip(1.0), step=0.1, steps=20)
    assert found.clipped_gradient_norm == pytest.approx(0, abs=1e-12)
    assert found.gradient_norm == pytest.approx(abs(2 * (start + 1))), "where it started, and nothing is learnt"
    assert found.tau == pytest.approx(TAU)
    assert found.gradient_norm < TAU, "the floor of this example: τ, not 15τ"


@pytest.mark.parametrize("clip", [0.5, 1.0, 2.0, 3.5])
def test_the_two_sample_example_clipped_descent_stops_at_tau_less_c(clip: float) -> None:
    """The clipped gradients cancel wherever both are clipped, that is on [−3 + c/2, 1 − c/2]; from the right one
    arrives at its upper end, where the true gradient is 2(2 − c/2) = τ − c."""
    found = descend(torch.tensor([6.0]), TWO, FlatClip(clip), step=0.05, steps=500 + int(200 / clip))
    assert found.gradient_norm == pytest.approx(TAU - clip, abs=1e-3)
    assert found.gradient_norm <= clipped_bound(smoothness=2, gap=49, tau=TAU, noise=0, steps=10**9, clip_norm=clip)


def test_the_two_sample_example_a_threshold_of_tau_has_no_bias() -> None:
    found = descend(torch.tensor([6.0]), TWO, FlatClip(TAU), step=0.1, steps=200)
    assert found.gradient_norm == pytest.approx(0, abs=1e-6)


def test_the_printed_theorem_3_2_says_nothing_about_the_two_sample_example() -> None:
    """Everything is clipped (Pr(‖g‖ < c) = 0) and c < 4τ: the left side of (11) is negative, whatever the gradient.
    The sharpened bound still is one."""
    for clip in (0.5, 1.0, 3.9):
        assert printed_left_side(TAU - clip, unclipped=0.0, clip_norm=clip, tau=TAU) < 0
        bound = clipped_bound(smoothness=2, gap=49, tau=TAU, noise=0, steps=10**9, clip_norm=clip)
        assert TAU - clip < bound < 2 * TAU * 1.001


SKEWED = torch.distributions.Exponential(1.0)


def skewed(count: int, width: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SKEWED.sample((count, width)).double() ** 2


def geometric_median(points: Tensor) -> Tensor:
    """Weiszfeld's iteration."""
    at = points.mean(0)
    for _ in range(3000):
        weight = 1 / (points - at).norm(dim=1, keepdim=True).clamp_min(1e-12)
        at = (points * weight).sum(0) / weight.sum()
    return at


def test_heavy_clipping_on_a_quadratic_finds_the_geometric_median_in_the_place_of_the_mean() -> None:
    """f_i(w) = ‖w − x_i‖²/2. With c below every norm the clipped mean gradient is c times that of Σ‖w − x_i‖, whose
    minimiser is the geometric median m: the bias is ‖E x − m‖ ≤ E‖x − m‖ ≤ E‖x − E x‖ ≤ τ."""
    points = skewed(41, 2)
    median, clip = geometric_median(points), 1e-3
    found = descend(points.mean(0), points, FlatClip(clip), step=0.02 / clip, steps=1500, scale=0.5)
    bias = float((median - points.mean(0)).norm())
    assert found.gradient_norm == pytest.approx(bias, rel=1e-2)
    assert found.tau == pytest.approx(math.sqrt(float((points - points.mean(0)).square().sum(1).mean())))
    assert 0.2 * found.tau < bias < found.tau, "of the order of τ, as the theorem says, and below it"


def test_a_skewed_quadratic_in_one_dimension_the_bias_is_the_mean_less_the_median() -> None:
    points = skewed(41, 1)
    found = descend(points.mean(0), points, FlatClip(1e-3), step=5.0, steps=6000, scale=0.5)
    assert found.gradient_norm == pytest.approx(float(points.mean() - points.median()), abs=0.01)


@pytest.mark.parametrize("noise", [0.0, 2.0])
def test_theorem_3_1_sharpened_holds_for_a_run_with_its_own_step_size(noise: float) -> None:
    """Smoothness 2, F(6) − F(−1) = 49. Two hundred runs at once, one a coordinate of its own."""
    steps, runs = 400, 200
    step = step_size(smoothness=2, gap=49, noise=noise, steps=steps)
    generator = torch.Generator().manual_seed(0)
    w, best = torch.full((runs,), 6.0, dtype=torch.float64), torch.full((runs,), math.inf, dtype=torch.float64)
    for _ in range(steps):
        best = torch.minimum(best, (2 * (w + 1)).abs())
        mean = (torch.sign(w - 1) + torch.sign(w + 3)) / 2
        w = w - step * (mean + noise * torch.randn(runs, generator=generator, dtype=torch.float64))
    bound = normalised_bound(smoothness=2, gap=49, tau=TAU, noise=noise, steps=steps)
    assert float(best.mean()) <= bound
    printed = math.sqrt(32 * 2 * 49 * (2 + noise**2) / steps) + PRINTED_FLOOR * TAU
    assert bound < printed / 3


vectors = st.lists(st.floats(-10, 10), min_size=2, max_size=2).map(lambda v: torch.tensor(v, dtype=torch.float64))


@settings(max_examples=200, deadline=None)
@given(gradient=vectors, noise=vectors, clip=st.floats(1e-2, 30))
def test_the_two_inequalities_behind_the_sharpened_bounds(gradient: Tensor, noise: Tensor, clip: float) -> None:
    g = gradient + noise
    length, size, error = float(g.norm()), float(gradient.norm()), float(noise.norm())
    if length > 1e-9:
        aligned = float(gradient @ g) / length
        assert aligned >= size - 2 * error - 1e-9
        assert size - 2 * error >= size / 4 - 15 * error / 4 - 1e-9, "(20) as printed is weaker, everywhere"
    clipped = g * min(1.0, clip / max(length, 1e-300))
    assert float(gradient @ clipped) >= min(size / 2, clip) * size - 2 * clip * error - 1e-9


def test_the_factor_two_is_attained_by_a_single_gradient_and_one_by_a_distribution() -> None:
    """Single: ξ just longer than −∇F. Distribution: g = A or −0 with equal chances, mean A/2 = τ, normalised mean 0."""
    size, error = 1.0, 1.0 + 1e-9
    assert -size == pytest.approx(size - 2 * error)
    g = torch.tensor([2.0, -1e-12], dtype=torch.float64)
    assert float(torch.sign(g).mean()) == 0
    assert float(g.mean().abs()) == pytest.approx(float((g - g.mean()).square().mean().sqrt()))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(2, 6), clip=st.floats(1e-2, 20), shift=st.floats(0, 6))
def test_the_printed_progress_inequality_of_theorem_3_2_holds_where_it_says_something(
    seed: int, count: int, clip: float, shift: float
) -> None:
    """⟨∇F, Ḡ⟩ ≥ the left side of (11) − 15cτ√(1 − P)/4, for every finite set of gradients."""
    g = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 4
    g[:, 0] += shift
    mean, norms = g.mean(0), g.norm(dim=1)
    tau = float((g - mean).square().sum(1).mean().sqrt())
    clipped = (g * (clip / norms).clamp_max(1)[:, None]).mean(0)
    unclipped = float((norms < clip).double().mean())
    right = printed_left_side(float(mean.norm()), unclipped, clip, tau) - 15 * clip * tau * math.sqrt(1 - unclipped) / 4
    assert float(mean @ clipped) >= right - 1e-9
