"""ε of random allocation for every number of epochs, noise and δ: an answer, never too small, of bounded effort."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from sordino.accounting import allocation, geometric, lattice
from sordino.accounting.account import Account, account
from sordino.accounting.events import Release, allocated, compose_events
from sordino.accounting.pairs import Pair, discretise
from sordino.accounting.pld import Composition

Plan = tuple[int, float, int, float]


def accounted(batches: int, sigma: float, epochs: int, delta: float, seen: int | None = None) -> Account:
    rest = [] if seen is None else [(allocated(sigma, batches, seen), 1)]
    return account(compose_events([(allocated(sigma, batches, batches), epochs), *rest]), delta)


class Effort:
    """Seconds on a quiet core, by counting: cells of composed losses, points of lattices, products of convolutions.

    The prices were fitted to the time of 250 random plans; they are upper ones.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def counted(self, function, price):
        def wrapped(*arguments, **options):
            self.seconds += price(*arguments)
            return function(*arguments, **options)

        return wrapped


@pytest.fixture
def effort(monkeypatch: pytest.MonkeyPatch) -> Effort:
    found = Effort()
    for cache in (allocation.epoch_pmfs, allocation._powers, geometric._places):
        cache.cache_clear()
    convolve, composed, power = np.convolve, Composition._composed, lattice._power
    monkeypatch.setattr(np, "convolve", found.counted(convolve, lambda a, b: 8e-6 + 4e-10 * len(a) * len(b)))
    monkeypatch.setattr(
        Composition, "_composed", found.counted(composed, lambda _, tilt, first, last: 2e-7 * (last - first))
    )
    monkeypatch.setattr(lattice, "_power", found.counted(power, lambda w, s, count, size, *_: 1e-3 + 1.2e-7 * size))
    return found


SLOW: list[tuple[Plan, int | None]] = [  # the slowest of 450 random plans, before or after
    ((10_000, 1.0, 10**9, 1e-5), None),  # 2.1 s
    ((1549, 20.04, 42_227_220_392, 3.851e-7), 759),  # 4.6 s
    ((60, 2.838, 775_496_862, 2.468e-76), None),
    ((7830, 0.9625, 982_527, 4.406e-12), 6093),
    ((6, 9.052, 8568, 3.04e-237), None),
    ((2947, 0.3096, 2, 2.447e-129), None),
    ((311, 22.84, 116_514_478, 4.987e-17), 154),
    ((148, 2.061, 7_304_974, 5.423e-6), 133),
]


@pytest.mark.parametrize(("plan", "seen"), SLOW, ids=str)
def test_the_effort_is_below_two_seconds(effort: Effort, plan: Plan, seen: int | None) -> None:
    found = accounted(*plan, seen)
    assert effort.seconds < 2
    assert found.epsilon_lower is not None
    assert 0.9 * found.epsilon < found.epsilon_lower <= found.epsilon < math.inf


@pytest.mark.parametrize(
    ("plan", "seen"),
    [
        ((10, 111.35, 10, 2.729e-193), None),  # ended in a ValueError
        ((5, 13.13, 119, 2.772e-193), None),  # the same
        ((318, 3.486, 60_304_924_865, 2.867e-14), 175),  # nothing was left of an epoch from below
        ((25, 0.1104, 56_571, 1.17e-250), None),  # losses whose exponential is no double
        ((37, 0.6928, 577_404_944, 9.546e-278), 3),  # was refused
        ((921, 0.2803, 873_993_489_780, 4.731e-8), None),  # was refused
        ((10_000, 1e-3, 10**12, 1e-300), None),
        ((10_000, 1e6, 10**12, 1e-300), 1),
        ((1, 1.0, 10**12, 1e-2), None),
        ((2, 1e-3, 1, 1e-300), 1),
    ],
    ids=str,
)
def test_every_plan_has_an_answer(effort: Effort, plan: Plan, seen: int | None) -> None:
    found = accounted(*plan, seen)
    assert effort.seconds < 2
    _, sigma, epochs, delta = plan
    unsampled = get_epsilon_gaussian(sigma / math.sqrt(epochs + (seen is not None)), delta)
    assert (found.epsilon_lower or 0.0) <= found.epsilon <= unsampled * (1 + 1e-9) + 1e-9


def test_ten_to_the_twelve_epochs_cost_their_mean_loss() -> None:
    """The loss of so many epochs is their Kullback-Leibler divergence, up to a part of about 1e-4."""
    generator = np.random.default_rng(0)
    z = generator.standard_normal((40_000, 100))
    z[:, 0] += 1
    losses = np.log(np.exp(z - 0.5).mean(axis=1))
    error = 4 * float(losses.std()) / math.sqrt(len(losses))
    found = accounted(100, 1.0, 10**12, 1e-5)
    assert found.epsilon_lower is not None
    assert found.epsilon_lower <= found.epsilon < 1.001 * found.epsilon_lower
    assert abs(found.epsilon / 1e12 - float(losses.mean())) < error + 1e-3 * float(losses.mean())


@pytest.mark.parametrize("epochs", [10**5, 10**7, 10**9, 10**11])
def test_epsilon_grows_with_the_epochs_where_the_method_changes(epochs: int) -> None:
    values = [accounted(50, 20.0, epochs * factor, 1e-6) for factor in (1, 2, 4)]
    for fewer, more in itertools.pairwise(values):
        assert fewer.epsilon < more.epsilon
        assert (fewer.epsilon_lower or 0) < more.epsilon


@pytest.mark.parametrize("count", [1, 30, 10**4, 10**8])
@pytest.mark.parametrize("sigma", [1.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-30])
def test_moments_bound_what_a_closed_form_says(count: int, sigma: float, delta: float) -> None:
    interval = 1e-3 / sigma
    forward, _ = discretise(Pair("gaussian", sigma, 1.0), interval, 1e-6 * delta / count)
    truth = get_epsilon_gaussian(sigma / math.sqrt(count), delta)
    assert truth <= Composition([(forward, count)], interval).renyi_epsilon(delta)
    below = Release("gaussian", sigma).from_below("add-remove")
    assert below is not None
    lower = Composition([(below(interval, 1e-6 * delta / count), count)], interval).moments_from_below(delta)
    assert lower <= truth
    if count / sigma**2 > 10**4:
        assert lower > 0.9 * truth
