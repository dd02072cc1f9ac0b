"""Parameters that are combined with data element by element (position tables, LayerScale, scales and shifts), or
concatenated with it (cls_token.expand(B, …) in torch.cat).

The parameter is replaced by a leaf of the result's shape that needs no memory. Autograd then computes the gradient of
every element, and a record's part is the sum over the dimensions that were expanded. A parameter that was expanded
before, or a table that was indexed with constants, is the same for all rows until it is combined with data; there the
data's label tells which positions belong to which row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.labels.book import Book
from sordino.gradients.labels.lineage import MANY, Axis, Lineage, Many, covers
from sordino.gradients.sums.contributions import Contribution, Dense, Lookup
from sordino.gradients.tape.layout import Frame
from sordino.gradients.tape.slots import Slot, Use
from sordino.gradients.tape.tape import Tape

_BASE = (
    "add sub mul div true_divide rsub maximum minimum max min pow where lerp addcmul addcdiv atan2 hypot "
    "logaddexp masked_fill fmax fmin copysign multiply divide subtract"
)
_OPERATORS = "add radd iadd sub rsub isub mul rmul imul truediv rtruediv itruediv pow rpow"
ELEMENTWISE = frozenset(
    [*_BASE.split(), *(n + "_" for n in _BASE.split()), *(f"__{n}__" for n in _OPERATORS.split()), "__setitem__"]
)
STRETCHING = frozenset(("expand", "expand_as", "broadcast_to", "repeat", "tile"))
SHAPE_ONLY = frozenset(("to", "type_as", "view_as", "reshape_as", "expand_as", "is_same_size", "device_of"))


def stretched_dims(source: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The dimensions of ``shape`` along which a tensor of shape ``source`` is repeated."""
    pad = len(shape) - len(source)
    return tuple(d for d in range(len(shape)) if d < pad or source[d - pad] == 1)


def stand_in(tape: Tape, func: Any, slot: Slot, shape: Sequence[int], label: Lineage) -> Tensor:
    """Replaces the slot by a leaf of the given shape and registers the use. label: the rows of that shape."""
    if slot.looked_up is not None:
        return _looked_up(tape, func, slot, shape, label)
    while slot.stretched is not None:
        slot = slot.stretched
    lead = stretched_dims(slot.value.shape, shape)
    kept = [d for d in range(len(shape)) if d not in lead]
    moved = torch.Size([shape[d] for d in (*lead, *kept)])

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        layout = frame.layout
        if isinstance(layout, Axis) and layout.before == layout.after == 1 and frame.slots is None:
            rows = lead[layout.dim]
            rest = tuple(d for d in lead if d != rows and gradient.shape[d] > 1)
            g = gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
            total = g.sum(rest, keepdim=True) if rest else g
            return [(slot, Dense(total.movedim(rows, 0).reshape(-1, *slot.value.shape)))]
        g = frame.fold(gradient.permute((*lead, *kept)), len(kept), gradient=True)
        return [(slot, Dense(g.sum(1).reshape(-1, *slot.value.shape)))]

    use = Use(func, (slot,), moved, tuple(range(len(lead))), emit, permute=(*lead, *kept))
    return tape.stand(slot.value, shape, use, label)


def _looked_up(tape: Tape, func: Any, slot: Slot, shape: Sequence[int], label: Lineage) -> Tensor:
    """table[ids] with constant ids, (…, d), expanded to ``shape``: gradients stay row-sparse."""
    assert slot.looked_up is not None
    table, ids = slot.looked_up
    ids = ids.expand(tuple(shape[:-1]))
    size = table.value.shape[0]

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        g = frame.fold(gradient, 1, gradient=True)
        return [(table, Lookup(frame.fold(ids, 0).long(), g, size))]

    use = Use(func, (table,), torch.Size(shape), tuple(range(len(shape) - 1)), emit)
    return tape.stand(slot.value, shape, use, label)


def placeable(slot: Slot, shape: Sequence[int], label: Lineage) -> bool:
    """Can a leaf of this shape replace the slot, that is, is the slot constant along the dimension of the rows?"""
    if slot.looked_up is not None:
        return shape[-1] == slot.value.shape[-1]
    while slot.stretched is not None:
        slot = slot.stretched
    lead = stretched_dims(slot.value.shape, shape)
    return covers(label, lead) if not isinstance(label, Many) else bool(lead)


def as_data(tape: Tape, slot: Slot, shape: Sequence[int], label: Lineage) -> Tensor | None:
    """For a tensor made of parameters and a constant that contains the rows (positions encoded for every row of a
    mask): repeats the operation with the constant treated as data of these rows. None if the result does not belong to
    them."""
    if slot.made is None or not isinstance(label, Axis) or tuple(slot.value.shape) != tuple(shape):
        return None
    again = _once_more(tape, slot)
    return again if again is not None and tape.lineage(again) == label else None


