"""Blocks, buffers and passes over memory. Where it matters numpy's are taken: they are the same numbers for less time.

| numpy's        | for torch's       | why, on one thread                                                         |
|----------------|-------------------|----------------------------------------------------------------------------|
| np.vecdot      | vector_norm       | a BLAS dot product per row: 0.16 ms against 0.37 for 1000 × 784            |
| np.empty       | torch.empty       | huge pages: torch's 4 KB pages take as long to fault in as the product     |
| ascontiguous   | reshape           | short strided runs: 2.8 ms against 6.1 for the patches of 512 4×4 kernels  |
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

BLOCK_BYTES = 8 << 20  # dense per-record gradients are made in blocks of about this size
CACHE_BYTES = 2 << 20  # what stays in a core's cache between a product and its norm
_LONGEST_DOT = 8192  # longer ones BLAS would split over threads

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}


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


def squares(t: Tensor) -> Tensor:
    """(records, coordinates) → (records,) squared l2 norms; not finite where a record is not, or its square is not."""
    if t.device.type != "cpu" or t.dtype not in _NUMPY:
        norms: Tensor = torch.linalg.vector_norm(t, dim=1)
        return norms.square()
    rows = t.detach().numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        total = np.vecdot(rows[:, :_LONGEST_DOT], rows[:, :_LONGEST_DOT])
        for start in range(_LONGEST_DOT, rows.shape[1], _LONGEST_DOT):
            part = rows[:, start : start + _LONGEST_DOT]
            total += np.vecdot(part, part)
    return torch.from_numpy(total)


def roots(terms: Sequence[Tensor]) -> Tensor:
    """√ of the sum of (records,) vectors."""
    total = functools.reduce(torch.add, terms)
    return torch.from_numpy(np.sqrt(total.numpy())) if total.device.type == "cpu" else total.sqrt()


def all_finite(t: Tensor) -> bool:
    return bool(np.isfinite(t.numpy()).all() if t.device.type == "cpu" else torch.isfinite(t).all())


def compact(t: Tensor) -> Tensor:
    """The same values, contiguous."""
    if t.device.type != "cpu" or t.dtype not in _NUMPY:
        return t.contiguous()
    return torch.from_numpy(np.ascontiguousarray(t.detach().numpy()))


class Pool:
    """Buffers that one chunk hands to the next of the same call: mapped memory need not be faulted in again."""

    def __init__(self) -> None:
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._lent: list[Tensor] = []

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        free = self._free.get((shape[1:], like.dtype), [])
        whole = free.pop() if free and free[-1].shape[0] >= shape[0] else buffer(shape, like)
        self._lent.append(whole)
        return whole[: shape[0]]

    def give_back(self) -> None:
        """The chunk is done: nothing of it is read any more."""
        for t in self._lent:
            self._free.setdefault((tuple(t.shape[1:]), t.dtype), []).append(t)
        self._lent.clear()


def buffer(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for a large result, in huge pages where the kernel has them."""
    kind = _NUMPY.get(like.dtype)
    if like.device.type != "cpu" or kind is None or math.prod(shape) < 1 << 20:
        return like.new_empty(shape)
    return torch.from_numpy(np.empty(shape, kind))
