"""Blocks, buffers and passes over memory, numpy's where they take less of it, or less time, than torch's.

| numpy's           | in place of | why                                                                            |
|-------------------|-------------|--------------------------------------------------------------------------------|
| empty             | torch.empty | huge pages: to fault in torch's 4 KB pages takes as long as the product itself |
| ascontiguousarray | reshape     | short strided runs: 0.15 ms against 0.19 for the patches of 20 × 16 × 13 × 13  |
| vecdot, sqrt      | vector_norm | the same time, but not the two megabytes of code that torch's reductions load  |
"""

from __future__ import annotations

import contextlib
import functools
import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.native.kernels import compiled, readable

BLOCK_BYTES = 8 << 20  # dense per-record gradients are made in blocks of about this size
CACHE_BYTES = 2 << 20  # what stays in a core's cache between a product and its norm
_LONGEST_DOT = 8192  # longer ones BLAS would split over threads

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_TINY = {kind: torch.finfo(kind).tiny for kind in _NUMPY}


_LARGEST_KEPT = (32 << 20) - (64 << 10)  # glibc: blocks of 32 MB and more are always mapped, and given back


@functools.cache
def keep_freed_memory() -> None:
    """Have the process keep the memory that a pass frees for the next one, once, before the first.

    glibc returns freed memory to the system when there is more of it than twice the largest block that was ever freed,
    and the next pass faults it in again, page by page: 8 % of a small CNN's step (docs/benchmarks.md). A block that
    is taken and freed, and never touched, raises that limit to 64 MB. Elsewhere than on glibc this does nothing.
    """
    with contextlib.suppress(MemoryError):  # a limit on the address space: then without
        np.empty(_LARGEST_KEPT, np.uint8)


def by_record(t: Tensor) -> Tensor:
    """(records, coordinates), also for a parameter without dimensions."""
    return t.reshape(t.shape[0], -1)


