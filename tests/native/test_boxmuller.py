"""round(x + s·Z): the float32 stage, the double stage and the exact one agree, and the law is that of the theorem."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sordino.errors import InputError
from sordino.native import boxmuller
from sordino.native.boxmuller import BLOCK, Pairs
from sordino.randomness import RandomSource, Stream
from sordino.randomness.exact import EXTRA_BITS, exact_normal
from sordino.randomness.keystream import Further, Keystream

LEVEL = 1e-4
SCALES = [64.0, 100.3, 127.999]  # those of a release


def stream(seed: int = 0) -> Stream:
    return RandomSource.seeded(seed).stream("sum", 0)


def drawn(values: torch.Tensor, scale: float, seed: int = 0, spacing: float = 1.0) -> torch.Tensor:
    result = values.clone()
    stream(seed).rounded_sum(result, scale, spacing)
    return result


def exactly(offset: npt.NDArray[np.float64], scale: float, seed: int) -> npt.NDArray[np.float64]:
    """round(offset + scale · Z) of one block, every pair by the 448-bit arithmetic from the same digits."""
    twin, pairs = stream(seed), (len(offset) + 1) // 2
    digits = twin.bits64(pairs).view("<u4").reshape(2, pairs)
    counters = np.stack([np.arange(pairs), np.zeros(pairs)], axis=1).astype("<u8")
    further = np.frombuffer(Further(twin._refine_key).digits(counters.tobytes()), "<u4").reshape(pairs, 4)[:, :2].T
    u, v = boxmuller.extended(digits, further)
    padded = np.append(offset, 0.0)
    result = np.empty(2 * pairs)
    for i in range(pairs):
        offsets = float(padded[i]), float(padded[pairs + i])
        result[[i, pairs + i]] = exact_normal(int(u[i]), int(v[i]), twin._extra(i, 2), scale, offsets)
    return result[: len(offset)]


# The stages agree


@pytest.mark.parametrize("scale", [1.0, *SCALES, 2.0**12])  # at 2¹² an eighth of the pairs is undecided in float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_integer_is_the_one_of_exact_arithmetic(scale: float, dtype: torch.dtype) -> None:
    """Offsets of all kinds, those right beside ±½ included; an odd number of them."""
    generator = torch.Generator().manual_seed(1)
    edge = 0.5 - 2.0 ** -torch.randint(2, 26, (2_000,), generator=generator)
    values = torch.cat([torch.rand(2_000, generator=generator) - 0.5, edge, -edge, torch.tensor([0.5, -0.5, 0.0])])
    values = values[torch.randperm(len(values), generator=generator)].to(dtype)
    if dtype == torch.float64:
        values *= 1 - 2.0**-40  # needs more digits than float32 has
    rest = values.double().numpy()
    rest = rest - np.rint(rest)
    assert np.array_equal(drawn(values, scale, seed=3).double().numpy(), exactly(rest, scale, seed=3))


def test_a_whole_block_of_a_release_is_that_of_exact_arithmetic() -> None:
    values = torch.rand(BLOCK, generator=torch.Generator().manual_seed(2)) - 0.5
    assert np.array_equal(drawn(values, 90.7, seed=4).numpy(), exactly(values.double().numpy(), 90.7, seed=4))


def test_values_beside_the_border_between_two_integers_are_rounded_exactly() -> None:
    """The adversary's choice: offsets that put x + s·Z as close to a half-integer as float64 can say."""
    scale, n = 77.7, 4_000
    zero = exactly(np.zeros(n), scale * 2.0**40, seed=5) / 2.0**40  # scale · Z to 2⁻⁴⁰
    border = np.floor(zero) + 0.5 - zero  # zero + border is a half-integer up to 2⁻⁴⁰
    border -= np.rint(border)
    for shift in (-(2.0**-36), -(2.0**-20), 2.0**-20, 2.0**-36):
        found = drawn(torch.from_numpy(border + shift), scale, seed=5).numpy()
        whole = np.rint(border + shift)
        assert np.array_equal(found, whole + np.rint(zero + (border + shift - whole)))


@pytest.fixture
def extreme(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Stream]:
    """Streams whose U digits are all zero or all one, where no float has a logarithm to offer."""
    fill = Keystream.fill

    def make(digit: int) -> Stream:
        def filled(self: Keystream, words: npt.NDArray[np.uint64], at: int) -> None:
            fill(self, words, at)
            words.view("<u4")[: len(words)] = np.uint32(digit)

        monkeypatch.setattr(Keystream, "fill", filled)
        return Stream(bytes(32), bytes(32))

    return make


@pytest.mark.parametrize(("digit", "low", "high"), [(0, 6.66, 24.9), (2**32 - 1, 0.0, 2.2e-5)])
def test_extreme_digits_go_on_to_the_exact_path(
    digit: int, low: float, high: float, extreme: Callable[[int], Stream]
) -> None:
    values = torch.zeros(2, 50, dtype=torch.float64)
    extreme(digit).rounded_sum(values.view(-1), 2.0**12)
    radius = (values / 2.0**12).square().sum(0).sqrt()
    assert radius.min() >= low - 2.0**-12
    assert radius.max() <= high + 2.0**-12


