"""Row lineage: which row of the batch each position of an activation belongs to.

A *label* is attached to every tensor that is computed from the inputs. For each position it names the one row whose
loss that position may influence:

- ``Axis(dim, before, after)``: dimension ``dim`` has length before · rows · after, with the row index in the middle.
  (B, S, d) has ``Axis(0)``; flattened to (B·S, d) it has ``Axis(0, after=S)``; (S·B, d) has ``Axis(0, before=S)``.
- ``Owners(own)``: an int64 tensor, broadcastable to the shape, with the row of each position (−1: of no row yet).
- ``MANY``: not known. ``MIXED``: certainly computed from several rows (a mean over the batch, a row plus another).

Labels follow the operations of the program (``flow.py``) and are never inferred from lengths. They are sound in this
sense: every operation gives an output position the label of each differentiable input position that it depends on, or
MANY. So if the losses have the label ``Axis(0)``, loss i depends on no position that is labelled with another row than
i, and the gradient that arrives at a position labelled i is that of loss i alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """Rows along one dimension, of length before · rows · after."""

    dim: int
    before: int = 1
    after: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Owners:
    """The row of each position; −1 if it belongs to no row yet. Broadcastable to the tensor's shape, equal ndim."""

    own: Tensor


@dataclass(frozen=True, slots=True)
class Many:
    """Several rows, or not known. certain: values of several rows were certainly combined."""

    certain: bool = False


MANY = Many()
MIXED = Many(certain=True)
ROWS = Axis(0)
Lineage = Axis | Owners | Many

Shape = Sequence[int]


def along(axis: Axis, rows: int) -> Tensor:
    """(before · rows · after,) the row of each index of the dimension."""
    one = torch.arange(rows)
    one = one.repeat_interleave(axis.after) if axis.after > 1 else one
    return one.repeat(axis.before) if axis.before > 1 else one


def owners(lineage: Axis | Owners, shape: Shape, rows: int) -> Tensor:
    """The row of each position, with length 1 in dimensions along which it is constant."""
    if isinstance(lineage, Owners):
        return lineage.own
    return along(lineage, rows).reshape([-1 if d == lineage.dim else 1 for d in range(len(shape))])


def spread(lineage: Axis | Owners, shape: Shape, rows: int) -> Tensor:
    """The row of every position, in full shape (a view without memory of its own)."""
    return owners(lineage, shape, rows).expand(tuple(shape))


def simplest(own: Tensor, rows: int) -> Lineage:
    """The same lineage with few varying dimensions; an ``Axis`` if it has that form.

    A position without a row (−1), for which any label is correct, gets the row of its neighbours if there is one way to
    do so: padding belongs to the text that is padded.
    """
    if not own.numel():
        return Owners(torch.full([1] * own.ndim, -1))
    for d in range(own.ndim):
        if own.shape[d] > 1 and bool((own == own.narrow(d, 0, 1)).all()):
            own = own.narrow(d, 0, 1)
    if bool((own < 0).any()):
        own = _filled(own)
    varying = [d for d in range(own.ndim) if own.shape[d] > 1]
    if len(varying) == 1:
        axis = _as_axis(own.flatten(), varying[0], rows)
        if axis is not None:
            return axis
    return Owners(own.contiguous())


def _filled(own: Tensor) -> Tensor:
    """Gives positions without a row (−1) the row of the others on the same line, along dimensions in which every line
    has one row. If few positions were selected, all dimensions may have that property; then nothing is filled in."""
    dims = [d for d in range(own.ndim) if own.shape[d] > 1 and _one_row(own, own.amax(d, keepdim=True))]
    if not dims:
        return own
    highest = own.amax(dims, keepdim=True)
    several = bool(((highest >= 0) & (highest != highest.max())).any())
    return highest if several and _one_row(own, highest) else own


def _one_row(own: Tensor, highest: Tensor) -> bool:
    return bool(((own == highest) | (own < 0)).all())


