"""Sums of Gaussians of several streams, rounded once: against exact arithmetic, and against each stream alone."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import torch
from scipy import stats

from sordino.randomness import RandomSource
from sordino.randomness.exact import _FRACTION, rounded_total
from sordino.randomness.mixture import BLOCK, rounded_mixture

SOURCE = RandomSource.seeded(5)


def streams(count: int) -> list:  # type: ignore[type-arg]
    return [SOURCE.stream("test", index) for index in range(count)]


def test_the_integers_are_those_of_exact_arithmetic() -> None:
    values = np.random.default_rng(0).normal(size=61) * 50
    coefficients = [1.0, -0.5, -0.125, 0.3]
    got = values.copy()
    rounded_mixture([got[:7], got[7:]], got, list(zip(coefficients, streams(4), strict=True)), 77.7, 0.25)
    blocks = [stream.gaussians(61) for stream in streams(4)]
    for i, value in enumerate(values):
        exact = rounded_total(
            [(a, b.exactly(i)) for a, b in zip(coefficients, blocks, strict=True)], 77.7, value / 0.25
        )
        assert got[i] == exact * 0.25


def test_noise_that_is_added_twice_with_opposite_signs_is_gone() -> None:
    values = np.arange(500.0)
    rounded_mixture([values], values, [(1.0, SOURCE.stream("one", 0)), (-1.0, SOURCE.stream("one", 0))], 100.0, 1.0)
    assert (values == np.arange(500.0)).all()


def test_a_stream_alone_is_a_gaussian_and_the_same_whatever_the_others_are() -> None:
    n = BLOCK + 17
    alone, pair = np.zeros(n), np.zeros(n)
    rounded_mixture([alone], alone, [(1.0, SOURCE.stream("a", 0))], 1000.0, 1.0)
    rounded_mixture([pair], pair, [(1.0, SOURCE.stream("a", 0)), (0.5, SOURCE.stream("b", 0))], 1000.0, 1.0)
    other = np.zeros(n)
    rounded_mixture([other], other, [(0.5, SOURCE.stream("b", 0))], 1000.0, 1.0)
    assert np.abs(pair - alone - other).max() <= 1
    assert stats.kstest(alone / 1000, "norm").pvalue > 1e-4


def test_extreme_draws_and_doubles_agree_with_fixed_point() -> None:
    block = SOURCE.stream("many", 0).gaussians(20_000)
    values = block.values().copy()
    places = [*np.argsort(np.abs(values))[-4:].tolist(), *np.argsort(np.abs(values))[:4].tolist(), 9_999, 10_000]
    for place in places:
        exact = Fraction(block.exactly(int(place)), 1 << 2 * _FRACTION)
        assert abs(Fraction(float(values[place])) - exact) <= Fraction(1, 2**45)


def test_zero_is_positive_and_the_factor_is_applied_last() -> None:
    values = np.full(64, -1e-9)
    rounded_mixture([values], values, [(0.0, SOURCE.stream("z", 0))], 64.0, 1.0, 0.5)
    assert (values == 0).all()
    assert not np.signbit(values).any()
    assert torch.from_numpy(values).dtype == torch.float64


def test_vectors_that_follow_one_another_are_one_vector_and_float32_is_rounded_after_the_noise() -> None:
    n = 2 * BLOCK + 5
    values = np.random.default_rng(1).normal(size=n) * 30
    whole, parts, single = np.empty(n), np.empty(n), np.empty(n, dtype=np.float32)
    terms = [(1.0, "a"), (-0.5, "b")]

    def streams_of() -> list:  # type: ignore[type-arg]
        return [(a, SOURCE.stream(name, 3)) for a, name in terms]

    rounded_mixture([values], whole, streams_of(), 50.0, 0.125)
    pieces = np.split(values, [1, 700, BLOCK, BLOCK + 1, 2 * BLOCK])
    rounded_mixture(pieces, parts, streams_of(), 50.0, 0.125)
    rounded_mixture(pieces, single, streams_of(), 50.0, 0.125)
    assert (whole == parts).all()
    assert (single == whole.astype(np.float32)).all()


def test_many_streams_work_in_the_memory_of_one() -> None:
    values = np.zeros(BLOCK + 3)
    many = [(0.1, stream) for stream in streams(20)]
    rounded_mixture([values], values, many, 100.0, 1.0)
    assert len({id(stream._work) for _, stream in many}) == 1
