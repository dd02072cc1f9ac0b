"""Labels through operations that move positions and compute nothing: views, selections, joins, scatters.

Where the label is not simply carried along, the same operation is applied to the row numbers themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.flow import Labelled, Labels, argument, dims_of, first, flat
from sordino.gradients.lineage import (
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
    permuted,
    reshaped,
    simplest,
    spread,
)


def _known(label: Lineage | None) -> bool:
    return label is not None and not isinstance(label, Many)


def reshape(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label = tape.lineage(x)
    if not _known(label):
        return label
    if out.dtype != x.dtype and out.numel() != x.numel():
        return MANY  # view(dtype) of another width
    assert isinstance(label, (Axis, Owners))
    return label if out.shape == x.shape else reshaped(label, x.shape, out.shape, tape.rows)


def _order(name: str, x: Tensor, args: Any, kwargs: Any) -> list[int] | None:
    order = list(range(x.ndim))
    if name == "permute":
        dims = args[1:] if len(args) > 2 or (len(args) == 2 and isinstance(args[1], int)) else None
        return [d % x.ndim for d in (dims or argument(args, kwargs, 1, "dims"))]
    if name in ("T", "H", "t"):
        return order[::-1]
    if name in ("mT", "mH", "adjoint"):
        return [*order[:-2], order[-1], order[-2]]
    if name in ("transpose", "swapaxes", "swapdims"):
        a = argument(args, kwargs, 1, "dim0", "axis0") % x.ndim
        b = argument(args, kwargs, 2, "dim1", "axis1") % x.ndim
        order[a], order[b] = order[b], order[a]
        return order
    source = dims_of(argument(args, kwargs, 1, "source"), x.ndim)
    target = dims_of(argument(args, kwargs, 2, "destination"), x.ndim)
    if source is None or target is None:
        return None
    rest = [d for d in order if d not in source]
    for t, s in sorted(zip(target, source, strict=True)):
        rest.insert(t, s)
    return rest


def permutation(name: str) -> Any:
    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        x = first(args, kwargs)
        label = tape.lineage(x)
        if not isinstance(label, (Axis, Owners)):
            return label
        order = _order(name, x, args, kwargs)
        return MANY if order is None else permuted(label, order)

    return rule


def unsqueeze(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label = tape.lineage(x)
    if not isinstance(label, (Axis, Owners)):
        return label
    dim = argument(args, kwargs, 1, "dim") % out.ndim
    if isinstance(label, Axis):
        return Axis(label.dim + (dim <= label.dim), label.before, label.after)
    return Owners(label.own.unsqueeze(dim))


def squeeze(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label = tape.lineage(x)
    if not isinstance(label, (Axis, Owners)):
        return label
    if out is x:
        return MANY  # squeeze_: the shape that it had is gone
    given = argument(args, kwargs, 1, "dim")
    dims = tuple(range(x.ndim)) if given is None else dims_of(given, x.ndim) or ()
    gone = [d for d in dims if x.shape[d] == 1]
    if isinstance(label, Axis):
        return Axis(label.dim - sum(d < label.dim for d in gone), label.before, label.after)
    return Owners(label.own.reshape([s for d, s in enumerate(label.own.shape) if d not in gone]))


def expand(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label = tape.lineage(x)
    return aligned(label, x.shape, out.shape, tape.rows) if isinstance(label, (Axis, Owners)) else label


def repeat(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """The whole tensor again and again along each dimension."""
    x = first(args, kwargs)
    label = tape.lineage(x)
    if not isinstance(label, (Axis, Owners)):
        return label
    pad = out.ndim - x.ndim
    if pad < 0:
        return MANY
    if isinstance(label, Axis):
        times = out.shape[label.dim + pad] // max(1, x.shape[label.dim])
        return Axis(label.dim + pad, label.before * times, label.after)
    sizes = [o // max(1, s) if w > 1 else 1 for o, s, w in zip(out.shape[pad:], x.shape, label.own.shape, strict=True)]
    return Owners(label.own.repeat(*([1] * pad), *sizes))


def repeat_interleave(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Each index along ``dim`` several times in a row."""
    x = first(args, kwargs)
    label, times = tape.lineage(x), argument(args, kwargs, 1, "repeats")
    if not isinstance(label, (Axis, Owners)):
        return label
    dims = dims_of(argument(args, kwargs, 2, "dim"), x.ndim)
    if dims is None:
        return MANY
    if isinstance(label, Axis) and (label.dim != dims[0] or isinstance(times, int)):
        return label if label.dim != dims[0] else Axis(label.dim, label.before, label.after * times)
    own = owners(label, x.shape, tape.rows)
    if own.shape[dims[0]] == 1:
        return label
    return simplest(own.repeat_interleave(times, dims[0]), tape.rows)


