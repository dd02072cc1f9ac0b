"""The statistics of an audit in one run: hand-computed values, brute force, and the promised error rate."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from sordino.audit.bounds import (
    GaussianCurve,
    ProfileCurve,
    combined,
    gaussian_delta,
    gaussian_epsilon,
    most_correct,
    one_run_epsilon,
    one_run_epsilon_gaussian,
    one_run_mu,
    p_value,
    p_value_curve,
    rejects,
)
from sordino.audit.guesses import Guesses
from sordino.errors import InputError


def counts() -> st.SearchStrategy[tuple[int, int, int]]:
    return st.integers(1, 60).flatmap(
        lambda m: st.integers(1, m).flatmap(lambda r: st.tuples(st.integers(0, r), st.just(r), st.just(m)))
    )


class TestSteinkeNasrJagielski:
    def test_all_right_and_pure_dp_has_a_closed_form(self) -> None:
        accuracy = 0.05 ** (1 / 100)  # P[Bin(100, x) ≥ 100] = x^100
        by_hand = math.log(accuracy / (1 - accuracy))
        assert by_hand == pytest.approx(3.4930, abs=1e-4)
        assert one_run_epsilon(100, 100, 100, delta=0.0) == pytest.approx(by_hand, abs=1e-9)

    def test_a_single_right_guess_by_hand(self) -> None:
        # P[Bin(1, ½) ≥ 1] + 2·10·0.01·P[Bin(1, ½) = 0]/1 = 0.5 + 0.2·0.5
        assert p_value(1, 1, 10, epsilon=0.0, delta=0.01) == pytest.approx(0.6, abs=1e-12)

    def test_two_of_three_by_hand(self) -> None:
        # Bin(3, ½): P[≥2] = 4/8; max(P[=1]/1, P[0..1]/2) = max(3/8, 2/8); 2·3·0.01 = 0.06
        assert p_value(2, 3, 3, epsilon=0.0, delta=0.01) == pytest.approx(0.5 + 0.06 * 3 / 8, abs=1e-12)

    @given(counts(), st.floats(0, 6), st.sampled_from([0.0, 1e-6, 1e-3, 0.02]))
    @settings(max_examples=60, deadline=None)
    def test_p_value_equals_a_plain_loop(self, count: tuple[int, int, int], epsilon: float, delta: float) -> None:
        v, r, m = count
        x = math.exp(epsilon) / (1 + math.exp(epsilon))
        pmf = [math.comb(r, k) * x**k * (1 - x) ** (r - k) for k in range(r + 1)]
        excess = max((sum(pmf[max(0, v - i) : v]) / i for i in range(1, m + 1)), default=0.0)
        assert p_value(v, r, m, epsilon, delta) == pytest.approx(
            min(1.0, sum(pmf[v:]) + 2 * m * delta * excess), rel=1e-7, abs=1e-12
        )

    def test_pure_dp_bound_is_attained_by_randomised_response(self) -> None:
        """Brute force over all coins and answers of four canaries: the p-value is the exact tail."""
        epsilon, m = 1.2, 4
        accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
        tail = [0.0] * (m + 1)
        for coins, flips in itertools.product(itertools.product([0, 1], repeat=m), repeat=2):
            probability = 0.5**m * math.prod(1 - accuracy if f else accuracy for f in flips)
            answers = [c ^ f for c, f in zip(coins, flips, strict=True)]
            right = sum(a == c for a, c in zip(answers, coins, strict=True))
            for v in range(right + 1):
                tail[v] += probability
        for v in range(1, m + 1):
            assert p_value(v, m, m, epsilon, delta=0.0) == pytest.approx(tail[v], abs=1e-12)

    @given(counts(), st.floats(0, 5), st.floats(0, 1))
    @settings(max_examples=60, deadline=None)
    def test_p_value_grows_with_epsilon_and_falls_with_right_guesses(
        self, count: tuple[int, int, int], epsilon: float, more: float
    ) -> None:
        v, r, m = count
        delta = 0.4 / m
        here = p_value(v, r, m, epsilon, delta)
        assert p_value(v, r, m, epsilon + more, delta) >= here - 1e-12
        assert p_value(v, r, m, epsilon, delta / 2) <= here + 1e-12

    def test_bound_grows_with_right_guesses_and_shrinks_with_delta_and_confidence(self) -> None:
        bounds = [one_run_epsilon(v, 200, 1000, 1e-5) for v in range(100, 201, 10)]
        assert bounds == sorted(bounds)
        assert bounds[-1] > bounds[0]
        assert one_run_epsilon(180, 200, 1000, 1e-4) < one_run_epsilon(180, 200, 1000, 1e-6)
        assert one_run_epsilon(180, 200, 1000, 1e-5, confidence=0.99) < one_run_epsilon(180, 200, 1000, 1e-5)

    def test_chance_level_shows_nothing(self) -> None:
        assert one_run_epsilon(50, 100, 100, 1e-5) == 0.0
        assert one_run_epsilon(0, 0, 100, 1e-5) == 0.0

    def test_many_guesses_stay_stable(self) -> None:
        bound = one_run_epsilon(99_900, 100_000, 100_000, 1e-9)
        assert 6.7 < bound < math.log(0.999 / 0.001)

    def test_a_large_delta_may_make_the_p_value_dip_and_the_first_crossing_counts(self) -> None:
        v, r, m, delta = 100, 100, 100, 0.01  # 2mδ = 2
        bound = one_run_epsilon(v, r, m, delta)
        assert all(p_value(v, r, m, e, delta) < 0.05 for e in np.linspace(0, bound, 300)[:-1])

    def test_randomised_response_exceeds_its_epsilon_in_at_most_5_percent_of_runs(self) -> None:
        epsilon, m, runs = 1.5, 400, 2000
        accuracy = math.exp(epsilon) / (1 + math.exp(epsilon))
        right = np.random.default_rng(5).binomial(m, accuracy, size=runs)
        table = {int(v): one_run_epsilon(int(v), m, m, delta=0.0) for v in np.unique(right)}
        exceeded = np.mean([table[int(v)] > epsilon for v in right])
        # it is exact up to the discreteness of a binomial, so it should be near 5 %, and not above
        assert 0.02 < exceeded <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)

    @pytest.mark.parametrize("bad", [(3, 2, 5), (1, 6, 5), (-1, 2, 5), (0, 0, 0)])
    def test_impossible_counts_are_refused(self, bad: tuple[int, int, int]) -> None:
        with pytest.raises(InputError, match="correct"):
            one_run_epsilon(*bad, delta=1e-5)

    def test_bad_delta_and_confidence_are_refused(self) -> None:
        with pytest.raises(InputError, match="delta"):
            one_run_epsilon(1, 1, 1, delta=1.0)
        with pytest.raises(InputError, match="confidence"):
            one_run_epsilon(1, 1, 1, delta=0.0, confidence=1.0)


class TestCurves:
    @given(st.floats(0.05, 4), st.floats(1e-6, 1 - 1e-6))
    @settings(max_examples=80, deadline=None)
    def test_the_gaussian_curve_is_its_own_profile(self, mu: float, true: float) -> None:
        """A finite profile never claims more than the curve, and on a fine grid nearly as much."""
        epsilons = np.linspace(0, 30, 3001)
        profile = ProfileCurve(tuple(epsilons), tuple(gaussian_delta(mu, e) for e in epsilons))
        exact = GaussianCurve(mu).least_false(true)
        assert profile.least_false(true) <= exact + 1e-9
        assert profile.least_false(true) == pytest.approx(exact, abs=2e-4)

    def test_gaussian_epsilon_inverts_gaussian_delta(self) -> None:
        for mu, delta in itertools.product([0.1, 0.670487, 3.0], [1e-3, 1e-5, 1e-9]):
            assert gaussian_delta(mu, gaussian_epsilon(mu, delta)) == pytest.approx(delta, rel=1e-6)
        # the worst batch in docs/guarantees/hidden_state.md, section 4
        assert gaussian_epsilon(0.670487, 1e-5) == pytest.approx(2.7712, abs=1e-4)
        assert gaussian_epsilon(0.0, 1e-5) == 0.0

    @given(st.lists(st.tuples(st.floats(0, 6), st.floats(0, 0.9)), min_size=1, max_size=12), st.floats(0, 1))
    @settings(max_examples=80, deadline=None)
    def test_a_profile_is_the_largest_of_its_lines(self, points: list[tuple[float, float]], y: float) -> None:
        lines = [0.0]
        for e, d in points:
            lines += [math.exp(-e) * (y - d), 1 - d - math.exp(e) * (1 - y)]
        curve = ProfileCurve(tuple(e for e, _ in points), tuple(d for _, d in points))
        assert curve.least_false(y) == pytest.approx(max(lines), abs=1e-9)

    def test_a_profile_needs_matching_points(self) -> None:
        with pytest.raises(InputError, match="profile"):
            ProfileCurve((0.0, 1.0), (0.1,))


class TestFDP:
    def test_two_canaries_by_hand(self) -> None:
        """m = r = v = 2 and pure ε-DP: t₁ ≥ (t₂ + 2·e^−ε·t₂)/1 and t₀ ≥ (t₁ + t₂ + 2g((t₁+t₂)/2))/2."""
        epsilon = 1.0
        e = math.exp(-epsilon)
        t1 = 1 + 2 * e  # for t₂ = 1
        t0 = (t1 + 1 + (t1 + 1) * e) / 2
        by_hand = 1 / t0  # the largest t₂ for which t₀ ≤ 1: in the linear part of g
        assert by_hand == pytest.approx((1 / (1 + e)) ** 2)  # randomised response: the bound is attained
        curve = ProfileCurve((epsilon,), (0.0,))
        assert p_value_curve(curve, 2, 2, 2) == pytest.approx(by_hand, rel=1e-6)

    @given(counts(), st.floats(0.0, 2.0), st.floats(0.0, 0.05), st.floats(0.01, 0.6))
    @settings(max_examples=40, deadline=None)
    def test_the_greedy_sequence_is_the_exact_answer_of_the_linear_program(
        self, count: tuple[int, int, int], epsilon: float, delta: float, level: float
    ) -> None:
        """(ε, δ)-DP makes the constraints linear; scipy's simplex maximises P[N ≥ v] over them."""
        v, r, m = min(count[0], 12), min(count[1], 12), count[2]
        if v == 0 or v > r:
            return
        curve = ProfileCurve((epsilon,), (delta,))
        largest = _largest_tail_by_linear_programming(v, r, m, epsilon, delta)
        if abs(largest - level) > 1e-6:
            assert rejects(curve, v, r, m, level) == (level > largest)

    def test_coin_tossing_and_no_guesses_show_nothing(self) -> None:
        assert one_run_mu(250, 500, 1000) == 0.0
        assert one_run_mu(0, 0, 1000) == 0.0
        assert p_value_curve(GaussianCurve(1.0), 0, 10, 10) == 1.0

    def test_bound_grows_with_right_guesses(self) -> None:
        bounds = [one_run_mu(v, 200, 1000) for v in range(100, 201, 10)]
        assert bounds == sorted(bounds)
        assert bounds[-1] > bounds[0] == 0.0

    @given(counts(), st.floats(0.01, 3), st.floats(0.0, 1.0))
    @settings(max_examples=40, deadline=None)
    def test_weaker_claims_have_larger_p_values(self, count: tuple[int, int, int], mu: float, more: float) -> None:
        strict = p_value_curve(GaussianCurve(mu), *count)
        assert p_value_curve(GaussianCurve(mu + more), *count) >= strict * (1 - 1e-9)

    def test_a_profile_and_the_curve_agree(self) -> None:
        epsilons = np.linspace(0, 20, 2001)
        profile = ProfileCurve(tuple(epsilons), tuple(gaussian_delta(1.0, e) for e in epsilons))
        exact = p_value_curve(GaussianCurve(1.0), 180, 200, 2000)
        approximate = p_value_curve(profile, 180, 200, 2000)
        assert exact <= approximate * (1 + 1e-9)  # fewer points claim less, so reject less
        assert approximate == pytest.approx(exact, rel=0.01)

    @pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
    def test_a_gaussian_mechanism_exceeds_its_claim_in_at_most_5_percent_of_runs(self, mu: float) -> None:
        """The best auditor against m independent Gaussian coordinates, 300 runs."""
        rng, runs, m, each = np.random.default_rng(11), 300, 600, 60
        bounds = [one_run_mu(_gaussian_guesses(rng, mu, m, each), 2 * each, m) for _ in range(runs)]
        assert np.mean(np.array(bounds) > mu) <= 0.05
        assert np.mean(bounds) > 0.2 * mu  # and it is not vacuous

    def test_all_eggs_in_one_basket_exceeds_its_claim_in_at_most_5_percent_of_runs(self) -> None:
        """With probability δ everything is published, else nothing: guesses as dependent as can be."""
        rng, runs, m, delta = np.random.default_rng(3), 400, 50, 0.045
        curve = ProfileCurve((0.0,), (delta,))
        broken = 0
        for _ in range(runs):
            coins = rng.random(m) < 0.5
            guesses = coins if rng.random() < delta else rng.random(m) < 0.5
            broken += rejects(curve, int((guesses == coins).sum()), m, m, 0.05)
        assert broken / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)

    def test_it_is_stronger_than_the_point_bound_on_a_gaussian(self) -> None:
        rng, m, each = np.random.default_rng(2), 5000, 250
        right = _gaussian_guesses(rng, 1.85, m, each)
        f_dp = one_run_epsilon_gaussian(right, 2 * each, m, 1e-5)
        assert f_dp > one_run_epsilon(right, 2 * each, m, 1e-5) + 0.5
        assert f_dp < gaussian_epsilon(1.85, 1e-5)

    @pytest.mark.parametrize("mu", [0.7, 2.0])
    def test_guesses_that_all_say_in_are_counted_over_half_of_the_canaries(self, mu: float) -> None:
        """Valid for a Gaussian mechanism, and never weaker than counting all canaries."""
        rng, runs, m, each = np.random.default_rng(5), 300, 600, 60
        guesses, broken = Guesses(each, 0), 0
        for _ in range(runs):
            coins = rng.random(m) < 0.5
            right = guesses.correct(torch.from_numpy(rng.normal(size=m) + mu * coins), torch.from_numpy(coins))
            broken += guesses.rejects(GaussianCurve(mu), [right], m, 0.05)
            if rejects(GaussianCurve(mu), right, each, m, 0.05):
                assert rejects(GaussianCurve(mu), right, each, guesses.places(m), 0.05)
        assert broken / runs <= 0.05
        assert guesses.places(m) == m / 2
        assert Guesses(each, each).places(m) == m

    def test_one_sided_eggs_in_one_basket_are_called_broken_in_at_most_5_percent_of_runs(self) -> None:
        """With probability δ all coins are published, and r of those that are in are guessed: as bad as can be."""
        rng, runs, m, r, delta = np.random.default_rng(7), 600, 60, 12, 0.045
        curve, guesses, broken = ProfileCurve((0.0,), (delta,)), Guesses(12, 0), 0
        for _ in range(runs):
            coins = rng.random(m) < 0.5
            chosen = np.flatnonzero(coins)[:r] if rng.random() < delta else rng.permutation(m)[:r]
            broken += guesses.rejects(curve, [int(coins[chosen].sum())], m, 0.05)
        assert broken / runs <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)

    def test_independent_runs_are_combined_by_fisher(self) -> None:
        assert combined([0.3]) == pytest.approx(0.3)
        assert combined([1.0, 1.0]) == 1.0
        rng = np.random.default_rng(0)
        assert np.mean([combined(list(rng.random(5))) < 0.05 for _ in range(4000)]) == pytest.approx(0.05, abs=0.015)

    def test_runs_of_a_gaussian_mechanism_together_exceed_their_claim_in_at_most_5_percent_of_audits(self) -> None:
        rng, mu, m, each = np.random.default_rng(9), 1.0, 400, 20
        guesses = Guesses(each, each)
        broken = 0
        for _ in range(150):
            right = [_gaussian_guesses(rng, mu, m, each) for _ in range(4)]
            broken += guesses.rejects(GaussianCurve(mu), right, m, 0.05)
        assert broken / 150 <= 0.05

    def test_several_runs_show_more_than_one_with_as_many_canaries(self) -> None:
        rng, mu, m, each = np.random.default_rng(4), 1.5, 2000, 100
        runs = [_gaussian_guesses(rng, mu, m, each) for _ in range(8)]
        apart = Guesses(each, each)
        weaker = [k / 20 for k in range(10, 30)]
        together = max(x for x in weaker if apart.rejects(GaussianCurve(x), runs, m, 0.05))
        as_one = max(x for x in weaker if rejects(GaussianCurve(x), sum(runs), 16 * each, 8 * m, 0.05))
        assert as_one < together < mu

    def test_most_correct_is_what_the_best_auditor_gets_on_average(self) -> None:
        rng, mu, m, each = np.random.default_rng(8), 1.2, 20_000, 1000
        mean = np.mean([_gaussian_guesses(rng, mu, m, each) for _ in range(20)])
        assert mean == pytest.approx(most_correct(GaussianCurve(mu), 2 * each, m), rel=0.005)


def _gaussian_guesses(rng: np.random.Generator, mu: float, m: int, each: int) -> int:
    coins = rng.random(m) < 0.5
    order = np.argsort(rng.normal(size=m) + mu * coins)
    return int(coins[order[m - each :]].sum() + (~coins[order[:each]]).sum())


def _largest_tail_by_linear_programming(v: int, r: int, m: int, epsilon: float, delta: float) -> float:
    """max P[N ≥ v] over distributions p of N with u_j ≤ min over the two lines of 1−f(w_{j−1}), all j ≥ 1."""
    p = np.arange(r + 1)
    rows, limits = [], []
    for j in range(1, r + 1):
        true = np.where(p >= j, p, 0) / m
        false = np.where(p >= j - 1, r - p, 0) / m
        rows += [true - math.exp(epsilon) * false, true - math.exp(-epsilon) * false]
        limits += [delta, 1 - math.exp(-epsilon) * (1 - delta)]
    answer = optimize.linprog(
        -(p >= v).astype(float), A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, r + 1)), b_eq=[1.0]
    )
    assert answer.status == 0
    return float(-answer.fun)
