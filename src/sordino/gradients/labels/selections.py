"""Labels through selections: indices, masks, gathers and scatters. The same operation is applied to the row numbers.

Indices may be data themselves. If they belong to other rows than the values that they select, no label records it: it
is noted (``suspect``), and the records are tested for interaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.labels.flow import Labelled, Labels, argument, dims_of, first, flat
from sordino.gradients.labels.lineage import (
    MANY,
    MIXED,
    Axis,
    Lineage,
    Many,
    Owners,
    aligned,
    cut,
    merged,
    owners,
    simplest,
    spread,
)


def _chosen(tape: Labelled, index: Any, result: Lineage | None, shape: Sequence[int]) -> Lineage | None:
    """The label of what data selected. Indices of other rows than the selected values are noted, because no label
    records it; a position without a row belongs to the row that selected it."""
    label = tape.lineage(index) if isinstance(index, Tensor) else None
    if label is None:
        return result
    if isinstance(label, Many) or result is None or isinstance(result, Many) or len(shape) < index.ndim:
        tape.suspect()
        return result
    behind = [1] * (len(shape) - index.ndim)
    own = owners(label, index.shape, tape.rows)
    both = merged([Owners(own.reshape([*own.shape, *behind])), result], shape, tape.rows)
    if isinstance(both, Many):
        tape.suspect()
        return result
    return both


def index_select(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = first(args, kwargs), argument(args, kwargs, 2, "index")
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 1, "dim"), x.ndim)
    if label is None:
        return _by_index(tape, out, dims[0], index) if dims else MANY
    if not isinstance(label, (Axis, Owners)) or dims is None:
        return MANY
    found = cut(label, x.shape, dims[0], index.reshape(-1), tape.rows)
    return _chosen(tape, index, found if dims[0] == 0 else None, out.shape) or found


def _by_index(tape: Labelled, out: Tensor, dim: int, index: Tensor) -> Labels:
    """Constants indexed by data of single rows: a table lookup."""
    label = tape.lineage(index)
    if not isinstance(label, (Axis, Owners)) or index.ndim != 1:
        return MANY
    own = owners(label, index.shape, tape.rows)
    return simplest(own.reshape([-1 if d == dim else 1 for d in range(out.ndim)]), tape.rows)


def gather(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = first(args, kwargs), argument(args, kwargs, 2, "index")
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 1, "dim"), x.ndim)
    if label is None:
        return tape.lineage(index)
    if not isinstance(label, (Axis, Owners)) or dims is None or not isinstance(index, Tensor):
        return MANY
    if isinstance(label, Axis) and label.dim != dims[0] and out.shape[label.dim] == x.shape[label.dim]:
        return _chosen(tape, index, label, out.shape)
    found = simplest(spread(label, x.shape, tape.rows).gather(dims[0], index), tape.rows)
    return _chosen(tape, index, found, out.shape)


def take_along_dim(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = first(args, kwargs), argument(args, kwargs, 1, "indices")
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 2, "dim"), x.ndim)
    if not isinstance(label, (Axis, Owners)) or dims is None:
        return MANY
    if isinstance(label, Axis) and label.dim != dims[0] and out.shape[label.dim] == x.shape[label.dim]:
        found: Lineage = label
    else:
        found = simplest(torch.take_along_dim(spread(label, x.shape, tape.rows), index, dims[0]), tape.rows)
    return _chosen(tape, index, found, out.shape)


def getitem(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = args
    label = tape.lineage(x)
    if label is None:
        return _looked_up(tape, x, index, out)
    if isinstance(label, Many):
        return MANY
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(label, Axis) and all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        plain = basic(label, x.shape, items)
        if plain is not None:
            return plain
    own = owners(label, x.shape, tape.rows)
    used = _dims_used(items, x.ndim)
    # length 1 along dimensions where the row is constant
    picked = own.expand((*x.shape[:used], *own.shape[used:]))[index]
    if picked.ndim != out.ndim:
        return MANY
    found = simplest(picked, tape.rows)
    if len(items) == 1 and isinstance(items[0], Tensor) and items[0].dtype != torch.bool:
        return _chosen(tape, items[0], found, out.shape)
    if any(tape.lineage(t) is not None for t in flat(items)):
        tape.suspect()
    return found


def basic(label: Axis, shape: Sequence[int], items: Sequence[Any]) -> Lineage | None:
    """Integers, slices, None and one Ellipsis that keep the rows' dimension whole; None if they do not."""
    given = sum(i is not None and i is not Ellipsis for i in items)
    if Ellipsis not in items:
        items = (*items, Ellipsis)
    source = result = 0
    for item in items:
        if item is None:
            result += 1
        elif item is Ellipsis:
            skipped = len(shape) - given
            if source <= label.dim < source + skipped:
                return Axis(result + label.dim - source, label.before, label.after)
            source, result = source + skipped, result + skipped
        elif source == label.dim:
            whole = isinstance(item, slice) and item.indices(shape[source]) == (0, shape[source], 1)
            return Axis(result, label.before, label.after) if whole else None
        else:
            result += isinstance(item, slice)
            source += 1
    return None


