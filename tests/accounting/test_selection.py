"""The cost of choosing: the theorems by hand, by dp-accounting, and against exact laws of small mechanisms."""

from __future__ import annotations

import math
from collections.abc import Callable

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.accounting.account import Releases, composed_epsilon
from sordino.accounting.events import Release, compose_events
from sordino.accounting.rdp import ORDERS, rdp_curve
from sordino.accounting.selection import (
    Repetition,
    calibrate_selection,
    composed_cost,
    selection_epsilon,
)
from sordino.checks import SHAPES
from sordino.errors import InputError, Refused
from sordino.randomness import RandomSource

DELTA = 1e-5
LAWS = [Repetition(name, mean) for name in SHAPES for mean in (2.0, 10.0)]


def releases(noise_multiplier: float, rate: float = 0.02, steps: int = 500) -> Releases:
    return [(Release("gaussian", noise_multiplier, rate), steps)]


def gamma_by_hand(law: Repetition) -> float:
    """Geometric: E K = 1/γ. Logarithmic: E K = (1/γ − 1)/log(1/γ), solved by bisection."""
    if law.distribution == "geometric":
        return 1 / law.mean_runs
    low, high = 1e-12, 1 - 1e-12
    for _ in range(200):
        middle = math.sqrt(low * high)
        if (1 / middle - 1) / -math.log(middle) > law.mean_runs:
            low = middle
        else:
            high = middle
    return low


def epsilon_by_hand(curve: dict[float, float], law: Repetition) -> float:
    """Papernot & Steinke, Thm 2 and Thm 6, order by order; then Canonne, Kamath, Steinke 2020, Prop. 12."""
    best = math.inf
    for order, one in curve.items():
        beside = math.log(law.mean_runs) / (order - 1)
        if law.distribution == "poisson":
            limit = math.log(1 + 1 / (order - 1))
            value = (
                one
                + law.mean_runs * float(google_rdp.compute_delta(list(curve), list(curve.values()), limit)[0])
                + beside
            )
        else:
            cost = -math.log(gamma_by_hand(law))
            value = one + beside + (1 + law.shape) * min((1 - 1 / a) * e + cost / a for a, e in curve.items())
        converted = value + math.log1p(-1 / order) - math.log(DELTA * order) / (order - 1)
        best = min(best, converted)
    return best


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_epsilon_is_that_of_the_theorem_evaluated_by_hand(law: Repetition) -> None:
    runs = releases(2.0)
    curve = dict(zip(ORDERS, rdp_curve(runs, "add-remove"), strict=True))
    found, by_hand = selection_epsilon([runs], law, DELTA, "add-remove"), epsilon_by_hand(curve, law)
    assert by_hand <= found <= by_hand * 1.001  # numerical errors and the draw of K are paid for, never gained


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_epsilon_is_that_of_dp_accountings_repeat_and_select_event(law: Repetition) -> None:
    runs = releases(2.0)
    accountant = RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    accountant.compose(law.event(compose_events(runs)))
    theirs = accountant.get_epsilon(DELTA)
    assert theirs <= selection_epsilon([runs], law, DELTA, "add-remove") <= theirs * 1.001


def test_under_replace_one_the_shift_is_doubled() -> None:
    """A full-batch Gaussian: noise 4 under replace-one moves as noise 2 under add-remove."""
    law = Repetition("geometric", 5.0)
    one = selection_epsilon([[(Release("gaussian", 2.0), 3)]], law, DELTA, "add-remove")
    assert selection_epsilon([[(Release("gaussian", 4.0), 3)]], law, DELTA, "replace-one") == pytest.approx(one)


GENERATING: dict[str, Callable[[Repetition, float], float]] = {
    "geometric": lambda law, s: law.gamma * s / (1 - (1 - law.gamma) * s),
    "logarithmic": lambda law, s: math.log(1 - (1 - law.gamma) * s) / math.log(law.gamma),
    "poisson": lambda law, s: math.exp(law.mean_runs * (s - 1)),
}


