"""Memory that the compiled loops read and write: vectors in several parts, the buffers and parameters of noise."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sordino.native.boxmuller import DOUBLE_LOGS, DOUBLE_TOLERANCE, SINGLE_LOGS, single_limit

Array = npt.NDArray[Any]
Pair = tuple[int, int]
_OPEN = np.dtype([("values", np.int64, 2), ("results", np.int64, 2), ("u", np.uint32), ("v", np.uint32)])


class Parts:
    """Vectors of one dtype that are treated as one; their memory is read in place.

    places: (address, number of elements) of each. arrays: creates them as arrays on request; this function, and so the
    memory, lives as long as this object.
    """

    def __init__(
        self, places: Sequence[tuple[int, int]], dtype: np.dtype[Any], arrays: Callable[[], list[Array]]
    ) -> None:
        self._table = array("q", [number for place in places for number in place])
        self._arrays = arrays
        self.at, self.count, self.dtype = self._table.buffer_info()[0], len(places), dtype
        self.size = sum(n for _, n in places)

    @classmethod
    def of(cls, vectors: Sequence[Array]) -> Parts:
        if any(vector.dtype != vectors[0].dtype for vector in vectors):
            raise TypeError("parts have one dtype")
        flat = [np.ascontiguousarray(vector) for vector in vectors]  # a column is not contiguous in memory
        return cls([(v.ctypes.data, v.size) for v in flat], flat[0].dtype, lambda: flat)

    def joined(self, out: Array | None = None) -> Array:
        """The values as one vector."""
        return np.concatenate(self._arrays(), out=out)

    def store(self, flat: Array) -> None:
        """Overwrite the values with such a vector."""
        start = 0
        for array_ in self._arrays():
            array_[:] = flat[start : start + array_.size]
            start += array_.size

    def arrays(self) -> list[Array]:
        return self._arrays()


def kinds_of(values: Parts, results: Parts) -> Pair:
    """The sizes in bytes of a value and of a result."""
    return values.dtype.itemsize, results.dtype.itemsize


class Room:
    """Buffers for blocks of values: the random words of one block, and the pairs that the first stage of several left
    open.

    words: the digits of U, 32 for each pair, then those of V. ready: the number of pairs that may be open before a
    block.
    """

    def __init__(self, values: int) -> None:
        self.ready = pairs = (values + 1) // 2
        self._memory = np.empty(137 * pairs, np.uint8)  # words, then for twice as many pairs the rest, and a mask
        self.words_at = at = self._memory.ctypes.data
        self.open_at, self.counters_at, self.left_at = at + 8 * pairs, at + 88 * pairs, at + 120 * pairs
        self.mask_at = at + 136 * pairs

    def words(self, pairs: int) -> npt.NDArray[np.uint64]:
        return self._memory[: 8 * pairs].view("<u8")

    def open(self, count: int) -> Array:
        """The open pairs: the addresses of their values and of their results, and their digits."""
        return self._memory[8 * self.ready :][: _OPEN.itemsize * count].view(_OPEN)

    def counters(self, count: int) -> bytes:
        """The positions of their digits in the stream, as blocks of 16 bytes."""
        return self._memory[88 * self.ready :][: 16 * count].tobytes()

    def left(self, count: int) -> list[int]:
        """The indices of those that the second stage left open."""
        numbers: list[int] = self._memory[120 * self.ready :][: 8 * count].view(np.int64).tolist()
        return numbers


class Rules:
    """Parameters of the two stages: the scale of the noise, the grid, and the value of a grid step in the result."""

    def __init__(self, scale: float, spacing: float, step: float) -> None:
        self.scale, self.spacing, self.step = scale, spacing, step
        first = float(single_limit(scale)), -SINGLE_LOGS[1], -SINGLE_LOGS[0]
        second = 0.5 - scale * DOUBLE_TOLERANCE, -DOUBLE_LOGS[1], -DOUBLE_LOGS[0]
        self._table = array("d", [scale, spacing, step, *first, scale, spacing, step, *second])
        self.first_at = self._table.buffer_info()[0]
        self.second_at = self.first_at + 6 * self._table.itemsize
