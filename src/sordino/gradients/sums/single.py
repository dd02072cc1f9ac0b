"""Records with one position: a linear map of vectors, and its bias.

Both gradients are computed from the same rows, which the backward pass delivers: norms from the lengths of
the rows, and the clipped sums from one pass that scales them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.gradients.sums.contributions import Dense, Outer, masked
from sordino.gradients.sums.memory import blocked, cross, scaled
from sordino.native.ownership import alone


class Scaled:
    """Rows g (records, d), and weight_i · g_i with its sum over the records: one pass for a weight and its bias.

    shared: there is a bias. once: each parameter requests one sum, a weight and its bias with the same weights, and
    nothing reads the rows afterwards. Then the result overwrites them, if nothing else refers to them.
    """

    def __init__(self, rows: Tensor, *, shared: bool = False, once: bool = False) -> None:
        self._held, self._shared, self._once = {"rows": rows}, shared, once
        self._found: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._spent = False

    @property
    def rows(self) -> Tensor:
        if self._spent:
            raise RuntimeError("these gradients were overwritten by their weighted sum; this is a bug in sordino")
        return self._held["rows"]

    def by(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Stored at the first call for the second one, with the same weights."""
        held, self._found = self._found, None
        if held is not None and held[0] is weight:
            return held[1]
        mine = self._once and alone(self._held)  # checked before the call, whose arguments also hold references
        found = scaled(self.rows, weight, mine)
        self._spent = found[0] is self.rows
        if self._shared:
            self._found = weight, found
        return found

    def keep(self) -> None:
        """The rows must not be overwritten."""
        self._once = False

    def drop(self, bad: Tensor) -> None:
        self._held["rows"] = masked(self.rows, bad)


class Single(Outer):
    """One position: g_i = l_i ⊗ r_i for rows l (records, d_out) and r (records, d_in), with its squared norm.

    A bias may share l. huge: some r is so long that weight · l, in its own precision, could lose digits.
    runs: bounds of blocks of records that may be summed in single precision (`runs.stable`); None if there are none.
    """

    def __init__(self, rows: Scaled, inputs: Tensor, norm2: Tensor, *, huge: bool = False) -> None:
        self.shared, self.inputs, self._norm2, self.huge = rows, inputs, norm2, huge
        self.records = inputs.shape[0]
        self.runs = None
        if huge:
            rows.keep()

    @property
    def left(self) -> Tensor:  # type: ignore[override]
        return self.shared.rows[:, None]

    @property
    def right(self) -> Tensor:  # type: ignore[override]
        return self.inputs[:, None]

    def norm2(self) -> Tensor:
        return self._norm2

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        if self.huge:
            super().add_to(total, weight)
            return
        whole, rows = total.view(-1, self.inputs.shape[1]), self.shared.by(weight)[0]
        if self.runs is None or rows.dtype == torch.float64:
            cross(whole, rows, self.inputs)
        else:
            blocked(whole, rows, self.inputs, self.runs, torch.ones(len(self.runs) - 1, dtype=torch.float64))

    def narrow_to(self, total: Tensor, weight: Tensor) -> bool:
        """See `narrow.narrow_sum`. One block is rounded already, in any order."""
        if self.huge or self.runs is None or len(self.runs) != 2 or self.inputs.dtype != torch.float32:
            return False
        whole, rows = total.view(-1, self.inputs.shape[1]), self.shared.by(weight)[0]
        whole.zero_().addmm_(rows.mT, self.inputs)  # avoids −0, whose sum with another process's 0 has other bits
        return True

    def keep(self) -> None:
        self.shared.keep()

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.shared.rows[lo:hi, :, None] * self.inputs[lo:hi, None]

    def drop(self, bad: Tensor) -> None:
        self.shared.drop(bad)
        self.inputs = masked(self.inputs, bad)
        self._squares = self._lengths = None


class Shift(Dense):
    """The bias of such a map: the gradients are the rows themselves."""

    def __init__(self, rows: Scaled, records: int, norm2: Tensor) -> None:
        self.shared, self.records, self.owned = rows, records, False
        self._norm2 = norm2

    @property
    def gradient(self) -> Tensor:  # type: ignore[override]
        return self.shared.rows

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        total += self.shared.by(weight)[1].view(total.shape)

    def narrow_to(self, total: Tensor, weight: Tensor) -> bool:
        """See `narrow.narrow_sum`."""
        total.copy_(self.shared.by(weight)[1].view(total.shape))
        return True

    def drop(self, bad: Tensor) -> None:
        self.shared.drop(bad)

    def keep(self) -> None:
        self.shared.keep()

    def add(self, other: Dense) -> None:
        self.shared, self._norm2 = Scaled(self.gradient + other.gradient.reshape(self.gradient.shape)), None
