"""Batch normalisation within each record: over a private row and its public companions, and over no other record.

The rows of a pass are ordered as (rows_per_record, records, …), private rows first, flattened into one dimension: row r
belongs to record r mod records. The same memory viewed as (rows_per_record, records · channels, …) has one channel for
each channel of each record, so one batch_norm call computes each record's statistics over its own rows, without a copy.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from sordino.errors import InputError
from sordino.gradients.labels.lineage import MANY, ROWS, Axis
from sordino.gradients.layers.elementwise import stand_in
from sordino.gradients.tape.tape import Tape

STACKED_ROWS = 128
"""Rows, companions included, of one pass. Measured on ResNet-8: larger passes leave the cache and are slower."""


def companion_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, rows_per_record: int, eps: float = 1e-5
) -> Tensor:
    """nn.BatchNorm in training mode, applied to each record's ``rows_per_record`` rows separately.

    No running statistics are read or written. x: (rows_per_record · records, channels, …), interleaved as above.
    """
    if has_torch_function_variadic(x, weight, bias):
        given = (x, weight, bias)
        return handle_torch_function(companion_norm, given, *given, rows_per_record, eps)
    records = _records(x, rows_per_record)
    scale, shift = (None if t is None else t.repeat(records) for t in (weight, bias))
    return _normalised(x, scale, shift, rows_per_record, records, eps)


def rule(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """Scale and shift as (records, channels), one for each record: autograd's own kernel returns their gradients
    separately."""
    x, weight, bias, rows_per_record, eps = args
    if tape.slot(x) is not None:
        return NotImplemented
    records = _records(x, rows_per_record)
    label = ROWS if tape.lineage(x) == Axis(0, before=rows_per_record) else MANY

    def own(t: Tensor | None) -> Tensor | None:
        slot = tape.slot(t)
        if slot is None:
            return None if t is None else t.repeat(records)
        return stand_in(tape, func, slot, (records, *slot.value.shape), label).flatten()

    return _normalised(x, own(weight), own(bias), rows_per_record, records, eps)


def _records(x: Tensor, rows_per_record: int) -> int:
    if x.ndim < 2 or x.shape[0] % rows_per_record:
        raise InputError(
            f"companion_norm: {tuple(x.shape)} is not {rows_per_record} rows for each record: the network must keep "
            "its rows in dimension 0"
        )
    return x.shape[0] // rows_per_record


def _normalised(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, rows_per_record: int, records: int, eps: float
) -> Tensor:
    if not x.shape[0]:
        return x
    beside = x.reshape(rows_per_record, records * x.shape[1], *x.shape[2:])
    return F.batch_norm(beside, None, None, scale, shift, True, 0.0, eps).reshape(x.shape)