def pieces(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """chunk, split, tensor_split: consecutive parts of one dimension."""
    x = first(args, kwargs)
    label = tape.lineage(x)
    dims = dims_of(argument(args, kwargs, 2, "dim", default=0), x.ndim)
    if not isinstance(label, (Axis, Owners)):
        return label
    if dims is None:
        return MANY
    own = owners(label, x.shape, tape.rows)
    if own.shape[dims[0]] == 1:
        return label
    if sum(part.shape[dims[0]] for part in out) != x.shape[dims[0]]:
        return MANY  # tensor_split at indices that do not ascend: parts overlap
    found: list[Lineage | None] = []
    start = 0
    for part in out:
        found.append(simplest(own.narrow(dims[0], start, part.shape[dims[0]]), tape.rows))
        start += part.shape[dims[0]]
    return found


def unbind(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label = tape.lineage(x)
    dims = dims_of(argument(args, kwargs, 1, "dim", default=0), x.ndim)
    if not isinstance(label, (Axis, Owners)) or dims is None:
        return label if dims is not None else MANY
    return [_selected(label, x.shape, dims[0], i, tape.rows) for i in range(len(out))]


def _selected(label: Axis | Owners, shape: Sequence[int], dim: int, index: int, rows: int) -> Lineage:
    if isinstance(label, Axis) and label.dim != dim:
        return Axis(label.dim - (dim < label.dim), label.before, label.after)
    own = owners(label, shape, rows)
    return Owners(own.select(dim, index if own.shape[dim] > 1 else 0))


def select(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label = tape.lineage(x)
    dims, index = dims_of(argument(args, kwargs, 1, "dim"), x.ndim), argument(args, kwargs, 2, "index")
    if not isinstance(label, (Axis, Owners)) or dims is None or not isinstance(index, int):
        return MANY if _known(label) else label
    return _selected(label, x.shape, dims[0], index, tape.rows)


def narrow(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    label, start = tape.lineage(x), argument(args, kwargs, 2, "start")
    dims = dims_of(argument(args, kwargs, 1, "dim"), x.ndim)
    if not isinstance(label, (Axis, Owners)) or dims is None or not isinstance(start, int):
        return MANY if _known(label) else label
    index = torch.arange(start % max(1, x.shape[dims[0]]), start % max(1, x.shape[dims[0]]) + out.shape[dims[0]])
    return cut(label, x.shape, dims[0], index, tape.rows)


def _chosen(tape: Labelled, index: Any, result: Lineage | None, shape: Sequence[int]) -> None:
    """Indices that are data of other rows than what they choose: noted, for no label tells of it."""
    label = tape.lineage(index) if isinstance(index, Tensor) else None
    if label is None:
        return
    if isinstance(label, Many) or result is None or isinstance(result, Many) or len(shape) < index.ndim:
        tape.suspect()
        return
    behind = [1] * (len(shape) - index.ndim)
    own = owners(label, index.shape, tape.rows)
    if isinstance(merged([Owners(own.reshape(*own.shape, *behind)), result], shape, tape.rows), Many):
        tape.suspect()


def index_select(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = first(args, kwargs), argument(args, kwargs, 2, "index")
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 1, "dim"), x.ndim)
    if label is None:
        return _by_index(tape, out, dims[0], index) if dims else MANY
    if not isinstance(label, (Axis, Owners)) or dims is None:
        return MANY
    found = cut(label, x.shape, dims[0], index.reshape(-1), tape.rows)
    _chosen(tape, index, found if dims[0] == 0 else None, out.shape)
    return found


def _by_index(tape: Labelled, out: Tensor, dim: int, index: Tensor) -> Labels:
    """Constants at indices that are data of single rows: a table that is looked up."""
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
        _chosen(tape, index, label, out.shape)
        return label
    found = simplest(spread(label, x.shape, tape.rows).gather(dims[0], index), tape.rows)
    _chosen(tape, index, found, out.shape)
    return found


def take_along_dim(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = first(args, kwargs), argument(args, kwargs, 1, "indices")
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 2, "dim"), x.ndim)
    if not isinstance(label, (Axis, Owners)) or dims is None:
        return MANY
    found: Lineage = label
    if not isinstance(label, Axis) or label.dim == dims[0] or out.shape[label.dim] != x.shape[label.dim]:
        found = simplest(torch.take_along_dim(spread(label, x.shape, tape.rows), index, dims[0]), tape.rows)
    _chosen(tape, index, found, out.shape)
    return found


def getitem(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, index = args
    label = tape.lineage(x)
    if label is None:
        return _looked_up(tape, x, index, out)
    if isinstance(label, Many):
        return MANY
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(label, Axis) and all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        plain = _basic(label, x.shape, items)
        if plain is not None:
            return plain
    own = owners(label, x.shape, tape.rows)
    used = _dims_used(items, x.ndim)
    picked = own.expand(*x.shape[:used], *own.shape[used:])[index]  # length 1 where the row does not vary
    if picked.ndim != out.ndim:
        return MANY
    found = simplest(picked, tape.rows)
    if len(items) == 1 and isinstance(items[0], Tensor) and items[0].dtype != torch.bool:
        _chosen(tape, items[0], found, out.shape)
    elif any(tape.lineage(t) is not None for t in flat(items)):
        tape.suspect()
    return found


def _basic(label: Axis, shape: Sequence[int], items: Sequence[Any]) -> Lineage | None:
    """Integers, slices, None and one Ellipsis that leave the rows' dimension whole; None where they do not."""
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
            return ndim  # an array of numpy's, perhaps a mask over several
        elif i is not None:
            used += 1
    return used


def _looked_up(tape: Labelled, x: Tensor, index: Any, out: Tensor) -> Labels:
    """A constant at indices that hold data: one index tensor, alone or after whole slices, leaves its own rows."""
    items = index if isinstance(index, tuple) else (index,)
    places = [k for k, i in enumerate(items) if isinstance(i, Tensor)]
    if len(places) != 1 or any(i != slice(None) for i in items[: places[0]]):
        return MANY
    label, ids = tape.lineage(items[places[0]]), items[places[0]]
    if label is None or isinstance(label, Many) or ids.dtype == torch.bool:
        return MANY if label is not None else None
    own, behind = owners(label, ids.shape, tape.rows), out.ndim - places[0] - ids.ndim
    return simplest(own.reshape(*([1] * places[0]), *own.shape, *([1] * behind)), tape.rows)


def cat(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    parts = [t for t in args[0] if t.numel()] if args else flat(kwargs)
    dims = dims_of(argument(args, kwargs, 1, "dim", "axis", default=0), out.ndim)
    if dims is None or any(isinstance(tape.lineage(t), Many) for t in parts):
        return MANY
    return joined(tape, parts, dims[0], out)


def joined(tape: Labelled, parts: Sequence[Tensor], dim: int, out: Tensor) -> Labels:
    """Consecutive parts along ``dim``; constants among them take the label of the others where that is possible."""
    labels = [tape.lineage(t) for t in parts]
    found = [label for label in labels if label is not None]
    if found and all(label == found[0] for label in found) and isinstance(found[0], Axis) and found[0].dim != dim:
        return found[0]
    owned = []
    for t, label in zip(parts, labels, strict=True):
        own = torch.full([1] * out.ndim, -1) if label is None else owners(label, t.shape, tape.rows)  # type: ignore[arg-type]
        owned.append(
            own.expand([s if d == dim else w for d, (s, w) in enumerate(zip(t.shape, own.shape, strict=True))])
        )
    widest = [max(o.shape[d] for o in owned) for d in range(out.ndim)]
    shaped = [o.expand([o.shape[d] if d == dim else w for d, w in enumerate(widest)]) for o in owned]
    return simplest(torch.cat(shaped, dim), tape.rows) if found else None


def stack(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    parts = list(args[0]) if args else flat(kwargs)
    dims = dims_of(argument(args, kwargs, 1, "dim", default=0), out.ndim)
    if dims is None or any(isinstance(tape.lineage(t), Many) for t in parts):
        return MANY
    dim, labels = dims[0], [tape.lineage(t) for t in parts]
    found = [label for label in labels if label is not None]
    if found and all(label == found[0] for label in found) and isinstance(found[0], Axis):
        return Axis(found[0].dim + (dim <= found[0].dim), found[0].before, found[0].after)
    owned = [
        (torch.full([1] * t.ndim, -1) if label is None else owners(label, t.shape, tape.rows)).unsqueeze(dim)  # type: ignore[arg-type]
        for t, label in zip(parts, labels, strict=True)
    ]
    widest = [max(o.shape[d] for o in owned) for d in range(out.ndim)]
    shaped = [o.expand([1 if d == dim else w for d, w in enumerate(widest)]) for o in owned]
    return simplest(torch.cat(shaped, dim), tape.rows) if found else None


def turned(place: int) -> Any:
    """flip and roll: the dimensions at ``place`` among the arguments are moved in themselves."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        x = first(args, kwargs)
        label = tape.lineage(x)
        if not isinstance(label, (Axis, Owners)):
            return label
        given = args[place:] if len(args) > place + 1 else argument(args, kwargs, place, "dims")
        dims = dims_of(given, x.ndim)
        if dims is None:
            return MANY
        if isinstance(label, Axis) and label.dim not in dims:
            return label
        own = owners(label, x.shape, tape.rows)
        moved = [d for d in dims if own.shape[d] > 1]
        if place == 1:
            return simplest(own.flip(moved), tape.rows)
        shifts = argument(args, kwargs, 1, "shifts")
        steps = (shifts,) if isinstance(shifts, int) else tuple(shifts)
        by = [s for s, d in zip(steps, dims, strict=True) if d in moved]
        return simplest(own.roll(by, moved) if moved else own, tape.rows)

    return rule


def pad(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Along the rows too: a shift, (1, -1), leaves the length as it was and moves every row."""
    x, sides = first(args, kwargs), argument(args, kwargs, 1, "pad")
    label = tape.lineage(x)
    if not isinstance(label, (Axis, Owners)):
        return label
    own = owners(label, x.shape, tape.rows)
    moved = [int(side) if own.shape[x.ndim - 1 - k // 2] > 1 else 0 for k, side in enumerate(sides)]
    if not any(moved):
        return label
    if argument(args, kwargs, 2, "mode", default="constant") != "constant":
        return MANY
    return simplest(torch.nn.functional.pad(own, moved, value=-1), tape.rows)


def unfold(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Tensor.unfold: windows along one dimension, with their inside as a last dimension."""
    x = first(args, kwargs)
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 1, "dimension"), x.ndim)
    if out.ndim != x.ndim + 1:
        return MANY
    if isinstance(label, Axis):
        return MANY if dims is None or label.dim == dims[0] else label
    return MANY if isinstance(label, Owners) else label


def masked_select(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, mask = first(args, kwargs), argument(args, kwargs, 1, "mask")
    label = tape.lineage(x)
    if not isinstance(label, (Axis, Owners)):
        return MANY
    shape = torch.broadcast_shapes(x.shape, mask.shape)  # type: ignore[no-untyped-call]
    if tape.lineage(mask) is not None and isinstance(tape.join([x, mask], shape, combines=False), Many):
        tape.suspect()
    return simplest(torch.masked_select(spread(label, x.shape, tape.rows), mask), tape.rows)


def scattered(place: int) -> Any:
    """index_add, index_copy, scatter, scatter_add: values at ``place`` are written or added at given indices."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        target, index = first(args, kwargs), argument(args, kwargs, 2, "index")
        values = argument(args, kwargs, place, "source", "src", "tensor", "value")
        dims = dims_of(argument(args, kwargs, 1, "dim"), target.ndim)
        old = tape.lineage(target)
        new = tape.lineage(values) if isinstance(values, Tensor) else None
        if dims is None or isinstance(old, Many) or isinstance(new, Many) or not isinstance(index, Tensor):
            return MANY
        if new is None:  # a constant at places that data chooses
            by = tape.lineage(index)
            same = index.ndim == target.ndim  # not so for index_add, whose indices are along dim
            if same and isinstance(by, Axis) and by.dim != dims[0] and index.shape[by.dim] == target.shape[by.dim]:
                return by if old is None else merged([old, by], target.shape, tape.rows)
            return by if isinstance(by, Many) else MANY
        _chosen(tape, index, new if index.ndim == values.ndim or dims[0] == 0 else None, values.shape)
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
    return landed if old is None else merged([old, landed], target.shape, tape.rows)


def packed(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """torch._pack_padded_sequence: the row numbers are packed in the same way."""
    x, lengths, batch_first = args
    label = tape.lineage(x)
    if not isinstance(label, (Axis, Owners)):
        return [label, None]
    own = owners(label, x.shape, tape.rows)
    thin = own.expand(*x.shape[:2], *own.shape[2:]).contiguous()
    if thin.numel() != x.shape[0] * x.shape[1]:
        return [MANY, None]
    rows, _ = torch._VF._pack_padded_sequence(thin.reshape(*x.shape[:2], 1), lengths, batch_first)
    return [simplest(rows.reshape(-1, *([1] * (x.ndim - 2))), tape.rows), None]


def unpacked(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """torch._pad_packed_sequence: padding belongs to the row that is padded."""
    data, sizes, batch_first, _, total = args
    label = tape.lineage(data)
    if not isinstance(label, (Axis, Owners)):
        return [label, None]
    own = owners(label, data.shape, tape.rows).reshape(data.shape[0], -1)
    if own.shape[1] != 1:
        return [MANY, None]
    padded, _ = torch._VF._pad_packed_sequence(own, sizes, batch_first, -1, total)
    return [simplest(padded.reshape(*padded.shape[:2], *([1] * (out[0].ndim - 2))), tape.rows), None]


def assigned(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Lineage | None:
    """target[index] = value: the label of the target afterwards.

    A constant target takes the label of its dimension that becomes the value's rows under the index; that is found by
    following each dimension through the index, not by its length.
    """
    target, index, value = args
    old = tape.lineage(target)
    new = tape.lineage(value) if isinstance(value, Tensor) else None
    by = [(t, label) for t in flat(index) if (label := tape.lineage(t)) is not None]
    if by:
        return _by_data(tape, target, old, by, value)
    if new is None or isinstance(old, Many):
        return old
    if isinstance(new, Many):
        return new
    part = target.detach()[index]
    if part.ndim < value.ndim:
        return MANY
    new = aligned(new, value.shape, part.shape, tape.rows)
    items = index if isinstance(index, tuple) else (index,)
    if isinstance(new, Axis) and all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        dims = [old.dim] if isinstance(old, Axis) else range(target.ndim) if old is None else []
        for dim in dims:
            label = Axis(dim, new.before, new.after)
            if _basic(label, target.shape, items) == new and (old is None or old == label):
                return label
    own = torch.full(tuple(target.shape), -1) if old is None else spread(old, target.shape, tape.rows).clone()
    before = own[index].clone()
    rows = owners(new, part.shape, tape.rows).expand(part.shape) if not isinstance(new, Many) else None
    if rows is None or bool(((before >= 0) & (before != rows)).any()):
        return MANY
    own[index] = rows
    return simplest(own, tape.rows)


def _by_data(
    tape: Labelled, target: Tensor, old: Lineage | None, by: Sequence[tuple[Tensor, Lineage]], value: Any
) -> Lineage | None:
    """target[index] = value where the index is data: a mask over leading dimensions acts as masked_fill does."""
    mask, label = by[0]
    if len(by) > 1 or mask.dtype != torch.bool or isinstance(label, Many) or flat(value):
        return MIXED if any(found == MIXED for _, found in by) else MANY
    own = owners(label, mask.shape, tape.rows)
    shown = Owners(own.reshape(*own.shape, *([1] * (target.ndim - mask.ndim))))
    return merged([shown] if old is None else [shown, old], target.shape, tape.rows)
