"""Per-record gradients minus a public vector, computed before clipping (DOPE-SGD clips this difference).

‖g − v‖² is not computed as ‖g‖² − 2⟨g, v⟩ + ‖v‖²: if g is close to v that expression cancels, the norm comes out too
small, and "clipped" records would exceed the bound. Instead the difference is computed coordinate by coordinate, in
blocks of records; norms and sums are then those of its rounded coordinates, as for any other gradient. Memory: one
block.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sordino.gradients.sums.contributions import Contribution, add_dense, dense_norm2


class Centred:
    """g_i − v for the records of a chunk; `of` is None if the loss does not depend on the parameter (g = 0)."""

    def __init__(self, of: Contribution | None, centre: Tensor, records: int) -> None:
        self.of, self.centre, self.records = of, centre, records
        self._dropped: Tensor | None = None

    def norm2(self) -> Tensor:
        return dense_norm2(self, self._size())

    def slack(self) -> float:
        return 0.0

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        add_dense(self, total, weight, self._size())

    def dense(self, lo: int, hi: int) -> Tensor:
        if self.of is None:
            difference = (-self.centre).expand(hi - lo, *self.centre.shape)
        else:
            difference = self.of.dense(lo, hi).reshape(hi - lo, *self.centre.shape) - self.centre
        if self._dropped is None:
            return difference
        return difference.masked_fill(self._dropped[lo:hi].reshape(-1, *([1] * self.centre.ndim)), 0)

    def drop(self, bad: Tensor) -> None:
        """A record whose gradient is not finite contributes zero, not −v."""
        self._dropped = bad if self._dropped is None else self._dropped | bad
        if self.of is not None:
            self.of.drop(bad)

    def _size(self) -> int:
        return max(1, self.centre.numel())


def centred(
    gradients: Mapping[str, Contribution], centre: Mapping[str, Tensor], parameters: Mapping[str, Tensor], records: int
) -> dict[str, Contribution]:
    """Every record's gradient minus the centre, for all parameters that the centre contains."""
    found: dict[str, Contribution] = {}
    for name, parameter in parameters.items():
        mine = gradients.get(name)
        if name in centre:
            kind = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
            found[name] = Centred(mine, centre[name].detach().to(kind).reshape(parameter.shape), records)
        elif mine is not None:
            found[name] = mine
    return found
