"""How many records are processed at a time: by the memory of their gradients, estimated from the model or measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sordino.gradients.layers.companion_norm import STACKED_ROWS
from sordino.gradients.measure import NotFinite
from sordino.gradients.passes import Setup, Values, contributions
from sordino.gradients.rows import Rows, chunks, take, tensors
from sordino.gradients.shards import Counting
from sordino.gradients.spectral import frozen
from sordino.gradients.sums.contributions import held_by
from sordino.gradients.survey import Survey

PRODUCT_BYTES = 192 << 20  # memory for the per-record gradients of a chunk if no chunk size is given
CHUNK_BYTES = 384 << 20  # memory for a chunk if its need was measured
SMALLEST_CHUNK = 16


def default_chunk(model: nn.Module, found: Survey, rows: Rows, records: int, held: int | None = None) -> int:
    """Equal chunks whose per-record weight gradients take about PRODUCT_BYTES, at least SMALLEST_CHUNK records each.

    With vectors of features as inputs there is one position per row, and only a record's activations are stored: no
    chunks. held: bytes per record, if they were measured (`held_bytes`): a chunk may also have as many records as fit
    into CHUNK_BYTES.
    """
    limit = most_records(model, found, rows, held)
    parts = 1 if limit is None else -(-records // limit)
    return max(1, -(-records // max(1, parts)))


def held_bytes(
    setup: Setup, rows: Rows, sizes: tuple[int, int], steps: Sequence[tuple[Values, float]], powers: Sequence[Any]
) -> int | None:
    """Bytes per record of a chunk, for what autograd saves and for the stored gradients, measured on the
    first two records; None if that is not possible. Nothing is drawn from the run's random numbers."""
    n, records = sizes
    few = next(iter(chunks(rows, n, records, 2, False)))
    data = take(rows.inputs, few.index, n), take(rows.targets, few.index, n)
    known = {t.untyped_storage().data_ptr() for t in (*setup.parameters.values(), *tensors(data))}
    saved: dict[int, int] = {}
    with frozen(powers), torch.random.fork_rng(devices=[]), Counting(saved).hooks():
        try:
            made = contributions(setup, data, few, steps)
        except NotFinite:
            return None
    for gradient in made.gradients.values():
        saved |= held_by(gradient)
    return sum(size for place, size in saved.items() if place not in known) // few.records


def most_records(model: nn.Module, found: Survey, rows: Rows, held: int | None = None) -> int | None:
    """The largest number of records in a chunk if the caller gives none; None: any number. held: as above."""
    first = next((t for t in tensors(rows.inputs) if t.ndim), None)
    if first is None or (first.ndim <= 2 and first.is_floating_point()):
        return None
    limit = max(SMALLEST_CHUNK, PRODUCT_BYTES // max(1, found.dense_bytes))
    limit = limit if held is None else max(limit, CHUNK_BYTES // max(1, held))
    if (stack := int(vars(model).get("rows_per_record", 1))) > 1:
        limit = max(1, min(limit, STACKED_ROWS // stack))
    return limit
