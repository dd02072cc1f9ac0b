"""The hull bound: its numbers, its optimality, its soundness against exact divergences, and its limits."""

from __future__ import annotations

import itertools
import json
import math
import time
from dataclasses import replace
from fractions import Fraction

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from sordino.accounting.events import Release
from sordino.cli import main
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state.accountant import (
    _energies,
    _energies_of_shape,
    account_hidden_state,
    calibrate_hidden_state,
    hidden_epsilon_curve,
    ye_shokri_rdp,
)
from sordino.methods.hidden_state.gaussian_mixture import GaussianMixture, gaussian_delta, gaussian_epsilon
from sordino.methods.hidden_state.hull import minorant_energy, position_energies
from sordino.methods.hidden_state.participation import fresh_shuffle_law, without_replacement_law
from sordino.methods.hidden_state.run import HiddenRun
from sordino.methods.hidden_state.ye_shokri import classic_epsilon, tight_epsilon

Array = npt.NDArray[np.float64]


def constant_run(
    *,
    records: int = 60000,
    batch: int = 2048,
    epochs: int = 1200,
    lr: float = 1.92,
    m: float = 0.02,
    smoothness: float = 1.02,
    sigma: float = 3.01,
    sampling: str = "partition",
    steps: int | None = None,
) -> HiddenRun:
    count = epochs * (records // batch) if steps is None else steps
    return HiddenRun(
        records, batch, sampling, np.full(count, lr), np.full(count, sigma / batch), m, smoothness, sensitivity=2.0
    )


def random_schedule(rng: np.random.Generator, steps: int) -> tuple[Array, Array, Array]:
    """(c, d, s²) with steps that use the record and steps that do not."""
    shrink = rng.uniform(0.3, 1.0, steps)
    disparities = rng.uniform(0.1, 2.0, steps) * (rng.random(steps) < 0.6)
    return shrink, disparities, rng.uniform(0.2, 2.0, steps) ** 2


def exact_energy(shrink: Array, disparities: Array, variances: Array) -> Fraction:
    """The minorant of all points, in exact arithmetic with the weights written out; no pooling."""
    weights = [Fraction(1)]
    for c in shrink[:0:-1]:
        weights.append(weights[-1] * Fraction(float(c)))
    weights.reverse()
    points = [(Fraction(0), Fraction(0))]
    for w, d, v in zip(weights, disparities, variances, strict=True):
        u, i = points[-1]
        points.append((u + w * w * Fraction(float(v)), i + w * Fraction(float(d))))
    hull: list[tuple[Fraction, Fraction]] = []
    for p in points:
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (p[0] - hull[-1][0]) >= (p[1] - hull[-1][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append(p)
    edges = itertools.pairwise(hull)
    return sum(((q[1] - p[1]) ** 2 / (q[0] - p[0]) for p, q in edges if q[0] > p[0]), Fraction(0))


# --- the numbers ---------------------------------------------------------------------------------------------------


def test_fashion_mnist_row_of_table_1() -> None:
    found = account_hidden_state(constant_run(), 1e-5)
    assert found.epsilon == pytest.approx(2.1805, abs=1e-4)
    assert found.mu_worst == pytest.approx(0.670487, abs=1e-6)
    assert found.epsilon_worst_position == pytest.approx(2.7712, abs=1e-4)
    assert (found.bound, found.relation) == ("hull", "replace-one")
    printed = account_hidden_state(constant_run(), 1e-5, bound="ye-shokri")
    assert printed.epsilon == pytest.approx(2.4993, abs=1e-4)
    assert classic_epsilon(ye_shokri_rdp(constant_run()), 1e-5) == pytest.approx(2.9966, abs=1e-4)


def test_the_other_rows_of_table_1() -> None:
    for records, sigma, classic, ours in ((60000, 3.08, 2.8845, 2.1061), (50000, 3.23, 2.7935, 2.0329)):
        run = constant_run(records=records, lr=0.75, m=0.08, smoothness=2.58, sigma=sigma)
        assert classic_epsilon(ye_shokri_rdp(run), 1e-5) == pytest.approx(classic, abs=1e-4)
        assert account_hidden_state(run, 1e-5).epsilon == pytest.approx(ours, abs=1e-4)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    setting = (
        "--records 60000 --batch 2048 --epochs 1200 --lr 1.92 --strong-convexity 0.02 --smoothness 1.02 --delta 1e-5"
    )
    assert main(f"account hidden-state {setting} --noise-multiplier 3.01 --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == pytest.approx(2.1805, abs=1e-4)
    assert found["epsilon_classic"] == pytest.approx(2.9966, abs=1e-4)
    assert {"mu_worst", "epsilon_worst_position", "bound", "relation", "theorem"} <= found.keys()
    assert main(f"calibrate hidden-state {setting} --epsilon 2.1805 --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["noise_multiplier"] == pytest.approx(3.01, abs=1e-3)
    assert main(f"account hidden-state {setting} --noise-multiplier 3.01 --lr 3 --json".split()) == 2
    assert "2/M" in capsys.readouterr().err


# --- the least energy ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("c", "period", "epochs"), [(0.9616, 29, 1200), (0.5, 3, 7), (0.999, 10, 50), (0.9, 1, 40)])
def test_closed_form_for_a_constant_schedule(c: float, period: int, epochs: int) -> None:
    """docs/guarantees/hidden_state.md, section 3: the last position, and the full batch (period 1)."""
    steps, ratio = period * epochs, 0.7
    found = position_energies(np.full(steps, c), np.full(steps, ratio), np.ones(steps), period)
    if period == 1:
        full = (1 + c) / (1 - c) * (1 - c**steps) / (1 + c**steps)
        assert math.sqrt(found[-1]) == pytest.approx(ratio * math.sqrt(full), rel=1e-10)
        return
    power = c ** (period * (epochs - 1))
    last = 1 + c ** (2 * period - 2) * (1 - c**2) / (1 - c**period) ** 2 * (1 - power) / (1 + power)
    assert math.sqrt(found[-1]) == pytest.approx(ratio * math.sqrt(last), rel=1e-10)


@pytest.mark.parametrize("seed", range(4))
def test_energies_of_other_noise_are_computed_once_and_never_smaller(seed: int) -> None:
    generator = np.random.default_rng(seed)
    shrink, sizes = 1 - generator.random(90) / 10, np.exp(generator.normal(size=90))
    variances = generator.random(90) + 0.1
    variances /= variances.max()
    before = _energies_of_shape.cache_info().misses
    for factor in (1.0, 3.7, 1e-5, 0.3):
        found, exact = (energies(factor) for energies in (
            lambda f: _energies(7, shrink, f * sizes, variances),
            lambda f: position_energies(shrink, f * sizes, variances, 7),
        ))  # fmt: skip
        assert (found >= exact * (1 - 1e-15)).all()
        assert found == pytest.approx(exact, rel=1e-9)
    assert _energies_of_shape.cache_info().misses <= before + 2  # a rounded number may differ


def test_convex_losses_give_theorem_4_3() -> None:
    """c = 1: each use is spread over the epoch that follows it, as in eq. (9) of Ye & Shokri."""
    found = position_energies(np.ones(60), np.full(60, 1.0), np.ones(60), 6)
    assert found == pytest.approx([9 / 6 + 1 / (6 - j) for j in range(6)], rel=1e-10)


@pytest.mark.parametrize("seed", range(12))
def test_equal_to_a_quadratic_program(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shrink, disparities, variances = random_schedule(rng, 7)

    def trajectory(shifts: Array) -> Array:
        z, values = 0.0, []
        for c, d, a in zip(shrink, disparities, shifts, strict=True):
            z = c * z + d - a
            values.append(z)
        return np.array(values)

    solved = minimize(
        lambda a: float(np.sum(a**2 / variances)),
        x0=disparities,
        constraints=[
            {"type": "ineq", "fun": lambda a: trajectory(a)[:-1]},
            {"type": "eq", "fun": lambda a: trajectory(a)[-1:]},
        ],
        bounds=[(0, None)] * 7,
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert minorant_energy(shrink, disparities, variances) == pytest.approx(solved.fun, rel=1e-6)


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 30), exponent=st.sampled_from([0, 1, 5, 300]))
@settings(max_examples=60, deadline=None)
def test_never_below_exact_arithmetic(seed: int, steps: int, exponent: int) -> None:
    """Also where the weights underflow: c⁻¹ up to 10³⁰⁰."""
    rng = np.random.default_rng(seed)
    shrink, disparities, variances = random_schedule(rng, steps)
    shrink = np.where(rng.random(steps) < 0.3, shrink * 10.0**-exponent, shrink)
    found = Fraction(minorant_energy(shrink, disparities, variances))
    exact = exact_energy(shrink, disparities, variances)
    assert found >= exact
    assert found <= exact * (1 + Fraction(1, 10**10)) + Fraction(1, 10**149)


@given(seed=st.integers(0, 10**6), period=st.integers(1, 9), steps=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_positions_are_the_runs_that_use_the_record_there(seed: int, period: int, steps: int) -> None:
    rng = np.random.default_rng(seed)
    shrink, _, variances = random_schedule(rng, steps)
    sizes = rng.uniform(0.1, 2.0, steps)
    found = position_energies(shrink, sizes, variances, period)
    for j in range(period):
        used = np.where(np.arange(steps) % period == j, sizes, 0.0)
        assert found[j] == pytest.approx(minorant_energy(shrink, used, variances), rel=1e-10, abs=1e-300)


# --- soundness against exact divergences ---------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), steps=st.integers(1, 30))
@settings(max_examples=60, deadline=None)
def test_never_below_the_exact_divergence_of_quadratic_losses(seed: int, steps: int) -> None:
    """On quadratics the iterates are Gaussian: μ is the distance of their means over their deviation."""
    shrink, disparities, variances = random_schedule(np.random.default_rng(seed), steps)
    mean = variance = 0.0
    for c, d, v in zip(shrink, disparities, variances, strict=True):
        mean, variance = c * mean + d, c * c * variance + v
    assert mean / math.sqrt(variance) <= math.sqrt(minorant_energy(shrink, disparities, variances)) * (1 + 1e-12)


def test_a_full_batch_on_a_quadratic_attains_the_bound() -> None:
    run = constant_run(records=100, batch=100, sampling="full", epochs=50, lr=0.3, m=1.0, smoothness=1.0, sigma=4.0)
    mean = variance = 0.0
    for _ in range(50):
        mean, variance = 0.7 * mean + 0.3 * 2 / 100, 0.49 * variance + (0.3 * 4 / 100) ** 2
    found = account_hidden_state(run, 1e-5)
    assert found.mu_worst == pytest.approx(mean / math.sqrt(variance), rel=1e-10)
    assert found.epsilon == pytest.approx(gaussian_epsilon(found.mu_worst, 1e-5), rel=1e-9)


GRID = np.linspace(-8, 8, 1201)
CELL = GRID[1] - GRID[0]


def last_iterate(centres: list[float], draws: list[list[int]], lr: float, noise: float) -> Array:
    """The density of the last iterate for losses x²/4 + Huber(x − centre), whose gradient is not linear, on a grid."""
    kernels = []
    for centre in centres:
        moved = GRID - lr * (0.5 * GRID + np.clip(GRID - centre, -0.5, 0.5))
        kernels.append(np.exp(-((GRID[:, None] - moved) ** 2) / (2 * noise**2)) * CELL / noise / math.sqrt(2 * math.pi))
    total = np.zeros_like(GRID)
    for draw in draws:
        density = np.zeros_like(GRID)
        density[len(GRID) // 2] = 1 / CELL  # at 0
        for record in draw:
            density = kernels[record] @ density
        total += density / len(draws)
    return total


@pytest.mark.parametrize("sampling", ["partition", "shuffle", "without-replacement"])
@pytest.mark.parametrize(("lr", "noise"), [(0.5, 0.5), (1.0, 0.4)])
def test_never_below_the_exact_divergence_of_a_small_private_run(sampling: str, lr: float, noise: float) -> None:
    """Three records, one per batch, clipped gradients, all ways to draw the batches enumerated."""
    steps = 6 if sampling != "without-replacement" else 4
    orders = list(itertools.permutations(range(3)))
    draws: list[list[int]] = {
        "partition": [list(o) * 2 for o in orders],
        "shuffle": [list(a + b) for a in orders for b in orders],
        "without-replacement": [list(draw) for draw in itertools.product(range(3), repeat=4)],
    }[sampling]
    first = last_iterate([5.0, 0.3, -1.0], draws, lr, lr * noise)
    second = last_iterate([-5.0, 0.3, -1.0], draws, lr, lr * noise)
    assert first.sum() * CELL == pytest.approx(1, abs=1e-9)
    run = HiddenRun(3, 1, sampling, np.full(steps, lr), np.full(steps, noise), 0.5, 1.5, sensitivity=1.0)
    for delta in (0.3, 0.1, 0.01):
        epsilon = account_hidden_state(run, delta, bound="hull").epsilon
        exact = np.sum(np.maximum(first - math.exp(epsilon) * second, 0)) * CELL
        assert exact <= delta + 1e-6
        assert exact > 0


# --- hidden batches ------------------------------------------------------------------------------------------------


def pattern_energies(shrink: Array, sizes: Array, variances: Array, patterns: list[Array]) -> Array:
    return np.array([minorant_energy(shrink, np.where(used, sizes, 0.0), variances) for used in patterns])


@pytest.mark.parametrize("seed", range(4))
def test_without_replacement_bounds_the_average_over_all_patterns(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, rate = 9, 0.3
    shrink, variances, sizes = rng.uniform(0.5, 1, steps), rng.uniform(0.5, 1.5, steps), rng.uniform(0.2, 1, steps)
    patterns = [np.array(bits, bool) for bits in itertools.product((0, 1), repeat=steps)]
    weights = np.array([rate ** p.sum() * (1 - rate) ** (steps - p.sum()) for p in patterns])
    exact = GaussianMixture(weights, pattern_energies(shrink, sizes, variances, patterns))
    for law in without_replacement_law(shrink, sizes, variances, rate):
        assert law.weights.sum() == pytest.approx(1, abs=1e-9)
        for epsilon in (0.05, 0.5, 2.0, 5.0):
            assert exact.delta(epsilon) <= law.delta(epsilon)


@pytest.mark.parametrize(("seed", "cut"), [(0, 0), (1, 0), (2, 1), (3, 2)])
def test_fresh_shuffles_bound_the_average_over_all_orders(seed: int, cut: int) -> None:
    rng = np.random.default_rng(seed)
    period, steps = 4, 16 - cut
    shrink, variances, sizes = rng.uniform(0.5, 1, steps), rng.uniform(0.5, 1.5, steps), rng.uniform(0.2, 1, steps)
    patterns = []
    for places in itertools.product(range(period), repeat=4):
        used = np.zeros(16, bool)
        used[[4 * e + j for e, j in enumerate(places)]] = True
        patterns.append(used[:steps])
    energies = pattern_energies(shrink, sizes, variances, patterns)
    exact = GaussianMixture(np.full(len(patterns), 1 / len(patterns)), energies)
    law, worst = fresh_shuffle_law(shrink, sizes, variances, period)
    assert worst >= energies.max()
    for epsilon in (0.05, 0.5, 2.0, 5.0):
        assert exact.delta(epsilon) <= law.delta(epsilon)


def test_the_three_samplings_of_one_run() -> None:
    """Near what the best shifts of every pattern would give (estimated by drawing patterns: 2.17 and 2.62)."""
    shuffled = account_hidden_state(constant_run(sampling="shuffle"), 1e-5).epsilon
    assert 2.16 < shuffled < 2.20
    drawn = account_hidden_state(constant_run(sampling="without-replacement"), 1e-5)
    assert 2.60 < drawn.epsilon < 2.85
    assert drawn.epsilon < tight_epsilon(ye_shokri_rdp(constant_run(sampling="without-replacement")), 1e-5)


def test_the_unused_remainder() -> None:
    plain = account_hidden_state(constant_run(), 1e-5).epsilon
    credited = account_hidden_state(constant_run(), 1e-5, credit_remainder=True).epsilon
    assert credited == pytest.approx(2.1785, abs=1e-4)
    assert credited < plain
    divisible = constant_run(batch=2000)
    assert account_hidden_state(divisible, 1e-5).epsilon == pytest.approx(
        account_hidden_state(divisible, 1e-5, credit_remainder=True).epsilon, rel=1e-12
    )


def test_few_steps_of_many_batches_leave_most_records_out() -> None:
    """One step of 1000: the record is in it with probability 1/1000, and else nothing is revealed."""
    run = constant_run(records=1000, batch=1, steps=1, sigma=2.0)
    found = account_hidden_state(run, 1e-5)
    one = GaussianMixture(np.array([1e-3]), np.ones(1)).epsilon(1e-5)
    assert found.epsilon == pytest.approx(one, rel=1e-9)


# --- beside the printed theorems and composition -------------------------------------------------------------------


@given(
    batches=st.integers(2, 60),
    epochs=st.integers(1, 60),
    strength=st.floats(1e-3, 0.5),
    share=st.floats(0.05, 1.0),
    sigma=st.floats(0.5, 20),
    delta=st.sampled_from([1e-3, 1e-5, 1e-9]),
)
@settings(max_examples=80, deadline=None)
def test_never_above_theirs(
    batches: int, epochs: int, strength: float, share: float, sigma: float, delta: float
) -> None:
    lr = share * 2 / (1 + 2 * strength)
    run = constant_run(
        records=100 * batches, batch=100, epochs=epochs, lr=lr, m=strength, smoothness=1 + strength, sigma=sigma
    )
    ours, theirs = account_hidden_state(run, delta), account_hidden_state(run, delta, bound="ye-shokri")
    assert ours.epsilon <= theirs.epsilon * (1 + 1e-9)
    assert ours.mu_worst <= theirs.mu_worst * (1 + 1e-9)
    assert ours.epsilon_composition is not None
    assert ours.epsilon <= ours.epsilon_composition


@pytest.mark.parametrize(
    ("lr", "m", "sigma", "batch"), [(1.0, 0.1, 3.0, 50), (0.2, 0.5, 1.0, 10), (1.9, 0.02, 8.0, 200)]
)
def test_never_above_theirs_without_replacement(lr: float, m: float, sigma: float, batch: int) -> None:
    run = constant_run(
        records=1000, batch=batch, epochs=30, lr=lr, m=m, smoothness=1.0, sigma=sigma, sampling="without-replacement"
    )
    ours = account_hidden_state(run, 1e-5)
    assert ours.epsilon <= tight_epsilon(ye_shokri_rdp(run), 1e-5) * (1 + 1e-8)
    assert ours.epsilon_composition is not None
    assert ours.epsilon <= ours.epsilon_composition


def test_short_runs_are_left_to_composition() -> None:
    run = constant_run(steps=60, sampling="without-replacement")
    found = account_hidden_state(run, 1e-5)
    assert (found.bound, found.epsilon) == ("composition", found.epsilon_composition)


def test_schedules_are_priced_as_composition_prices_them() -> None:
    """Many noise levels are grouped from below, so the composition of the groups is never smaller."""
    varied = replace(
        constant_run(steps=300, sampling="without-replacement"), noise_stds=np.linspace(3.0, 3.3, 300) / 2048
    )
    assert (found := account_hidden_state(varied, 1e-5).epsilon_composition) is not None
    for sigma, above in ((3.3, True), (3.0, False)):
        bound = account_hidden_state(constant_run(steps=300, sigma=sigma, sampling="without-replacement"), 1e-5)
        assert bound.epsilon_composition is not None
        assert (found >= bound.epsilon_composition) is above


# --- statistics, rounding, monotonicity ----------------------------------------------------------------------------


def test_statistics_add_in_squares() -> None:
    run = constant_run(records=10, batch=10, sampling="full", steps=1, sigma=4.0)
    alone = account_hidden_state(run, 1e-5)
    assert alone.mu_worst == pytest.approx(0.5, rel=1e-12)
    both = account_hidden_state(run, 1e-5, further=[(Release("gaussian", 8.0), 2)])
    assert both.mu_worst == pytest.approx(math.sqrt(0.25 + 2 * 0.0625), rel=1e-12)
    for release in (Release("laplace", 8.0), Release("gaussian", 8.0, 0.1)):
        with pytest.raises(Refused, match="Gaussian"):
            account_hidden_state(run, 1e-5, further=[(release, 1)])


def test_slack_covers_a_disparity_in_every_step() -> None:
    rng = np.random.default_rng(0)
    sizes, noise = rng.uniform(0.2, 1.0, 40), rng.uniform(0.5, 1.5, 40)
    run = HiddenRun(5, 1, "partition", sizes, noise, 0.1, 1.0, 1.0, disparity_slack=0.05)
    found = account_hidden_state(run, 1e-5)
    shrink, variances = 1 - 0.1 * sizes, (sizes * noise) ** 2
    shrink = np.maximum(shrink, np.abs(1 - sizes))
    exact = []
    for j in range(5):
        moved = np.where(np.arange(40) % 5 == j, sizes, 0.0) + 0.05
        exact.append(math.sqrt(minorant_energy(shrink, moved, variances)))
    assert max(exact) <= found.mu_worst <= 1.2 * max(exact)
    for sampling in ("without-replacement", "shuffle"):
        drawn = replace(run, sampling=sampling)
        without = replace(drawn, disparity_slack=0.0)
        assert (
            account_hidden_state(drawn, 1e-5, bound="hull").epsilon
            > account_hidden_state(without, 1e-5, bound="hull").epsilon
        )


def test_monotone_in_noise_delta_epochs_and_convexity() -> None:
    def epsilon(delta: float = 1e-5, **changes: float) -> float:
        return account_hidden_state(constant_run(**{"epochs": 40, **changes}), delta).epsilon  # type: ignore[arg-type]

    for values in (
        [epsilon(sigma=s) for s in (6, 5, 4, 3, 2, 1)],
        [epsilon(delta=d) for d in (1e-2, 1e-4, 1e-8, 1e-12)],
        [epsilon(epochs=k) for k in (1, 2, 5, 20, 100)],
        [epsilon(m=m) for m in (0.05, 0.02, 0.01, 0.001, 0.0)],
    ):
        assert values == sorted(values)


def test_curve_is_that_of_stopping_early() -> None:
    run = constant_run(epochs=20)
    at = [1, 29, 100, 580]
    found = hidden_epsilon_curve(run, 1e-5, at)
    assert found == [account_hidden_state(run.until(t), 1e-5).epsilon for t in at]
    with pytest.raises(InputError, match="at_steps"):
        hidden_epsilon_curve(run, 1e-5, [0])


# --- calibration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "target", "steps"),
    [
        ("partition", 3.0, 600),
        ("partition", 0.1, 40),
        ("shuffle", 1.0, 600),
        ("without-replacement", 3.0, 600),
        ("without-replacement", 1.0, 40),
    ],
)
def test_calibration_is_never_above_and_close_below(sampling: str, target: float, steps: int) -> None:
    further = [(Release("gaussian", 200.0), 2)]
    factor, found = calibrate_hidden_state(target, constant_run(sampling=sampling, steps=steps), 1e-5, further)
    assert target - 1e-3 * min(1, target) <= found.epsilon <= target
    again = account_hidden_state(constant_run(sampling=sampling, steps=steps).noisier(factor), 1e-5, further=further)
    assert again == found


def test_calibration_says_what_cannot_be_met() -> None:
    with pytest.raises(InputError, match="statistics alone"):
        calibrate_hidden_state(0.1, constant_run(epochs=2), 1e-5, [(Release("gaussian", 8.0), 2)])
    with pytest.raises(InputError, match="epsilon"):
        calibrate_hidden_state(0.0, constant_run(epochs=2), 1e-5)


# --- mixtures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1e-4, 0.01, 0.3, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 1.0, 10.0, 300.0])
def test_gaussian_delta_is_exact_from_above(mu: float, epsilon: float) -> None:
    with mpmath.workdps(60):
        e, m = mpmath.mpf(epsilon), mpmath.sqrt(mpmath.mpf(mu) ** 2)
        exact = mpmath.ncdf(-e / m + m / 2) - mpmath.exp(e) * mpmath.ncdf(-e / m - m / 2)
        found = mpmath.mpf(float(gaussian_delta(np.array([mu**2]), epsilon)[0]))
        assert found >= exact * (1 - mpmath.mpf("1e-15")) - mpmath.mpf("1e-300")
        assert found <= exact * (1 + mpmath.mpf("1e-7")) + mpmath.mpf("1e-13")


def test_epsilon_inverts_delta_from_above() -> None:
    mixture = GaussianMixture(np.array([0.2, 0.5]), np.array([0.5, 0.1]))
    for delta in (1e-12, 1e-5, 0.01):
        epsilon = mixture.epsilon(delta)
        assert mixture.delta(epsilon) <= delta < mixture.delta(epsilon * (1 - 1e-9))
    assert mixture.epsilon(0.5) == 0.0


@given(seed=st.integers(0, 10**6), epsilon=st.floats(1e-3, 8))
@settings(max_examples=60, deadline=None)
def test_spreading_only_adds(seed: int, epsilon: float) -> None:
    rng = np.random.default_rng(seed)
    squares = rng.uniform(0.01, 6, 5)
    width = rng.uniform(0, 0.99, 5) * squares
    apart = GaussianMixture(np.full(10, 0.1), np.concatenate([squares - width, squares + width]), spread=True)
    assert GaussianMixture(np.full(5, 0.2), squares).delta(epsilon) <= apart.delta(epsilon)


# --- limits --------------------------------------------------------------------------------------------------------


def test_long_runs() -> None:
    begin = time.process_time()
    long = account_hidden_state(constant_run(steps=10**6 - 10**6 % 29), 1e-5)
    assert long.epsilon == pytest.approx(account_hidden_state(constant_run(), 1e-5).epsilon, rel=1e-8)
    full = account_hidden_state(constant_run(records=2048, sampling="full", steps=10**6), 1e-5)
    assert full.mu_worst == pytest.approx(2 / 3.01 * math.sqrt(1.9616 / 0.0384), rel=1e-8)
    assert time.process_time() - begin < 60


def test_weak_contraction_and_wide_schedules() -> None:
    assert account_hidden_state(constant_run(m=0.0, epochs=10), 1e-5).epsilon > 0
    assert account_hidden_state(constant_run(m=1e-14, epochs=10), 1e-5).epsilon > 0
    sizes = np.geomspace(1.9, 1e-20, 500)
    run = HiddenRun(500, 50, "partition", sizes, np.geomspace(1e-3, 10, 500), 0.02, 1.02, 1.0)
    assert 0 < account_hidden_state(run, 1e-5).epsilon < math.inf


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"step_sizes": np.full(4, 2.1)}, Refused),
        ({"step_sizes": np.full(3, 1.0)}, InputError),
        ({"step_sizes": np.array([1.0, 1.0, 0.0, 1.0])}, InputError),
        ({"noise_stds": np.array([1.0, np.nan, 1.0, 1.0])}, InputError),
        ({"noise_stds": np.full(4, 1e-9)}, InputError),
        ({"noise_stds": np.full((2, 2), 1.0)}, InputError),
        ({"noise_stds": np.array([])}, InputError),
        ({"sampling": "poisson"}, InputError),
        ({"sampling": "full"}, InputError),
        ({"batch": 11}, InputError),
        ({"strong_convexity": -0.1}, InputError),
        ({"strong_convexity": 1.1}, InputError),
        ({"smoothness": math.inf}, InputError),
        ({"sensitivity": 0.0}, InputError),
        ({"disparity_slack": -1.0}, InputError),
    ],
)
def test_extreme_inputs_are_refused(changes: dict[str, object], error: type[Exception]) -> None:
    run = HiddenRun(10, 5, "partition", np.full(4, 1.0), np.full(4, 1.0), 0.1, 1.0, 1.0)
    with pytest.raises(error):
        replace(run, **changes)  # type: ignore[arg-type]


def test_theirs_is_refused_where_it_does_not_apply() -> None:
    run = constant_run(epochs=2)
    for unfit in (
        run.until(30),
        replace(run, noise_stds=np.linspace(1, 2, run.steps)),
        replace(run, disparity_slack=1e-6),
        replace(run, sampling="shuffle"),
        constant_run(m=0.0, epochs=2),
    ):
        with pytest.raises(Refused):
            account_hidden_state(unfit, 1e-5, bound="ye-shokri")
    with pytest.raises(InputError, match="delta"):
        account_hidden_state(run, 0.0)
    with pytest.raises(InputError, match="bound"):
        account_hidden_state(run, 1e-5, bound="best")
