"""The engine's input and output: rows, the record of each row, and the clipped sum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import InputError, Refused


@dataclass(frozen=True)
class Rows:
    """Rows of data and the record (the person) that each one belongs to.

    Args:
        inputs: a tensor (``model(x)``), a tuple or list (``model(*x)``) or a mapping (``model(**x)``); tensors have
            rows in dimension 0, everything else is passed on unchanged.
        targets: any nest of tensors with rows in dimension 0, passed to the loss.
        record: (rows,) int64 in [0, records); None means that row i is record i.
        records: the number of records; None: the largest index plus one.
        coefficient: (rows,) the weight of each row's loss; None means 1.
    """

    inputs: Any
    targets: Any
    record: Tensor | None = None
    records: int | None = None
    coefficient: Tensor | None = None


@dataclass(frozen=True)
class ClippedSum:
    """Σ over records of the clipped record gradient, per trainable parameter.

    norms: (records,) the norm of each record's gradient before clipping (l1 for L1Clip, else l2); NaN or inf for
        a dropped record. Private: never publish it. dropped: how many records were not finite and contributed
        zero. losses: (rows,) the unweighted loss of each row, at the last iterate given. Private as well.
    dtype: the type to which the sums may be rounded after noise is added: float32 if no parameter is wider; None if it
    is not known. It depends on the model alone, not on the records.
    """

    sums: dict[str, Tensor]
    norms: Tensor
    dropped: int
    losses: Tensor
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Chunk:
    """Some records with all their rows. ``slots`` (records, k) holds the position of each record's rows within the
    chunk, −1 where a record has fewer than k; None when row i is record i."""

    index: Tensor | slice  # which rows of the whole batch
    ids: Tensor | slice  # which records of the whole batch
    records: int
    rows: int
    slots: Tensor | None
    weight: Tensor | None  # (rows,) factor of each row's loss

    def filled(self, rows: int, total: int) -> Chunk:
        """Pads to ``rows`` rows with copies of the last row that have weight zero and belong to additional records,
        which come last. total: the number of rows of the whole batch.

        A chunk of k rows per record is padded by whole records: ``rows`` is then a multiple of k.
        """
        more = rows - self.rows
        index = _numbers(self.index, total)
        weight = torch.ones(self.rows) if self.weight is None else self.weight
        slots, records = self.slots, more
        if slots is not None:
            places = torch.arange(self.rows, rows)
            if bool((slots < 0).any()):
                own = torch.full((more, slots.shape[1]), -1)
                own[:, 0] = places
            else:
                own = places.reshape(-1, slots.shape[1])
            slots, records = torch.cat([slots, own]), len(own)
        return replace(
            self,
            index=torch.cat([index, index[-1:].expand(more)]),
            records=self.records + records,
            rows=rows,
            slots=slots,
            weight=torch.cat([weight, weight.new_zeros(more)]),
        )

    def by_record(self, rows: int, records: int) -> list[Chunk]:
        """The same records, each in a chunk of its own."""
        index, ids = _numbers(self.index, rows), _numbers(self.ids, records)
        parts = []
        for i in range(self.records):
            own = torch.tensor([i]) if self.slots is None else self.slots[i][self.slots[i] >= 0]
            places = None if self.slots is None else torch.arange(len(own))[None]
            weight = None if self.weight is None else self.weight[own]
            parts.append(Chunk(index[own], ids[i : i + 1], 1, len(own), places, weight))
        return parts


def _numbers(places: Tensor | slice, size: int) -> Tensor:
    return torch.arange(size)[places] if isinstance(places, slice) else places


def tree_map(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(fn, t) for t in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(tree_map(fn, t) for t in tree)
    if isinstance(tree, Mapping):
        return {k: tree_map(fn, v) for k, v in tree.items()}
    return tree


def placed(rows: Rows, model: nn.Module) -> Rows:
    """The rows on the device of the model's parameters; copied once, asynchronously from pinned memory."""
    first = next(model.parameters(), None)
    if first is None or first.device.type == "cpu":
        return rows
    moved = [
        tree_map(lambda t: (t.pin_memory() if first.is_cuda else t).to(first.device, non_blocking=True), part)
        for part in (rows.inputs, rows.targets, rows.coefficient)
    ]
    return Rows(moved[0], moved[1], rows.record, rows.records, moved[2])


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from tensors(item)
    elif tree is not None and isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors(item)


def count(rows: Rows) -> int:
    """The number of rows, from the record index, the coefficients, the targets or the inputs, in this order."""
    for tree in (rows.record, rows.coefficient, rows.targets, rows.inputs):
        for t in tensors(tree):
            if t.ndim:
                return t.shape[0]
    raise InputError(
        "Rows: no tensor with a row dimension among targets and inputs; give tensors with rows in dimension 0"
    )