def _once_more(tape: Tape, slot: Slot) -> Tensor | None:
    """Repeats the operations that made the slot, with rows in dimension 0 of the constant; the result confirms the
    label."""
    assert slot.made is not None
    func, args, kwargs = slot.made
    inner = tape.slot(args[0])
    if inner is not None and inner.made is not None:
        start = _once_more(tape, inner)
        if start is None:
            return None
        with tape:
            return func(start, *args[1:], **kwargs)  # type: ignore[no-any-return]
    constants = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and tape.slot(t) is None]
    if len(constants) != 1 or not constants[0].ndim or constants[0].shape[0] % tape.rows:
        return None
    stand = constants[0].detach()
    tape.book.put(stand, Axis(0, after=stand.shape[0] // tape.rows))
    with tape:
        return func(*(stand if a is constants[0] else a for a in args), **kwargs)  # type: ignore[no-any-return]


def _result_shape(func: Any, args: Any, tensors: Sequence[Tensor]) -> torch.Size:
    name = func.__name__
    if (name.endswith("_") and not name.startswith("__")) or name.startswith("__i"):
        return args[0].shape  # type: ignore[no-any-return]
    out = [1] * max(t.ndim for t in tensors)
    for t in tensors:
        for place, size in enumerate(reversed(t.shape), 1):
            if out[-place] == 1:
                out[-place] = size
            elif size not in (1, out[-place]):
                break
        else:
            continue
        return torch.Size(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]
    return torch.Size(out)  # what torch.broadcast_shapes returns after a hundred calls, for symbolic sizes


def broadcast(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    if func.__name__ == "__setitem__":
        return _assign(tape, func, args)
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    if any(isinstance(a, (list, tuple)) for a in args) or "out" in kwargs or "dim" in kwargs:
        return NotImplemented
    try:
        shape = _result_shape(func, args, tensors)
    except RuntimeError:
        return NotImplemented
    label = tape.joined([t for t in tensors if tape.is_data(t)], shape)
    slots = [s for s in map(tape.slot, tensors) if s is not None]
    revived: dict[Slot, Tensor] = {}
    for slot in slots if tape.rows > 1 else []:
        if placeable(slot, shape, label):
            continue
        again = as_data(tape, slot, shape, label)
        if again is None:
            return NotImplemented
        revived[slot] = again

    def stand(t: Any) -> Any:
        slot = tape.slot(t)
        if slot is None:
            return t
        return revived[slot] if slot in revived else stand_in(tape, func, slot, shape, label)

    return func(*(stand(a) for a in args), **{k: stand(v) for k, v in kwargs.items()})


def _assign(tape: Tape, func: Any, args: Any) -> Any:
    """data[index] = slot."""
    target, index, value = args
    slot, label = tape.slot(value), tape.lineage(target)
    if slot is None or tape.slot(target) is not None:
        return NotImplemented
    part = target.detach()[index]
    if label is None or isinstance(label, Many):
        rows: Lineage = MANY
    else:
        found = Book(tape.rows)
        found.put(target, label)
        found.follow(Tensor.__getitem__, (target, index), {}, part)
        rows = found.lineage(part) or MANY
    func(target, index, stand_in(tape, func, slot, part.shape, rows))


def cat(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """torch.cat of slots with data: what is concatenated belongs to the rows of the neighbouring data."""
    parts = list(args[0] if args else kwargs["tensors"])
    dim = (args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))) % max(1, parts[0].ndim)
    labels = [label for t in parts if (label := tape.lineage(t)) is not None]
    label = labels[0] if labels and all(found == labels[0] for found in labels) else MANY
    if tape.rows > 1 and (not isinstance(label, Axis) or label.dim == dim):
        return NotImplemented
    joined = []
    for t in parts:
        slot = tape.slot(t)
        if slot is not None and tape.rows > 1 and not placeable(slot, t.shape, label):
            return NotImplemented
        joined.append(t if slot is None else stand_in(tape, func, slot, t.shape, label))
    return torch.cat(joined, dim)


def stretch(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """expand, repeat and the like of a slot: the result is the same for all rows and is recorded as a repetition."""
    slot = tape.slot(args[0])
    assert slot is not None
    shape = func(slot.value, *args[1:], **kwargs).shape
    pad = len(shape) - slot.value.ndim
    plain = all(slot.value.shape[d - pad] in (1, shape[d]) for d in range(pad, len(shape)))
    whole = slot.looked_up is None and slot.source is None
    tiled = None
    if not pad and not plain and shape[1:] == slot.value.shape[1:]:  # repeat(times, 1, 1)
        tiled = args[0]
    return tape.derive(func, args, kwargs, stretched=slot if plain and whole else None, tiled=tiled)
