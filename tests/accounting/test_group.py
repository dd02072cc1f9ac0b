"""Rows are sampled, users are protected: the mixture of Gaussians."""

from __future__ import annotations

import json
import math
import time

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as google
from scipy.stats import binom

from sordino.accounting.account import account, epsilon
from sordino.accounting.calibration import calibrate
from sordino.accounting.events import Release, compose_events, flatten, grouped
from sordino.accounting.group import GroupPair
from sordino.cli import main
from sordino.errors import InputError


def found(sigma: float, rate: float, rows: int, steps: int, delta: float = 1e-5) -> float:
    return epsilon(compose_events([(grouped(sigma, rate, rows), steps)]), delta)


def test_it_agrees_with_dp_accounting() -> None:
    rows, rate, sigma, steps = 2, 0.05, 2.0, 10
    weights = [float(binom.pmf(j, rows, rate)) for j in range(rows + 1)]
    theirs = google.from_mixture_gaussian_mechanism(
        sigma, list(range(rows + 1)), weights, value_discretization_interval=1e-3
    ).self_compose(steps)
    ours = account(compose_events([(grouped(sigma, rate, rows), steps)]), 1e-5)
    assert ours.epsilon == pytest.approx(theirs.get_epsilon_for_delta(1e-5), rel=2e-3)
    assert 0.98 * ours.epsilon < ours.epsilon_lower <= ours.epsilon


def test_one_row_is_a_record_and_more_rows_cost_more() -> None:
    assert grouped(1.0, 0.1, 1) == Release("gaussian", 1.0, 0.1)
    assert grouped(1.0, 1.0, 4) == Release("gaussian", 0.25)
    values = [found(2.0, 0.05, rows, 5) for rows in (1, 2, 4)]
    assert values == sorted(values)
    assert values[1] > 1.3 * values[0]


def test_an_event_is_read_back_and_too_many_rows_are_an_error() -> None:
    assert flatten(compose_events([(grouped(2.0, 0.1, 3), 7)])) == [(grouped(2.0, 0.1, 3), 7)]
    with pytest.raises(InputError, match="sample users"):
        grouped(1.0, 0.1, 1001)


@pytest.mark.parametrize(("rate", "sigma", "steps"), [(0.01, 30.0, 1000), (0.5, 1000.0, 100), (1e-5, 5.0, 10**5)])
def test_a_thousand_rows_take_less_than_two_seconds(rate: float, sigma: float, steps: int) -> None:
    begin = time.process_time()
    found = account(compose_events([(grouped(sigma, rate, 1000), steps)]), 1e-5)
    assert time.process_time() - begin < 2
    assert 0.99 * found.epsilon < found.epsilon_lower <= found.epsilon


def test_shifts_that_are_left_out_are_paid_for() -> None:
    """Against all shifts, by quadrature, in both directions."""
    sigma, rate, rows, interval = 3.0, 0.2, 12, 1e-3
    x = np.linspace(-10 * sigma, rows + 10 * sigma, 200_001)
    width = x[1] - x[0]
    densities = [np.exp(-0.5 * ((x - j) / sigma) ** 2) / sigma / math.sqrt(2 * math.pi) for j in range(rows + 1)]
    p = sum(float(binom.pmf(j, rows, rate)) * density for j, density in enumerate(densities))
    q = densities[0]
    for tail in (1e-12, 1e-3):
        forward, backward = GroupPair(sigma, rate, rows).from_above(interval, tail)
        for eps in (0.1, 0.5, 1.0):
            for pmf, truth in ((forward, p - math.exp(eps) * q), (backward, q - math.exp(eps) * p)):
                losses = (pmf.lower + np.arange(len(pmf.probs))) * interval
                delta = pmf.infinity + float((pmf.probs * np.maximum(-np.expm1(eps - losses), 0)).sum())
                exact = float(np.maximum(truth, 0).sum() * width)
                assert exact * (1 - 1e-6) - 1e-12 <= delta <= exact * (1 + 1e-4) + 2 * tail
        below = GroupPair(sigma, rate, rows).attained(tail)
        assert float(below.weights.sum()) <= 1


def test_noise_is_calibrated_where_the_first_guess_has_losses_beyond_every_grid() -> None:
    sigma, value = calibrate(lambda s: compose_events([(grouped(s, 0.01, 300), 50)]), 3.0, 1e-6, guess=0.5)
    assert 2.998 <= value <= 3.0
    assert sigma > 10


def test_the_command_says_user(capsys: pytest.CaptureFixture[str]) -> None:
    line = "account dpsgd --sampling-rate 0.05 --noise-multiplier 2 --steps 5 --delta 1e-5 --examples-per-user 2 --json"
    assert main(line.split()) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["unit"], said["examples_per_user"]) == ("user", 2)
    assert said["epsilon"] == pytest.approx(found(2.0, 0.05, 2, 5))


def _true_delta(sigma: float, rate: float, rows: int, epsilon: float) -> mpmath.mpf:
    """δ(ε) of one step by its closed form, with fifty digits."""
    with mpmath.workdps(50):
        s, q, e = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.mpf(epsilon)
        weights = [mpmath.binomial(rows, j) * q**j * (1 - q) ** (rows - j) for j in range(rows + 1)]

        def loss(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.log(sum(w * mpmath.exp((x * j - j * j / 2) / s**2) for j, w in enumerate(weights)))

        low, high = mpmath.mpf(-1000), mpmath.mpf(1000)
        for _ in range(160):
            middle = (low + high) / 2
            low, high = (middle, high) if loss(middle) < e else (low, middle)
        above = [mpmath.ncdf((j - low) / s) for j in range(rows + 1)]
        return sum(w * a for w, a in zip(weights, above, strict=True)) - mpmath.exp(e) * above[0]


@pytest.mark.parametrize(
    ("sigma", "rate", "rows", "delta"),
    [
        (0.39746951146930204, 0.8385539441248526, 4, 4.217185999601121e-169),
        (0.343669618725316, 0.9981959661005645, 2, 1.2628288823550104e-229),
        (0.18846564234898305, 0.9296500104114012, 1, 6.106289743136146e-269),
        (7.591857890924489, 0.02546643007646964, 3, 3.975764465314201e-21),
    ],
)
def test_both_bounds_hold_where_probabilities_are_too_small_for_doubles(
    sigma: float, rate: float, rows: int, delta: float
) -> None:
    """The lower bound was once above the truth: at large losses Q underflows long before P."""
    bounds = account(compose_events([(grouped(sigma, rate, rows), 1)]), delta)
    assert _true_delta(sigma, rate, rows, bounds.epsilon) <= delta
    if bounds.epsilon_lower:
        assert _true_delta(sigma, rate, rows, bounds.epsilon_lower) >= delta


def test_laplace_noise_has_its_pure_epsilon_however_small_delta_is() -> None:
    pure = account(compose_events([(Release("laplace", 2.0, 0.5), 10)]), 1e-290)
    assert pure.epsilon == pytest.approx(10 * math.log(0.5 + 0.5 * math.exp(0.5)))