def _dims_used(items: Sequence[Any], ndim: int) -> int:
    if any(i is Ellipsis for i in items):
        return ndim
    used = 0
    for i in items:
        if isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8):
            used += i.ndim
        elif isinstance(i, (list, tuple)) and any(isinstance(v, (bool, list, tuple)) for v in i):
            return ndim
        elif i is not None and not isinstance(i, (int, slice, list, tuple, Tensor)):
            return ndim  # a numpy array, perhaps a mask over several dimensions
        elif i is not None:
            used += 1
    return used


def _looked_up(tape: Labelled, x: Tensor, index: Any, out: Tensor) -> Labels:
    """A constant indexed by data: one index tensor, alone or after whole slices; the result has the index's rows."""
    items = index if isinstance(index, tuple) else (index,)
    places = [k for k, i in enumerate(items) if isinstance(i, Tensor)]
    if any(i.dtype == torch.bool and tape.lineage(i) is not None for i in flat(items)):
        tape.suspect()  # the shape reveals how many were selected
    if len(places) != 1 or any(i != slice(None) for i in items[: places[0]]):
        return MANY
    label, ids = tape.lineage(items[places[0]]), items[places[0]]
    if label is None or isinstance(label, Many) or ids.dtype == torch.bool:
        return MANY if label is not None else None
    own, behind = owners(label, ids.shape, tape.rows), out.ndim - places[0] - ids.ndim
    return simplest(own.reshape([*([1] * places[0]), *own.shape, *([1] * behind)]), tape.rows)


