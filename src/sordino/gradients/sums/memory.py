"""Blocks, buffers and passes over memory. NumPy is used if it needs less memory or time than torch:

| numpy's           | in place of | why                                                                            |
|-------------------|-------------|--------------------------------------------------------------------------------|
| empty             | torch.empty | huge pages: to fault in torch's 4 KB pages takes as long as the product itself |
| ascontiguousarray | reshape     | short strided runs: 0.15 ms against 0.19 for the patches of 20 × 16 × 13 × 13  |
| sqrt              | torch.sqrt  | the same time, but not the megabytes of code that torch's functions load       |
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.native.kernels import EVERY, Kernels, compiled, readable

BLOCK_BYTES = 8 << 20  # dense per-record gradients are made in blocks of about this size
CACHE_BYTES = 2 << 20  # what stays in a core's cache between a product and its norm

_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}
_TINY = torch.finfo(torch.float64).tiny


_LITTLE = 32 << 20
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's names for them, in malloc.h


@functools.cache
def keep_freed_memory() -> None:
    """Have the process keep the memory that a pass frees for the next one, once, before the first.

    glibc returns freed memory to the system if there is more of it than twice the largest block that was ever freed,
    and the next pass faults it in again, page by page: 8 % of a small CNN's step (docs/benchmarks.md). Up to 512 MB are
    kept, and blocks up to 32 MB are not mapped separately. Without glibc this does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, 32 << 20)
        library.mallopt(_TRIM_THRESHOLD, 512 << 20)


def give_back_freed_memory() -> None:
    """Returns unused memory of the process to the system: called before and after rare operations that need much.

    A small amount is kept: faulting it in again would take a small model as long as several steps.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = _Mallinfo
        if library.mallinfo2().fordblks > _LITTLE:
            library.malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """The struct mallinfo2 of glibc's malloc.h; fordblks: the number of free bytes."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def checksum(t: Tensor) -> int:
    """A hash of a tensor's content: equal for equal values of the same type."""
    if t.dtype in _NUMPY and t.is_cpu and t.is_contiguous() and not t.is_neg():
        return zlib.crc32(t.detach().numpy().data)
    flat = t.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
    flat = flat if flat.is_contiguous() and flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def by_record(t: Tensor) -> Tensor:
    """Views a gradient as (records, coordinates), also for a parameter without dimensions."""
    return t.reshape(t.shape[0], -1)


