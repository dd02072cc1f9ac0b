"""Position tables, in the ways that models look them up, whatever lengths happen to be equal to the batch.

Opacus' ghost mode crashes on expanded ids; an engine that reads shapes alone takes a sequence as long as the batch
for the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sordino.gradients import Rows

LOOKUPS: dict[str, Callable[[nn.Module, int, int], Tensor]] = {
    "repeated": lambda table, batch, length: table(torch.arange(length).repeat(batch, 1)),
    "expanded": lambda table, batch, length: table(torch.arange(length).expand(batch, length)),
    "one row for all": lambda table, batch, length: table(torch.arange(length)[None]),
    "without a row": lambda table, batch, length: table(torch.arange(length)),
    "time first": lambda table, batch, length: table(torch.arange(length)[:, None].repeat(1, batch)).transpose(0, 1),
    "flattened": lambda table, batch, length: table(torch.arange(length).repeat(batch)).view(batch, length, -1),
    "relative": lambda table, batch, length: table((torch.arange(length)[:, None] - torch.arange(length)).abs()).mean(
        1
    ),
}


class Positioned(nn.Module):
    def __init__(self, lookup: Callable[[nn.Module, int, int], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.head = nn.Embedding(11, 5), nn.Embedding(16, 5), nn.Linear(5, 3)
        self.lookup = lookup

    def forward(self, ids: Tensor) -> Tensor:
        places = self.lookup(self.positions, *ids.shape)
        return self.head((self.tokens(ids) + places).tanh()).mean(1)


@pytest.mark.parametrize("name", LOOKUPS)
@pytest.mark.parametrize(("batch", "length"), [(3, 4), (4, 4), (6, 4), (4, 9), (2, 4), (9, 9), (4, 16)])
def test_position_table_matches_the_loop(name: str, batch: int, length: int, agree, awaken) -> None:
    rows = Rows(torch.randint(11, (batch, length)), torch.arange(batch) % 3)
    agree(awaken(Positioned(LOOKUPS[name])), nn.CrossEntropyLoss(), rows)
