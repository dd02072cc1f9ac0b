"""Both bounds on ε of random allocation around an independent reference, for every number of epochs."""

from __future__ import annotations

import contextlib
import math

import mpmath
import numpy as np
import pytest
import two_batches
from contour import TooHard
from whole_epochs import few_batches, log_delta, many_batches

from sordino.accounting.account import account
from sordino.accounting.allocation import Epoch, epoch_from_below, epoch_pmfs
from sordino.accounting.calibration import calibrate
from sordino.accounting.events import allocated, compose_events
from sordino.accounting.pairs import Pmf
from sordino.accounting.pld import _CUMULANT_ERROR, _MEAN_ERROR, Composition, tail_of

Plan = tuple[int, float, int, float]  # batches, noise multiplier, epochs, δ


@pytest.mark.parametrize("removing", [True, False])
def test_the_references_agree(removing: bool) -> None:
    for sigma, epsilon in ((1.0, 0.5), (0.7, 1.5), (3.0, 0.2)):
        expected = math.log(two_batches.delta(2, sigma, epsilon, removing=removing, others=[]))
        assert log_delta(few_batches(2, sigma, removing=removing), 1, epsilon) == pytest.approx(expected, abs=1e-11)
        fine = log_delta(few_batches(2, sigma, removing=removing, fine=1.7), 1, epsilon, 1.5)
        assert fine == pytest.approx(expected, abs=1e-11)
    for batches, sigma, epochs, epsilon in ((2, 1.0, 100, 40.0), (3, 1.0, 2000, 500.0), (2, 1.0, 10**5, 30_000.0)):
        one, other = (log_delta(make(batches, sigma, removing=removing), epochs, epsilon)
                      for make in (few_batches, many_batches))  # fmt: skip
        assert one == pytest.approx(other, abs=1e-9)


def above(plan: Plan, epsilon: float, *, removing: bool) -> float:
    """log of the true δ(ε) over δ."""
    batches, sigma, epochs, delta = plan
    if batches <= 3:
        try:
            return log_delta(few_batches(batches, sigma, removing=removing), epochs, epsilon) - math.log(delta)
        except TooHard:
            if epochs < 1000:
                raise
    return log_delta(many_batches(batches, sigma, removing=removing), epochs, epsilon) - math.log(delta)


def random_plans(seed: int, count: int) -> list[Plan]:
    """Two or three batches, up to 10¹² epochs, δ down to 10⁻²⁹⁰."""
    generator, found = np.random.default_rng(seed), []
    for _ in range(count):
        epochs = int(10 ** generator.uniform(0, 12)) if generator.random() < 0.6 else int(generator.integers(1, 20))
        exponent = generator.uniform(0.3, 14) if generator.random() < 0.6 else generator.uniform(14, 290)
        sigma = round(float(np.exp(generator.uniform(math.log(0.3), math.log(60)))), 3)
        found.append((int(generator.choice([2, 2, 3])), sigma, epochs, float(f"{10**-exponent:.2e}")))
    return found


MANY: list[Plan] = [
    (37, 1.32, 210_931_899, 4.2e-2), (7808, 7.32, 568_166_800, 3.2e-3), (69, 3.4, 10_776_950_728, 4.2e-10),
    (967, 1.58, 36_889_160, 1.5e-3), (4410, 5.38, 549_691_068_732, 7.5e-7), (11, 0.42, 784_101, 2.3e-6),
    (4598, 14.41, 1_149_140_898, 2e-12), (6, 14.27, 7621, 2.7e-6), (7651, 0.96, 2_292_091_056, 1.6e-7),
    (2, 14.095, 11, 2.15e-245),
]  # fmt: skip


@pytest.mark.parametrize("plan", [*random_plans(3, 24), *MANY], ids=str)
def test_the_true_epsilon_lies_between_the_bounds(plan: Plan) -> None:
    batches, sigma, epochs, delta = plan
    found = account(compose_events([(allocated(sigma, batches, batches), epochs)]), delta)
    rounding = 1e-8 + 3e-15 * epochs
    checked = 0
    for removing in (True, False):
        with contextlib.suppress(TooHard):
            assert found.epsilon == 0 or above(plan, found.epsilon, removing=removing) <= rounding
            checked += 1
    assert checked
    if found.epsilon_lower:
        below = []
        for removing in (True, False):
            try:
                below.append(above(plan, found.epsilon_lower, removing=removing))
            except TooHard:
                below.append(math.inf if removing else -math.inf)  # removing is what the lower bound is for
        assert max(below) >= -rounding


