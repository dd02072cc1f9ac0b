"""Loops in C, where a compiler was there at the installation: faster, and no other results.

| loop            | stands in for                          | its results                                              |
|-----------------|----------------------------------------|----------------------------------------------------------|
| `rounded_sum`   | `boxmuller.Pairs.single`, pass by pass | the same integers; both leave open what they can't decide |
| `rounded_again` | `boxmuller.double`, pass by pass       | the same integers, likewise                               |
| `squares`       | numpy's `vecdot` of rows               | the same up to rounding, which BLAS does not fix either   |
| `largest`       | a minimum and a maximum                | the same                                                  |
| `patches`       | a contiguous copy of strided windows   | the same                                                  |

`compiled()` is None without the library, and also if the library, tried on a block of digits, decides otherwise than
numpy does (a stale build, a broken compiler): then numpy does the work. So whether it is there can't be told from the
noise, only from the clock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Sequence
from ctypes import c_double, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.boxmuller import (
    DOUBLE_LOGS,
    DOUBLE_TOLERANCE,
    SINGLE_LOGS,
    Pairs,
    double,
    extended,
    single_limit,
)

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_SUFFIX = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}


class Parts:
    """Vectors of one dtype whose values follow one another; the memory is read where it lies."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        if any(array.dtype != arrays[0].dtype for array in arrays):
            raise TypeError("parts have one dtype")
        self.arrays = [np.ascontiguousarray(array) for array in arrays]  # a column is not what its pointer points at
        self.size, self.dtype = sum(array.size for array in arrays), arrays[0].dtype
        self.table = np.array([(array.ctypes.data, array.size) for array in self.arrays], np.int64)
        self.at = self.table.ctypes.data


class Room:
    """What a block of at most `pairs` pairs is worked in: its random words, and what the first stage leaves open."""

    def __init__(self, pairs: int) -> None:
        self.words = np.empty(pairs, "<u8")
        self.mask = np.empty(pairs, np.bool_)
        self.slots = np.empty(pairs, np.int64)
        self.counters = np.empty((pairs, 2), "<u8")
        self.at = [array.ctypes.data for array in (self.words, self.mask, self.slots, self.counters)]


class Rules:
    """What the two stages are told: the scale of the noise, the grid, and what a step of the grid becomes."""

    def __init__(self, scale: float, spacing: float, step: float) -> None:
        limits = float(single_limit(scale)), 0.5 - scale * DOUBLE_TOLERANCE
        logs = [(-high, -low) for low, high in (SINGLE_LOGS, DOUBLE_LOGS)]
        self.table = np.array([(scale, spacing, step, limits[i], *logs[i]) for i in range(2)])
        self.first = self.table.ctypes.data
        self.second = self.first + self.table.strides[0]


