"""calibrate: the smallest noise that meets a target, never above it, within 1e-3 below it, or a clear refusal."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from dp_accounting import dp_event
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting import calibrate, calibration, epsilon
from sordino.accounting.account import TOLERANCE
from sordino.accounting.events import Release, allocated, compose_events
from sordino.errors import InputError
from sordino.methods.dpsgd.accountant import account_dpsgd, calibrate_dpsgd


@given(
    target=st.floats(-1.5, 1.3).map(lambda x: 10**x),
    rate=st.floats(-4, 0).map(lambda x: 10**x),
    steps=st.floats(0, 4).map(lambda x: round(10**x)),
    delta=st.floats(-10, -3).map(lambda x: 10**x),
)
@settings(deadline=None, max_examples=8)
def test_never_above_the_target_and_within_a_thousandth(target: float, rate: float, steps: int, delta: float) -> None:
    least = account_dpsgd(0.01, steps, delta, sampling_rate=rate)["epsilon"]
    if least <= target:  # met by the least noise on offer
        with pytest.raises(InputError, match="no privacy"):
            calibrate_dpsgd(target, steps, delta, sampling_rate=rate)
        return
    found = calibrate_dpsgd(target, steps, delta, sampling_rate=rate)
    assert target - 1e-3 * min(1.0, target) <= found["epsilon"] <= target
    again = account_dpsgd(found["noise_multiplier"], steps, delta, sampling_rate=rate)
    assert again["epsilon"] == found["epsilon"]
    less = account_dpsgd(found["noise_multiplier"] * 0.99, steps, delta, sampling_rate=rate)
    assert less["epsilon"] > target


@pytest.mark.parametrize(
    "options",
    [
        {"sampling_rate": 0.01, "accountant": "rdp"},
        {"sampling_rate": 0.01, "relation": "replace-one"},
        {"sampling": "partition", "records": 1000, "batch": 10},
        {"sampling": "without-replacement", "records": 1000, "batch": 10},
        {"sampling": "truncated-poisson", "records": 1000, "batch": 10, "cap": 20},
        {"sampling_rate": 0.01, "mechanism": "laplace"},
    ],
)
def test_every_sampler_can_be_calibrated(options: dict[str, object]) -> None:
    found = calibrate_dpsgd(2.0, 500, 1e-5, **options)  # type: ignore[arg-type]
    assert 2.0 - 1e-3 <= found["epsilon"] <= 2.0
    assert found["target_epsilon"] == 2.0


def test_calibration_takes_a_fraction_of_a_second() -> None:
    begin = time.process_time()
    calibrate_dpsgd(2.0, 10_000, 1e-5, sampling_rate=0.01)
    assert time.process_time() - begin < 3


def with_statistic(sigma: float) -> dp_event.DpEvent:
    step = dp_event.PoissonSampledDpEvent(0.01, dp_event.GaussianDpEvent(sigma))
    return dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(step, 100), dp_event.GaussianDpEvent(4.0)])


@pytest.mark.parametrize(("batches", "epochs", "target"), [(59, 10, 3.0), (300, 400, 0.3)])
def test_a_rough_calibration_meets_the_target_with_a_thousandth_more_noise_at_most(
    batches: int, epochs: int, target: float
) -> None:
    def event(sigma: float) -> object:
        return compose_events([(allocated(sigma, batches, batches), epochs)])

    (rough, stated), (least, _) = (calibrate(event, target, 1e-5, rough=way) for way in (True, False))
    assert epsilon(event(rough), 1e-5) <= stated <= target
    assert least * (1 - 1e-4) <= rough <= least * (1 + 1e-3)


def test_few_evaluations_follow_the_coarse_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope of the coarse search leads to the result: fine grids are expensive."""
    tolerances = []
    measured = calibration.composed_epsilon

    def counted(*arguments: Any, tolerance: float) -> tuple[float, str]:
        tolerances.append(tolerance)
        return measured(*arguments, tolerance=tolerance)

    monkeypatch.setattr(calibration, "composed_epsilon", counted)
    for target in (0.2, 1.0, 5.0):
        calibrate(lambda s: compose_events([(Release("gaussian", s, 0.01), 2000)]), target, 1e-6)
    assert tolerances.count(TOLERANCE) <= 9
    assert len(tolerances) <= 36


def test_fixed_releases_are_part_of_the_budget() -> None:
    sigma, value = calibrate(with_statistic, 1.5, 1e-5)
    assert value == epsilon(with_statistic(sigma), 1e-5)
    assert 1.5 - 1e-3 <= value <= 1.5
    assert sigma > calibrate_dpsgd(1.5, 100, 1e-5, sampling_rate=0.01)["noise_multiplier"]


def test_an_impossible_budget_says_what_can_be_reached() -> None:
    floor = epsilon(dp_event.GaussianDpEvent(4.0), 1e-5)
    with pytest.raises(InputError, match=f"can't be reached.*{floor:.3g}"):
        calibrate(with_statistic, 0.5, 1e-5)


def test_a_target_beyond_all_privacy_is_an_input_error() -> None:
    with pytest.raises(InputError, match="no privacy"):
        calibrate_dpsgd(1e9, 10, 1e-5, sampling_rate=1.0)


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf, "3", None])
def test_the_target_is_checked(target: object) -> None:
    with pytest.raises(InputError, match="epsilon"):
        calibrate_dpsgd(target, 10, 1e-5, sampling_rate=0.1)  # type: ignore[arg-type]
