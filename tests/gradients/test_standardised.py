"""Weights and projections that are standardised: the closed forms of the engine against autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradients.cases import ROWS, Fn, matches, noise
from sordino.gradients import passes
from sordino.gradients.layers.gru import standardised_gru
from sordino.gradients.sums.standardisation import pull_back, standardised_weight


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@settings(deadline=None, max_examples=30)
@given(filters=st.integers(1, 4), fan_in=st.integers(2, 9), scale=st.floats(1e-6, 1e3), m=st.integers(1, 3))
def test_the_pull_back_is_autograds(filters: int, fan_in: int, scale: float, m: int) -> None:
    weight = (scale * torch.randn(filters, fan_in, dtype=torch.float64)).requires_grad_()
    gradients = torch.randn(m, filters, fan_in, dtype=torch.float64)
    out = standardised_weight(weight)
    wanted = torch.stack([torch.autograd.grad(out, weight, g, retain_graph=True)[0] for g in gradients])
    size = float(gradients.abs().max() / (weight.detach().std(1) + 1e-6).min())  # two weights: nearly all of it cancels
    pull_back(weight)(gradients)
    assert torch.allclose(gradients, wanted, rtol=1e-9, atol=1e-12 * size)


@settings(deadline=None, max_examples=20)
@given(fan_in=st.integers(2, 30), shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_a_standardised_filter_forgets_shift_and_scale(fan_in: int, shift: float, scale: float) -> None:
    weight = torch.randn(3, fan_in, dtype=torch.float64)
    out = standardised_weight(weight)
    assert torch.allclose(out.mean(1), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    norms = torch.linalg.vector_norm(out, dim=1)
    assert torch.allclose(norms, torch.full_like(norms, math.sqrt((fan_in - 1) / fan_in)), rtol=1e-4)
    assert torch.allclose(standardised_weight(scale * weight + shift), out, rtol=1e-3, atol=1e-4)


def test_a_filter_without_spread_is_zero_and_its_gradient_finite() -> None:
    weight = torch.ones(2, 3, dtype=torch.float64)
    assert not standardised_weight(weight).any()
    gradient = torch.randn(1, 2, 3, dtype=torch.float64)
    pull_back(weight)(gradient)
    assert torch.isfinite(gradient).all()


def convolution(weight: Tensor) -> nn.Module:
    return Fn(lambda s, x: F.conv2d(x, standardised_weight(s.weight), padding=1).tanh().flatten(1), weight=weight)


@pytest.mark.parametrize("side", [6, 2])  # 2×2 images and 40 channels: activations are held, not products
@pytest.mark.parametrize("channels", [2, 40])
def test_a_standardised_convolution(side: int, channels: int) -> None:
    matches(convolution(noise(channels + 1, channels, 3, 3)), noise(ROWS, channels, side, side))


def test_a_standardised_weight_used_twice_scaled_or_of_a_linear_map() -> None:
    def twice(s: Fn, x: Tensor) -> Tensor:
        w = standardised_weight(s.weight)
        return F.linear(F.linear(x, w).tanh(), standardised_weight(s.weight)) + F.linear(x, s.gain * w)

    matches(Fn(twice, weight=noise(4, 4), gain=noise(4, 1)), noise(ROWS, 3, 4))


def test_a_standardised_weight_takes_no_second_way_through_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general pull-back of derived weights is slow: it must not come back silently."""
    monkeypatch.setattr(passes, "Pulled", None)
    matches(convolution(noise(3, 2, 3, 3)), noise(ROWS, 2, 5, 5))
    matches(recurrent(), noise(ROWS, 4, 3))


def recurrent() -> nn.Module:
    def forward(s: Fn, x: Tensor) -> Tensor:
        states, last = standardised_gru(x, s.w_ih, s.w_hh, s.b_ih, s.b_hh)
        return torch.cat((states[:, 1], last), 1)

    return Fn(forward, w_ih=noise(6, 3), w_hh=noise(6, 2), b_ih=noise(6), b_hh=noise(6))


@pytest.mark.parametrize("length", [4, ROWS])  # ROWS: as long as the batch
def test_the_standardised_gru(length: int) -> None:
    matches(recurrent(), noise(ROWS, length, 3))


def test_the_standardised_gru_after_a_trained_layer() -> None:
    matches(nn.Sequential(nn.Linear(4, 3), recurrent()), noise(ROWS, 5, 4))


def test_the_loop_over_time_is_one_operation_to_the_tape() -> None:
    model = recurrent()
    x = noise(ROWS, 50, 3)
    setup = passes.Setup(model, lambda out, y: out.sum(1) * y, dict(model.named_parameters()), ())
    run = passes.Pass(setup, (x, noise(ROWS)), ROWS, {})
    assert len(run.tape.uses) == 2  # the input projection and the hidden one, whatever the length
    run.close()