class Kernels:
    """The functions of the library, with arrays for pointers."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._sums, self._again, self._squares, self._patches = {}, {}, {}, {}
        for dtype, suffix in _SUFFIX.items():
            sums = self._sums[dtype] = library[f"rounded_sum_{suffix}"]
            sums.argtypes = (c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_uint64, *[c_void_p] * 3)
            again = self._again[dtype] = library[f"rounded_sum_{suffix}_again"]
            again.argtypes = (c_void_p, c_int64, *[c_void_p] * 4, c_int64)
            sums.restype = again.restype = c_int64
            squares = self._squares[dtype] = library[f"squares_{suffix}"]
            squares.argtypes, squares.restype = [c_void_p] + [c_int64] * 3 + [c_double, c_void_p], None
            patches = self._patches[dtype] = library[f"patches_{suffix}"]
            patches.argtypes, patches.restype = [c_void_p, c_void_p, c_int64, c_void_p], None
        self._largest = library["largest_f32"]
        self._largest.argtypes, self._largest.restype = [c_void_p, c_int64], c_int32

    def rounded_sum(self, parts: Parts, start: int, out: Array, rules: Rules, room: Room, address: int) -> int:
        """out ← step · round(values/spacing + scale · Z), for len(out) values from `start` on among the parts.

        The digits are in `room.words`: ⌈n/2⌉ of 32 for U, then as many for V. Returns how many pairs of values are
        open, and so stay as they were: `room.slots` has their numbers, `room.counters` their addresses (`address` is
        that of the first pair). The last pair of an odd number of values is always open. `out` may be the values.
        """
        words, mask, slots, counters = room.at
        count: int = self._sums[out.dtype](
            parts.at, start, out.ctypes.data, len(out), words, rules.first, address, mask, slots, counters
        )
        return count

    def rounded_again(self, out: Array, further: bytes, rules: Rules, room: Room, count: int) -> int:
        """The same for the open pairs, with 32 further digits of U and of V at the beginning of each 16 bytes.

        Returns how many are open even now: `room.slots` then has their numbers among the `count` that were given.
        """
        words, _, slots, _ = room.at
        left: int = self._again[out.dtype](out.ctypes.data, len(out), words, further, rules.second, slots, count)
        return left

    def squares(self, rows: Array, extra: float) -> Array | None:
        """(n,) sums of squares of the rows plus `extra`; None where the memory is not of a form that it knows."""
        if rows.dtype not in _SUFFIX or rows.strides[1] != rows.itemsize or rows.strides[0] % rows.itemsize:
            return None
        n, columns = rows.shape
        out = np.empty(n, rows.dtype)
        stride = rows.strides[0] // rows.itemsize
        self._squares[rows.dtype](rows.ctypes.data, n, columns, stride, extra, out.ctypes.data)
        return out

    def largest(self, parts: Parts) -> float:
        """The largest magnitude among float32 values: NaN if there is one, 0 if there is none."""
        return float(np.int32(self._largest(parts.at, len(parts.arrays))).view(np.float32))

    def patches(self, images: Array, kernel: Pair, stride: Pair, dilation: Pair, out: Array) -> bool:
        """(n, C, H, W) → (n, places, C·kernel), what lies under the kernel at each of its places, into `out`.

        False where the memory is not of a form that it knows, or of another size: nothing is written.
        """
        if images.dtype not in _SUFFIX or out.dtype != images.dtype:
            return False
        n, channels, *size = images.shape
        places = [(i - d * (k - 1) - 1) // t + 1 for i, k, t, d in zip(size, kernel, stride, dilation, strict=True)]
        fits = min(places) > 0 and out.size == n * places[0] * places[1] * channels * kernel[0] * kernel[1]
        if not (fits and images.flags.c_contiguous and out.flags.c_contiguous):
            return False
        shape = np.array([channels, *size, *kernel, *stride, *dilation, *places], np.int64)
        self._patches[images.dtype](images.ctypes.data, out.ctypes.data, n, shape.ctypes.data)
        return True


@functools.cache
def compiled() -> Kernels | None:
    """The library, or None."""
    spec = importlib.util.find_spec("sordino._kernels")
    if spec is None or spec.origin is None:
        return None
    try:
        found = Kernels(spec.origin)
    except (OSError, AttributeError):
        return None
    return found if agrees(found) else None


def agrees(kernels: Kernels, pairs: int = 4096) -> bool:
    """Does it decide as numpy does, and nearly as often? The other loops are tried as well."""
    # multiples of the golden ratio fill the range evenly; numpy.random would take two megabytes for this alone
    spread = (np.arange(6 * pairs, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)).astype(np.uint32)
    digits, further = spread[: 2 * pairs].reshape(2, -1), spread[4 * pairs :].reshape(2, -1)
    digits[0, :2] = 0, (1 << 32) - 1  # never to be decided
    offset = (spread[2 * pairs : 4 * pairs] * 2.0**-32 - 0.5).astype(np.float32)
    rows = offset.reshape(64, -1)
    squares, most = kernels.squares(rows, 0.0), kernels.largest(Parts([offset]))
    return bool(
        _decides(kernels, digits, further, offset)
        and squares is not None
        and np.allclose(squares, np.vecdot(rows, rows), rtol=1e-5)
        and most == np.abs(offset).max()
    )


def _decides(kernels: Kernels, digits: Array, further: Array, offset: Array) -> bool:
    """Both stages on the same digits, by the loops and by numpy."""
    pairs, scale = digits.shape[1], 100.0
    work, room, rules = Pairs(pairs, offset.dtype), Room(pairs), Rules(scale, 1.0, 1.0)
    work.digits[...], room.words.view("<u4")[:] = digits, digits.reshape(-1)
    values = np.empty_like(offset)
    count = kernels.rounded_sum(Parts([offset]), 0, values, rules, room, 7)
    open_ = np.zeros(pairs, np.bool_)
    open_[room.slots[:count]] = True
    with np.errstate(divide="ignore", invalid="ignore"):  # U = 0
        slots = work.single(offset, scale)
        decided, _ = double(*extended(digits, further), offset.reshape(2, -1).astype(np.float64), scale)
    same = values == work.rounded
    same[np.concatenate([slots, slots + pairs])] = True
    same[np.tile(open_, 2)] = True
    if not (same.all() and open_[:2].all() and 0 < count < 0.02 * pairs):
        return False
    places, words = room.slots[:count].copy(), np.zeros((count, 4), "<u4")
    words[:, :2] = further[:, places].T
    left = kernels.rounded_again(values, words.tobytes(), rules, room, count)
    still = np.zeros(count, np.bool_)
    still[room.slots[:left]] = True
    settled = values.reshape(2, -1)[:, places] == decided[:, places]
    return bool(settled[:, ~still].all() and left < max(3, count // 8) and np.isin(places[:2], (0, 1)).all())
