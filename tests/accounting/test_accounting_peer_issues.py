"""Accountant bugs that users of the peers reported, by repository and number; each must not happen here."""

from __future__ import annotations

import math

import pytest

from sordino import Plan
from sordino.errors import InputError, Refused
from sordino.methods.dpsgd.accountant import account_dpsgd, calibrate_dpsgd
from sordino.plan import ROUNDING_MARGIN


def eps(rate: float, sigma: float, steps: int, delta: float, accountant: str = "pld") -> float:
    return float(account_dpsgd(sigma, steps, delta, sampling_rate=rate, accountant=accountant)["epsilon"])


@pytest.mark.parametrize("target", [8.0, 12.0, 50.0, 200.0])
def test_opacus_601_calibration_fails_for_specific_inputs(target: float) -> None:
    """ "Discrete mean differs significantly from continuous mean": few-shot settings, large rates, few steps."""
    for rate, steps in ((0.5, 40), (1.0, 20), (0.1, 7), (64 / 500, 160)):
        found = calibrate_dpsgd(target, steps, 1e-5, sampling_rate=rate)
        assert target - 1e-3 <= found["epsilon"] <= target


def test_opacus_602_an_accountant_that_fails_is_not_left_without_an_answer() -> None:
    """PRV fails where the noise is small; here such a run gets an answer and the accountant's true name."""
    for sigma in (0.05, 0.1, 0.3):
        found = account_dpsgd(sigma, 100, 1e-5, sampling_rate=0.2)
        assert math.isfinite(found["epsilon"])
        assert found["accountant"] in ("pld", "rdp")
        assert found["accountant"] != "rdp" or found["epsilon"] == found["epsilon_rdp"]


def test_opacus_604_large_target_epsilons_work() -> None:
    for target in (20.0, 100.0, 1000.0):
        found = calibrate_dpsgd(target, 500, 1e-5, sampling_rate=0.05)
        assert target - 1e-3 <= found["epsilon"] <= target


def test_opacus_591_cannot_compute_epsilon() -> None:
    """A plan from a target ε, with the default accountant and ordinary numbers, and with a tiny dataset."""
    for records, batch in ((60_000, 256), (120, 16), (12, 6)):
        plan = Plan.dpsgd(epsilon=5.0, delta=1e-5, records=records, expected_batch=batch, epochs=10)
        assert 5.0 - 1e-3 <= plan.guarantee().epsilon <= 5.0


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.2, 0.6, 40), (0.5, 1.0, 20), (0.1, 0.4, 100)])
def test_prv_accountant_36_discrete_mean_differs(rate: float, sigma: float, steps: int) -> None:
    """ε around 7 to 60 from few steps at high rates: PLD answers, below RDP."""
    found = account_dpsgd(sigma, steps, 1e-5, sampling_rate=rate)
    assert found["accountant"] == "pld"
    assert 1 < found["epsilon"] < found["epsilon_rdp"]


def test_prv_accountant_42_very_large_epsilons() -> None:
    """q = 0.2, σ = 1, 10 of at most 500 steps at δ = 1e-5: the issue's own numbers."""
    few, many = eps(0.2, 1.0, 10, 1e-5), eps(0.2, 1.0, 500, 1e-5)
    assert 4 < few < 6 < 35 < many < 45


@pytest.mark.parametrize("rate", [0.00033, 0.00038])
def test_prv_accountant_17_small_deltas(rate: float) -> None:
    """δ = 1.1e-18 and 1.13e-18 gave 0.06 and 3.8; the truth is smooth, and below RDP's 0.669."""
    values = [eps(rate, 4.0, 10_000, delta) for delta in (1.0e-18, 1.1e-18, 1.11e-18, 1.13e-18, 1.2e-18)]
    assert values == sorted(values, reverse=True)
    assert values[0] - values[-1] < 0.002
    assert 0.05 < values[-1] < eps(rate, 4.0, 10_000, 1.13e-18, "rdp") < 0.9


def test_opacus_585_negative_epsilons_at_high_deltas() -> None:
    for accountant in ("pld", "rdp"):
        assert eps(0.001, 5.0, 1, 0.5, accountant) == 0


def test_opacus_571_and_819_nothing_is_read_off_the_data() -> None:
    """Rate and divisor follow from the plan's public numbers alone, and are not rounded to batches per epoch."""
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=391, expected_batch=1, steps=10)
    assert plan.sampling_rate == 1 / 391
    assert plan.divisor == 1
    other = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=1000, expected_batch=300, epochs=1)
    assert other.sampling_rate == 0.3  # not 1 / len(loader) = 1 / 4
    assert other.divisor == 300  # not int(1000 / 4)
    assert other.steps == 4


def test_opacus_80_shuffled_batches_are_not_accounted_as_poisson() -> None:
    options = {"noise_multiplier": 1.0, "delta": 1e-5, "records": 1000, "expected_batch": 10, "epochs": 3}
    shuffled = Plan.dpsgd(sampling="partition", **options).guarantee()
    poisson = Plan.dpsgd(**options).guarantee()
    assert shuffled.epsilon > 3 * poisson.epsilon
    assert (shuffled.sampler, shuffled.relation) == ("partition", "replace-one")
    assert "no amplification" in shuffled.theorem
    with pytest.raises(Refused, match="partition"):
        Plan.dpsgd(sampling="partition", relation="add-remove", **options)


def test_opacus_813_and_600_an_unknown_sampler_is_refused_not_replaced() -> None:
    with pytest.raises(InputError, match="weighted"):
        Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=100, expected_batch=10, steps=3, sampling="weighted")


def test_jax_privacy_383_noise_belongs_to_the_sum() -> None:
    """The noise is relative to one record's bound in the *sum*; the divisor comes after and changes no ε."""
    options = {"noise_multiplier": 1.3, "delta": 1e-5, "records": 1000, "expected_batch": 100, "steps": 10}
    plan = Plan.dpsgd(clip_norm=0.5, **options)
    assert plan.sensitivity == 0.5 * (1 + ROUNDING_MARGIN)
    assert plan.noise.noise_multiplier == 1.3
    halved = Plan.dpsgd(clip_norm=0.5, divisor=50, **options)
    assert halved.guarantee().epsilon == plan.guarantee().epsilon
    assert halved.sensitivity == plan.sensitivity


def test_fastdp_46_the_clip_norm_is_not_ignored() -> None:
    options = {"noise_multiplier": 1.3, "delta": 1e-5, "records": 1000, "expected_batch": 100, "steps": 10}
    for clip_norm in (0.1, 1.0, 7.0):
        plan = Plan.dpsgd(clip_norm=clip_norm, **options)
        assert plan.clipping.clip_norm == clip_norm
        assert plan.sensitivity == clip_norm * (1 + ROUNDING_MARGIN)
