"""Which row does each position of an activation belong to?

Usually rows are dimension 0. But nn.LSTM and nn.MultiheadAttention come time-first, many models flatten
(B, S, d) to (B·S, d), and nn.MultiheadAttention flattens (S, B, d) to (S·B, d). A shape alone can't tell these
apart, so a position's row is *measured* when the shape leaves a doubt: the gradient of row 0's loss is zero at
every position of another row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sordino.gradients.memory import Pool


def split_dim(t: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return t.reshape(*t.shape[:dim], *sizes, *t.shape[dim + 1 :])


def full(t: Tensor) -> Tensor:
    """At least single precision."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


@dataclass(frozen=True)
class Axis:
    """Rows along one dimension. block = 1: the dimension is the rows. block = k: the dimension is rows × k,
    with the row index outside (``major``) or inside (not ``major``)."""

    dim: int
    block: int = 1
    major: bool = True


@dataclass(frozen=True)
class Whole:
    """Every position belongs to the only row."""


@dataclass(frozen=True)
class Positions:
    """Position j of the flattened leading dimensions belongs to row ``row[j]`` (−1: to none, its gradient is zero)."""

    row: Tensor


Layout = Axis | Whole | Positions


@functools.lru_cache(1 << 10)
def by_shape(shape: tuple[int, ...], lead: tuple[int, ...], rows: int, stack: int = 1) -> Layout | None:
    """The layout if the shape leaves no doubt, else None. ``lead``: the dimensions that may hold rows. ``stack``: the
    model makes so many of each row, the row index inside (companions.py)."""
    if rows == 1:
        return Whole()
    hits = [Axis(d) for d in lead if shape[d] == rows]
    if stack > 1:
        hits += [Axis(d, stack, major=False) for d in lead if shape[d] == rows * stack]
    return hits[0] if len(hits) == 1 else None


def merged_axis(before: Sequence[int], after: Sequence[int], rows: int) -> Layout | None:
    """Where the rows are after a reshape that made one dimension of the leading ones; None if that is not certain."""
    count, size = 0, 1
    while count < len(before) and size < after[0]:
        size *= before[count]
        count += 1
    hits = [d for d in range(len(before)) if before[d] == rows]
    if size != after[0] or count < 2 or len(hits) != 1 or hits[0] not in (0, count - 1):
        return None
    return Axis(0, size // rows, major=hits[0] == 0)


def probed(masks: Sequence[Tensor], lead: Sequence[int]) -> list[Layout]:
    """Every layout that explains the masks: masks[r] is true, over the leading dimensions, where the gradient of row
    r's loss is not zero, in a pass over len(masks) rows."""
    rows = len(masks)
    if rows == 0 or not any(bool(m.any()) for m in masks):
        return []
    options: list[Layout] = []
    for dim in lead:
        size = masks[0].shape[dim]
        if size % rows:
            continue
        block = size // rows
        for major in (True, False) if block > 1 else (True,):
            split = (rows, block) if major else (block, rows)
            row_dim = dim if major else dim + 1
            grouped = [split_dim(m, dim, split).movedim(row_dim, 0) for m in masks]
            if not any(bool(g[other].any()) for r, g in enumerate(grouped) for other in range(rows) if other != r):
                options.append(Axis(dim, block, major))
    return options


def fits(layout: Layout | None, shape: Sequence[int], rows: int, small: int, small_shape: Sequence[int]) -> bool:
    """Is the layout that was measured on ``small`` rows possible for these rows and this shape?"""
    if not isinstance(layout, Axis) or len(shape) != len(small_shape):
        return False
    return shape[layout.dim] == rows * layout.block and small_shape[layout.dim] == small * layout.block


@dataclass(frozen=True)
class Frame:
    """Folds activations into (records, S, features): S runs over all positions of all rows of a record."""

    layout: Layout
    rows: int
    records: int
    slots: Tensor | None  # (records, k) as in rows.Chunk
    ragged: bool  # some slots are empty
    pool: Pool = field(default_factory=Pool)  # memory for what a rule has to hold
    once: bool = False  # weighted sums are asked for once, all with the same weights (single.Scaled)

    @functools.cached_property
    def rowwise(self) -> bool:
        """Row i is record i, and rows are dimension 0: nothing to be folded."""
        return self.slots is None and self.layout == Axis(0)

    def fold(self, t: Tensor, features: int, gradient: bool = False) -> Tensor:
        """t (leading dimensions, *features) → (records, S, *features). Empty places hold zeros if ``gradient``, else
        copies of the record's own first row (so that a bad record can't touch its neighbours)."""
        t = full(t)
        tail = t.shape[t.ndim - features :]
        t = self._by_row(t, features, tail)  # (rows, S, *features)
        if self.slots is None:
            return t
        m, k = self.slots.shape
        if not self.ragged:
            return t.reshape(m, k * t.shape[1], *tail)
        picked = t[torch.where(self.slots < 0, self.slots[:, :1], self.slots)]  # (m, k, S, *features)
        if gradient:
            empty = (self.slots < 0).reshape(m, k, *([1] * (t.ndim - 1)))
            picked = picked.masked_fill(empty, 0)
        return picked.reshape(m, k * t.shape[1], *tail)

    def owner(self, shape: Sequence[int]) -> Tensor:
        """The record of every position (−1: of none), ready to be broadcast against a gradient of this shape.
        All dimensions of the gradient are leading ones."""
        if self.slots is None:
            record = torch.arange(self.rows)
        else:
            record = torch.empty(self.rows, dtype=torch.int64)
            valid = self.slots >= 0
            record[self.slots[valid]] = torch.arange(self.records)[:, None].expand_as(self.slots)[valid]
        if isinstance(self.layout, Whole):
            return torch.zeros([1] * len(shape), dtype=torch.int64)
        if isinstance(self.layout, Positions):
            row = self.layout.row.reshape(shape)
            return torch.where(row < 0, -1, record[row.clamp_min(0)])
        block, dim = self.layout.block, self.layout.dim
        along = record.repeat_interleave(block) if self.layout.major else record.repeat(block)
        return along.reshape([-1 if d == dim else 1 for d in range(len(shape))])

    def _by_row(self, t: Tensor, features: int, tail: torch.Size) -> Tensor:
        if isinstance(self.layout, Whole):
            return t.reshape(1, -1, *tail)
        if isinstance(self.layout, Positions):
            return self._gather(t.reshape(-1, *tail))
        dim, block, major = self.layout.dim, self.layout.block, self.layout.major
        if block > 1:
            t = split_dim(t, dim, (self.rows, block) if major else (block, self.rows))
            dim = dim if major else dim + 1
        if dim:
            t = t.movedim(dim, 0)
        if t.ndim == features + 2:
            return t
        return t.unsqueeze(1) if t.ndim == features + 1 else t.reshape(self.rows, -1, *tail)

    def _gather(self, t: Tensor) -> Tensor:
        assert isinstance(self.layout, Positions)
        row = self.layout.row
        counts = torch.bincount(row[row >= 0], minlength=self.rows)
        width = max(int(counts.max()), 1)
        order = torch.argsort(row, stable=True)[int((row < 0).sum()) :]
        starts = torch.cumsum(counts, 0) - counts
        place = torch.arange(len(order)) - starts[row[order]]
        out = t.new_zeros(self.rows, width, *t.shape[1:])
        out[row[order], place] = t[order]
        return out
