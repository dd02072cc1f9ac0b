"""The success of an attack that the report prints is an upper bound, and close to the trade-off curve."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from sordino.plan import Plan
from sordino.plan.attack import bounded_by_profile, success_rate


@pytest.mark.parametrize("alpha", [0.001, 0.01, 0.2])
@pytest.mark.parametrize("sigma", [0.5, 2.0, 20.0])
def test_the_bound_lies_above_the_gaussian_trade_off_curve_and_near_it(sigma: float, alpha: float) -> None:
    """One release of everything with Gaussian noise: the curve is known, β = Φ(Φ⁻¹(α) + 1/σ)."""
    plan = Plan.dpsgd(noise_multiplier=sigma, delta=1e-5, records=50, expected_batch=50, steps=1)
    true = float(norm.cdf(norm.ppf(alpha) + 1 / sigma))
    found = success_rate(plan, alpha)
    assert found >= true
    assert found <= max(2.0 * true, true + 0.05)


def test_edge_cases() -> None:
    assert bounded_by_profile([], 0.01) == 1.0
    assert bounded_by_profile([(math.inf, 1e-5)], 0.01) == 1.0
    assert bounded_by_profile([(0.0, 0.0)], 0.01) == pytest.approx(0.01)
    assert bounded_by_profile([(800.0, 1e-5)], 0.01) == 1.0