def selected(scores: list[float], law: Repetition) -> list[float]:
    """The exact law of the best of K draws from `scores` (probabilities of 0 < 1 < 2 …); first: nothing was drawn.

    P[best ≤ y] = E F(y)^K, the generating function of K at F(y).
    """
    reached = [GENERATING[law.distribution](law, s) for s in [0.0, *np.minimum(np.cumsum(scores), 1.0)]]
    return [reached[0], *np.diff(reached)]


def renyi(p: list[float], q: list[float], order: float) -> float:
    logs = [order * math.log(a) + (1 - order) * math.log(b) for a, b in zip(p, q, strict=True) if a > 0]
    return float(np.logaddexp.reduce(logs)) / (order - 1)


def normalised(weights: list[float]) -> list[float]:
    return [w / math.fsum(weights) for w in weights]


SCORES = st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4).map(normalised)


@settings(max_examples=60, deadline=None)
@given(SCORES, SCORES, st.sampled_from(LAWS))
def test_the_theorem_bounds_the_exact_divergence_of_selection(p: list[float], q: list[float], law: Repetition) -> None:
    """A mechanism with four outputs on neighbouring data: the selected run's true divergence is below the bound."""
    orders = [1.25, 1.5, 2.0, 3.0, 5.0, 8.0, 16.0, 64.0]
    curve = [max(renyi(p, q, a), renyi(q, p, a), 0.0) + 1e-12 for a in orders]
    bounds = google_rdp._compute_rdp_repeat_and_select(orders, curve, law.mean_runs, law.shape)
    for order, bound in zip(orders, bounds, strict=True):
        assert renyi(selected(p, law), selected(q, law), order) <= bound + 1e-9


def test_the_bound_is_needed_selection_from_many_runs_costs_more_than_one_run() -> None:
    p, q = normalised([1.0, 1.0, 1.0, 1.5]), normalised([1.0, 1.0, 1.0, 1.0])
    law = Repetition("geometric", 10.0)
    assert renyi(selected(q, law), selected(p, law), 2.0) > renyi(q, p, 2.0)


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_the_law_of_the_number_of_runs_sums_to_one_and_has_its_mean(law: Repetition) -> None:
    probabilities = law.probabilities(2000)
    assert math.fsum(probabilities) == pytest.approx(1, abs=1e-12)
    assert math.fsum(k * value for k, value in enumerate(probabilities)) == pytest.approx(law.mean_runs, rel=1e-6)
    assert (probabilities[0] > 0) == (law.distribution == "poisson")


@pytest.mark.parametrize("name", list(SHAPES))
def test_what_is_drawn_has_that_law(name: str) -> None:
    law, source, count = Repetition(name, 3.0), RandomSource.seeded(1), 2000
    drawn = [law.draw(source.stream("sweep/runs", index)) for index in range(count)]
    for k, expected in enumerate(law.probabilities(6)):
        deviation = math.sqrt(max(expected * (1 - expected), 1e-4) / count)
        assert abs(drawn.count(k) / count - expected) < 5 * deviation


@settings(max_examples=20, deadline=None)
@given(st.floats(0.8, 8.0), st.floats(1.5, 40.0), st.sampled_from(sorted(SHAPES)))
def test_a_selection_costs_more_than_one_run_and_more_with_more_runs(sigma: float, mean: float, name: str) -> None:
    runs = releases(sigma, 1.0, 4)
    single, _ = composed_epsilon(runs, DELTA, "add-remove", "rdp")
    fewer, more = (selection_epsilon([runs], Repetition(name, m), DELTA, "add-remove") for m in (mean, 2 * mean))
    assert single < fewer <= more


@pytest.mark.parametrize("name", list(SHAPES))
def test_calibration_meets_the_target_from_below(name: str) -> None:
    law = Repetition(name, 5.0)

    def runs(noise_multiplier: float) -> Releases:
        return releases(noise_multiplier, 1.0, 4)

    (sigma,) = calibrate_selection([runs], 2.0, law, DELTA, "add-remove")
    assert 1.99 <= selection_epsilon([runs(sigma)], law, DELTA, "add-remove") <= 2.0


