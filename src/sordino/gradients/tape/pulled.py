"""Contributions to tensors that were computed from parameters, pulled back to the parameters.

For example F.linear(x, U @ V), a weight-normalised kernel, a position bias that a small network computes: the
per-record gradients are pulled back through that computation by autograd.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.gradients.sums.contributions import Contribution, add_dense, dense_norm2
from sordino.gradients.sums.totals import keep

# per-record gradients of all parameters of one such tensor that are kept between norms and sums
PULLED_BYTES = 32 << 20


class Pullback:
    """Contributions to a tensor that was computed from parameters, pulled back to all of them in one backward pass.

    The result is kept for its second use (norms, then sums) if it is small.
    """

    def __init__(self, source: Tensor, leaves: Sequence[Tensor], through: Contribution) -> None:
        self.source, self.leaves, self.through = source, list(leaves), through
        self.size = max(source.numel(), *(leaf.numel() for leaf in leaves))
        whole = through.records * sum(leaf.numel() * leaf.element_size() for leaf in leaves)
        self._held: dict[tuple[int, int], list[Tensor]] | None = {} if whole <= PULLED_BYTES else None
        keep(through)

    def dense(self, leaf: Tensor, lo: int, hi: int) -> Tensor:
        """(hi − lo, *shape) the gradients of these records with respect to this leaf."""
        found = None if self._held is None else self._held.get((lo, hi))
        if found is None:
            wanted = [leaf] if self._held is None else self.leaves
            cotangents = self.through.dense(lo, hi).reshape(hi - lo, *self.source.shape)
            try:
                found = self._pull(cotangents, wanted, True)
            except RuntimeError:  # no batching rule for some step of the computation
                each = [self._pull(c, wanted, False) for c in cotangents]
                found = [torch.stack(rows) for rows in zip(*each, strict=True)]
            if self._held is None:
                return found[0]
            self._held[lo, hi] = found
        return found[next(i for i, other in enumerate(self.leaves) if other is leaf)]

    def _pull(self, cotangent: Tensor, leaves: Sequence[Tensor], batched: bool) -> list[Tensor]:
        out = torch.autograd.grad(
            self.source, leaves, cotangent.to(self.source.dtype), retain_graph=True, is_grads_batched=batched
        )
        return [g.float() if g.dtype in (torch.bfloat16, torch.float16) else g for g in out]

    def drop(self, bad: Tensor) -> None:
        if self._held is not None:
            self._held.clear()
        self.through.drop(bad)


class Pulled:
    """A contribution to a tensor that was computed from the parameter: pulled back through that computation."""

    def __init__(self, leaf: Tensor, by: Pullback) -> None:
        self.leaf, self.by = leaf, by
        self.records = by.through.records

    def norm2(self) -> Tensor:
        return dense_norm2(self, self.by.size)

    def slack(self) -> float:
        return 0.0

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        """Not the pulled-back sum: its rounding would be that of a long sum in the parameter's precision."""
        add_dense(self, total, weight, self.by.size)

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.by.dense(self.leaf, lo, hi)

    def drop(self, bad: Tensor) -> None:
        self.by.drop(bad)


class Viewed:
    """A contribution to a view with coordinates of the parameter, each at most once: norms are the same."""

    def __init__(self, source: Tensor, leaf: Tensor, through: Contribution) -> None:
        self.source, self.leaf, self.through = source, leaf, through
        self.records = through.records

    def norm2(self) -> Tensor:
        return self.through.norm2()

    def slack(self) -> Tensor | float:
        return self.through.slack()

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        if not self.leaf.is_contiguous():
            keep(self.through)
            add_dense(self, total, weight, max(self.source.numel(), self.leaf.numel()))
            return
        part = total.new_zeros(self.source.shape)
        self.through.add_to(part, weight)
        offset = self.source.storage_offset() - self.leaf.storage_offset()
        total.as_strided(self.source.shape, self.source.stride(), total.storage_offset() + offset).add_(part)

    def dense(self, lo: int, hi: int) -> Tensor:
        return Pullback(self.source, [self.leaf], self.through).dense(self.leaf, lo, hi)

    def drop(self, bad: Tensor) -> None:
        self.through.drop(bad)
