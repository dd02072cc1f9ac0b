"""Four loops in C, where a compiler was there at the installation: faster, and no other results.

| loop          | stands in for                          | its results                                              |
|---------------|----------------------------------------|----------------------------------------------------------|
| `rounded_sum` | `boxmuller.Pairs.single`, pass by pass | the same integers; both leave open what they can't decide |
| `squares`     | numpy's `vecdot` of rows               | the same up to rounding, which BLAS does not fix either   |
| `copied`      | a copy, a minimum and a maximum        | the same                                                  |
| `patches`     | a contiguous copy of strided windows   | the same                                                  |

`compiled()` is None without the library, and also if the library, tried on a block of digits, decides otherwise than
numpy does (a stale build, a broken compiler): then numpy does the work. So whether it is there can't be told from the
noise, only from the clock.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from ctypes import c_double, c_int32, c_int64, c_void_p
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.boxmuller import SINGLE_LOGS, Pairs, single_limit

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_SUFFIX = {np.dtype(np.float32): "f32", np.dtype(np.float64): "f64"}


class Kernels:
    """The functions of the library, with arrays for pointers."""

    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._sums, self._squares, self._patches = {}, {}, {}
        for dtype, suffix in _SUFFIX.items():
            sums = self._sums[dtype] = library[f"rounded_sum_{suffix}"]
            sums.argtypes, sums.restype = [c_void_p] * 4 + [c_int64] + [c_double] * 5 + [c_void_p], None
            squares = self._squares[dtype] = library[f"squares_{suffix}"]
            squares.argtypes, squares.restype = [c_void_p] + [c_int64] * 3 + [c_double, c_void_p], None
            patches = self._patches[dtype] = library[f"patches_{suffix}"]
            patches.argtypes, patches.restype = [c_void_p, c_void_p, c_int64, c_void_p], None
        self._copy = library["copy_f32"]
        self._copy.argtypes, self._copy.restype = [c_void_p, c_void_p, c_int64], c_int32

    def rounded_sum(
        self, values: Array, digits: npt.NDArray[np.uint32], scale: float, spacing: float, mask: Array
    ) -> npt.NDArray[np.intp]:
        """values ← spacing · round(values/spacing + scale · Z), but for the pairs returned, which stay as they were.

        Takes n values (float32 or float64), two rows of ⌈n/2⌉ digits, a power of two for the spacing, and room for one
        truth value for each pair. The last pair of an odd number of values is always left open.
        """
        pairs, at, row = digits.shape[1], values.ctypes.data, digits.ctypes.data
        whole, (low, high), limit = len(values) - pairs, SINGLE_LOGS, float(single_limit(scale))
        mask[whole:] = True
        halves = at, at + pairs * values.itemsize, row, row + 4 * pairs
        self._sums[values.dtype](*halves, whole, scale, spacing, limit, -low, -high, mask.ctypes.data)
        return mask.nonzero()[0]

    def squares(self, rows: Array, extra: float) -> Array | None:
        """(n,) sums of squares of the rows plus `extra`; None where the memory is not of a form that it knows."""
        if rows.dtype not in _SUFFIX or rows.strides[1] != rows.itemsize or rows.strides[0] % rows.itemsize:
            return None
        n, columns = rows.shape
        out = np.empty(n, rows.dtype)
        stride = rows.strides[0] // rows.itemsize
        self._squares[rows.dtype](rows.ctypes.data, n, columns, stride, extra, out.ctypes.data)
        return out

    def copied(self, parts: list[Array]) -> tuple[Array, float]:
        """The parts (float32) one after the other, and their largest magnitude: NaN if there is one."""
        out = np.empty(sum(len(part) for part in parts), np.float32)
        at, most = out.ctypes.data, 0
        for part in map(np.ascontiguousarray, parts):  # a column, or one number stretched, is not what it points at
            most = max(most, self._copy(part.ctypes.data, at, len(part)))
            at += part.nbytes
        return out, float(np.int32(most).view(np.float32))

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
    """Does it decide as numpy does, and nearly as often? Squares and copies are tried as well."""
    scale, work = 100.0, Pairs(pairs, np.dtype(np.float32))
    # multiples of the golden ratio fill the range evenly; numpy.random would take two megabytes for this alone
    spread = (np.arange(4 * pairs, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)).astype(np.uint32)
    work.digits[...] = spread[: 2 * pairs].reshape(2, -1)
    work.digits[0, :2] = 0, (1 << 32) - 1  # never to be decided
    offset = (spread[2 * pairs :] * 2.0**-32 - 0.5).astype(np.float32)
    values, open_ = offset.copy(), np.zeros(pairs, np.bool_)
    kernels.rounded_sum(values, work.digits, scale, 1.0, open_)
    with np.errstate(divide="ignore", invalid="ignore"):  # U = 0
        slots = work.single(offset, scale)
    same = values == work.rounded
    same[np.concatenate([slots, slots + pairs])] = True
    same[np.tile(open_, 2)] = True
    rows = offset.reshape(64, -1)
    squares, (copy, most) = kernels.squares(rows, 0.0), kernels.copied([offset])
    return bool(
        same.all()
        and open_[:2].all()
        and open_.mean() < 0.02
        and squares is not None
        and np.allclose(squares, np.vecdot(rows, rows), rtol=1e-5)
        and np.array_equal(copy, offset)
        and most == np.abs(offset).max()
    )
