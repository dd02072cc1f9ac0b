"""Rows are sampled, users are protected: the mixture of Gaussians."""

from __future__ import annotations

import json

import pytest
from dp_accounting.pld import privacy_loss_distribution as google
from scipy.stats import binom

from sordino.accounting.account import account, epsilon
from sordino.accounting.events import Release, compose_events, flatten, grouped
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


def test_the_command_says_user(capsys: pytest.CaptureFixture[str]) -> None:
    line = "account dpsgd --sampling-rate 0.05 --noise-multiplier 2 --steps 5 --delta 1e-5 --examples-per-user 2 --json"
    assert main(line.split()) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["unit"], said["examples_per_user"]) == ("user", 2)
    assert said["epsilon"] == pytest.approx(found(2.0, 0.05, 2, 5))