def blocks(records: int, coordinates: int, itemsize: int = 4, size: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """Ranges of nearly equally many records whose dense gradients take at most ``size`` bytes (or one record each)."""
    most = max(1, size // max(1, coordinates * itemsize))
    step = max(1, -(-records // max(1, -(-records // most))))
    return [(lo, min(lo + step, records)) for lo in range(0, records, step)]


def reads_memory(positions: Tensor, outputs: int) -> bool:
    """Is a linear map of these positions to so few outputs bound by reading them from memory?"""
    return outputs <= 32 and positions.numel() * positions.element_size() > 4 * CACHE_BYTES


def squares(t: Tensor, times: Tensor | None = None) -> Tensor:
    """(records, coordinates) → (records,) squared l2 norms; not finite where a record is not, or its square is not.

    times: other numbers, one for each record, to multiply them with (‖l ⊗ r‖ = ‖l‖·‖r‖).
    Never too small for underflow: a square below the smallest normal number may count as zero, so one such number is
    added for each coordinate. A tiny vector, times a huge one or divided by its norm, must not outgrow its bound.
    """
    if times is not None and not (times.dtype == t.dtype and times.is_contiguous() and readable(times)):
        return squares(t) * times
    if t.dtype not in _NUMPY or not readable(t):
        norms: Tensor = torch.linalg.vector_norm(t, dim=1)
        norm2 = norms.square() + t.shape[1] * torch.finfo(t.dtype).tiny
        return norm2 if times is None else norm2 * times
    least, kernels = t.shape[1] * _TINY[t.dtype], compiled()
    if kernels is not None and t.stride(1) == 1:
        out = t.new_empty(t.shape[0])
        factors = None if times is None else times.data_ptr()
        kernels.squares[t.itemsize](t.data_ptr(), *t.shape, t.stride(0), least, factors, out.data_ptr())
        return out
    rows = t.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.vecdot(rows[:, :_LONGEST_DOT], rows[:, :_LONGEST_DOT])
        for start in range(_LONGEST_DOT, rows.shape[1], _LONGEST_DOT):
            part = rows[:, start : start + _LONGEST_DOT]
            total += np.vecdot(part, part)
        total += rows.dtype.type(least)
    return torch.from_numpy(total) if times is None else torch.from_numpy(total) * times


def scaled(rows: Tensor, weight: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """(records, d) the rows, each times its weight, and (d,) their sum. in_place: the rows are not needed any more."""
    kernels = compiled() if rows.dtype in _NUMPY and readable(rows) and readable(weight) else None
    if kernels is None or rows.stride(1) != 1 or weight.stride(0) != 1:
        return rows * weight[:, None], weight @ rows
    (n, d), out = rows.shape, rows if in_place and rows.is_contiguous() else rows.new_empty(rows.shape)
    total, pointers = rows.new_empty(d), (rows.data_ptr(), weight.data_ptr(), out.data_ptr())
    kernels.scaled[rows.itemsize](pointers[0], n, d, rows.stride(0), *pointers[1:], total.data_ptr())
    return out, total


def lengths(terms: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """√ of the sum of (records,) vectors, and whether all of these are finite."""
    first = terms[0]
    kernels = compiled() if first.device.type == "cpu" and first.dtype in _NUMPY else None
    if kernels is None or any(t.dtype != first.dtype or t.shape != first.shape or t.stride(0) != 1 for t in terms):
        on_cpu = first.device.type == "cpu"
        norms = torch.from_numpy(_roots(terms)) if on_cpu else torch.stack(list(terms)).sum(0).sqrt()
        return norms, bool(torch.isfinite(norms).all())
    out, table = first.new_empty(first.shape), array("q", [t.data_ptr() for t in terms])
    finite = kernels.lengths[first.itemsize](table.buffer_info()[0], len(terms), len(first), out.data_ptr())
    return out, bool(finite)


def _roots(terms: Sequence[Tensor]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(np.sqrt(sum(t.numpy() for t in terms)))


def compact(t: Tensor) -> Tensor:
    """The same values, contiguous."""
    if t.device.type != "cpu" or t.dtype not in _NUMPY:
        return t.contiguous()
    return torch.from_numpy(np.ascontiguousarray(t.detach().numpy()))


class Pool:
    """Buffers that one chunk hands to the next, and one sum to the next of the same training: mapped memory need not be
    faulted in again. Whoever holds it holds what the largest chunk so far needed for its products."""

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._lent: list[Tensor] = []
        self._asked: set[tuple[tuple[int, ...], torch.dtype]] = set()

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        key = shape[1:], like.dtype
        self._asked.add(key)
        free, whole = self._free.get(key, []), None
        while free and (whole is None or whole.shape[0] < shape[0]):  # those that are too small are given up
            whole = free.pop()
        if whole is None or whole.shape[0] < shape[0]:
            whole = buffer(shape, like)
        self._lent.append(whole)
        return whole[: shape[0]]

    def free(self, t: Tensor) -> None:
        """One buffer back before the chunk is done, where it came from here."""
        for place, whole in enumerate(self._lent):
            if whole.data_ptr() == t.data_ptr():
                del self._lent[place]
                self._free.setdefault((tuple(whole.shape[1:]), whole.dtype), []).append(whole)
                return

    def give_back(self) -> None:
        """The chunk is done: nothing of it is read any more."""
        for t in self._lent:
            self._free.setdefault((tuple(t.shape[1:]), t.dtype), []).append(t)
        self._lent.clear()

    def trim(self) -> None:
        """The sum is done: what it had no use for is given up (texts of another length, another batch's patches)."""
        self._free = {key: found for key, found in self._free.items() if key in self._asked}
        self._asked.clear()


def buffer(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for a large result, in huge pages where the kernel has them."""
    kind = _NUMPY.get(like.dtype)
    if like.device.type != "cpu" or kind is None or math.prod(shape) < 1 << 20:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, kind))
