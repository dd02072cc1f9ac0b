"""Rows are read while others are computed: the same rows, one chunk ahead, and errors where they are due."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sordino.clipping import FlatClip
from sordino.gradients import Rows
from sordino.records.ahead import ReadingAhead
from sordino.records.gradients import Counted, record_gradients
from sordino.records.reading import Collated
from sordino.sampling import LogicalBatch


class Slow:
    """A map-style dataset that notes which thread read what."""

    def __init__(self) -> None:
        self.read: list[tuple[str, int]] = []

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        if index == 39:
            raise ValueError("record 39 can't be read")
        self.read.append((threading.current_thread().name, index))
        return torch.full((4,), float(index)), index % 3


def _sums(dataset: Any, workers: int) -> list[bytes]:
    torch.manual_seed(0)
    made = record_gradients(nn.Linear(4, 3), cross_entropy, Collated(dataset, workers=workers), FlatClip(1.0))
    counted, batches = Counted(made), [LogicalBatch(t, torch.arange(t, 30, 2), 4) for t in range(3)]
    found = []
    for number, batch in enumerate(batches):
        if number + 1 < len(batches):
            counted.expect(batches[number + 1])
        found.append(b"".join(v.numpy().tobytes() for v in counted(batch).sums.values()))
    return found


def test_reading_ahead_changes_no_bit_and_reads_nothing_twice() -> None:
    ahead, alone = Slow(), Slow()
    assert _sums(ahead, 1) == _sums(alone, 0)
    assert sorted(index for _, index in ahead.read) == sorted(index for _, index in alone.read)


def test_rows_that_were_not_announced_are_read_when_they_are_asked_for() -> None:
    asked: list[int] = []

    def fetch(indices: torch.Tensor, step: int = 0) -> Rows:
        asked.append(step)
        return Rows(indices.float(), indices)

    reader = ReadingAhead(fetch)
    reader.start(torch.tensor([1, 2]), 0)
    assert torch.equal(reader(torch.tensor([3]), 0).targets, torch.tensor([3]))
    assert torch.equal(reader(torch.tensor([1, 2]), 1).targets, torch.tensor([1, 2]))  # another step
    assert torch.equal(reader(torch.tensor([1, 2]), 0).targets, torch.tensor([1, 2]))
    assert sorted(asked) == [0, 0, 1]


def test_an_error_of_the_thread_is_raised_where_the_rows_are_due() -> None:
    made = record_gradients(nn.Linear(4, 3), cross_entropy, Collated(Slow(), workers=1), FlatClip(1.0))
    made.expect(LogicalBatch(0, torch.tensor([39]), 4))
    made(LogicalBatch(0, torch.tensor([1]), 4))
    with pytest.raises(ValueError, match="record 39"):
        made(LogicalBatch(0, torch.tensor([39]), 4))
