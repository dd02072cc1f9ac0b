"""Coupling (Liu, Bu, Wang, Zha & Karypis 2023): Theorem 4.3, Corollary 4.3.1 and Lemma 4.1, held against numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from sordino.plan import Plan

LOSS, SMOOTH, DIMENSION, BATCH = 2.0, 3.0, 1000, 100  # 𝓛₀, L, d, B


def weights(sigma: float) -> tuple[float, float]:
    """(A_pub, A_priv) of (24)."""
    return 1 / (2 * SMOOTH), math.sqrt(LOSS / (2 * SMOOTH * (1 + sigma**2 * DIMENSION / BATCH**2)))


def m_r(g: float, r: float, xi: float) -> float:
    """𝓜_r(‖g‖), by Theorem 8 of Bu et al. 2022 as Liu et al. quote it."""
    return (1 / ((r - 1) * g + 1) - 1 / ((r + 1) * g + 1)) * (g - xi / r)


def f_r(g: float, sigma: float, xi: float, r: float | None = None) -> float:
    """(25); without r it is 2ξ/‖g‖, as in the proof of Lemma 4.1."""
    public, private = weights(sigma)
    return public * g**2 + private * m_r(g, 2 * xi / g if r is None else r, xi)


@pytest.mark.parametrize("xi", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("length", [0.2, 1.0, 3.0])
def test_the_expected_clipped_gradient_is_at_least_half_of_m_r(xi: float, length: float) -> None:
    """g·E[gᵢ/(‖gᵢ‖ + 1)] ≥ ½𝓜_r for symmetric noise with E‖gᵢ − g‖² ≤ ξ², for every r > 1."""
    generator = np.random.default_rng(0)
    g = np.array([length, 0.0, 0.0])
    noise = generator.normal(size=(20_000, 3)) * xi / math.sqrt(3)
    both = np.concatenate([g + noise, g - noise])  # symmetric to the last digit
    found = float((both @ g / (np.linalg.norm(both, axis=1) + 1)).mean())
    assert all(found >= 0.5 * m_r(length, r, xi) for r in (1.1, 2.0, 5.0, 2 * xi / length + 1))


def test_f_r_grows_with_the_gradient_and_falls_with_the_noise_where_r_follows_the_gradient() -> None:
    lengths = np.linspace(0.01, 1.0, 50)
    for sigma in (0.5, 2.0, 8.0):
        values = [f_r(g, sigma, 2.0) for g in lengths]
        assert min(values) > 0
        assert np.all(np.diff(values) > 0)
    assert all(f_r(g, 2.0, 2.0) < f_r(g, 0.5, 2.0) for g in lengths)


def test_for_a_fixed_r_it_is_neither_positive_nor_falling_with_the_noise() -> None:
    """Theorem 4.3 says "a positive function … decreasing in σ": below ‖g‖ = ξ/r both fail, so r has to follow ‖g‖."""
    assert f_r(0.05, 1.0, 2.0, r=2.0) < 0
    assert f_r(0.05, 4.0, 2.0, r=2.0) > f_r(0.05, 1.0, 2.0, r=2.0)


def bounds(steps: float, xi: float, c: float = 0.1, mu: float = 1.0, private: float = 2_000.0) -> tuple[float, float]:
    """(f_r⁻¹ exactly, as Lemma 4.1 has it), with σ of Corollary 4.3.1."""
    sigma = math.sqrt(1 / math.log(private**2 * mu**2 / (steps * BATCH**2) + 1))
    right = (2 * LOSS + xi**2 / (2 * BATCH * SMOOTH)) / (c * math.sqrt(steps))
    exact = brentq(lambda g: f_r(g, sigma, xi) - right, 1e-9, 2 * xi)
    x = math.sqrt(LOSS * SMOOTH * private**2 * mu**2 / (2 * steps * DIMENSION)) / (4 * xi**2)
    return exact, math.sqrt(4 * LOSS * SMOOTH + xi**2 / BATCH) / (math.sqrt(c) * steps**0.25) * (1 - x)


def test_lemma_4_1_approaches_the_exact_inverse_for_large_gradient_noise() -> None:
    errors = [abs(lemma / exact - 1) for exact, lemma in (bounds(steps, 30.0) for steps in (1e6, 1e8, 1e10))]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-5


def test_the_x_of_lemma_4_1_is_too_large_where_the_gradient_noise_is_not() -> None:
    """1/((2ξ + 1)² − ‖g‖²) was replaced by 1/4ξ²: at ξ = 1 that is (2ξ + 1)²/4ξ² = 2.25 times too much.

    The bound it gives is then below the exact one: no upper bound on the gradient.
    """
    steps, xi = 1e12, 1.0
    exact, lemma = bounds(steps, xi)
    leading = math.sqrt(4 * LOSS * SMOOTH + xi**2 / BATCH) / (math.sqrt(0.1) * steps**0.25)
    assert lemma < exact
    assert (1 - lemma / leading) / (1 - exact / leading) == pytest.approx(2.25, rel=0.01)


def test_corollary_4_3_1_understates_epsilon() -> None:
    """Its σ makes a run μ-GDP in the central limit; the accountant's ε of that run is larger than μ-GDP's."""
    mu, records, batch, steps, delta = 1.0, 10_000, 100, 400, 1e-5
    sigma = math.sqrt(1 / math.log(records**2 * mu**2 / (steps * batch**2) + 1))
    plan = Plan.dpsgd(
        noise_multiplier=sigma, records=records, expected_batch=batch, steps=steps, delta=delta, clip_norm=1.0
    )

    def delta_of(epsilon: float) -> float:
        return float(norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2))

    limit = brentq(lambda epsilon: delta_of(epsilon) - delta, 0.1, 20.0)
    assert plan.guarantee().epsilon > 1.1 * limit
