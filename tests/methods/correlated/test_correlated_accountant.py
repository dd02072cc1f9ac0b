"""Strategies, sensitivities and ε of correlated noise against brute force and the values of the theory."""

from __future__ import annotations

import math

import numpy as np
import pytest

import sordino
from sordino.accounting.account import account
from sordino.accounting.events import Release, compose_events
from sordino.errors import InputError, Refused
from sordino.methods.correlated.accountant import account_correlated, calibrate_correlated
from sordino.methods.correlated.choose import best_strategy
from sordino.methods.correlated.mechanism import Pattern, moves, releases
from sordino.methods.correlated.sensitivity import brute_force, sensitivity
from sordino.methods.correlated.strategies import Strategy, inverse
from sordino.methods.correlated.workloads import Workload, noise_in_weights

PREFIX = Workload()


def test_sensitivities_are_those_of_the_theory() -> None:
    assert sensitivity(Strategy("lambda", 0.5), steps=8, separation=4) ** 2 == pytest.approx(2.82745361, rel=1e-8)
    root = Strategy("inverse-root", bands=4)
    assert sensitivity(root, steps=8, separation=4) ** 2 == pytest.approx(3.91331196, rel=1e-8)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy("lambda", 0.5),
        Strategy("lambda", 0.97),
        Strategy("inverse-root", bands=3),
        Strategy("inverse-root", bands=8),
        Strategy("banded-root", bands=3),
        Strategy("banded-lambda", 0.8, 4),
        Strategy("identity"),
    ],
    ids=str,
)
def test_no_participation_pattern_moves_more_than_the_sensitivity(strategy: Strategy) -> None:
    for steps, separation in ((7, 1), (9, 2), (10, 3), (11, 5)):
        worst = brute_force(strategy.matrix(steps), separation, math.ceil(steps / separation))
        bound = sensitivity(strategy, steps=steps, separation=separation)
        assert worst <= bound <= worst * (1 + 1e-6)


@pytest.mark.parametrize(
    ("separation", "alone", "best", "value", "sixteen"),
    [(200, 10.02, 3.24, 0.905, 2.79), (50, 20.05, 6.51, 0.901, 5.75), (20, 31.70, 11.10, 0.870, 10.82)],
)
def test_errors_on_prefix_sums_are_those_of_the_theory(
    separation: int, alone: float, best: float, value: float, sixteen: float
) -> None:
    pattern = Pattern(separation)

    def error(strategy: Strategy) -> float:
        return moves(strategy, pattern, 200) * noise_in_weights(strategy, PREFIX, 200)

    assert error(Strategy("identity")) == pytest.approx(alone, abs=0.006)
    assert error(Strategy("lambda", value)) == pytest.approx(best, abs=0.006)
    assert error(Strategy("inverse-root", bands=16)) == pytest.approx(sixteen, abs=0.006)
    assert error(best_strategy(pattern, PREFIX, 200)) <= sixteen + 0.006


def test_a_matrix_times_its_noise_is_the_identity_up_to_the_residue() -> None:
    for strategy in (Strategy("inverse-root", bands=5), Strategy("banded-root", bands=4)):
        terms = strategy.noise(60)
        given = np.zeros(60)
        given[list(terms)] = list(terms.values())
        product = np.convolve(given, strategy.matrix(60))[:60]
        product[0] -= 1
        assert np.abs(product).sum() <= strategy.residue(60) + 1e-13


def test_what_is_cut_off_a_banded_inverse_is_bounded_by_the_residue() -> None:
    strategy = Strategy("banded-lambda", 0.9, 5)
    terms = strategy.noise(400)
    given = np.zeros(400)
    given[list(terms)] = list(terms.values())
    exact = inverse(given, 400)
    assert 0 < np.abs(exact - strategy.matrix(400)).sum() <= strategy.residue(400) < 1e-11
    found = releases(strategy, Pattern(5, 0.1), 2.0, 400)
    assert found[1][0].whole, "the rest is paid for by a release of its own"


