"""Made-up records that may violate a bound: the choices of an adversary who controls one record.

Every candidate is one record of the dataset's own shape. A bound on one record's contribution holds for all of them,
so one counter-example refutes it. There are several families: extreme, tiny, huge, not finite, cancelling or repeating
the other records, and a random search around the record with the largest effect.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.split import Split


@dataclass(frozen=True, eq=False)
class Record:
    """One made-up record and a description of it."""

    kind: str
    inputs: Tensor
    target: Tensor


def candidates(split: Split, classes: int, *, quick: bool, seed: int = 0) -> list[Record]:
    """Made-up records in the dtype of the split, those most likely to violate a bound first."""
    made = list(_floats(split, quick) if split.inputs.is_floating_point() else _words(split, seed))
    labels = _labels(split, classes, quick)
    kept = [
        Record(kind, row, label) for number, (kind, row) in enumerate(made) for label in _some(labels, number, quick)
    ]
    return kept


def mutated(record: Record, generator: torch.Generator) -> Record:
    """A variant of a record for the search: scaled, or with some entries replaced by extreme ones."""
    row = record.inputs.clone()
    if not row.is_floating_point():
        place = torch.randint(0, row.numel(), (1,), generator=generator)
        row.view(-1)[place] = row.view(-1)[torch.randint(0, row.numel(), (1,), generator=generator)]
        return Record(f"search from {record.kind}", row, record.target)
    if float(torch.rand(1, generator=generator)) < 0.5:
        row = row * math.exp(3.0 * float(torch.randn(1, generator=generator)))
    else:
        places = torch.rand(row.shape, generator=generator) < 0.1
        finite = row[row.isfinite()]
        size = float(finite.abs().max()) if finite.numel() else 1.0
        row = torch.where(places, size * torch.randn(row.shape, generator=generator).to(row.dtype), row)
    return Record(f"search from {record.kind}".replace("search from search from", "search from"), row, record.target)


def _floats(split: Split, quick: bool) -> Iterator[tuple[str, Tensor]]:
    some = split.inputs[0]
    ones, dtype = torch.ones_like(some), some.dtype
    signs = torch.where(torch.arange(some.numel()) % 2 == 0, 1.0, -1.0).reshape(some.shape).to(dtype)
    wide = dtype == torch.float64
    tiny, huge = (1e-200, 1e200) if wide else (1e-30, 1e18)
    least, most = torch.finfo(dtype).smallest_normal / 2**20, torch.finfo(dtype).max
    single = torch.zeros_like(some)
    single.view(-1)[some.numel() // 2] = 1.0
    # these two moderate records are opposite under one label: replace-one may change a sum by twice the bound
    yield "gentle", 0.3 * ones
    yield "extreme", 1e3 * ones
    yield "gentle, negative", -0.3 * ones
    yield "cancelling a record", -split.inputs[0]
    yield "a record again", split.inputs[0].clone()
    yield "tiny", tiny * signs
    yield "huge", huge * signs
    yield "one NaN", torch.where(single == 1.0, math.nan, some)
    yield "one large pixel", 1e4 * single
    yield "alternating", 50.0 * signs
    if quick:
        return
    yield "zeros", torch.zeros_like(some)
    yield "subnormal", least * signs
    yield "one subnormal pixel", least * single
    yield "the largest number", most * signs
    yield "one infinity", torch.where(single == 1.0, math.inf, some)
    yield "all NaN", math.nan * ones
    yield "large and tiny", torch.where(signs > 0, ones, tiny * ones)
    yield "just above one", (1.0 + 1e-6) * ones / math.sqrt(some.numel())
    yield "negative", -1e3 * ones
    yield "a record, a thousand times", 1e3 * split.inputs[0]
    yield "cancelling all others", -split.inputs[1:].sum(0)
    yield "huge and finite sums", math.sqrt(most) * signs / some.numel()
    if wide:
        yield "squares that underflow", 1e-170 * ones
        yield "1e-300", 1e-300 * signs


def _words(split: Split, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Token ids that occur in the data: others may have no vector."""
    some, generator = split.inputs[0], torch.Generator().manual_seed(seed)
    known = torch.unique(split.inputs)
    for name, token in (("the first word only", known[0]), ("the last word only", known[-1])):
        yield name, torch.full_like(some, int(token))
    yield "a record again", some.clone()
    yield "reversed", some.flip(0)
    yield "random words", known[torch.randint(0, len(known), some.shape, generator=generator)]


def _labels(split: Split, classes: int, quick: bool) -> list[Tensor]:
    targets = split.targets
    if targets.is_floating_point() or targets.dim() > 1:
        return [targets[0].clone(), -targets[0]]
    wanted = (0, classes - 1) if quick else (0, classes // 2, classes - 1)
    return [torch.tensor(value, dtype=targets.dtype) for value in dict.fromkeys(wanted)]


def _some(labels: list[Tensor], number: int, quick: bool) -> list[Tensor]:
    return [labels[number % len(labels)]] if quick else labels


def with_last(split: Split, record: Record) -> Split:
    """The split with its last record replaced by this one."""
    inputs = torch.cat([split.inputs[:-1], record.inputs[None].to(split.inputs.dtype)])
    return Split(inputs, torch.cat([split.targets[:-1], record.target[None]]))


def at(split: Split, index: int, record: Record) -> Split:
    """The split with the record in the place of another one."""
    inputs, targets = split.inputs.clone(), split.targets.clone()
    inputs[index], targets[index] = record.inputs, record.target
    return Split(inputs, targets)
