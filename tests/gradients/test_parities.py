"""Values that a model reads: the groups in which a batch is computed again leave no parity of the records unseen."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients.checks.interaction import ALONE, partitions
from sordino.records.gradients import record_gradients
from sordino.sampling import LogicalBatch


@pytest.mark.parametrize("rows", [1, 2, 3, 9, ALONE, ALONE + 1, 25, 26, 100, 257])
def test_every_way_to_divide_has_all_rows_and_two_rows_share_one_group_at_most(rows: int) -> None:
    ways, together = partitions(rows, 5), Counter[tuple[int, ...]]()
    for groups in ways:
        assert sorted(torch.cat(groups).tolist()) == list(range(rows))
        for group in groups:
            together.update(itertools.combinations(sorted(group.tolist()), 2))
    assert len(ways) == (1 if rows <= ALONE else 3)
    assert max(together.values(), default=0) <= (0 if rows <= ALONE else 1)


def test_groups_are_others_in_every_test() -> None:
    assert len({str(partitions(30, purpose)) for purpose in range(10)}) == 10


def _even_sets(side: int) -> Counter[int]:
    """How many sets of places, by their size, have an even number on every row, column and diagonal: a basis by
    elimination, then all of its sums."""
    places = itertools.product(range(side), repeat=2)
    lines = [1 << i | 1 << side + j | 1 << 2 * side + (i + j) % side for i, j in places]
    pivots: dict[int, tuple[int, int]] = {}
    basis = []
    for place, line in enumerate(lines):
        chosen = 1 << place
        while line and (top := line.bit_length()) in pivots:
            line, chosen = line ^ pivots[top][0], chosen ^ pivots[top][1]
        if line:
            pivots[line.bit_length()] = line, chosen
        else:
            basis.append(chosen)
    sums = [0]
    for one in basis:
        sums += [one ^ other for other in sums]
    return Counter(found.bit_count() for found in sums)


def test_a_parity_of_an_even_number_of_records_is_missed_once_in_three_thousand_batches_at_most() -> None:
    """Of k records at random places of the smallest square. In larger ones fewer sets are even."""
    sizes = _even_sets(5)
    assert sizes[0] == 1
    assert not {2, 4} & set(sizes)
    assert max(count / math.comb(25, k) for k, count in sizes.items() if k and not k % 2) < 1 / 3000


def odd_few(s: Any, x: Tensor) -> Tensor:
    """Flagged rows turn their sign where their number is odd."""
    flagged = x[:, 0] > 5
    h = s.b(torch.tanh(s.a(x)))
    return torch.where(flagged[:, None], -h, h) if int(flagged.sum()) % 2 else h


@pytest.mark.parametrize("first", range(8))
def test_a_parity_that_is_felt_by_the_records_that_decide_it_does_not_pass_in_both_of_two_neighbouring_batches(
    first: int,
) -> None:
    """In four random groups both passed in some pairs, and a record moved the sum by more than the clip norm."""
    x, y = torch.randn(60, 8), torch.arange(60) % 3
    x[:, 0] = 0
    x[40:43, 0] = 9.0
    for trial in range(4):
        torch.manual_seed(10 * first + trial)
        refused = []
        for flagged in (2, 3):
            model = Fn(odd_few, a=nn.Linear(8, 16), b=nn.Linear(16, 3))
            sums = record_gradients(model, F.cross_entropy, (x, y), FlatClip(1.0))
            sums(LogicalBatch(0, torch.arange(40), 512))
            try:
                sums(LogicalBatch(1, torch.arange(20, 40 + flagged), 512))
            except Refused:
                refused.append(flagged)
        assert refused