def test_double_precision_leaves_extreme_u_and_borders_to_the_exact_path() -> None:
    u = np.array([0, 1, (1 << 39) - 1, (1 << 63) - 1, (1 << 63) - (1 << 37), 1 << 62], np.int64)
    with np.errstate(divide="ignore", invalid="ignore"):
        _, undecided = boxmuller.double(u, np.full(6, 1 << 61, np.int64), np.zeros((2, 6)), 64.0)
    assert undecided == [0, 1, 2, 3, 4]
    v, zeros = np.zeros(1, np.int64), np.zeros((2, 1))  # sine: exactly the offset, up to the unknown digits of V
    assert boxmuller.double(u[5:], v, zeros + 0.5 - 2.0**-35, 64.0)[1] == [0]
    assert boxmuller.double(u[5:], v, zeros + 0.5 - 2.0**-33, 64.0)[1] == []


# What the proof assumes, on this platform


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_log_cos_and_sin_are_within_four_units_in_the_last_place(dtype: type[np.floating]) -> None:
    generator = np.random.default_rng(0)
    u = np.concatenate([generator.random(300_000), 1 - 2.0 ** generator.uniform(-25, -1, 200_000)])
    u = np.append(u, 2.0 ** generator.uniform(-24, 0, 200_000)).astype(dtype)
    u = u[u < 1]
    quarters = generator.integers(-2, 3, 200_000) * (np.pi / 2) + 10.0 ** generator.uniform(-8, 0, 200_000)
    angles = np.append(generator.uniform(-np.pi, np.pi, 500_000), quarters).astype(dtype)
    for function, arguments in ((np.log, u), (np.cos, angles), (np.sin, angles)):
        true = function(arguments.astype(np.longdouble))
        assert np.abs(function(arguments) / true - 1).max() < 4 * np.finfo(dtype).eps


