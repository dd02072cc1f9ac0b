"""Order statistics of independent canaries: an exact law, a test of its level, and what it shows in one run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

import sordino
from small_audits import RECORDS, small_data, small_model
from sordino.audit import audit_plan
from sordino.audit.bounds import GaussianCurve, ProfileCurve, rejects
from sordino.audit.guesses import ALARM, Chosen, Guesses, OrderedGuesses
from sordino.audit.ordered import p_value_ordered
from sordino.audit.scores import Scorer
from sordino.errors import InputError


class TestLaw:
    @pytest.mark.parametrize("one_sided", [True, False])
    def test_it_is_the_law_of_the_best_auditor_against_a_gaussian(self, one_sided: bool) -> None:
        rng, m, k, mu, runs = np.random.default_rng(1), 60, 12, 1.5, 8000
        coins = rng.random((runs, m)) < 0.5
        scores = mu * (rng.normal(size=(runs, m)) + mu * coins) - mu * mu / 2
        order = np.argsort(-(scores if one_sided else np.abs(scores)), axis=1)[:, :k]
        said = np.ones_like(coins) if one_sided else scores > 0
        right = np.take_along_axis(said == coins, order, axis=1).sum(1)
        for v in range(8, k + 1):
            exact = p_value_ordered(GaussianCurve(mu), v, k, m, one_sided=one_sided)
            assert np.mean(right >= v) == pytest.approx(exact, abs=4 * math.sqrt(0.25 / runs))

    def test_randomised_response_by_hand(self) -> None:
        """Three canaries, pure ε-DP: the answers `in` are surest, and one of them is guessed where there is one."""
        epsilon, m = 1.2, 3
        sure = 1 / (1 + math.exp(-epsilon))
        exact = 0.0
        for answers in itertools.product([True, False], repeat=m):
            exact += 0.5**m * (sure if any(answers) else 1 - sure)
        found = p_value_ordered(ProfileCurve((epsilon,), (0.0,)), 1, 1, m, one_sided=True)
        assert exact <= found <= exact + 1e-4
        two = p_value_ordered(ProfileCurve((epsilon,), (0.0,)), 2, 2, m, one_sided=False)
        assert sure**2 <= two <= sure**2 + 1e-4

    def test_all_canaries_guessed_is_a_binomial(self) -> None:
        curve = ProfileCurve((1.0,), (0.0,))
        sure = 1 / (1 + math.exp(-1.0))
        assert p_value_ordered(curve, 12, 12, 12, one_sided=False) == pytest.approx(sure**12, rel=1e-3)
        assert p_value_ordered(curve, 12, 12, 12, one_sided=True) == pytest.approx(0.5**12, rel=0.02)

    def test_stronger_claims_and_more_right_guesses_have_smaller_p_values(self) -> None:
        values = [p_value_ordered(GaussianCurve(mu), 90, 100, 1000, one_sided=True) for mu in (0.5, 1.0, 1.5, 2.5)]
        assert values == sorted(values)
        values = [p_value_ordered(GaussianCurve(1.0), v, 100, 1000, one_sided=True) for v in range(70, 101, 5)]
        assert values == sorted(values, reverse=True)
        assert p_value_ordered(GaussianCurve(1.0), 0, 100, 1000, one_sided=True) == 1.0

    def test_impossible_counts_are_refused(self) -> None:
        with pytest.raises(InputError, match="correct"):
            p_value_ordered(GaussianCurve(1.0), 3, 2, 5, one_sided=True)


class TestLevel:
    @pytest.mark.parametrize(("mu", "guesses"), [(0.5, (60, 0)), (1.5, (100, 0)), (1.5, (40, 40)), (3.0, (150, 0))])
    def test_a_mechanism_on_its_claim_is_rejected_in_nearly_5_percent_of_runs_at_that_level(
        self, mu: float, guesses: tuple[int, int]
    ) -> None:
        rng, m, runs, chosen = np.random.default_rng(3), 600, 800, OrderedGuesses(*guesses)
        curve = GaussianCurve(mu)
        least = next(v for v in range(chosen.total + 2) if v > chosen.total or chosen.rejects(curve, [v], m, 0.05))
        broken = 0
        for _ in range(runs):
            coins = torch.from_numpy(rng.random(m) < 0.5)
            scores = torch.from_numpy(rng.normal(size=m)) + mu * coins
            broken += chosen.correct(scores, coins) >= least
        assert broken / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)

    def test_it_is_no_bound_for_canaries_that_depend_on_each_other(self) -> None:
        """With probability δ all coins are published: (0, δ)-DP, and far from independent. The other test allows it."""
        m, delta = 50, 0.045
        curve = ProfileCurve((0.0,), (delta,))
        assert p_value_ordered(curve, m, m, m, one_sided=False) < 1e-9 < delta
        assert not rejects(curve, m, m, m, delta * 0.99)

    def test_both_levels_together_are_the_level_of_the_verdict(self) -> None:
        chosen = Chosen(Guesses(5, 5), OrderedGuesses(9, 0))
        assert chosen.levels(0.95) == pytest.approx((0.05 - ALARM, ALARM))
        assert sum(chosen.levels(0.99999)) == pytest.approx(1e-5)
        assert Chosen(Guesses(5, 5), None).levels(0.95) == pytest.approx((0.05, 0.0))

    def test_samplers_whose_draws_hang_together_have_no_independent_canaries(self) -> None:
        for sampling, independent in (("poisson", True), ("partition", True), ("truncated-poisson", False)):
            options: dict[str, Any] = {"cap": 40} if sampling == "truncated-poisson" else {}
            plan = sordino.dpsgd(
                noise_multiplier=2.0, delta=1e-5, records=RECORDS, expected_batch=RECORDS // 2, steps=4,
                sampling=sampling, **options,
            )  # fmt: skip
            assert Scorer.of(plan).independent == independent


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 8), (0.25, 16)])
def test_one_run_shows_seven_tenths_of_a_true_epsilon(rate: float, steps: int) -> None:
    plan = sordino.dpsgd(epsilon=4.0, delta=1e-5, records=RECORDS, expected_batch=RECORDS * rate, steps=steps)
    found = audit_plan(plan, small_model(), cross_entropy, small_data(), canaries=7800, seed=1)
    assert found.holds
    assert found.epsilon_lower >= 0.7 * found.epsilon_claimed
    assert found.epsilon_lower_independent is not None
    assert found.epsilon_lower_any < found.epsilon_lower < found.epsilon_lower_independent


def test_noise_at_four_fifths_is_caught_in_one_run() -> None:
    """Which f-DP in one run does not see."""
    plan = sordino.dpsgd(epsilon=4.0, delta=1e-5, records=RECORDS, expected_batch=RECORDS, steps=8)
    found = audit_plan(plan, small_model(), cross_entropy, small_data(), canaries=7800, seed=1, noise_scale=0.8)
    assert not found.holds
    assert found.epsilon_lower_any <= found.epsilon_claimed < found.epsilon_lower


def test_a_confidence_is_never_shown_as_certainty() -> None:
    plan = sordino.dpsgd(noise_multiplier=2.0, delta=1e-5, records=64, expected_batch=64, steps=1)
    found = audit_plan(plan, small_model(), cross_entropy, small_data(), canaries=200, seed=0, confidence=0.9999)
    assert "at 99.99 % confidence" in found.sentence
