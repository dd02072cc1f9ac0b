"""The compiled loops: the same noise as the passes they stand in for, and never used where they are not right."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import InputError
from sordino.gradients.sums import memory
from sordino.native import boxmuller, kernels, parts
from sordino.native.kernels import Kernels, agrees, compiled
from sordino.native.parts import Array, Pair, Parts, Room, Rules
from sordino.randomness import RandomSource, Stream, keystream
from sordino.randomness import rounded_sum as randomness
from sordino.randomness.exact import EXTRA_BITS, exact_normal
from sordino.release import requests as release

LIBRARY = compiled()
needs_compiler = pytest.mark.skipif(LIBRARY is None, reason="installed without a C compiler")


def stream() -> Stream:
    return RandomSource.seeded(7).stream("noise", 3)


def by_passes(values: torch.Tensor, scale: float, spacing: float) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(randomness, "compiled", lambda: None)
        patch.setattr(keystream, "compiled", lambda: None)
        result = values.clone()
        stream().rounded_sum(result, scale, spacing)
    return result


def first_stage(values: Array, digits: Array, scale: float) -> tuple[Array, Array]:
    """What the loop makes of values (cosines, then sines), and which pairs it leaves open; block by block."""
    assert LIBRARY is not None
    pairs, half, rules = digits.shape[1], boxmuller.BLOCK // 2, Rules(scale, 1.0, 1.0)
    result, open_ = np.full((2, pairs), np.nan, values.dtype), np.zeros(pairs, np.bool_)
    for lo in range(0, pairs, half):
        here = slice(lo, min(lo + half, pairs))
        n, block = here.stop - lo, values.reshape(2, -1)[:, here].reshape(-1)
        room, out = Room(2 * n), np.empty_like(block)
        room.words(n).view("<u4")[:] = digits[:, here].reshape(-1)
        count = LIBRARY.rounded_sum(Parts.of([block]), Parts.of([out]), 0, 2 * n, rules, room, 5, 0)
        addresses, found = np.frombuffer(room.counters(count), np.int64).reshape(-1, 2), room.open(count)
        slots = addresses[:, 0] - 5
        assert (addresses[:, 1] == 0).all()
        for name, array in (("values", block), ("results", out)):
            places = array.ctypes.data + np.stack([slots, n + slots], 1) * array.itemsize
            assert np.array_equal(found[name], places)
        assert np.array_equal(np.stack([found["u"], found["v"]]), digits[:, lo + slots])
        result[:, here] = out.reshape(2, -1)
        open_[lo + slots] = True
    return result.reshape(-1), open_


@needs_compiler
class TestNoise:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    @pytest.mark.parametrize("n", [1, 2, 3, 1000, boxmuller.BLOCK + 1, 2 * boxmuller.BLOCK + 12_345])
    @pytest.mark.parametrize("scale", [1.0, 64.0, 127.9, 4096.0])
    def test_it_does_not_tell_whether_it_was_compiled(self, dtype: torch.dtype, n: int, scale: float) -> None:
        values = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 3
        by_loop = values.clone()
        stream().rounded_sum(by_loop, scale, 2.0**-6)
        assert torch.equal(by_loop, by_passes(values, scale, 2.0**-6))
        assert n < 1000 or (by_loop != values).float().mean() > 0.9

    @given(
        sizes=st.lists(st.integers(0, 40) | st.just(boxmuller.BLOCK // 2 + 3), min_size=1, max_size=9),
        double=st.booleans(),
        factor=st.sampled_from([1.0, 0.01]),
    )
    @settings(max_examples=40, deadline=None)
    def test_values_in_several_tensors_are_those_of_one_vector(
        self, sizes: list[int], double: bool, factor: float
    ) -> None:
        kind = np.float64 if double else np.float32
        arrays = [np.random.default_rng(i).normal(size=n).astype(kind) for i, n in enumerate(sizes)]
        before = [array.copy() for array in arrays]
        joined = np.concatenate(arrays)
        out = np.full(len(joined), np.nan, kind)
        stream().rounded_sum_of(Parts.of(arrays), Parts.of([out]), 100.0, 2.0**-6, factor)
        expected = by_passes(torch.from_numpy(joined), 100.0, 2.0**-6).numpy()
        assert np.array_equal(out, expected if factor == 1.0 else expected * 2.0**6 * kind(2.0**-6 * factor))
        assert all(np.array_equal(a, b) for a, b in zip(arrays, before, strict=True)), "values are only read"
        places = Parts.of(arrays)
        stream().rounded_sum_of(places, places, 100.0, 2.0**-6, factor)
        assert np.array_equal(np.concatenate(arrays), out), "results may take the place of the values"

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_pairs_that_stay_open_are_settled_in_the_block_that_they_belong_to(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second stage is told to decide nothing, so that all that the first leaves is settled exactly."""
        n = 5 * boxmuller.BLOCK + 12_345
        values = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(2)) * 3
        expected = by_passes(values, 20.0, 2.0**-6)
        monkeypatch.setattr(parts, "DOUBLE_TOLERANCE", 1.0)
        monkeypatch.setattr(randomness, "_rules", Rules)  # not what was kept of others
        settled = 0
        settle = randomness.RoundedSum._settle

        def counted(*arguments: Any) -> None:
            nonlocal settled
            settled += 1
            settle(*arguments)

        monkeypatch.setattr(randomness.RoundedSum, "_settle", counted)
        stream().rounded_sum(values, 20.0, 2.0**-6)
        assert torch.equal(values, expected)
        assert settled > 100

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_however_many_pairs_are_open_there_is_room_for_them(
        self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first stage is told to decide nothing."""
        n = 4 * boxmuller.BLOCK + 1
        values = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(3)) * 3
        expected = by_passes(values, 20.0, 2.0**-6)
        monkeypatch.setattr(parts, "single_limit", lambda scale: 0.0)
        monkeypatch.setattr(randomness, "_rules", Rules)
        counts, sums = [], randomness.RoundedSum
        decide = sums._decide
        monkeypatch.setattr(sums, "_decide", lambda *arguments: counts.append(arguments[-1]) or decide(*arguments))
        stream().rounded_sum(values, 20.0, 2.0**-6)
        assert torch.equal(values, expected)
        assert len(counts) > 1
        assert sum(counts) == n // 2 + 1

    @pytest.mark.parametrize("decided", [True, False], ids=["as it is", "the first stage decides nothing"])
    @pytest.mark.parametrize("n", [1, 7, boxmuller.BLOCK + 12_345])
    def test_narrower_results_are_the_wide_ones_rounded_once(
        self, n: int, decided: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        values = np.random.default_rng(n).normal(size=n) * 1e9  # beyond the digits of float32
        before, narrow, slow = values.copy(), np.full(n, np.nan, np.float32), np.full(n, np.nan, np.float32)
        if not decided:
            monkeypatch.setattr(parts, "single_limit", lambda scale: 0.0)
            monkeypatch.setattr(randomness, "_rules", Rules)
        stream().rounded_sum_of(Parts.of([values]), Parts.of([narrow]), 100.0, 2.0**-6, 0.01)
        assert np.array_equal(values, before)
        with monkeypatch.context() as without:
            without.setattr(randomness, "compiled", lambda: None)
            stream().rounded_sum_of(Parts.of([values]), Parts.of([slow]), 100.0, 2.0**-6, 0.01)
        wide = Parts.of([values])
        stream().rounded_sum_of(wide, wide, 100.0, 2.0**-6, 0.01)
        assert np.array_equal(narrow, values.astype(np.float32))
        assert np.array_equal(narrow, slow)

    def test_results_have_the_number_of_the_values_and_are_no_wider(self) -> None:
        four = Parts.of([np.zeros(4)])
        with pytest.raises(InputError, match="as many results"):
            stream().rounded_sum_of(four, Parts.of([np.zeros(5)]), 1.0, 1.0)
        with pytest.raises(InputError, match="as many results"):
            stream().rounded_sum_of(Parts.of([np.zeros(4, np.float32)]), four, 1.0, 1.0)
        with pytest.raises(InputError, match="contiguous"):
            stream().rounded_sum(torch.zeros(4)[::2], 1.0)
        with pytest.raises(TypeError, match="one dtype"):
            Parts.of([np.zeros(4), np.zeros(4, np.float32)])

    @pytest.mark.parametrize("offset", [0.4999999, -0.4999999, 0.5, -0.5, 0.0, 1e7 + 0.5])
    def test_sums_beside_a_half_integer_come_out_the_same(self, offset: float) -> None:
        values = torch.full((boxmuller.BLOCK,), offset)
        by_loop = values.clone()
        stream().rounded_sum(by_loop, 64.0)
        assert torch.equal(by_loop, by_passes(values, 64.0, 1.0))

    def test_zero_has_no_sign(self) -> None:
        values = torch.full((boxmuller.BLOCK,), -0.0)
        stream().rounded_sum(values, 1.0)
        zeros = values[values == 0]
        assert len(zeros) > 10_000
        assert not torch.signbit(zeros).any()

    def test_what_it_leaves_open_is_as_rare_as_the_note_says_and_untouched(self) -> None:
        assert LIBRARY is not None
        pairs, scale = 1 << 19, 100.0
        digits = np.random.default_rng(0).integers(0, 1 << 32, (2, pairs), dtype=np.uint32)
        digits[0, :3] = 0, 1, (1 << 32) - 1  # U beyond both ends of the range
        values = np.random.default_rng(1).normal(size=2 * pairs).astype(np.float32)
        out, open_ = first_stage(values, digits, scale)
        assert open_[:3].all()
        assert open_.mean() < 1.15 * (2.0**-13 + 2.0**-11 + 4 * scale * boxmuller.SINGLE_TOLERANCE)
        rows = np.concatenate([open_, open_])
        assert np.array_equal(out[rows], values[rows])
        assert not np.isnan(out).any()

    @pytest.mark.parametrize("smallest", [1 << 19, 1 << 31, (1 << 32) - (1 << 22)])
    def test_its_error_is_a_third_of_its_bound(self, smallest: int) -> None:
        """Read off the offsets at which the rounding turns: |error of Z| < bound/3 at both ends of the open digits.

        The sum is made to lie bound/3 on one side of a half-integer, as double precision sees it; the loop, asked with
        a tolerance of nothing, has to round to that side.
        """
        assert LIBRARY is not None
        rng, pairs, scale = np.random.default_rng(2), 1 << 16, 2.0**12
        u = rng.integers(smallest, min(2 * smallest, (1 << 32) - (1 << 21)), pairs)
        v = rng.integers(0, 1 << 32, pairs)
        digits = np.stack([u, v]).astype(np.uint32)
        for du, dv in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
            radius = np.sqrt(-2 * np.log((u + du) * 2.0**-32))
            angle = (v.astype(np.uint32).view(np.int32) + dv) * (2 * np.pi * 2.0**-32)
            z = scale * np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
            for side in (-1, 1):
                values = np.floor(z) + 0.5 - z + side * scale * boxmuller.SINGLE_TOLERANCE / 3
                keep = np.abs(values) < 0.5  # an offset that is a rest, as in a release
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("sordino.native.parts.single_limit", lambda scale: np.float32(0.5))
                    values, _ = first_stage(values, digits, scale)
                expected = np.floor(z) + (side > 0)
                assert keep.mean() > 0.3
                assert np.array_equal(values[keep], expected[keep])


@needs_compiler
class TestRows:
    @given(
        n=st.integers(1, 5),
        columns=st.integers(1, 200) | st.sampled_from([2047, 2048, 2100, 7000]),
        gap=st.integers(0, 3),
        double=st.booleans(),
        seed=st.integers(0, 99),
    )
    @settings(max_examples=100, deadline=None)
    def test_squares_are_those_of_the_rows(self, n: int, columns: int, gap: int, double: bool, seed: int) -> None:
        whole = torch.randn(n, columns + gap, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        rows = whole.to(torch.float64 if double else torch.float32)[:, :columns]
        found, exact = memory.squares(rows), rows.double().square().sum(1)
        assert found.dtype == torch.float64
        assert torch.allclose(found, exact, rtol=1e-14 if double else 1e-6)
        times = torch.rand(2 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(memory.squares(rows, times[:n]), found * times[:n])
        assert torch.allclose(memory.squares(rows, times[::2]), found * times[::2], rtol=1e-6), "not in a row"
        assert torch.equal(memory.squares(rows, times[:n].float()), found * times[:n].float()), "of another kind"

    @given(n=st.integers(1, 40), columns=st.sampled_from([1, 7, 100, 2047, 2048, 4100]), double=st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_gathered_rows_are_their_sum_and_those_of_weight_zero_are_not_read(
        self, n: int, columns: int, double: bool
    ) -> None:
        generator = torch.Generator().manual_seed(n)
        rows = torch.randn(n, columns + 1, dtype=torch.float64, generator=generator)[:, 1:]
        rows = rows if double else rows.float()
        weight = torch.rand(n, dtype=torch.float64, generator=generator)
        weight[::3] = 0
        total = torch.ones(columns, dtype=torch.float64)
        expected = weight @ rows.double() + 1
        rows[::3] = torch.nan
        memory.gather(total, rows, weight)
        assert torch.allclose(total, expected, rtol=1e-12, atol=1e-12)
        memory.gather(total, rows.T.contiguous().T, weight.float())
        assert torch.isfinite(total).all()

    @given(n=st.integers(1, 20), p=st.integers(1, 9), q=st.sampled_from([1, 5, 255, 256, 300]), double=st.booleans())
    @settings(max_examples=40, deadline=None)
    def test_crossed_rows_are_the_product_of_matrices(self, n: int, p: int, q: int, double: bool) -> None:
        generator, kind = torch.Generator().manual_seed(n), torch.float64 if double else torch.float32
        left = torch.randn(n, p, dtype=kind, generator=generator)
        right = torch.randn(n, q + 2, dtype=kind, generator=generator)[:, 1:-1]
        total = torch.ones(p, q, dtype=torch.float64)
        memory.cross(total, left, right)
        assert torch.allclose(total, left.double().mT @ right.double() + 1, rtol=1e-12, atol=1e-12)

    @given(
        n=st.integers(1, 700),
        columns=st.integers(1, 70) | st.sampled_from([511, 512, 513, 1100]),
        gap=st.integers(0, 3),
        double=st.booleans(),
    )
    @settings(max_examples=60, deadline=None)
    def test_scaled_rows_and_their_sum(self, n: int, columns: int, gap: int, double: bool) -> None:
        kind = torch.float64 if double else torch.float32
        generator = torch.Generator().manual_seed(n)
        rows = torch.randn(n, columns + gap, dtype=kind, generator=generator)[:, :columns]
        weight = torch.rand(n, dtype=torch.float64, generator=generator)
        found, total = memory.scaled(rows, weight)
        assert torch.equal(found, (rows.double() * weight[:, None]).to(kind))
        assert torch.allclose(total, found.double().sum(0), rtol=1e-12, atol=1e-12)
        again = memory.scaled(rows, weight, in_place=True)
        assert torch.equal(again[0], found)
        assert torch.equal(again[1], total)
        assert (again[0] is rows) == (rows.is_contiguous() and LIBRARY is not None)

    def test_rows_of_other_forms_are_left_to_numpy_and_torch(self) -> None:
        turned = torch.ones(3, 4).T
        assert memory.squares(turned).tolist() == pytest.approx([3.0] * 4)
        assert memory.scaled(turned, torch.arange(4.0))[1].tolist() == [6.0] * 3
        assert memory.scaled(torch.ones(4, 3), torch.arange(8.0)[::2])[1].tolist() == [12.0] * 3
        assert memory.lengths([torch.ones(8)[::2], torch.full((4,), 3.0)])[0].tolist() == [2.0] * 4

    @pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-20, 1e-10, 1e19, 1e30, 3e38])
    def test_squares_of_any_finite_size_are_right(self, size: float) -> None:
        rows = torch.zeros(3, 5000)
        rows[1, 70], rows[2] = size, size
        exact = rows.double().square().sum(1)
        assert torch.allclose(memory.squares(rows), exact, rtol=2.0**-17, atol=0)

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_row_that_is_not_finite_has_no_finite_square(self, bad: float) -> None:
        rows = torch.ones(3, 100)
        rows[1, 70] = bad
        assert torch.isfinite(memory.squares(rows)).tolist() == [True, False, True]


@needs_compiler
class TestLargest:
    @pytest.mark.parametrize(
        ("values", "largest"),
        [([1.0, -3.0, 2.0], 3.0), ([-0.0], 0.0), ([1.0, float("-inf")], float("inf")), ([1e-45, -1e-44], 9.80909e-45)],
    )
    def test_it_is_that_of_all_parts(self, values: list[float], largest: float) -> None:
        assert LIBRARY is not None
        parts = [np.zeros(33, np.float32), np.zeros(0, np.float32), np.array(values, np.float32)]
        assert LIBRARY.largest(Parts.of(parts)) == pytest.approx(largest, rel=1e-5)

    @pytest.mark.parametrize("nan", [float("nan"), -float("nan")])
    def test_a_nan_is_never_overlooked(self, nan: float) -> None:
        assert LIBRARY is not None
        values = np.full(100, np.inf, np.float32)
        values[41] = nan
        assert np.isnan(LIBRARY.largest(Parts.of([values])))


@needs_compiler
@given(
    n=st.integers(1, 3),
    channels=st.integers(1, 3),
    kernel=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    more=st.tuples(st.integers(0, 6), st.integers(0, 6)),
    double=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_patches_are_torch_s(
    n: int, channels: int, kernel: Pair, stride: Pair, dilation: Pair, more: Pair, double: bool
) -> None:
    assert LIBRARY is not None
    size = [d * (k - 1) + 1 + extra for k, d, extra in zip(kernel, dilation, more, strict=True)]
    kind = torch.float64 if double else torch.float32
    images = torch.randn(n, channels, *size, dtype=kind, generator=torch.Generator().manual_seed(n))
    expected = torch.nn.functional.unfold(images, kernel, dilation=dilation, stride=stride).mT
    out = np.full(expected.shape, np.nan, images.numpy().dtype)
    assert LIBRARY.patches(images.numpy(), kernel, stride, dilation, out)
    assert np.array_equal(out, expected.numpy())


@needs_compiler
def test_patches_of_memory_that_it_does_not_know_are_left_to_numpy() -> None:
    assert LIBRARY is not None
    images, out, one = np.ones((2, 1, 4, 6), np.float32), np.zeros((2, 12, 1), np.float32), (1, 1)
    assert not LIBRARY.patches(images[..., ::2], one, one, one, out)
    assert not LIBRARY.patches(images[..., ::2].astype(np.float16), one, one, one, out)
    assert not LIBRARY.patches(images, one, one, one, out)  # 24 places, and room for 12
    assert not LIBRARY.patches(images, (5, 1), one, one, out)  # a kernel that does not fit
    assert not LIBRARY.patches(images.astype(np.float64), one, (1, 2), one, out)
    assert not out.any()


def test_both_ways_refuse_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts.of([np.array([1.0, -7.0], np.float32), np.zeros(0, np.float32), np.array([2.0], np.float32)])
    bad = Parts.of([np.array([np.nan, 1.0], np.float32), np.array([np.inf], np.float32)])
    found = release.largest_magnitude(parts), release.largest_magnitude(bad)
    monkeypatch.setattr(release, "compiled", lambda: None)
    assert found[0] == release.largest_magnitude(parts) == 7.0
    assert np.isnan([found[1], release.largest_magnitude(bad)]).all()


@pytest.mark.parametrize("loops", [True, False])
def test_columns_and_stretched_numbers_are_read_by_value(loops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not loops:
        monkeypatch.setattr(randomness, "compiled", lambda: None)
    table = torch.arange(12.0).reshape(3, 4)
    values = {"column": table[:, 1], "odd": torch.arange(6.0)[::2], "one": torch.tensor(-20.0).expand(3), "T": table.T}
    values |= {"negated": torch._neg_view(torch.tensor([3.0, 4.0])), "nothing": torch._efficientzerotensor((2,))}
    parts, out = release.flat_parts(values, torch.float32)[0], np.empty(25, np.float32)
    stream().rounded_sum_of(parts, Parts.of([out]), 1.0, 2.0**-20)
    plain = [1, 5, 9, 0, 2, 4, -20, -20, -20, *table.T.flatten().tolist(), -3, -4, 0, 0]
    assert np.abs(out - np.array(plain)).max() < 1e-4
    assert release.largest_magnitude(parts) == 20.0


def test_what_a_library_is_tried_on_is_rounded_exactly() -> None:
    """The constant in the module: every sum by 448-bit arithmetic, but for the two pairs that are left as they were."""
    digits, further, offset = kernels.trial()
    pairs = digits.shape[1]
    u, v = boxmuller.extended(digits, further)
    expected = offset.copy()
    for i in range(2, pairs):
        offsets = float(offset[i]), float(offset[pairs + i])
        expected[[i, pairs + i]] = exact_normal(int(u[i]), int(v[i]), bytes(2 * EXTRA_BITS // 8), 100.0, offsets)
    assert hashlib.blake2b(expected.tobytes(), digest_size=16).hexdigest() == kernels._ROUNDED_EXACTLY


class TestLoading:
    def test_without_a_compiler_there_is_nothing_and_numpy_does_the_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert compiled.__wrapped__() is None

    def test_a_file_that_is_no_library_is_not_used(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        broken = tmp_path / "broken.so"
        broken.write_bytes(b"not a library")
        spec = ModuleSpec("sordino.native._kernels", None, origin=str(broken))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        assert compiled.__wrapped__() is None

    @needs_compiler
    def test_a_library_that_decides_otherwise_is_not_used(self) -> None:
        class Wrong(Kernels):
            """The first integer is one too large."""

            def rounded_sum(self, parts, results, start, n, *rest):  # type: ignore[no-untyped-def]
                count = super().rounded_sum(parts, results, start, n, *rest)
                results.arrays()[0][n - 1] += 1
                return count

        class WrongAgain(Kernels):
            def rounded_again(self, kinds, further, rules, room, count):  # type: ignore[no-untyped-def]
                left = super().rounded_again(kinds, further, rules, room, count)
                ctypes.c_float.from_address(int(room.open(count)["results"][-1, 0])).value += 1
                return left

        spec = importlib.util.find_spec("sordino.native._kernels")
        assert spec is not None
        assert spec.origin is not None
        assert agrees(Kernels(spec.origin))
        assert not agrees(Wrong(spec.origin))
        assert not agrees(WrongAgain(spec.origin))


@needs_compiler
@pytest.mark.parametrize(("outputs", "inputs"), [(25, 1), (96, 31), (97, 129), (130, 300), (193, 33)])
@pytest.mark.parametrize("each", [1, 4, 40, 200])
def test_sums_of_blocks_at_the_edges_of_tiles_of_records_and_of_blocks(outputs: int, inputs: int, each: int) -> None:
    """Rows outside of the blocks and those of a block of weight zero (here NaN) are not read."""
    generator = np.random.default_rng(outputs + each)
    left, right = (generator.standard_normal((640, size)).astype(np.float32) for size in (outputs, inputs))
    bounds, weights = np.array([40, 240, 400, 400, 600]), np.array([0.5, 0.0, 7.0, -1.5])
    left[:40] = right[600:] = left[240:400] = np.nan
    total, narrow = np.ones((outputs, inputs)), np.full((outputs, inputs), np.nan, np.float32)
    places = (left.ctypes.data, outputs), (right.ctypes.data, inputs)
    whole = np.zeros_like(total)
    assert LIBRARY is not None
    for to, rounded in ((total, False), (whole, False), (narrow, True)):
        LIBRARY.blocked(*places, to.shape, bounds, weights, to.ctypes.data, each, rounded)
    kept = [(40, 240, 0.5), (400, 600, -1.5)]
    expected = sum(w * left[lo:hi].astype(float).T @ right[lo:hi].astype(float) for lo, hi, w in kept)
    np.testing.assert_allclose(whole, expected, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(total, whole + 1)
    np.testing.assert_array_equal(narrow, whole.astype(np.float32))


@needs_compiler
def test_rows_of_a_record_are_summed_before_those_of_other_records() -> None:
    """1 and −1 cancel within each record, so the small numbers are not lost, as they would be in one long sum."""
    records, each, small = 4, 3, np.float32(2.0**-30)
    left = np.tile(np.array([[2.0**10], [-(2.0**10)], [small]], np.float32), (records, 32))
    right, total = np.ones((records * each, 32), np.float32), np.zeros((32, 32))
    places, bounds = ((left.ctypes.data, 32), (right.ctypes.data, 32)), np.array([0, records * each])
    assert LIBRARY is not None
    LIBRARY.blocked(*places, total.shape, bounds, np.ones(1), total.ctypes.data, each)
    np.testing.assert_array_equal(total, np.full((32, 32), records * float(small)))
