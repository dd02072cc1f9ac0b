"""Records of one position: a linear map of vectors, and its bias.

The gradients of both are made from the same rows, those that the backward pass brought: norms come from the lengths of
rows, and the clipped sums from one pass that scales them.
"""

from __future__ import annotations

from torch import Tensor

from sordino.gradients.contributions import Dense, Outer, masked, summed
from sordino.gradients.memory import scaled
from sordino.native.ownership import alone


class Scaled:
    """Rows g (records, d), and weight_i · g_i with its sum over the records: one pass for a weight and its bias.

    shared: there is a bias. once: a parameter asks for one sum, a weight and its bias with the same weights, and nobody
    for the rows after it. Then the result takes their place, if nobody else holds them.
    """

    def __init__(self, rows: Tensor, *, shared: bool = False, once: bool = False) -> None:
        self._held, self._shared, self._once = {"rows": rows}, shared, once
        self._found: tuple[Tensor, tuple[Tensor, Tensor]] | None = None
        self._spent = False

    @property
    def rows(self) -> Tensor:
        if self._spent:
            raise RuntimeError("these gradients were overwritten by their weighted sum; this is a mistake of sordino's")
        return self._held["rows"]

    def by(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Held after the first call for the second one, with the same weights."""
        held, self._found = self._found, None
        if held is not None and held[0] is weight:
            return held[1]
        mine = self._once and alone(self._held)  # before the call, whose arguments are holders as well
        found = scaled(self.rows, weight if weight.dtype == self.rows.dtype else weight.to(self.rows.dtype), mine)
        self._spent = found[0] is self.rows
        if self._shared:
            self._found = weight, found
        return found

    def drop(self, bad: Tensor) -> None:
        self._held["rows"] = masked(self.rows, bad)


class Single(Outer):
    """One position: g_i = l_i ⊗ r_i for rows l (records, d_out) and r (records, d_in), with its squared norm.

    A bias may have the same l.
    """

    def __init__(self, rows: Scaled, inputs: Tensor, norm2: Tensor) -> None:
        self.shared, self.inputs, self._norm2 = rows, inputs, norm2
        self.records = inputs.shape[0]

    @property
    def left(self) -> Tensor:  # type: ignore[override]
        return self.shared.rows[:, None]

    @property
    def right(self) -> Tensor:  # type: ignore[override]
        return self.inputs[:, None]

    def norm2(self) -> Tensor:
        return self._norm2

    def weighted(self, weight: Tensor) -> Tensor:
        return summed(self.shared.by(weight)[0], self.inputs)

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.shared.rows[lo:hi, :, None] * self.inputs[lo:hi, None]

    def drop(self, bad: Tensor) -> None:
        self.shared.drop(bad)
        self.inputs = masked(self.inputs, bad)


class Shift(Dense):
    """The bias of such a map: the gradients are the rows themselves."""

    def __init__(self, rows: Scaled, records: int, norm2: Tensor) -> None:
        self.shared, self.records, self.owned = rows, records, False
        self._norm2 = norm2

    @property
    def gradient(self) -> Tensor:  # type: ignore[override]
        return self.shared.rows

    def weighted(self, weight: Tensor) -> Tensor:
        return self.shared.by(weight)[1]

    def drop(self, bad: Tensor) -> None:
        self.shared.drop(bad)

    def add(self, other: Dense) -> None:
        self.shared, self._norm2 = Scaled(self.gradient + other.gradient.reshape(self.gradient.shape)), None
