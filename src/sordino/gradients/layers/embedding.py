"""Tables: F.embedding, F.embedding_bag, table[ids]. Gradients stay row-sparse until the clipped sum."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.sums.contributions import Contribution, Lookup
from sordino.gradients.tape.layout import Frame
from sordino.gradients.tape.slots import Slot, Use, describe, hold
from sordino.gradients.tape.tape import Tape

_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_BAG = (
    *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse"),
    *("per_sample_weights", "include_last_offset", "padding_idx"),
)


def _refuse(label: str, call: dict[str, Any]) -> None:
    if call.get("max_norm") is not None:
        raise Refused(f"{label}: max_norm rewrites the table in the forward pass; set max_norm=None")
    if call.get("scale_grad_by_freq"):
        raise Refused(
            f"{label}: scale_grad_by_freq divides by counts over the batch, so records interact; set it to False"
        )


def embedding(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = {**dict(zip(_EMBEDDING, args, strict=False)), **kwargs}
    slot = tape.slot(call["weight"])
    ids, skip = call["input"], call.get("padding_idx")
    if slot is None or tape.slot(ids) is not None:
        return NotImplemented
    _refuse(describe(func, (slot,)), call)
    size = slot.value.shape[0]
    skip = None if skip is None else skip % size
    return _lookup(tape, func, slot, ids, skip)


def constant_places(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """A table indexed with constants (position ids): the same for all rows, and recorded as a lookup."""
    call = {**dict(zip(_EMBEDDING, args, strict=False)), **kwargs}
    slot, ids = tape.slot(call["weight"]), call["input"]
    if slot is None or tape.slot(ids) is not None or call.get("padding_idx") is not None:
        return tape.derive(func, args, kwargs)
    _refuse(describe(func, (slot,)), call)
    return tape.derive(func, args, kwargs, looked_up=(slot, ids))


def _lookup(tape: Tape, func: Any, slot: Slot, ids: Tensor, skip: int | None) -> Tensor:
    size = slot.value.shape[0]

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        g = frame.fold(gradient, 1, gradient=True)  # (m, S, d)
        return [(slot, Lookup(frame.fold(ids, 0).long(), g, size, skip))]

    output = F.embedding(ids, slot.value)
    lead = tuple(range(output.ndim - 1))
    return tape.tap(output, Use(func, (slot,), output.shape, lead, emit, hold(ids)))


def getitem(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """table[ids] with a table of two dimensions and one index tensor; table[i] with one integer, which is a part
    of the parameter (the weights of one expert)."""
    table, ids = args
    slot = tape.slot(table)
    if slot is not None and isinstance(ids, Tensor) and not ids.ndim and ids.dtype in (torch.int64, torch.int32):
        return tape.derive(func, (table, int(ids)), kwargs)
    if (
        slot is None
        or slot.value.ndim != 2
        or not isinstance(ids, Tensor)
        or ids.dtype not in (torch.int64, torch.int32)
    ):
        return NotImplemented
    return _lookup(tape, func, slot, ids % slot.value.shape[0], None)


def bag(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Sums and means of bags given as a matrix of ids (bags, L); other forms use the fallback."""
    call = {**dict(zip(_BAG, args, strict=False)), **kwargs}
    slot, ids = tape.slot(call["weight"]), call["input"]
    if slot is None or ids.ndim != 2 or call.get("mode", "mean") not in ("sum", "mean"):
        return NotImplemented
    per_sample = call.get("per_sample_weights")
    if tape.slot(per_sample) is not None:
        return NotImplemented
    _refuse(describe(func, (slot,)), call)
    size, padding = slot.value.shape[0], call.get("padding_idx")
    skip = None if padding is None else padding % size

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        share = torch.ones_like(ids, dtype=gradient.dtype) if per_sample is None else per_sample.detach()
        if skip is not None:
            share = share * (ids != skip)
        if call.get("mode", "mean") == "mean":
            share = share / (ids.shape[1] if skip is None else (ids != skip).sum(1, keepdim=True).clamp_min(1))
        g = frame.fold(gradient[:, None, :] * share[:, :, None], 2, gradient=True).flatten(1, 2)  # (m, S·L, d)
        return [(slot, Lookup(frame.fold(ids, 1).flatten(1).long(), g, size))]

    options = {k: call[k] for k in ("mode", "per_sample_weights", "padding_idx") if k in call}
    output = F.embedding_bag(ids, slot.value, **options)
    return tape.tap(output, Use(func, (slot,), output.shape, (0,), emit, hold(ids)))