def masked_select(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, mask = first(args, kwargs), argument(args, kwargs, 1, "mask")
    label = tape.lineage(x)
    if tape.lineage(mask) is not None:
        tape.suspect()  # the number of earlier selected values determines the position of later ones
    if not isinstance(label, (Axis, Owners)):
        return MANY
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    if tape.lineage(mask) is not None and isinstance(tape.join([x, mask], shape, combines=False), Many):
        tape.suspect()
    return simplest(torch.masked_select(spread(label, x.shape, tape.rows), mask), tape.rows)


def scattered(place: int) -> Any:
    """index_add, index_copy, scatter, scatter_add: values at ``place`` are written or added at the given indices."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        target, index = first(args, kwargs), argument(args, kwargs, 2, "index")
        values = argument(args, kwargs, place, "source", "src", "tensor", "value")
        dims = dims_of(argument(args, kwargs, 1, "dim"), target.ndim)
        old = tape.lineage(target)
        new = tape.lineage(values) if isinstance(values, Tensor) else None
        if dims is None or isinstance(old, Many) or isinstance(new, Many) or not isinstance(index, Tensor):
            return MANY
        if new is None:  # a constant at positions that data selects
            by = tape.lineage(index)
            if by is None:
                if isinstance(old, (Axis, Owners)) and owners(old, target.shape, tape.rows).shape[dims[0]] > 1:
                    tape.by_place()
                return old
            if (
                index.ndim == target.ndim
                and isinstance(by, Axis)
                and by.dim != dims[0]
                and index.shape[by.dim] == target.shape[by.dim]
            ):
                return by if old is None else merged([old, by], target.shape, tape.rows)
            return by if isinstance(by, Many) else MANY
        _chosen(tape, index, new if index.ndim == values.ndim else None, values.shape)
        if tape.lineage(index) is not None and owners(new, values.shape, tape.rows).shape[dims[0]] > 1:
            tape.suspect()  # several rows select among the same positions
        if new == old and isinstance(new, Axis) and new.dim != dims[0]:
            return new
        return _landed(tape, (target, old), index, (values, new), dims[0])

    return rule


def _landed(
    tape: Labelled, into: tuple[Tensor, Lineage | None], index: Tensor, values: tuple[Tensor, Lineage], dim: int
) -> Labels:
    (target, old), (source, new) = into, values
    assert not isinstance(new, Many)
    if isinstance(new, Axis) and new.dim != dim and old is None and target.shape[new.dim] == source.shape[new.dim]:
        return new
    own = spread(new, source.shape, tape.rows)
    if index.ndim == 1 and (target.ndim > 1 or index.shape != source.shape):
        index = index.reshape([-1 if d == dim else 1 for d in range(target.ndim)]).expand(source.shape)
    own = own[tuple(slice(0, s) for s in index.shape)]
    start = torch.full(tuple(target.shape), -1)
    highest = start.scatter_reduce(dim, index, own, "amax", include_self=False)
    lowest = start.scatter_reduce(dim, index, own, "amin", include_self=False)
    if not torch.equal(highest, lowest):
        return MANY
    landed = simplest(highest, tape.rows)
    both = landed if old is None else merged([old, landed], target.shape, tape.rows)
    if isinstance(both, Many) and not target.requires_grad:
        tape.suspect()  # what was there (often zeros of this shape) carries no gradient
        return landed
    return both


def assigned(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Lineage | None:
    """target[index] = value: the label of the target afterwards.

    A constant target gets the label of its dimension that corresponds to the value's rows under the index; this is
    determined by following each dimension through the index, not by its length.
    """
    target, index, value = args
    old = tape.lineage(target)
    new = tape.lineage(value) if isinstance(value, Tensor) else None
    by = [(t, label) for t in flat(index) if (label := tape.lineage(t)) is not None]
    if by:
        return _by_data(tape, target, old, by, value) if isinstance(index, Tensor) else MANY
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(old, (Axis, Owners)) and not _whole(old, target.shape, items):
        tape.by_place()
    if new is None or isinstance(old, Many):
        return old
    if isinstance(new, Many):
        return new
    part = target.detach()[index]
    if part.ndim < value.ndim:
        return MANY
    new = aligned(new, value.shape, part.shape, tape.rows)
    if isinstance(new, Axis) and all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        dims = [old.dim] if isinstance(old, Axis) else range(target.ndim) if old is None else []
        for dim in dims:
            label = Axis(dim, new.before, new.after)
            if basic(label, target.shape, items) == new and (old is None or old == label):
                return label
    own = torch.full(tuple(target.shape), -1) if old is None else spread(old, target.shape, tape.rows).clone()
    before = own[index].clone()
    rows = owners(new, part.shape, tape.rows).expand(part.shape) if not isinstance(new, Many) else None
    if rows is None:
        return MANY
    if bool(((before >= 0) & (before != rows)).any()):
        if target.requires_grad:
            return MANY
        tape.suspect()  # what was there (often zeros of this shape) carries no gradient
    own[index] = rows
    return simplest(own, tape.rows)


def _whole(label: Axis | Owners, shape: Sequence[int], items: Sequence[Any]) -> bool:
    """Does this index select something of every row, in the same way?"""
    plain = all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items)
    return isinstance(label, Axis) and plain and basic(label, shape, items) is not None


def _by_data(
    tape: Labelled, target: Tensor, old: Lineage | None, by: Sequence[tuple[Tensor, Lineage]], value: Any
) -> Lineage | None:
    """target[index] = value with data as index: a mask over leading dimensions acts as masked_fill does, a vector of
    places as index_copy."""
    mask, label = by[0]
    places = len(by) == mask.ndim == 1 and mask.dtype == torch.int64 and isinstance(value, Tensor)
    if places and value.shape == (len(mask), *target.shape[1:]) and not bool((mask < 0).any()):
        return scattered(3)(tape, (target, 0, mask, value), {}, target)  # type: ignore[no-any-return]
    if len(by) > 1 or mask.dtype != torch.bool or isinstance(label, Many) or flat(value):
        masked = any(found == MIXED and t.dtype == torch.bool for t, found in by)  # places may be a mere permutation
        return MIXED if masked else MANY
    own = owners(label, mask.shape, tape.rows)
    shown = Owners(own.reshape([*own.shape, *([1] * (target.ndim - mask.ndim))]))
    return merged([shown] if old is None else [shown, old], target.shape, tape.rows)