def blocks(records: int, coordinates: int, itemsize: int = 4, size: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """Ranges of nearly equal numbers of records whose dense gradients take at most ``size`` bytes (or one record
    each)."""
    most = max(1, size // max(1, coordinates * itemsize))
    step = max(1, -(-records // max(1, -(-records // most))))
    return [(lo, min(lo + step, records)) for lo in range(0, records, step)]


def reads_memory(positions: Tensor, outputs: int) -> bool:
    """Is the time of a linear map from these positions to so few outputs dominated by reading them from memory?"""
    return outputs <= 32 and positions.numel() * positions.element_size() > 4 * CACHE_BYTES


def squares(t: Tensor, times: Tensor | None = None) -> Tensor:
    """(records, coordinates) → (records,) squared l2 norms in double precision; not finite where a record is not.

    times: further factors in double precision, one for each record (‖l ⊗ r‖ = ‖l‖·‖r‖).
    Accurate to 2⁻¹⁷ (relative) for numbers of any size in single precision, to 2⁻⁴⁰ in double precision, where a square
    that underflows counts as the smallest normal number (docs/guarantees/noise.md, section 6).
    """
    kernels = compiled() if t.dtype in _NUMPY and t.stride(1) == 1 and readable(t) else None
    times = times if times is None or times.dtype == torch.float64 else times.double()
    if kernels is None or not (times is None or (times.is_contiguous() and readable(times))):
        least = t.shape[1] * _TINY if t.dtype == torch.float64 else 0.0
        parts = [_dots(t[lo:hi].double()) for lo, hi in blocks(t.shape[0], t.shape[1], 8)]
        total = torch.cat(parts) + least if parts else torch.zeros(0, dtype=torch.float64, device=t.device)
        return total if times is None else total * times
    out = torch.empty(t.shape[0], dtype=torch.float64)
    factors = None if times is None else times.data_ptr()
    kernels.squares[t.itemsize](t.data_ptr(), *t.shape, t.stride(0), factors, out.data_ptr())
    return out


def _dots(t: Tensor) -> Tensor:
    return (t * t).sum(1)


def too_long(norm2: Tensor) -> bool:
    """Is there a row with norm above 2⁶⁰, given all squares? For such a row, 2⁻¹²⁶ times its length is not
    negligible."""
    values = norm2 if norm2.is_cpu else norm2.cpu()
    return bool((values.numpy() > 2.0**120).any())  # False for NaN


def scaled(rows: Tensor, weight: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """(records, d) the rows, each times its weight, and (d,) their sum in double precision.

    in_place: the rows are not needed afterwards. A row of weight zero counts as zero, whatever its values.
    """
    weight = weight if weight.dtype == torch.float64 else weight.double()
    kernels = compiled() if rows.dtype in _NUMPY and readable(rows) and readable(weight) else None
    if kernels is None or rows.stride(1) != 1 or weight.stride(0) != 1:
        product = (rows.double() * weight[:, None]).masked_fill_(weight[:, None] == 0, 0).to(rows.dtype)
        return product, product.sum(0, dtype=torch.float64)
    (n, d), out = rows.shape, rows if in_place and rows.is_contiguous() else rows.new_empty(rows.shape)
    total, pointers = weight.new_zeros(d), (rows.data_ptr(), weight.data_ptr(), out.data_ptr())
    kernels.scaled[rows.itemsize](pointers[0], n, d, rows.stride(0), *pointers[1:], total.data_ptr())
    return out, total


def gather(total: Tensor, rows: Tensor, weight: Tensor) -> None:
    """total += Σ_i weight_i · rows_i in double precision, for total (d,), contiguous; rows of weight zero are
    skipped."""
    weight = weight if weight.dtype == torch.float64 else weight.double()
    kernels = compiled() if rows.dtype in _NUMPY and readable(rows) and readable(weight) else None
    if kernels is not None and rows.stride(1) == 1 and weight.stride(0) == 1:
        address = rows.data_ptr(), *rows.shape, rows.stride(0), weight.data_ptr()
        kernels.gathered[rows.itemsize](*address, total.data_ptr())
        return
    for lo, hi in blocks(rows.shape[0], rows.shape[1], 8):
        kept = rows[lo:hi].double().masked_fill_(weight[lo:hi, None] == 0, 0)
        total.addmv_(kept.mT, weight[lo:hi])


def scatter(total: Tensor, rows: Tensor, place: Tensor, owner: Tensor, weight: Tensor) -> None:
    """total[place_j] += weight[owner_j] · rows_j in double precision, for total (size, d), contiguous; rows of weight
    zero are skipped."""
    kernels = compiled() if rows.dtype in _NUMPY and all(map(readable, (rows, place, owner, weight))) else None
    if kernels is not None and all(t.is_contiguous() for t in (rows, place, owner, weight)):
        places = place.data_ptr(), owner.data_ptr(), weight.data_ptr(), total.data_ptr()
        kernels.scattered[rows.itemsize](rows.data_ptr(), *rows.shape, *places)
        return
    for lo, hi in blocks(rows.shape[0], rows.shape[1], 8):
        factor = weight[owner[lo:hi], None]
        total.index_add_(0, place[lo:hi], (rows[lo:hi].double() * factor).masked_fill_(factor == 0, 0))


def scatter_narrow(total: Tensor, rows: Tensor, place: Tensor, owner: Tensor, weight: Tensor) -> bool:
    """total ← the sum of `scatter` on zeros, rounded once to single precision; False without a suitable compiled
    loop."""
    given = rows, place, owner, weight
    kernels = compiled() if rows.dtype == total.dtype == torch.float32 and all(map(readable, given)) else None
    if kernels is None or not all(t.is_contiguous() for t in given) or not len(rows):
        return False
    kernels.placed(rows.data_ptr(), rows.shape, place.data_ptr(), owner.data_ptr(), weight.data_ptr(), total)
    return True


def merge(index: Tensor, rows: Tensor, size: int, skip: int | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """Sums the rows of each record at the same place: (values, places, owners), from index (m, S) and rows (m, S, d) at
    these places of a table of ``size`` rows, without those at ``skip``. None without a suitable compiled loop."""
    kernels = compiled() if rows.dtype == torch.float32 and readable(rows) and readable(index) else None
    if kernels is None or not (rows.is_contiguous() and index.is_contiguous()) or index.dtype != torch.int64:
        return None
    values, places, owners = torch.empty(rows.shape).flatten(0, 1), *torch.empty(2, index.numel(), dtype=torch.int64)
    found = values.data_ptr(), places.data_ptr(), owners.data_ptr()
    given = rows.data_ptr(), index.data_ptr(), rows.shape, size, -1 if skip is None else skip
    count = kernels.merged(*given, found)
    return None if count < 0 else (values[:count], places[:count], owners[:count])


DEEPEST = 4096  # rows of one product in double precision


def cross(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += Σ_i left_i ⊗ right_i in double precision, for total (p, q), contiguous, left (n, p), right (n, q)."""
    n, p = left.shape
    step = max(64, min(DEEPEST, CACHE_BYTES // (8 * (p + right.shape[1]))))
    wide = [_InDouble(t, min(n, step)) for t in (left, right)]
    for lo in range(0, n, step):
        total.addmm_(wide[0].rows(lo, lo + step).mT, wide[1].rows(lo, lo + step))


class _InDouble:
    """Rows of a tensor in double precision, in one buffer. With a new copy for each block of rows the heap grew to the
    size of the batch in double precision in some processes, because freed blocks were not used again."""

    def __init__(self, t: Tensor, most: int) -> None:
        self.t = t
        self.room = None if t.dtype == torch.float64 else t.new_empty((most, t.shape[1]), dtype=torch.float64)

    def rows(self, lo: int, hi: int) -> Tensor:
        part = self.t[lo:hi]
        return part if self.room is None else self.room[: len(part)].copy_(part)


def blocked(
    total: Tensor, left: Tensor, right: Tensor, bounds: npt.NDArray[np.int64], weight: Tensor, each: int = EVERY
) -> None:
    """total += Σ_b weight_b · Σ_k left_k ⊗ right_k over the rows from bounds_b to bounds_(b+1).

    The sum over a block is computed in the precision of the rows, the sum over blocks in double precision; blocks of
    weight zero are skipped. total (p, q), contiguous, left (n, p), right (n, q). each: this many rows of a block
    belong to one record and are summed first.
    """
    if (kernels := _for_blocks(left, right, weight)) is not None:
        places = (left.data_ptr(), left.stride(0)), (right.data_ptr(), right.stride(0))
        kernels.blocked(*places, (total.shape[0], total.shape[1]), bounds, weight.numpy(), total.data_ptr(), each)
        return
    for b, (lo, hi) in enumerate(itertools.pairwise(bounds.tolist())):
        for k in range(lo, hi, each) if float(weight[b]) != 0 else ():
            total.add_(left[k : min(k + each, hi)].mT @ right[k : min(k + each, hi)], alpha=float(weight[b]))


def blocked_narrow(
    total: Tensor, left: Tensor, right: Tensor, bounds: npt.NDArray[np.int64], weight: Tensor, each: int
) -> bool:
    """total ← the sum of `blocked` on zeros, rounded once to single precision; False without the compiled loop. For
    more than FEW_OUTPUTS columns of ``left``."""
    kernels = _for_blocks(left, right, weight)
    if kernels is None or total.dtype != torch.float32 or not readable(total):
        return False
    places = (left.data_ptr(), left.stride(0)), (right.data_ptr(), right.stride(0))
    shape = total.shape[0], total.shape[1]
    kernels.blocked(*places, shape, bounds, weight.numpy(), total.data_ptr(), each, narrow=True)
    return True


def _for_blocks(left: Tensor, right: Tensor, weight: Tensor) -> Kernels | None:
    """The compiled loops if they can read these."""
    if not left.dtype == right.dtype == torch.float32 or not all(map(readable, (left, right, weight))):
        return None
    return compiled() if left.stride(1) == right.stride(1) == 1 else None


def in_numpy(t: Tensor) -> npt.NDArray[np.float64]:
    """In double precision. torch's functions on a few numbers load megabytes of code into the first step."""
    found: npt.NDArray[np.float64] = t.detach().double().cpu().numpy()
    return found


def lengths(terms: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """√ of the sum of (records,) vectors, and whether all of these are finite."""
    if not terms[0].is_cpu:
        norms = torch.stack(list(terms)).sum(0).sqrt()
        return norms, bool(torch.isfinite(norms).all())
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.sqrt(functools.reduce(np.add, [t.numpy() for t in terms]))
    return torch.from_numpy(found), math.isfinite(found.sum())  # a sum of finite roots does not overflow


def compact(t: Tensor) -> Tensor:
    """The same values, contiguous."""
    if t.device.type != "cpu" or t.dtype not in _NUMPY:
        return t.contiguous()
    return torch.from_numpy(np.ascontiguousarray(t.detach().numpy()))


def address(t: Tensor) -> int | None:
    """Where its memory begins; None or 0 for tensors without accessible memory (within torch.func, or sparse)."""
    try:
        return t.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None
