"""From the label of an activation to its positions by record.

A *layout* tells where the rows are among the leading dimensions of the tensor whose gradient arrives at a use. It is
derived from the tensor's label (``lineage.py``); if the program does not determine it, it is measured (``measure.py``).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.gradients.labels.lineage import Axis, Lineage, Owners, along, covers


def split_dim(t: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    return t.reshape(*t.shape[:dim], *sizes, *t.shape[dim + 1 :])


def full(t: Tensor) -> Tensor:
    """At least single precision."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


@dataclass(frozen=True)
class Whole:
    """Every position belongs to the only row."""


@dataclass(frozen=True, eq=False)
class Positions:
    """Position j of the flattened leading dimensions belongs to row ``row[j]`` (−1: to no row, its gradient is
    zero)."""

    row: Tensor

    @functools.cached_property
    def spots(self) -> tuple[int, Tensor | None, Tensor]:
        """(the most positions of a row, the positions that belong to a row, or None for all, the place of each of these
        in a table of that width with a line for every row)."""
        owned = None if bool((self.row >= 0).all()) else torch.nonzero(self.row >= 0)[:, 0]
        row = self.row if owned is None else self.row[owned]
        counts = torch.bincount(row)
        width = int(counts.max()) if len(row) else 1
        starts = torch.cumsum(counts, 0) - counts
        ranked, order = torch.sort(row, stable=True)
        spots = torch.empty_like(row)
        spots[order] = ranked * width + torch.arange(len(row), device=row.device) - starts[ranked]
        return width, owned, spots


Layout = Axis | Whole | Positions


def layout_of(label: Lineage, shape: Sequence[int], lead: Sequence[int], rows: int) -> Layout | None:
    """The layout of a tensor with this label; None if the rows are not known or lie in the feature dimensions."""
    if rows == 1:
        return Whole()
    if math.prod(shape) == 0 and not isinstance(label, Axis):
        return Positions(torch.full((math.prod(shape[d] for d in lead),), -1))
    if not covers(label, lead):
        return None
    if isinstance(label, Axis):
        return label
    assert isinstance(label, Owners)
    own = label.own.reshape([label.own.shape[d] for d in lead])
    return Positions(own.expand([shape[d] for d in lead]).flatten())


@dataclass(frozen=True)
class Frame:
    """Reshapes activations to (records, S, features): S runs over all positions of all rows of a record."""

    layout: Layout
    rows: int
    records: int
    slots: Tensor | None  # (records, k) as in rows.Chunk
    ragged: bool  # some slots are empty
    once: bool = False  # weighted sums are requested once, all with the same weights (single.Scaled)

    @functools.cached_property
    def rowwise(self) -> bool:
        """Row i is record i, and rows are dimension 0: nothing has to be reordered."""
        return self.slots is None and self.layout == Axis(0)

    def fold(self, t: Tensor, features: int, gradient: bool = False) -> Tensor:
        """t (leading dimensions, *features) → (records, S, *features). Empty places contain zeros if ``gradient``, else
        copies of the record's own first row (so that a non-finite record can't affect others)."""
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
        """The record of every position (−1: none), broadcastable to a gradient of this shape, all of whose dimensions
        are leading ones."""
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
        rows = record[along(self.layout, self.rows)]
        return rows.reshape([-1 if d == self.layout.dim else 1 for d in range(len(shape))])

    def _by_row(self, t: Tensor, features: int, tail: torch.Size) -> Tensor:
        if isinstance(self.layout, Whole):
            return t.reshape(1, -1, *tail)
        if isinstance(self.layout, Positions):
            return self._gather(t.reshape(-1, *tail))
        dim, before, after = self.layout.dim, self.layout.before, self.layout.after
        if before > 1:
            t, dim = split_dim(t, dim, (before, t.shape[dim] // before)), dim + 1
        if after > 1:
            t = split_dim(t, dim, (self.rows, after))
        if dim:
            t = t.movedim(dim, 0)
        if t.ndim == features + 2:
            return t
        return t.unsqueeze(1) if t.ndim == features + 1 else t.reshape(self.rows, -1, *tail)

    def _gather(self, t: Tensor) -> Tensor:
        assert isinstance(self.layout, Positions)
        width, owned, spots = self.layout.spots
        out = t.new_zeros(self.rows * width, *t.shape[1:])
        out.index_copy_(0, spots.to(t.device), t if owned is None else t[owned])
        return out.reshape(self.rows, width, *t.shape[1:])
