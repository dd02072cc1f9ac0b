"""Rules for the weight of the public gradient: by hand, and against numerical minimisation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sordino.errors import InputError
from sordino.methods.coupling import rules

QUICK = settings(max_examples=60, deadline=None)
SIZES = st.integers(10, 100_000)
POSITIVE = st.floats(0.01, 100.0)


def golden(function: Callable[[float], float], low: float, high: float) -> float:
    """The minimiser of a unimodal function, to about 1e-9 of the interval."""
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        left, right = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return (low + high) / 2


def test_the_rules_without_estimates_by_hand() -> None:
    assert rules.constant(0.3) == 0.3
    assert (rules.only_private(), rules.only_public(), rules.adamix()) == (0.0, 1.0, 0.5)
    assert rules.sample_mechanism(3_000, 57_000) == 0.05
    assert rules.dpmd(0, 200) == 0.0
    assert rules.dpmd(100, 200) == pytest.approx(1 - math.sqrt(0.5))
    assert rules.dpmd(200, 200) == pytest.approx(1.0)
    assert rules.dpmd(300, 200) == pytest.approx(1.0)  # the printed cosine would go on to 1.71


@pytest.mark.parametrize("wrong", [-0.1, 1.1, math.nan, True, "0.5"])
def test_a_weight_outside_the_unit_interval_is_refused(wrong: float) -> None:
    with pytest.raises(InputError, match="between 0"):
        rules.constant(wrong)


def test_equation_5_by_hand() -> None:
    """B = 1000, σ = 1, d = 3·10⁶, L = 2, 𝓛₀ = 2: √(8 / 4·10⁶) = √2/1000, so α = 1/(1 + √2)."""
    found = rules.equation_5(batch=1000, noise_multiplier=1.0, parameters=3_000_000, smoothness=2.0, loss=2.0)
    assert found == pytest.approx(1 / (1 + math.sqrt(2)))


@QUICK
@given(
    batch=st.floats(10, 5000), sigma=st.floats(0.3, 20), parameters=st.integers(10, 10**6), smooth=POSITIVE,
    loss=st.floats(0.1, 10), steps=st.integers(10, 10_000),
)  # fmt: skip
def test_equation_5_is_the_best_private_step_beside_the_set_public_one(
    batch: float, sigma: float, parameters: int, smooth: float, loss: float, steps: int
) -> None:
    """η_priv minimises the bound of private steps; η_pub = 1/(B L √T) is not minimised over, but set."""
    fixed: dict[str, Any] = {
        "batch": batch, "noise_multiplier": sigma, "parameters": parameters, "smoothness": smooth, "loss": loss,
    }  # fmt: skip

    def bound(log_lr: float) -> float:
        return math.log(rules.private_step_bound(math.exp(log_lr), steps=steps, **fixed))

    private = math.exp(golden(bound, -35.0, 12.0))
    public = 1 / (batch * smooth * math.sqrt(steps))
    assert rules.equation_5(**fixed) == pytest.approx(public / (public + private), rel=1e-3)


@QUICK
@given(
    public=SIZES, private=SIZES, distance=st.floats(0.01, 20), parameters=st.integers(1, 10**5),
    mu=st.floats(0.05, 10), spread=st.floats(0.01, 500),
)  # fmt: skip
def test_theorem_3_1_is_the_minimum_of_its_bound(
    public: int, private: int, distance: float, parameters: int, mu: float, spread: float
) -> None:
    fixed: dict[str, Any] = {
        "public_records": public, "private_records": private, "distance": distance, "parameters": parameters,
        "mu": mu, "spread": spread,
    }  # fmt: skip
    found = rules.theorem_3_1(**fixed)

    def bound(alpha: float) -> float:
        return rules.theorem_3_1_bound(alpha, **fixed)

    assert 0 <= found <= 1
    numerical = bound(golden(bound, 0.0, 1.0))
    assert bound(found) <= numerical * (1 + 1e-9)
    assert bound(found) >= numerical * (1 - 1e-6)


def test_theorem_3_1_without_noise_counts_every_record_alike() -> None:
    options: dict[str, Any] = {"public_records": 10, "private_records": 90, "parameters": 1, "mu": 1e9, "spread": 1.0}
    assert rules.theorem_3_1(distance=1e-9, **options) == pytest.approx(0.1)


def test_theorem_3_1_has_no_stationary_point_where_noise_dominates() -> None:
    """The paper solves for one and takes it to lie in [0, 1]."""
    options: dict[str, Any] = {"public_records": 50, "private_records": 50, "parameters": 10**6, "mu": 0.1}
    assert rules.theorem_3_1(distance=1.0, spread=1.0, **options) == 1.0


def test_gaussian_mu_is_equation_2() -> None:
    found = rules.gaussian_mu(sampling_rate=0.01, steps=400, noise_multiplier=1.0)
    assert found == pytest.approx(0.2 * math.sqrt(math.e - 1))
    assert math.isfinite(rules.gaussian_mu(sampling_rate=0.01, steps=400, noise_multiplier=1e-3))


def test_the_least_error_by_hand() -> None:
    """tr Σ = 4, B = 100, σ = 1, R = 2, d = 1000, B_pub = 50: v_priv = 0.04 + 0.4, v_pub = 0.08."""
    private = rules.private_error(moment=4.0, batch=100, noise_multiplier=1.0, clip_norm=2.0, parameters=1000)
    public = rules.public_error(trace=4.0, batch=50)
    assert (private, public) == (pytest.approx(0.44), pytest.approx(0.08))
    assert rules.least_error(private, public) == pytest.approx(0.44 / 0.52)
    biased = rules.private_error(moment=4.0, batch=100, noise_multiplier=1.0, clip_norm=2.0, parameters=1000, bias=0.48)
    assert rules.least_error(biased, public) == pytest.approx(0.92)
    assert rules.least_error(0.0, 0.0) == 0.5


def test_over_a_horizon_noise_averages_out_and_the_public_set_does_not() -> None:
    """H = 10, n_pub = 200: v_pub = 4 · (1/200 + (1/50 − 1/200)/10) = 0.026, v_priv = 0.44/10."""
    private = rules.private_error(
        moment=4.0, batch=100, noise_multiplier=1.0, clip_norm=2.0, parameters=1000, horizon=10
    )
    public = rules.public_error(trace=4.0, batch=50, records=200, horizon=10)
    assert (private, public) == (pytest.approx(0.044), pytest.approx(0.026))
    assert rules.public_error(trace=4.0, batch=50, records=200) == pytest.approx(0.08)  # H = 1: tr Σ / B_pub
    measured = rules.public_error(trace=4.0, batch=50, records=200, horizon=10, lasting=0.1)
    assert measured == pytest.approx(0.106)


@QUICK
@given(private=st.floats(1e-6, 1e3), public=st.floats(1e-6, 1e3))
def test_the_least_error_is_least(private: float, public: float) -> None:
    found = rules.least_error(private, public)

    def error(alpha: float) -> float:
        return alpha**2 * public + (1 - alpha) ** 2 * private

    assert error(found) <= min(error(a) for a in np.linspace(0, 1, 101)) * (1 + 1e-12)


def test_the_least_error_in_a_simulation() -> None:
    """Two independent estimates of one vector, the private one noisier: no other weight comes closer."""
    rng = np.random.default_rng(0)
    truth, runs = rng.normal(size=5), 20_000
    public = truth + rng.normal(scale=0.3, size=(runs, 5))
    private = truth + rng.normal(scale=0.6, size=(runs, 5))
    found = rules.least_error(5 * 0.36, 5 * 0.09)
    assert found == pytest.approx(0.8)

    def measured(alpha: float) -> float:
        return float(np.square(alpha * public + (1 - alpha) * private - truth).sum(1).mean())

    best = min(np.linspace(0, 1, 41), key=measured)
    assert best == pytest.approx(found, abs=0.03)


BASE: dict[str, Any] = {
    "batch": 1000.0,
    "noise_multiplier": 2.0,
    "parameters": 100_000,
    "smoothness": 5.0,
    "loss": 2.3,
}


def noise(batch: float, records: float, steps: float, mu: float = 0.5) -> float:
    """σ of equation (29): what μ-GDP takes, approximately."""
    return math.sqrt(1 / math.log1p((records * mu) ** 2 / (steps * batch**2)))


class TestWhatCorollary432Claims:
    """α falls with B, L, 𝓛₀ and n_priv, rises with σ and d; σ follows from ε, T, B and n_priv as in equation (29)."""

    @pytest.mark.parametrize(
        ("key", "rises"),
        [("noise_multiplier", True), ("parameters", True), ("smoothness", False), ("loss", False), ("batch", False)],
    )
    def test_one_after_the_other_all_else_fixed(self, key: str, rises: bool) -> None:
        found = [rules.equation_5(**{**BASE, key: BASE[key] * factor}) for factor in (1, 2, 4)]
        assert found == sorted(found, reverse=not rises)
        assert found[0] != found[-1]

    def test_the_batch_hardly_matters_at_equal_privacy_and_equal_steps(self) -> None:
        """The corollary varies B with σ fixed. At equal (ε, T) equation (29) makes σ grow with B, and B²/(B² + σ²d)
        stays where it is: the claim is one about another ε."""
        batches = (1000.0, 4000.0)
        equal_privacy = [
            rules.equation_5(**{**BASE, "batch": batch, "noise_multiplier": noise(batch, 60_000, 10_000)})
            for batch in batches
        ]
        assert equal_privacy[1] == pytest.approx(equal_privacy[0], rel=0.05)
        equal_noise = [rules.equation_5(**{**BASE, "batch": batch}) for batch in batches]
        assert equal_noise[0] - equal_noise[1] > 5 * abs(equal_privacy[0] - equal_privacy[1])

    def test_private_records_pull_towards_private_and_steps_away(self) -> None:
        def at(records: float, steps: float) -> float:
            return rules.equation_5(**{**BASE, "noise_multiplier": noise(1000, records, steps)})

        assert at(120_000, 1000) < at(60_000, 1000) < at(60_000, 4000)


@QUICK
@given(private=SIZES, more=st.integers(1, 10_000))
def test_more_public_rows_raise_the_weight_under_theorem_3_1(private: int, more: int) -> None:
    options: dict[str, Any] = {
        "private_records": private, "distance": 1.0, "parameters": 10, "mu": 1.0, "spread": 3.0,
    }  # fmt: skip
    fewer = rules.theorem_3_1(public_records=100, **options)
    assume(fewer < 1)
    assert rules.theorem_3_1(public_records=100 + more, **options) >= fewer
