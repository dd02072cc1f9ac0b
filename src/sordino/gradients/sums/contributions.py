"""A record's gradient of one parameter, stored in the form that is cheapest for that parameter.

Each form provides three things: the squared l2 norm per record, the sum over records with given weights, and the
dense per-record gradients of a range of records. Nothing else in the engine depends on the form.

Two rules make the sensitivity of the sums a theorem (docs/guarantees/noise.md, section 6). What a form adds for a
record is, up to the rounding of double precision, its weight times a vector that is a function of that record alone;
and the norm that the form returns is at most 2⁻¹⁶ (relative) below the norm of *that* vector.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.gradients.sums.gram import PART, gram, gram_by_parts
from sordino.gradients.sums.memory import (
    CACHE_BYTES,
    DEEPEST,
    blocked,
    blocked_narrow,
    blocks,
    by_record,
    cross,
    gather,
    merge,
    scaled,
    scatter,
    scatter_narrow,
    squares,
    too_long,
)
from sordino.gradients.sums.products import are_whole
from sordino.gradients.sums.record_products import product_norms, record_products
from sordino.native.kernels import FEW_OUTPUTS

KEEP_RATIO = 2.0  # store products of at most this many times the size of the positions that they were computed from
MANY = 32  # positions from which on a record's own product is computed in single precision
RAISED = 2.0**-7  # the largest relative increase of a squared norm that single-precision inner products may cause
CANCELLED = 2.0**-12  # of the lengths of positions that are summed one by one: the least value that is used for a norm
_UNIT = 2.0**-24  # the unit roundoff of single precision
_LARGEST = 2.0**126  # longer sums of positions may overflow in between
Parts = tuple[Tensor, Tensor, npt.NDArray[np.int64], Tensor, int]  # as in `memory.blocked`


class Contribution(Protocol):
    records: int

    def norm2(self) -> Tensor:
        """(records,) squared l2 norms in double precision; not finite for a record that is to be dropped."""

    def slack(self) -> Tensor | float:
        """(records,) an l2 bound on the difference between what is added for a record and its ``dense`` gradient."""

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        """total += Σ_i weight_i · g_i, for a contiguous total in the parameter's shape; both in double precision."""

    def dense(self, lo: int, hi: int) -> Tensor:
        """(hi − lo, *shape) the gradients of these records."""

    def drop(self, bad: Tensor) -> None:
        """Replace the gradients of the records where ``bad`` is true by zero."""


def masked(t: Tensor, bad: Tensor) -> Tensor:
    return t.masked_fill(bad.reshape(-1, *([1] * (t.ndim - 1))), 0)


class Dense:
    """The gradients themselves: (records, *shape), with their squared norms if these were a by-product.

    owned: nothing else refers to the memory, so other gradients may be added in place.
    """

    def __init__(self, gradient: Tensor, norm2: Tensor | None = None, *, owned: bool = False) -> None:
        self.gradient, self._norm2, self.owned = gradient, norm2, owned
        self.records = gradient.shape[0]

    def norm2(self) -> Tensor:
        if self._norm2 is None:
            self._norm2 = squares(by_record(self.gradient))
        return self._norm2

    def slack(self) -> float:
        return 0.0

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        gather(total.view(-1), by_record(self.gradient), weight)

    def sliced(self) -> Iterator[tuple[int, int, Contribution]]:
        """Ranges of coordinates, whose sums in double precision take little memory, and the gradients there."""
        flat = by_record(self.gradient)
        for lo, hi in blocks(flat.shape[1], 1, 8, CACHE_BYTES):
            yield lo, hi, Dense(flat[:, lo:hi])

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.gradient[lo:hi]

    def drop(self, bad: Tensor) -> None:
        self.gradient = masked(self.gradient, bad)

    def keep(self) -> None:
        """See `totals.keep`."""

    def add(self, other: Dense) -> None:
        more = other.gradient.reshape(self.gradient.shape)
        self.gradient = self.gradient.add_(more) if self.owned else self.gradient + more
        self._norm2 = None


