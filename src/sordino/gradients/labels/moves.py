"""Labels through operations that only move values: views, selections, concatenations, scatters.

If the label does not carry over directly, the same operation is applied to the row numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.labels.flow import Labelled, Labels, argument, dims_of, first, flat
from sordino.gradients.labels.lineage import (
    MANY,
    Axis,
    Lineage,
    Many,
    Owners,
    aligned,
    cut,
    owners,
    permuted,
    reshaped,
    simplest,
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


def order_of(name: str, x: Tensor, args: Any, kwargs: Any) -> list[int] | None:
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
        order = order_of(name, x, args, kwargs)
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
        return MANY  # squeeze_: its previous shape is not available
    given = argument(args, kwargs, 1, "dim")
    dims = tuple(range(x.ndim)) if given is None else dims_of(given, x.ndim) or ()
    gone = [d for d in dims if x.shape[d] == 1]
    if isinstance(label, Axis):
        return Axis(label.dim - sum(d < label.dim for d in gone), label.before, label.after)
    return Owners(label.own.reshape([s for d, s in enumerate(label.own.shape) if d not in gone]))


def expand(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x, like = first(args, kwargs), argument(args, kwargs, 1, "other")
    label = tape.lineage(x)
    if label is None and isinstance(like, Tensor) and like.shape == out.shape:
        return tape.lineage(like)  # expand_as: constants with the rows of the other
    return aligned(label, x.shape, out.shape, tape.rows) if isinstance(label, (Axis, Owners)) else label


def repeat(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Repeats the whole tensor along each dimension."""
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
    return Owners(label.own.repeat([*([1] * pad), *sizes]))


def repeat_interleave(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Repeats each index along ``dim`` several times in a row."""
    x = first(args, kwargs)
    label, times = tape.lineage(x), argument(args, kwargs, 1, "repeats")
    if times is None or (isinstance(times, Tensor) and tape.lineage(times) is not None):
        tape.suspect()  # the repetitions of earlier values determine the position of later ones
        return MANY
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
    if any(tape.lineage(t) is not None for t in (*flat(args[1:]), *flat(kwargs)) if t is not x):
        tape.suspect()  # where it is divided
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


def cat(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    parts = [t for t in args[0] if t.numel()] if args else flat(kwargs)
    dims = dims_of(argument(args, kwargs, 1, "dim", "axis", default=0), out.ndim)
    if dims is None or any(isinstance(tape.lineage(t), Many) for t in parts):
        return MANY
    return joined(tape, parts, dims[0], out)


def joined(tape: Labelled, parts: Sequence[Tensor], dim: int, out: Tensor) -> Labels:
    """Consecutive parts along ``dim``; constants among them get the label of the others if that is possible."""
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
    """flip and roll: moves values within the dimensions given by the argument at ``place``."""

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
    """Padding along the rows too: a shift, (1, -1), preserves the length and moves every row."""
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
    """Tensor.unfold (windows along one dimension, whose values become the last dimension) and F.unfold."""
    x = first(args, kwargs)
    label, dims = tape.lineage(x), dims_of(argument(args, kwargs, 1, "dimension"), x.ndim)
    if out.ndim != x.ndim + 1:  # F.unfold: (N, C, H, W) to (N, patch, places)
        return label if x.ndim == 4 and out.ndim == 3 and label in (None, Axis(0)) else MANY
    if isinstance(label, Axis):
        return MANY if dims is None or label.dim == dims[0] else label
    return MANY if isinstance(label, Owners) else label


def packed(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """torch._pack_padded_sequence: the row numbers are packed in the same way."""
    x, lengths, batch_first = args
    label = tape.lineage(x)
    if tape.lineage(lengths) is not None:
        tape.suspect()  # the longest of all rows determines the shape
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
