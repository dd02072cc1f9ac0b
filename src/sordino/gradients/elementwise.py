"""Parameters that meet data element by element (position tables, LayerScale, scales and shifts), and parameters
stretched over the batch (cls_token.expand(B, …)).

The parameter's place is taken by a leaf of the result's shape that costs no memory; autograd itself then gives the
gradient of every element, and a record's share is the sum over the dimensions that were stretched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.contributions import Contribution, Dense
from sordino.gradients.layout import Axis, Frame
from sordino.gradients.tape import Slot, Tape, Use

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


def stand_in(tape: Tape, func: Any, slot: Slot, shape: Sequence[int]) -> Tensor:
    """A leaf of the given shape in the slot's place, as a use."""
    lead = stretched_dims(slot.value.shape, shape)
    kept = [d for d in range(len(shape)) if d not in lead]
    moved = torch.Size([shape[d] for d in (*lead, *kept)])

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        if isinstance(frame.layout, Axis) and frame.layout.block == 1 and frame.slots is None:
            rows = lead[frame.layout.dim]
            rest = tuple(d for d in lead if d != rows and gradient.shape[d] > 1)
            g = gradient.float() if gradient.dtype in (torch.bfloat16, torch.float16) else gradient
            total = g.sum(rest, keepdim=True) if rest else g
            return [(slot, Dense(total.movedim(rows, 0).reshape(-1, *slot.value.shape)))]
        g = frame.fold(gradient.permute(*lead, *kept), len(kept), gradient=True)
        return [(slot, Dense(g.sum(1).reshape(-1, *slot.value.shape)))]

    use = Use(func, (slot,), moved, tuple(range(len(lead))), emit, permute=(*lead, *kept))
    return tape.stand(slot, shape, use)


def _result_shape(func: Any, args: Any, tensors: Sequence[Tensor]) -> torch.Size:
    name = func.__name__
    if (name.endswith("_") and not name.startswith("__")) or name.startswith("__i"):
        return args[0].shape  # type: ignore[no-any-return]
    return torch.Size(torch.broadcast_shapes(*(t.shape for t in tensors)))  # type: ignore[no-untyped-call]


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
    slots = [s for s in map(tape.slot, tensors) if s is not None]
    if any(not _stretches(s, shape) for s in slots) and tape.rows > 1:
        return NotImplemented

    def stand(t: Any) -> Any:
        slot = tape.slot(t)
        if slot is None:
            return t
        return stand_in(tape, func, slot, shape)

    out = func(*(stand(a) for a in args), **{k: stand(v) for k, v in kwargs.items()})
    return tape.mark(out)


def _stretches(slot: Slot, shape: Sequence[int]) -> bool:
    return bool(stretched_dims(slot.value.shape, shape))


def _assign(tape: Tape, func: Any, args: Any) -> Any:
    target, index, value = args
    slot = tape.slot(value)
    if slot is None or tape.slot(target) is not None:
        return NotImplemented
    shape = target.detach()[index].shape
    func(target, index, stand_in(tape, func, slot, shape))
    return tape.mark(target)


def stretch(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """expand, repeat and the like of a slot: a use if a dimension as long as the batch comes out, else a new slot."""
    slot = tape.slot(args[0])
    assert slot is not None
    shape = func(slot.value, *args[1:], **kwargs).shape
    new = [d for d in stretched_dims(slot.value.shape, shape) if shape[d] == tape.rows]
    is_view = "repeat" not in func.__name__ and func.__name__ != "tile"
    pad = len(shape) - slot.value.ndim
    plain = is_view or all(
        slot.value.shape[d - pad] == 1 or slot.value.shape[d - pad] == shape[d] for d in range(pad, len(shape))
    )
    if tape.rows == 1 or not new or not plain:
        return tape.derive(func, args, kwargs)
    tape.candidates += 1
    if tape.candidates - 1 in tape.shared:
        return tape.derive(func, args, kwargs)
    out = stand_in(tape, func, slot, shape)
    tape.uses[-1].candidate = tape.candidates - 1
    return out if is_view else tape.mark(out.clone())