class Outer:
    """g_i = Σ_s left_s ⊗ right_s: the weight of a linear map, left (records, S, d_out), right (records, S, d_in).

    A sum over many positions is computed for each record in single precision, and these are summed in double precision;
    a sum over few positions is computed in double precision altogether. runs: bounds of blocks of records that may also
    be summed in single precision (`runs.stable`); None if there are none.
    """

    _squares: Tensor | None = None  # squared norms of the rows of `right`
    _lengths: Tensor | None = None  # see `lengths`

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.records = left.shape[0]
        self.runs: npt.NDArray[np.int64] | None = None

    def norm2(self) -> Tensor:
        """Σ_st (l_s·l_t)(r_s·r_t), or the norm of the product, whichever takes less work."""
        left, right = self.left, self.right
        (_, s, p), q = left.shape, right.shape[2]
        if s == 1:  # ‖l ⊗ r‖ = ‖l‖·‖r‖
            return squares(right[:, 0], squares(left[:, 0]))
        lengths = self.lengths()
        if s * (p + q) <= p * q:
            norm = self._gram_norm2(lengths.square()).sqrt() + self.slack()
        else:
            norm = self._product_norm2().sqrt() + self.slack()
        if not self._by_record():
            norm = torch.maximum(norm, CANCELLED * lengths)
        if left.dtype != torch.float64:  # not finite if lengths is NaN
            norm = torch.where(lengths < _LARGEST, norm, torch.inf)
        return norm.square()

    def _product_norm2(self) -> Tensor:
        found = product_norms(self.left, self.right)
        if found is not None:
            return found
        size = self.left.shape[2] * self.right.shape[2]
        parts = [squares(self.dense(lo, hi).flatten(1)) for lo, hi in blocks(self.records, size, self.left.itemsize)]
        return torch.cat(parts)

    def _gram_norm2(self, lengths2: Tensor) -> Tensor:
        """Never too small: a bound on the rounding error, in terms of the positions' squared lengths, is added.
        Computed in single precision if that raises no norm by much; records whose positions cancel or are out of range
        in double."""
        left, right = self.left, self.right
        (m, s, p), q = left.shape, right.shape[2]
        double = (p + q + s * s + 8) * 2.0**-52
        if left.dtype != torch.float32 or not are_whole():
            parts = [gram(left[lo:hi], right[lo:hi]) for lo, hi in blocks(m, s * (2 * s + p + q), 8)]
            return torch.cat(parts) + double * lengths2
        parts = [gram_by_parts(left[lo:hi], right[lo:hi]) for lo, hi in blocks(m, 4 * s * s, 8)]
        norm2, rounding = torch.cat(parts), (2 * (PART + 1) * _UNIT * 1.01 + double) * lengths2
        plain = (rounding <= RAISED * norm2) & (lengths2 > 2.0**-80) & (lengths2 < 2.0**100)
        norm2 += rounding
        for lo, hi in blocks(m, s * (2 * s + p + q), 8):
            again = lo + torch.nonzero(~plain[lo:hi]).flatten()
            if len(again):
                norm2[again] = gram(left[again], right[again]) + double * lengths2[again]
        return norm2

    def _by_record(self) -> bool:
        return self.left.shape[1] >= MANY and self.left.dtype != torch.float64

    def lengths(self) -> Tensor:
        """(records,) Σ_s ‖l_s‖·‖r_s‖ in double precision, rounded up."""
        if self._lengths is None:
            m, s, p = self.left.shape
            self._squares = squares(self.right.reshape(m * s, -1))
            flat = squares(self.left.reshape(m * s, p)) * self._squares
            self._lengths = flat.sqrt().view(m, s).sum(1) * (1 + 2.0**-15)
        return self._lengths

    def slack(self) -> Tensor | float:
        """The rounding error of a sum of S products in any order, with rows that may be rounded, counted twice: `dense`
        and `add_to` may round differently."""
        s = self.left.shape[1]
        if s == 1 and self.left.dtype == torch.float64:
            return 0.0
        unit = 2.0**-53 if self.left.dtype == torch.float64 else _UNIT
        return 2 * (s + 2) * unit * self.lengths()

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        (m, s, p), q = self.left.shape, self.right.shape[2]
        whole = total.view(p, q)
        if (parts := self._parts(weight)) is not None:
            blocked(whole, *parts)
            return
        for lo, hi in blocks(m, s, 1, DEEPEST):  # some positions at a time: each sum has fewer roundings
            left = (self.left[lo:hi].double() * weight[lo:hi, None, None]).flatten(0, 1)
            part = whole if hi - lo == m else torch.zeros_like(whole)
            cross(part, left, self.right[lo:hi].reshape(-1, q))
            if part is not whole:
                whole += part

    def narrow_to(self, total: Tensor, weight: Tensor) -> bool:
        """See `narrow.narrow_sum`. The same sum as in `add_to`, rounded where it is computed."""
        if self.left.shape[2] <= FEW_OUTPUTS or (parts := self._parts(weight)) is None:
            return False
        return blocked_narrow(total.view(self.left.shape[2], self.right.shape[2]), *parts)

    def _parts(self, weight: Tensor) -> Parts | None:
        """The sum as one of `blocked`; None if it is to be computed in double precision."""
        (m, s, p), q = self.left.shape, self.right.shape[2]
        right = self.right.reshape(m * s, q)
        if self._in_blocks():
            assert self.runs is not None
            left = scaled(self.left.reshape(m * s, p), weight.repeat_interleave(s))[0]
            return left, right, self.runs * s, torch.ones(len(self.runs) - 1, dtype=torch.float64), s
        if self._by_record():
            return self.left.reshape(m * s, p), right, np.arange(0, (m + 1) * s, s, dtype=np.int64), weight, s
        return None

    def _in_blocks(self) -> bool:
        """May records be summed in single precision, block by block? Not if weight · left could underflow."""
        (_, s, p), right = self.left.shape, self.right
        if self.runs is None or s < 2 or p <= FEW_OUTPUTS or self.left.dtype != torch.float32:
            return False
        return not too_long(squares(right.reshape(-1, right.shape[2])) if self._squares is None else self._squares)

    def keep(self) -> None:
        """See `totals.keep`."""

    def dense(self, lo: int, hi: int) -> Tensor:
        if self.left.shape[1] == 1:
            return self.left[lo:hi].mT * self.right[lo:hi]
        return record_products(self.left[lo:hi], self.right[lo:hi])[0]

    def drop(self, bad: Tensor) -> None:
        self.left, self.right = masked(self.left, bad), masked(self.right, bad)
        self._squares = self._lengths = None


