"""Items that are drawn at random: each record draws for itself, so one record does not change the rows of others."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import sordino
from sordino.errors import Refused
from sordino.records.gradients import record_gradients
from sordino.records.reading import row_reader
from sordino.sampling import LogicalBatch

FLIPS = {
    "numpy": lambda: np.random.random() < 0.5,  # noqa: NPY002
    "python": lambda: random.random() < 0.5,
    "torch": lambda: bool(torch.rand(()) < 0.5),
}


class Augmented(Dataset[tuple[Tensor, int]]):
    """Rows that are turned around by a coin, as transforms in `__getitem__` do."""

    def __init__(self, coin: Any, held: Any = None) -> None:
        self.inputs, self.coin = torch.arange(1.0, 31.0).repeat_interleave(3).reshape(30, 3), coin
        self.transforms = [{"deep": held}]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = self.inputs[index]
        return (-row if self.coin() else row), index % 2


def seeded() -> None:
    """Seeds that everybody knows, as scripts begin with."""
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002
    random.seed(0)


@pytest.mark.parametrize("kind", FLIPS)
def test_one_record_less_moves_the_sum_by_one_clip_norm_at_most(kind: str) -> None:
    """With generators that went on from record to record it moved by 1 to 3 (Python) and 11 to 17 (numpy) of them."""
    model = nn.Linear(3, 2)
    sums = []
    for batch in (torch.arange(30), torch.arange(1, 30)):
        seeded()
        gradients = record_gradients(model, nn.functional.cross_entropy, Augmented(FLIPS[kind]), sordino.FlatClip(1.0))
        total = gradients(LogicalBatch(0, batch, 64)).sums
        sums.append(torch.cat([value.flatten() for value in total.values()]))
    assert float((sums[0] - sums[1]).norm()) <= 1.001


@pytest.mark.parametrize("kind", FLIPS)
def test_draws_differ_from_record_to_record_and_step_to_step_and_leave_the_generators_alone(kind: str) -> None:
    seeded()
    fetch = row_reader(Augmented(FLIPS[kind]))
    before = torch.rand(()), np.random.random(), random.random()  # noqa: NPY002
    seeded()
    first, again, later = (fetch(torch.arange(30), step).inputs[:, 0].sign() for step in (0, 0, 1))
    assert before == (torch.rand(()), np.random.random(), random.random())  # noqa: NPY002
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert 5 < int((first > 0).sum()) < 25


def test_items_that_are_not_drawn_are_read_once() -> None:
    read: list[int] = []

    class Plain(Augmented):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            read.append(index)
            return super().__getitem__(index)

    row_reader(Plain(lambda: False))(torch.arange(10))
    assert read == list(range(10))


@pytest.mark.parametrize(
    "own", [np.random.default_rng(0), np.random.RandomState(0), random.Random(0), torch.Generator()]
)
def test_a_generator_of_the_datasets_own_is_refused(own: Any) -> None:
    with pytest.raises(Refused, match="generator"):
        row_reader(Augmented(lambda: False, held=own))


def test_threads_do_not_draw_from_one_generator() -> None:
    plan = sordino.dpsgd(noise_multiplier=2.0, delta=1e-3, records=30, expected_batch=15, steps=1)
    options: dict[str, Any] = {"lr": 0.1, "num_workers": 2}
    sordino.train(nn.Linear(3, 2), nn.functional.cross_entropy, Augmented(lambda: False), plan, **options)
    with pytest.raises(Refused, match="num_workers=0"):
        sordino.train(nn.Linear(3, 2), nn.functional.cross_entropy, Augmented(FLIPS["numpy"]), plan, **options)