def test_coefficients_that_rise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strategy, "matrix", lambda self, steps: np.linspace(1, 2, steps))
    with pytest.raises(Refused, match="non-increasing"):
        sensitivity(Strategy("lambda", 0.5), steps=6, separation=2)


def test_a_fixed_order_is_one_gaussian_whatever_the_number_of_steps() -> None:
    found = account_correlated(3.0, 1e-5, records=1000, batch=100, epochs=2, strategy="lambda", value=0.8)
    moved = sensitivity(Strategy("lambda", 0.8), steps=20, separation=10)
    alone = account(compose_events([(Release("gaussian", 3.0 / moved), 1)]), 1e-5)
    assert found["epsilon"] == pytest.approx(alone.epsilon)
    assert found["mechanism_noise_multiplier"] == pytest.approx(3.0 / moved)


def test_cyclic_sampling_is_amplified_as_fewer_steps_at_a_higher_rate() -> None:
    setting = {"records": 1000, "batch": 50, "epochs": 2, "groups": 4, "strategy": "banded-lambda"}
    found = account_correlated(3.0, 1e-5, **setting, value=0.7, bands=4)
    norm = math.sqrt(sum(0.7 ** (2 * j) for j in range(4)))
    alone = account(compose_events([(Release("gaussian", 3.0 / norm, 0.2), 10)]), 1e-5)
    assert alone.epsilon <= found["epsilon"] <= alone.epsilon * (1 + 1e-4)


def test_more_bands_than_groups_are_refused_where_batches_are_sampled() -> None:
    setting = {"records": 1000, "batch": 50, "epochs": 1, "groups": 4}
    for strategy in ({"strategy": "banded-root", "bands": 5}, {"strategy": "lambda", "value": 0.5}):
        with pytest.raises(Refused, match="bands"):
            account_correlated(1.0, 1e-5, **setting, **strategy)
    with pytest.raises(Refused, match="add-remove"):
        account_correlated(1.0, 1e-5, **setting, strategy="identity", relation="replace-one")


def test_calibration_meets_its_target_and_beats_independent_noise_in_one_epoch() -> None:
    setting = {"records": 6000, "batch": 200, "epochs": 1}
    found = calibrate_correlated(8.0, 1e-5, **setting)
    plain = calibrate_correlated(8.0, 1e-5, **setting, strategy="identity")
    assert 7.99 <= found["epsilon"] <= 8.0
    assert found["noise_in_weights"] < 0.7 * plain["noise_in_weights"]


def test_the_workload_of_momentum_is_that_of_the_update() -> None:
    workload, steps = Workload(momentum=0.9, decay=0.01), 12
    weights, velocity, seen = 0.0, 0.0, []
    for t in range(steps):
        velocity = 0.9 * velocity + (1.0 if t == 0 else 0.0)
        weights = (1 - 0.01) * weights + velocity
        seen.append(weights)
    assert workload.coefficients(steps) == pytest.approx(seen)
    best = best_strategy(Pattern(12), workload, steps)
    assert noise_in_weights(best, workload, steps) > 0


def test_a_plan_comes_back_from_its_ledger_and_says_what_it_rests_on() -> None:
    plan = sordino.correlated(records=400, expected_batch=40, epochs=2, epsilon=4.0, delta=1e-4, groups=10)
    assert sordino.Plan.from_dict(plan.to_dict()) == plan
    assert plan.guarantee().epsilon <= 4.0
    assert "Denisov" in str(plan.guarantee())
    assert plan.method.epsilons(plan, [1, 10, 20])[0] < plan.method.epsilons(plan, [1, 10, 20])[2]


def test_wrong_options_are_named() -> None:
    with pytest.raises(InputError, match="give its name"):
        sordino.correlated(records=100, expected_batch=10, epochs=1, epsilon=1.0, delta=1e-3, bands=4)
    with pytest.raises(InputError, match="takes lambda"):
        Strategy("lambda")
    with pytest.raises(InputError, match="groups"):
        sordino.correlated(records=100, expected_batch=10, epochs=1, epsilon=1.0, delta=1e-3, groups=11)