def checked(rows: Rows) -> tuple[int, int]:
    """(rows, records), after checking that the index, the coefficients and the data are consistent."""
    if torch.is_inference_mode_enabled():
        raise InputError("gradients are computed here: call it outside of torch.inference_mode()")
    for part, tree in (("inputs", rows.inputs), ("targets", rows.targets)):
        for t in tensors(tree):
            _check_form(part, t)
    n = count(rows)
    for part, tree in (("inputs", rows.inputs), ("targets", rows.targets)):
        sizes = {t.shape[0] for t in tensors(tree) if t.ndim}
        if sizes - {n}:
            raise InputError(
                f"Rows: {part} have first dimension {sorted(sizes)} but there are {n} rows; every tensor has one entry "
                "per row in dimension 0 (what all rows share belongs in a buffer of the model)"
            )
    if rows.record is None:
        if rows.records not in (None, n):
            raise InputError(f"Rows: records={rows.records} but there are {n} rows and no record index")
        return n, n
    if rows.record.shape != (n,) or rows.record.dtype != torch.int64:
        raise InputError(
            f"Rows: record must be int64 of shape ({n},), got {rows.record.dtype} {tuple(rows.record.shape)}"
        )
    top = int(rows.record.max()) + 1 if n else 0
    records = top if rows.records is None else rows.records
    if n and (top > records or int(rows.record.min()) < 0):
        raise InputError(f"Rows: record index must lie in [0, {records}), found {int(rows.record.min())} to {top - 1}")
    return n, records


def _check_form(part: str, t: Tensor) -> None:
    """InputError for tensors whose rows can't be selected: nested, sparse and quantized ones, or without data."""
    found = "nested" if t.is_nested else "" if t.layout == torch.strided else str(t.layout).removeprefix("torch.")
    found = found or ("quantized" if t.is_quantized else "meta" if t.is_meta else "")
    if found:
        raise InputError(
            f"Rows: {part} have a tensor that is {found.replace('_', ' ').strip()}, whose rows can't be selected: give "
            "a dense one (.to_dense(), .dequantize(); nested: to_padded_tensor with a public length)"
        )
    if t.is_inference():
        raise InputError(
            f"Rows: {part} have a tensor that was made in torch.inference_mode(), which takes part in no gradient: "
            "make it under torch.no_grad() instead, or give its .clone()"
        )


def take(tree: Any, index: Tensor | slice, n: int) -> Any:
    """The given rows of every tensor; a tensor without dimensions is shared by all rows."""
    if isinstance(index, slice) and index == slice(0, n):
        return tree
    return tree_map(lambda t: t[index] if t.ndim else t, tree)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (list, tuple)):
        return model(*inputs)
    return model(inputs)


def chunks(rows: Rows, n: int, records: int, size: int | None, mean: bool) -> Iterator[Chunk]:
    """Divides the records into chunks of at most ``size`` records; all rows of a record are in one chunk.

    Records with equal numbers of rows are grouped, so that little padding is needed.
    """
    if n == 0 or records == 0:
        return
    weight = rows.coefficient
    if weight is not None and weight.shape != (n,):
        raise InputError(f"Rows: coefficient must have shape ({n},), got {tuple(weight.shape)}")
    if rows.record is None:
        step = size or n
        for lo in range(0, n, step):
            part = slice(lo, min(lo + step, n))
            m = part.stop - part.start
            yield Chunk(part, part, m, m, None, None if weight is None else weight[part])
        return
    counts = torch.bincount(rows.record, minlength=records)
    if mean:
        per_row = 1.0 / counts[rows.record].to(torch.float64)
        weight = per_row if weight is None else weight * per_row
    by_record = torch.argsort(rows.record, stable=True)
    starts = torch.cumsum(counts, 0) - counts
    order = torch.argsort(counts, stable=True)
    order = order[counts[order] > 0]
    step = size or max(len(order), 1)
    for lo in range(0, len(order), step):
        ids = order[lo : lo + step]
        k = int(counts[ids].max())
        offsets = torch.arange(k)
        valid = offsets < counts[ids, None]  # (m, k)
        slots = torch.full((len(ids), k), -1)
        slots[valid] = torch.arange(int(valid.sum()))
        index = by_record[(starts[ids, None] + offsets)[valid]]
        single = k == 1
        part_weight = None if weight is None else weight[index]
        yield Chunk(index, ids, len(ids), len(index), None if single else slots, part_weight)


def check_losses(losses: Any, rows: int) -> None:
    """Raises Refused unless there is one loss per row."""
    got: Any = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if got != (rows,):
        kind = f"a tensor with {len(got)} dimensions" if isinstance(got, tuple) else f"a {got}"
        raise Refused(
            f"the loss returned {kind}; it must return one value per row, shape (rows,): use reduction='none' and "
            "reduce each row's own values (for example .flatten(1).mean(1))",
            private=f"it returned {got} for {rows} rows",
        )


class Scattered:
    """A vector that is given in pieces; coordinates that no piece covers are zero."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pieces: list[tuple[Tensor | slice, Tensor]] = []

    def put(self, places: Tensor | slice, values: Tensor) -> None:
        self.pieces.append((places, values))

    def whole(self, kind: torch.dtype, device: torch.device) -> Tensor:
        if len(self.pieces) == 1 and self.pieces[0][0] == slice(0, self.size):
            return self.pieces[0][1]
        out = torch.zeros(self.size, dtype=kind, device=device)
        for places, values in self.pieces:
            out[places] = values
        return out
