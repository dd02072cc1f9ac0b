"""Many short convolutions that are added to one vector, each at its place."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from sordino.native.kernels import Kernels, compiled

Vector = NDArray[np.float64]


def add_convolutions(
    values: Vector, weights: Vector, factors: Vector, groups: NDArray[np.int64], ratio: int, shift: int, out: Vector
) -> None:
    """out[place + ratio·p] += factors[p] · Σ_k weights[k]·values[p + shift − k], for start ≤ p < stop, first ≤ k < end.

    Args:
        groups: rows (start, stop, first, end, place), with p and k counted from 0. A row with start ≥ stop or
            first ≥ end adds nothing.

    With the library this takes a third of numpy's time; neither rounds a product or a sum more than once. A library
    that adds small whole numbers wrongly is not used: ε would be wrong, too.

    Raises ValueError if a group reaches beyond a vector; nothing has been added then.
    """
    groups = groups[(groups[:, 0] < groups[:, 1]) & (groups[:, 2] < groups[:, 3])]
    if not len(groups):
        return
    start, stop, first, end, place = groups.T
    limits = (
        (start, stop, len(factors)),
        (first, end, len(weights)),
        (start + shift - end + 1, stop + shift - first, len(values)),
        (place + ratio * start, place + ratio * (stop - 1) + 1, len(out)),
    )
    if any(int(low.min()) < 0 or int(high.max()) > size for low, high, size in limits):
        raise ValueError("a group reaches beyond its vectors")
    library = compiled()
    vectors = [np.ascontiguousarray(v, np.float64) for v in (values, weights, factors)]
    if library is not None and out.dtype == np.float64 and out.flags.c_contiguous and _adds_up(library):
        _by_library(library, vectors, groups, ratio, shift, out)
    else:
        _by_numpy(vectors, groups, ratio, shift, out)


def _by_library(
    library: Kernels, vectors: list[Vector], groups: NDArray[np.int64], ratio: int, shift: int, out: Vector
) -> None:
    table = np.ascontiguousarray(groups, np.int64)
    sizes = np.array([len(table), table[:, 1].max(), ratio, shift], np.int64)
    library.grouped(*(v.ctypes.data for v in (*vectors, table, sizes, out)))


def _by_numpy(vectors: list[Vector], groups: NDArray[np.int64], ratio: int, shift: int, out: Vector) -> None:
    values, weights, factors = vectors
    for begin, last, k, ending, to in groups.tolist():
        sums = np.convolve(values[begin + shift - ending + 1 : last + shift - k], weights[k:ending], "valid")
        out[to + ratio * begin : to + ratio * (last - 1) + 1 : ratio] += factors[begin:last] * sums


@functools.cache
def _adds_up(library: Kernels) -> bool:
    """Is the library exact on small whole numbers, on full lines of points and on the rest?"""
    points, width = 71, 9
    sizes = (7, points + width - 1), (3, width), (5, points)
    vectors = [step * np.arange(size, dtype=np.float64) % 11 for step, size in sizes]
    groups = np.array([[0, points, 0, width, 1], [3, 40, 2, 5, 0]])
    for ratio in (1, 2):
        found, wanted = np.zeros((2, ratio * points + 1))
        _by_library(library, vectors, groups, ratio, width - 1, found)
        _by_numpy(vectors, groups, ratio, width - 1, wanted)
        if not np.array_equal(found, wanted):
            return False
    return True