@pytest.mark.parametrize(
    "plan",
    [(8, 1.788, 1, 7.8e-13), (8, 1.788, 3, 7.8e-13), (20, 1.6, 1, 1e-14), (1000, 1.6, 1, 1e-12), (60, 2.2, 1, 1e-20),
     (10_000, 1.0, 10, 1e-12), (5000, 1.0, 10, 1e-12), (10_000, 1.0, 100, 1e-12)],
    ids=str,
)  # fmt: skip
def test_few_epochs_are_bounded_tightly_at_small_delta(plan: Plan) -> None:
    """On a lattice the tail of few batches was mostly a bound on rounding errors (2.50 for 1.96). The lower bound of
    many batches was 0: tilted like the upper bound, its bulk were its largest losses."""
    batches, sigma, epochs, delta = plan
    found = account(compose_events([(allocated(sigma, batches, batches), epochs)]), delta)
    assert found.epsilon_lower is not None
    assert 0.99 * found.epsilon < found.epsilon_lower <= found.epsilon


@pytest.mark.parametrize("delta", [1e-4, 1e-5, 1e-6, 1e-7])
@pytest.mark.parametrize("plan", [(100, 1.0, 10), (30, 2.0, 30), (600, 1.5, 5), (10, 5.0, 100)], ids=str)
def test_ordinary_plans_have_no_tails_of_rounding(plan: tuple[int, float, int], delta: float) -> None:
    """So nothing is computed twice for them, and their ε does not change."""
    batches, sigma, epochs = plan
    for interval in (0.02, 0.005):
        for pmf in epoch_pmfs(Epoch(sigma, batches, batches), interval, tail_of(delta, epochs)):
            assert pmf.coarse * epochs <= 0.01 * delta


@pytest.mark.parametrize(
    ("plan", "interval"),
    [((2, 0.3, 10**6, 1e-5), 0.05), ((3, 0.25, 200, 1e-40), 0.1), ((2, 1.0, 10**12, 0.1), 0.01),
     ((50, 20.0, 10**9, 1e-100), 1e-4), ((2, 60.0, 10**12, 1e-100), 1e-3), ((1000, 0.5, 10**4, 1e-12), 0.02)],
    ids=str,
)  # fmt: skip
def test_rounding_of_cumulants_and_means_is_below_its_bound(plan: Plan, interval: float) -> None:
    batches, sigma, epochs, delta = plan
    epoch, tail = Epoch(sigma, batches, batches), tail_of(delta, epochs)
    forward, _ = epoch_pmfs(epoch, interval, tail)
    composition = Composition([(forward, 1)], interval)
    _, tilt = Composition([(forward, epochs)], interval).renyi(delta)
    with mpmath.workdps(40):
        step = mpmath.mpf(interval)
        losses = [(forward.lower + i) * step for i in range(len(forward.probs))]
        for order in (tilt, tilt / 10, 3 * tilt, 0.0):
            total = mpmath.fsum(
                mpmath.mpf(p) * mpmath.exp(mpmath.mpf(order) * loss)
                for p, loss in zip(forward.probs.tolist(), losses, strict=True)
            )
            assert abs(composition.cumulant(order) - mpmath.log(total)) <= _CUMULANT_ERROR
        below = epoch_from_below(epoch, interval, tail)
        losses = [(below.lower + i) * step for i in range(len(below.probs))]
        pairs = list(zip(map(mpmath.mpf, below.probs.tolist()), losses, strict=True))
        mass, mean, size = (mpmath.fsum(values) for values in (
            [p for p, _ in pairs], [p * loss for p, loss in pairs], [p * abs(loss) for p, loss in pairs]))  # fmt: skip
        assert abs(Composition([(below, 1)], interval).moments(0.0)[0] - mean / mass) <= _MEAN_ERROR / 10 * size / mass


def test_no_tilt_is_so_steep_that_its_exponents_lose_their_digits() -> None:
    """It was doubled sixty times in search of a mean that no tilt has."""
    composition = Composition([(Pmf(-1, np.array([0.5, 0.0, 0.5]), 0.0, np.zeros(3)), 10)], 0.01)
    assert composition.tilt_near(0.11, 1.0) == pytest.approx(700 / 0.01)
    assert composition.moments(composition.tilt_near(0.09, 1.0))[0] == pytest.approx(0.09, abs=0.01)


def test_calibration_at_small_delta_uses_the_tight_bound() -> None:
    def event(sigma: float) -> object:
        return compose_events([(allocated(sigma, 8, 8), 1)])

    sigma, _ = calibrate(event, 1.97, 7.8e-13)
    assert sigma < 1.788
    assert account(event(sigma), 7.8e-13).epsilon <= 1.97
