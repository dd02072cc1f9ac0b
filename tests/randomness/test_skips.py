"""Rare successes are found by skipping, with the law of single trials."""

from __future__ import annotations

import math
import time
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from sordino.errors import InputError
from sordino.randomness import RandomSource
from sordino.randomness.exact import EXTRA_BITS, extended, negative_log
from sordino.randomness.skips import _gaps
from sordino.sampling import MANY, Poisson, TruncatedPoisson, batches


def _source(seed: int = 1) -> RandomSource:
    return RandomSource.seeded(seed)


@pytest.mark.parametrize("rate", [2.0**-5, 0.01, 1e-3])
def test_gaps_are_geometric(rate: float) -> None:
    chosen = np.concatenate([_source(seed).stream("t", 0).successes(rate, 400_000) for seed in range(5)])
    firsts = np.array([_source(seed).stream("t", 1).successes(rate, 10**6)[0] for seed in range(400)])
    assert stats.kstest(firsts, lambda g: 1 - (1 - rate) ** (np.floor(g) + 1)).pvalue > 1e-4
    expected = 5 * 400_000 * rate
    assert abs(len(chosen) - expected) < 5 * math.sqrt(expected)
    halves = np.histogram(chosen, bins=8, range=(0, 400_000))[0]
    assert stats.chisquare(halves).pvalue > 1e-4  # no place is favoured


def test_the_number_of_successes_is_binomial() -> None:
    counts = [len(_source(seed).stream("t", 0).successes(0.002, 1000)) for seed in range(3000)]
    seen = np.bincount(np.minimum(counts, 7), minlength=8)
    law = stats.binom(1000, 0.002).pmf(np.arange(7))
    assert stats.chisquare(seen, 3000 * np.append(law, 1 - law.sum())).pvalue > 1e-4


@pytest.mark.parametrize("rate", [2.0**-5, 1e-5, 2.0**-39])
def test_every_floor_is_that_of_exact_arithmetic(rate: float) -> None:
    """Words are chosen where double precision is worst: at the boundaries between gaps, near 0 and near 1."""
    threshold = math.floor(Fraction(rate) * 2**64)
    rate_exact = negative_log((1 << 64) - threshold, 64)
    heads = [
        0,
        1,
        2,
        1 << 19,
        (1 << 20) + 1,
        (1 << 47) - 1,
        (1 << 47) + 1,
        (1 << 50) + 12345,
        (1 << 63) - 1,
        (1 << 63) - 2,
        (1 << 63) - 1000,
    ]
    for m in (1, 2, 3, 10, 1000, 123_456):
        edge = int((1 - Fraction(threshold, 1 << 64)) ** m * 2**63) if m <= 10 else int((1 - rate) ** m * 2**63)
        heads += [min(max(edge + shift, 0), (1 << 63) - 1) for shift in (-3, -1, 0, 1, 3)]
    words = np.array([head << 1 for head in heads], dtype=np.uint64)
    gaps = _gaps(lambda n: (words, lambda place: bytes([place % 251] * (EXTRA_BITS // 8))), rate_exact, len(words))
    for place, head in enumerate(heads):
        value = negative_log(extended(head, bytes([place % 251] * (EXTRA_BITS // 8))), 63 + EXTRA_BITS + 1)
        assert gaps[place] == min(value // rate_exact, 1 << 61), (head, rate)


def test_a_hundred_million_records_are_sampled_in_milliseconds() -> None:
    drawn = batches(Poisson(1e-5), records=10**8, steps=21, source=_source(), chunk=64)
    next(drawn)
    tracemalloc.start()
    began, sizes = time.process_time(), [len(batch) for batch in drawn]
    seconds, most = (time.process_time() - began) / 20, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < 0.05
    assert most < 10**8
    assert abs(np.mean(sizes) - 1000) < 5 * math.sqrt(1000 / 20)


def test_batches_can_be_drawn_again_and_a_cap_holds() -> None:
    sampling, records = TruncatedPoisson(1e-5, 30), 2 * MANY
    first, again = (
        [b.indices.tolist() for b in batches(sampling, records=records, steps=3, source=_source(), chunk=9)]
        for _ in range(2)
    )
    assert first == again
    for indices in first:
        assert len(indices) == 30
        assert indices == sorted(set(indices))
        assert indices[-1] < records


def test_rates_that_the_digits_do_not_reach_are_refused() -> None:
    for rate in (0.5, 2.0**-41):
        with pytest.raises(InputError, match="between"):
            _source().stream("t", 0).successes(rate, 10)
