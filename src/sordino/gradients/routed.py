"""Weights of experts: rows that were routed to one of E linear maps (grouped products, mixtures of experts).

For rows x (N, d_in) and gradients g (N, d_out), of which row t belongs to record owner[t] and went through expert[t],
record i's gradient of the weights (E, d_in, d_out) is, expert by expert,

    ∂W[i, e] = Σ_{t: owner = i, expert = e} x_t ⊗ g_t

The sum over all rows is one product for each expert, as in the plain backward pass, and norms come from one product for
each (record, expert) pair that has rows. Products are made some pairs at a time, pairs of like size together, so that
little is spent on padding; nothing of size records × weights is ever held.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sordino.gradients.memory import CACHE_BYTES, by_record, squares


class Routed:
    """A contribution (contributions.Contribution) to weights (E, d_in, d_out); swapped: (E, d_out, d_in)."""

    def __init__(
        self, x: Tensor, g: Tensor, owner: Tensor, expert: Tensor, sizes: tuple[int, int], *, swapped: bool = False
    ) -> None:
        """owner (N,): the record of each row, −1 for none. expert (N,): its linear map. sizes: (records, E)."""
        self.records, self.experts = sizes
        if len({len(x), len(g), len(owner), len(expert)}) != 1:
            raise ValueError(f"rows differ in number: {len(x)}, {len(g)}, {len(owner)}, {len(expert)}")
        self._left, self._right = (g, x) if swapped else (x, g)
        self._owner, self._expert = owner, expert
        self._norm2: Tensor | None = None

    def norm2(self) -> Tensor:
        """Σ over experts of ‖∂W[i, e]‖²: different experts are different coordinates."""
        if self._norm2 is None:
            self._norm2 = self._left.new_zeros(self.records)
            for owner, _, product in self._products(0, self.records):
                self._norm2.index_add_(0, owner, squares(by_record(product)))
        return self._norm2

    def weighted(self, weight: Tensor) -> Tensor:
        mine = self._owner >= 0
        factor = torch.where(mine, weight.to(self._right.dtype)[self._owner.clamp_min(0)], 0)
        right, order = self._right * factor[:, None], torch.argsort(self._expert, stable=True)
        counts = torch.bincount(self._expert, minlength=self.experts).tolist()
        total = right.new_zeros(self.experts, self._left.shape[1], right.shape[1])
        for expert, rows in enumerate(torch.split(order, counts)):
            if len(rows):
                torch.mm(self._left[rows].mT, right[rows], out=total[expert])
        return total

    def dense(self, lo: int, hi: int) -> Tensor:
        out = self._left.new_zeros(hi - lo, self.experts, self._left.shape[1], self._right.shape[1])
        for owner, expert, product in self._products(lo, hi):
            out[owner - lo, expert] = product
        return out

    def drop(self, bad: Tensor) -> None:
        """Replace what the records where `bad` is true have by zero."""
        gone = (self._owner >= 0) & bad[self._owner.clamp_min(0)]
        self._left, self._right = (t.masked_fill(gone[:, None], 0) for t in (self._left, self._right))
        self._norm2 = None

    def _products(self, lo: int, hi: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(records, experts, products (·, d, d′)) of the pairs that have rows, for the records from lo to hi."""
        here = ((self._owner >= lo) & (self._owner < hi)).nonzero()[:, 0]
        keys = self._owner[here] * self.experts + self._expert[here]
        order = torch.argsort(keys, stable=True)
        pairs, counts = torch.unique_consecutive(keys[order], return_counts=True)
        rows, starts = here[order], counts.cumsum(0) - counts
        by_size = torch.argsort(counts, stable=True)
        width = self._left.shape[1] * self._right.shape[1]
        most = max(1, CACHE_BYTES // (width * self._left.element_size()))
        for chosen in torch.split(by_size, most) if len(by_size) else ():
            longest = int(counts[chosen[-1]])
            place = torch.arange(longest, device=counts.device)
            inside = place < counts[chosen][:, None]  # (pairs, longest)
            at = rows[torch.where(inside, starts[chosen][:, None] + place, starts[chosen][:, None])]
            left = self._left[at].masked_fill_(~inside[..., None], 0)  # empty places: 0 times the pair's own first row
            product = torch.bmm(left.mT, self._right[at])
            yield pairs[chosen] // self.experts, pairs[chosen] % self.experts, product