def _as_axis(values: Tensor, dim: int, rows: int) -> Axis | None:
    changes = torch.nonzero(values != values[0])
    after = int(changes[0]) if len(changes) and int(values[0]) == 0 else 1
    if len(values) % (rows * after):
        return None
    axis = Axis(dim, len(values) // (rows * after), after)
    return axis if torch.equal(values, along(axis, rows)) else None


def reshaped(lineage: Axis | Owners, before: Shape, after: Shape, rows: int) -> Lineage:
    """Through a reshape, which preserves the row-major order of positions: row = (position // inner) mod rows."""
    if math.prod(after) == 0:
        return MANY
    if isinstance(lineage, Axis):
        inner, stride = lineage.after * math.prod(before[lineage.dim + 1 :]), 1
        for d in range(len(after) - 1, -1, -1):
            reach = stride * after[d]
            if stride <= inner and inner * rows <= reach:
                if inner % stride == 0 and reach % (inner * rows) == 0:
                    return Axis(d, reach // (inner * rows), inner // stride)
                break
            stride = reach
    return simplest(spread(lineage, before, rows).reshape(tuple(after)), rows)


def permuted(lineage: Axis | Owners, order: Sequence[int]) -> Lineage:
    """Dimension d of the result is dimension order[d] of the tensor."""
    if isinstance(lineage, Axis):
        return Axis(list(order).index(lineage.dim), lineage.before, lineage.after)
    return Owners(lineage.own.permute(tuple(order)))


def aligned(lineage: Axis | Owners, shape: Shape, result: Shape, rows: int) -> Lineage:
    """Through broadcasting of ``shape`` to ``result``, dimensions aligned from the right."""
    pad = len(result) - len(shape)
    if isinstance(lineage, Axis):
        return Axis(lineage.dim + pad, lineage.before, lineage.after) if pad else lineage
    return Owners(lineage.own.reshape([*([1] * pad), *lineage.own.shape])) if pad else lineage


def reduced(lineage: Axis | Owners, dims: Sequence[int], keepdim: bool) -> Lineage:
    """Through an operation whose result depends on all positions along ``dims``."""
    if isinstance(lineage, Axis):
        if lineage.dim in dims:
            return MIXED
        return lineage if keepdim else Axis(lineage.dim - sum(d < lineage.dim for d in dims), *_sides(lineage))
    own, varying = lineage.own, [d for d in dims if lineage.own.shape[d] > 1]
    if varying:  # a selection may have left one row along a dimension, or one row and positions without a row
        highest = own.amax(varying, keepdim=True)
        if not bool(((own == highest) | (own < 0)).all()):
            return MIXED
        own = highest
    return Owners(own) if keepdim else Owners(own.reshape([s for d, s in enumerate(own.shape) if d not in dims]))


def _sides(axis: Axis) -> tuple[int, int]:
    return axis.before, axis.after


def merged(parts: Sequence[Lineage], shape: Shape, rows: int) -> Lineage:
    """The common label of the arguments of an operation, all given in the dimensions of the result.

    If one has no row (−1), the others determine the label. MIXED if two disagree.
    """
    first = parts[0]
    if all(p == first for p in parts) and isinstance(first, Axis):
        return first
    if any(isinstance(p, Many) for p in parts):
        return MIXED if MIXED in parts else MANY
    total: Tensor | None = None
    for part in parts:
        assert not isinstance(part, Many)
        own = owners(part, shape, rows)
        if total is None:
            total = own
            continue
        a, b = torch.broadcast_tensors(total, own)  # type: ignore[no-untyped-call]
        if bool(((a >= 0) & (b >= 0) & (a != b)).any()):
            return MIXED
        total = torch.maximum(a, b)
    assert total is not None
    return simplest(total, rows)


def cut(lineage: Axis | Owners, shape: Shape, dim: int, index: Tensor, rows: int) -> Lineage:
    """Through a selection of ``index`` along ``dim``."""
    if isinstance(lineage, Axis) and lineage.dim != dim:
        return lineage
    own = owners(lineage, shape, rows)
    return lineage if own.shape[dim] == 1 else simplest(own.index_select(dim, index), rows)


def covers(lineage: Lineage, lead: Sequence[int]) -> bool:
    """Does the label vary along these dimensions only, and is the row of every position known?"""
    if isinstance(lineage, Axis):
        return lineage.dim in lead
    if isinstance(lineage, Many):
        return False
    own = lineage.own
    return all(own.shape[d] == 1 or d in lead for d in range(own.ndim)) and bool((own >= 0).all())