def test_single_precision_stays_within_the_tolerance_that_the_proof_allows() -> None:
    generator = np.random.default_rng(6)
    work = Pairs(6_000, np.dtype(np.float32))
    work.digits[...] = generator.integers(0, 2**32, (2, 6_000), dtype=np.uint32)
    work.digits[0, :1_500] = 2**19 + generator.integers(0, 2**17, 1_500)  # U a little over 2⁻¹³
    work.digits[0, 1_500:3_000] = 2**32 - 2**21 - generator.integers(2**10, 2**17, 1_500)  # R a little over 2⁻⁵
    work.digits[1, :6] = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**30]
    inside = ~work.approximate(np.zeros(12_000, np.float32), 1.0)
    assert inside.sum() > 5_990
    worst = 0.0
    for last in (0, 2**32 - 1):  # the unknown digits at both ends
        u, v = boxmuller.extended(work.digits, np.full((2, 6_000), last, np.uint32))
        for i in inside.nonzero()[0].tolist():
            exact = exact_normal(int(u[i]), int(v[i]), bytes(2 * EXTRA_BITS // 8), 2.0**80)
            worst = max(worst, *(abs(float(work.total[k, i]) - exact[k] / 2.0**80) for k in (0, 1)))
    assert 2.0**-21 < worst < 0.5 * boxmuller.SINGLE_TOLERANCE


def test_double_precision_stays_within_the_tolerance_that_the_proof_allows() -> None:
    generator = random.Random(8)
    us = [generator.getrandbits(63) for _ in range(1_000)]
    us += [(1 << 63) - (generator.getrandbits(37) | 1 << 38) for _ in range(500)]  # radius a little over 2⁻¹²
    us += [generator.getrandbits(38) | 1 << 39 for _ in range(500)]  # U a little over 2⁻²⁴
    vs = [generator.getrandbits(64) - (1 << 63) for _ in us]
    vs[:4] = [0, -1, -(1 << 63), (1 << 63) - 1]
    fine = 2.0**48  # so fine a grid shows the error itself
    u, v = np.array(us, np.int64), np.array(vs, np.int64)
    found, _ = boxmuller.double(u, v, np.zeros((2, len(us))), fine)
    log_u = np.log(u * 2.0**-63)
    inside = (log_u >= boxmuller.DOUBLE_LOGS[0]) & (log_u <= boxmuller.DOUBLE_LOGS[1])
    assert inside.sum() > 1_990
    worst = 0.0
    for i in inside.nonzero()[0].tolist():
        exact = exact_normal(us[i], vs[i], bytes(2 * EXTRA_BITS // 8), 2.0**80)
        worst = max(worst, *(abs(found[k, i] / fine - exact[k] / 2.0**80) for k in (0, 1)))
    assert worst < 0.75 * boxmuller.DOUBLE_TOLERANCE


@pytest.mark.parametrize("scale", SCALES)
def test_single_precision_decides_all_but_a_few_in_a_thousand(scale: float) -> None:
    work = Pairs(BLOCK // 2, np.dtype(np.float32))
    open_ = 0
    for seed in range(20):
        stream(seed)._fill(work.words)
        open_ += len(work.single(np.zeros(BLOCK, np.float32), scale))
    expected = 2.0**-13 + 2.0**-11 + 4 * (scale * boxmuller.SINGLE_TOLERANCE + boxmuller.SINGLE_ADDITION)
    assert open_ / (20 * BLOCK // 2) == pytest.approx(expected, rel=0.1)
    assert expected < 0.005


# The law


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (0.5, 1.0), (0.3, 3.0), (-0.49, 2.2)])
def test_the_integers_have_the_probabilities_of_a_rounded_gaussian(offset: float, scale: float) -> None:
    n = 1_000_000
    found = drawn(torch.full((n,), offset), scale, seed=7).numpy()
    shift, reach = float(np.float32(offset)), int(3.5 * scale)
    edges = np.concatenate([[-np.inf], np.arange(-reach, reach + 2) - 0.5, [np.inf]])
    expected = n * np.diff(stats.norm.cdf((edges - shift) / scale))
    assert stats.chisquare(np.histogram(found, edges)[0], expected).pvalue > LEVEL
    assert abs(found.mean(dtype=np.float64) - shift) < 4 * np.sqrt((scale**2 + 1 / 12) / n)


def test_on_the_grid_of_a_release_the_law_is_gaussian_to_five_sigma() -> None:
    scale, n = 80.0, 4_000_000
    found = drawn(torch.zeros(n), scale, seed=8).numpy()
    smooth = (found + np.random.default_rng(0).uniform(-0.5, 0.5, n)) / scale
    assert stats.kstest(smooth, "norm").pvalue > LEVEL
    for z in (3.0, 4.0, 4.5, 5.0):
        for tail in (found > z * scale, found < -z * scale):
            expected = stats.norm.sf((z * scale + 0.5) / scale)  # z · scale is an integer
            assert stats.binomtest(int(tail.sum()), n, expected).pvalue > LEVEL, z


def test_the_coordinates_are_independent() -> None:
    block = drawn(torch.zeros(2 * BLOCK), 70.0, seed=9).view(4, -1)  # cosines, sines, cosines, sines
    for i in range(4):
        assert stats.pearsonr(block[i, 1:], block[i, :-1]).pvalue > LEVEL
        for j in range(i):
            assert stats.pearsonr(block[i], block[j]).pvalue > LEVEL
            assert stats.pearsonr(block[i].abs(), block[j].abs()).pvalue > LEVEL


# What depends on what


@given(st.integers(-40, 40), st.integers(1, 3_000), st.sampled_from([torch.float32, torch.float64]))
@settings(deadline=None, max_examples=30)
def test_a_whole_number_of_steps_in_the_value_is_the_same_number_in_the_result(
    steps: int, n: int, dtype: torch.dtype
) -> None:
    values = (torch.rand(n, generator=torch.Generator().manual_seed(n)) * 64).round() / 64
    moved = drawn((values + steps).to(dtype), 64.0) - drawn(values.to(dtype), 64.0)
    assert torch.equal(moved, torch.full_like(moved, steps))


def test_a_part_of_a_step_moves_that_part_of_the_results_by_one() -> None:
    n = 200_000
    moved = drawn(torch.full((n,), 0.375), 64.0) - drawn(torch.full((n,), 0.125), 64.0)
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    assert stats.binomtest(int(moved.sum()), n, 0.25).pvalue > LEVEL


@pytest.mark.parametrize("n", [1, 2, 3, 1_001, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5])
def test_the_result_depends_neither_on_the_dtype_nor_on_the_spacing(n: int) -> None:
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 100
    single = drawn(values, 100.0)
    assert torch.equal(single.double(), drawn(values.double(), 100.0))
    assert torch.equal(single * 2.0**-9, drawn(values * 2.0**-9, 100.0, spacing=2.0**-9))
    assert torch.equal(single, single.round())


def test_zero_has_no_sign() -> None:
    for dtype in (torch.float32, torch.float64):
        for tiny in (-1e-20, -0.4, -0.0, 0.4):
            found = drawn(torch.full((3_000,), tiny, dtype=dtype), 1.0)
            assert (found == 0).sum() > 500
            assert not torch.signbit(found[found == 0]).any()


def test_consecutive_calls_continue_the_stream_and_nothing_is_no_draw() -> None:
    reader = stream()
    one, none, two = torch.zeros(1_000), torch.zeros(0), torch.zeros(1_000)
    for values in (one, none, two):
        reader.rounded_sum(values, 64.0)
    assert torch.equal(one, drawn(torch.zeros(1_000), 64.0))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.15


@pytest.mark.parametrize("scale", [0.5, 2.0**13, float("nan")])
def test_a_scale_out_of_range_is_refused(scale: float) -> None:
    with pytest.raises(InputError, match="scale"):
        stream().rounded_sum(torch.zeros(3), scale)