def outer(left: Tensor, right: Tensor) -> Contribution:
    """Σ_s left_s ⊗ right_s, stored as the positions or as the product, whichever is smaller.

    The product costs as much as the plain weight gradient; norms and the clipped sum are then one pass over it.
    The positions need S²·(d_out + d_in) work for the norms and a matrix product for the sum.
    """
    (m, s, p), q = left.shape, right.shape[2]
    if s == 1 or p * q > KEEP_RATIO * s * (p + q):
        return Outer(left, right)
    return products(m, (p, q), left, lambda lo, hi: (left[lo:hi], right[lo:hi]))


def products(
    records: int,
    shape: tuple[int, int],
    like: Tensor,
    factors: Callable[[int, int], tuple[Tensor, Tensor]],
    working: int = 0,
) -> Dense:
    """Σ_s left_s ⊗ right_s of every record, with its norm computed while the product is in the cache.

    working: further elements per record that ``factors`` allocates; the block size takes them into account.
    """
    product, norm2 = like.new_empty((records, *shape)), like.new_empty(records, dtype=torch.float64)
    for lo, hi in blocks(records, shape[0] * shape[1] + working, like.element_size(), CACHE_BYTES):
        norm2[lo:hi] = record_products(*factors(lo, hi), product[lo:hi])[1]
    return Dense(product, norm2, owned=True)


class Lookup:
    """Row-sparse: record owner[j]'s gradient has value[j] at row index[j]; every (owner, index) pair occurs once."""

    def __init__(self, index: Tensor, gradient: Tensor, size: int, skip: int | None = None) -> None:
        """index (records, S), gradient (records, S, d): the row of the table and the gradient for each position."""
        found = merge(index, gradient, size, skip)
        if found is not None:
            self.records, self.size = index.shape[0], size
            self.value, self.index, self.owner = found
            return
        keys = (index + torch.arange(index.shape[0], device=index.device)[:, None] * size).flatten()
        values = gradient.flatten(0, 1)
        if skip is not None:
            keep = (index != skip).flatten()
            keys, values = keys[keep], values[keep]
        self._gather(index.shape[0], size, keys, values)

    def _gather(self, records: int, size: int, keys: Tensor, values: Tensor) -> None:
        self.records, self.size = records, size
        unique, inverse = torch.unique(keys, return_inverse=True)
        self.value = values.new_zeros(len(unique), values.shape[1]).index_add_(0, inverse, values)
        self.index, self.owner = unique % size, unique // size

    @classmethod
    def join(cls, parts: Sequence[Lookup]) -> Lookup:
        """The sum of several lookups of the same table."""
        self, first = cls.__new__(cls), parts[0]
        keys = torch.cat([p.owner * p.size + p.index for p in parts])
        self._gather(first.records, first.size, keys, torch.cat([p.value for p in parts]))
        return self

    def norm2(self) -> Tensor:
        per_pair = squares(self.value)
        return per_pair.new_zeros(self.records).index_add_(0, self.owner, per_pair)

    def slack(self) -> float:
        return 0.0

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        scatter(total.view(self.size, -1), self.value, self.index, self.owner, weight)

    def narrow_to(self, total: Tensor, weight: Tensor) -> bool:
        """See `narrow.narrow_sum`."""
        return scatter_narrow(total.view(self.size, -1), self.value, self.index, self.owner, weight)

    def dense(self, lo: int, hi: int) -> Tensor:
        here = (self.owner >= lo) & (self.owner < hi)
        out = self.value.new_zeros(hi - lo, self.size, self.value.shape[1])
        out[self.owner[here] - lo, self.index[here]] = self.value[here]
        return out

    def drop(self, bad: Tensor) -> None:
        self.value = masked(self.value, bad[self.owner])


def held_by(of: Contribution) -> dict[int, int]:
    """The memory that the contribution occupies, activations included: bytes by address, each storage once."""
    found: dict[int, int] = {}
    waiting: list[Any] = [of]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, (list, tuple)):
            waiting += one
        elif isinstance(one, dict):
            waiting += one.values()
        elif type(one).__module__.startswith("sordino.gradients"):
            waiting += vars(one).values()
    return found


def dense_norm2(of: Contribution, coordinates: int) -> Tensor:
    """Squared norms of dense gradients, computed for some records at a time."""
    parts = [squares(by_record(of.dense(lo, hi))) for lo, hi in blocks(of.records, coordinates)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def add_dense(of: Contribution, total: Tensor, weight: Tensor, coordinates: int) -> None:
    """`add_to` in the same blocks of records as `dense_norm2`, so that exactly the normed values are added."""
    for lo, hi in blocks(of.records, coordinates):
        gather(total.view(-1), by_record(of.dense(lo, hi)), weight[lo:hi])