def test_of_different_runs_the_worst_at_each_order_counts() -> None:
    """Few noisy steps and many quiet ones: neither curve lies above the other, and the maximum is paid for."""
    law = Repetition("geometric", 5.0)
    kinds: list[Callable[[float], Releases]] = [
        lambda sigma: releases(sigma, 1.0, 2),
        lambda sigma: releases(sigma, 0.01, 1000),
    ]
    found = calibrate_selection(kinds, 2.0, law, DELTA, "add-remove")
    runs = [kind(sigma) for kind, sigma in zip(kinds, found, strict=True)]
    whole = selection_epsilon(runs, law, DELTA, "add-remove")
    assert whole <= 2.0
    assert whole >= max(selection_epsilon([run], law, DELTA, "add-remove") for run in runs)


def test_the_figures_of_the_guide() -> None:
    """docs/sweep.md: 1000 steps of rate 0.02 with noise 1.5 at δ = 1e-5."""
    runs = releases(1.5, 0.02, 1000)
    figures = {
        name: selection_epsilon([runs], Repetition(name, 10.0), DELTA, "add-remove")
        for name in ("logarithmic", "geometric", "poisson")
    }
    assert figures == pytest.approx({"logarithmic": 3.615, "geometric": 4.263, "poisson": 4.746}, abs=1e-3)
    assert composed_cost([(runs, 0.0, DELTA, "add-remove")] * 10).epsilon == pytest.approx(7.117, abs=1e-3)


def test_what_has_no_renyi_bound_is_refused() -> None:
    law = Repetition()
    with pytest.raises(Refused, match="no Rényi bound"):
        selection_epsilon([releases(2.0)], law, DELTA, "replace-one")
    capped = [(Release("gaussian", 2.0, 0.02, records=1000, cap=40), 100)]
    with pytest.raises(Refused, match="no Rényi bound"):
        selection_epsilon([capped], law, DELTA, "add-remove")


def test_a_delta_that_the_draw_of_k_would_use_up_promises_nothing() -> None:
    assert selection_epsilon([releases(2.0)], Repetition(), 1e-12, "add-remove") == math.inf


@pytest.mark.parametrize(("name", "mean"), [("binomial", 3.0), ("poisson", 1.0), ("geometric", math.nan)])
def test_a_law_that_is_not_covered_is_an_error(name: str, mean: float) -> None:
    with pytest.raises(InputError):
        Repetition(name, mean)


def test_seeing_all_runs_costs_their_composition() -> None:
    one, _ = composed_epsilon(releases(2.0), DELTA, "add-remove", "pld")
    three, _ = composed_epsilon(releases(2.0, steps=1500), DELTA, "add-remove", "pld")
    run = (releases(2.0), one, DELTA, "add-remove")
    assert composed_cost([run]).epsilon == pytest.approx(one)
    assert composed_cost([run] * 3).epsilon == pytest.approx(three)
    assert composed_cost([run] * 3).delta == DELTA
    assert three < 3 * one


def test_where_releases_do_not_tell_everything_epsilons_and_deltas_are_added() -> None:
    found = composed_cost([(None, 1.0, 1e-5, "add-remove"), (releases(2.0), 2.0, 1e-6, "add-remove")])
    assert (found.epsilon, found.delta) == (pytest.approx(3.0), pytest.approx(1.1e-5))
    assert found.epsilon >= 3.0
    assert "basic" in found.rule


def test_runs_under_different_relations_have_no_common_cost() -> None:
    found = composed_cost([(None, 1.0, 1e-5, "add-remove"), (None, 1.0, 1e-5, "replace-one")])
    assert found.relation is None
    assert found.epsilon == math.inf


def test_the_conversion_used_by_hand_is_dp_accountings() -> None:
    """Guards `epsilon_by_hand`: at a single order the two conversions agree."""
    value = 0.3 + math.log1p(-1 / 20) - math.log(DELTA * 20) / 19
    assert google_rdp.compute_epsilon([20.0], [0.3], DELTA)[0] == pytest.approx(value)
