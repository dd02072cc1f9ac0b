"""What a record adds to one parameter's gradient, in the form in which it is cheapest to hold.

Each form knows three things: the squared l2 norm per record, the sum over records with given weights, and the
dense per-record gradient of a range of records. Nothing else of the engine depends on the form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sordino.gradients.memory import CACHE_BYTES, Pool, blocks, by_record, reads_memory, squares

SHORT_BLOCK = 64  # positions at a time in a product that is bound by memory: 3.7 ms against 6.2 for 2048 × 4096 → 10
SLACK = 4.0  # rounding units, of the squared sum of the lengths of parts, by which their joint norm is raised
KEEP_RATIO = 2.0  # hold products of at most this many times the size of the positions they came from


class Contribution(Protocol):
    records: int

    def norm2(self) -> Tensor:
        """(records,) squared l2 norms."""

    def weighted(self, weight: Tensor) -> Tensor:
        """Σ_i weight_i · g_i, in the parameter's shape."""

    def dense(self, lo: int, hi: int) -> Tensor:
        """(hi − lo, *shape) the gradients of these records."""

    def drop(self, bad: Tensor) -> None:
        """Replace the gradients of the records where ``bad`` is true by zero."""


def not_too_small(norm2: Tensor, lengths: Tensor) -> Tensor:
    """Squared norms of sums of parts, raised by the rounding that the parts may have left in them.

    lengths: (records,) the sum of the norms of the record's parts. Inner products of parts that cancel have an error
    of up to a rounding unit of lengths² (0.8 was the most that was measured), while the true norm may be next to
    nothing: a record of huge, opposite parts would be taken for a short one and add thousands of clip norms
    (tests/gradients/test_cancellation.py). Where nothing cancels, the norm of S parts grows by at most 2·S units.
    """
    return norm2.clamp_min(0) + SLACK * torch.finfo(norm2.dtype).eps * lengths.square()


def masked(t: Tensor, bad: Tensor) -> Tensor:
    return t.masked_fill(bad.reshape(-1, *([1] * (t.ndim - 1))), 0)


class Dense:
    """The gradients themselves: (records, *shape), with their squared norms where these came for free.

    owned: the memory is this object's alone, so that another's gradients may be added in place.
    """

    def __init__(self, gradient: Tensor, norm2: Tensor | None = None, *, owned: bool = False) -> None:
        self.gradient, self._norm2, self.owned = gradient, norm2, owned
        self.records = gradient.shape[0]

    def norm2(self) -> Tensor:
        if self._norm2 is None:
            self._norm2 = squares(by_record(self.gradient))
        return self._norm2

    def weighted(self, weight: Tensor) -> Tensor:
        flat = self.gradient.reshape(self.records, -1)
        return (weight.to(flat.dtype) @ flat).reshape(self.gradient.shape[1:])

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.gradient[lo:hi]

    def drop(self, bad: Tensor) -> None:
        self.gradient = masked(self.gradient, bad)

    def add(self, other: Dense) -> None:
        more = other.gradient.reshape(self.gradient.shape)
        self.gradient = self.gradient.add_(more) if self.owned else self.gradient + more
        self._norm2 = None


class Outer:
    """g_i = Σ_s left_s ⊗ right_s: the weight of a linear map, left (records, S, d_out), right (records, S, d_in)."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left, self.right = left, right
        self.records = left.shape[0]

    def norm2(self) -> Tensor:
        left, right = self.left, self.right
        (m, s, p), q = left.shape, right.shape[2]
        if s == 1:  # ‖l ⊗ r‖ = ‖l‖·‖r‖
            return squares(right[:, 0], squares(left[:, 0]))
        out, lengths = left.new_empty(m), left.new_empty(m)
        if s * (p + q) <= p * q:  # Σ_st (l_s·l_t)(r_s·r_t)
            for lo, hi in blocks(m, 2 * s * s, left.element_size()):
                a, b = left[lo:hi], right[lo:hi]
                gram = torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT))
                out[lo:hi] = gram.sum((1, 2))
                lengths[lo:hi] = gram.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().sum(1)
            return not_too_small(out, lengths)
        for lo, hi in blocks(m, p * q, left.element_size()):
            out[lo:hi] = squares(self.dense(lo, hi).flatten(1))
            norms = torch.linalg.vector_norm(left[lo:hi], dim=2) * torch.linalg.vector_norm(right[lo:hi], dim=2)
            lengths[lo:hi] = norms.sum(1)
        return not_too_small(out, lengths)

    def weighted(self, weight: Tensor) -> Tensor:
        left = (self.left * weight.to(self.left.dtype)[:, None, None]).flatten(0, 1)
        return summed(left, self.right.flatten(0, 1))

    def dense(self, lo: int, hi: int) -> Tensor:
        if self.left.shape[1] == 1:
            return self.left[lo:hi].mT * self.right[lo:hi]
        return torch.bmm(self.left[lo:hi].mT, self.right[lo:hi])

    def drop(self, bad: Tensor) -> None:
        self.left, self.right = masked(self.left, bad), masked(self.right, bad)


def summed(left: Tensor, right: Tensor) -> Tensor:
    """Σ_s left_s ⊗ right_s over all positions of all records."""
    if not reads_memory(right, left.shape[1]):
        return torch.mm(left.mT, right)
    total = right.new_zeros(left.shape[1], right.shape[1])
    for lo in range(0, len(right), SHORT_BLOCK):
        total.addmm_(left[lo : lo + SHORT_BLOCK].mT, right[lo : lo + SHORT_BLOCK])
    return total


def outer(left: Tensor, right: Tensor, pool: Pool) -> Contribution:
    """Σ_s left_s ⊗ right_s, held as the positions or as the product, whichever is less.

    The product costs what the plain weight gradient costs, and then both the norms and the clipped sum are one pass
    over it; the positions need S²·(d_out + d_in) work for the norms and a matrix product for the sum.
    """
    (m, s, p), q = left.shape, right.shape[2]
    if s == 1 or p * q > KEEP_RATIO * s * (p + q):
        return Outer(left, right)
    return products(m, (p, q), left, lambda lo, hi: (left[lo:hi], right[lo:hi]), pool)


def products(
    records: int,
    shape: tuple[int, int],
    like: Tensor,
    factors: Callable[[int, int], tuple[Tensor, Tensor]],
    pool: Pool,
    working: int = 0,
) -> Dense:
    """Σ_s left_s ⊗ right_s of every record, with its norm taken while the product is still in the cache.

    working: elements per record that ``factors`` makes on the way; a block of records is chosen to fit them too.
    """
    product, norm2 = pool.take((records, *shape), like), like.new_empty(records)
    for lo, hi in blocks(records, shape[0] * shape[1] + working, like.element_size(), CACHE_BYTES):
        left, right = factors(lo, hi)
        torch.bmm(left.mT, right, out=product[lo:hi])
        norm2[lo:hi] = squares(product[lo:hi].flatten(1))
    return Dense(product, norm2, owned=True)


class Lookup:
    """Row-sparse: record owner[j]'s gradient has value[j] at row index[j]; every (owner, index) pair is there once."""

    def __init__(self, index: Tensor, gradient: Tensor, size: int, skip: int | None = None) -> None:
        """index (records, S), gradient (records, S, d): the row of the table and the gradient of each position."""
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

    def weighted(self, weight: Tensor) -> Tensor:
        return self.add_to(self.value.new_zeros(self.size, self.value.shape[1]), weight)

    def add_to(self, total: Tensor, weight: Tensor) -> Tensor:
        """Add the weighted sum to ``total`` in place, without a table of zeros in between."""
        scaled = self.value * weight.to(self.value.dtype)[self.owner, None]
        return total.index_add_(0, self.index, scaled.to(total.dtype))

    def dense(self, lo: int, hi: int) -> Tensor:
        here = (self.owner >= lo) & (self.owner < hi)
        out = self.value.new_zeros(hi - lo, self.size, self.value.shape[1])
        out[self.owner[here] - lo, self.index[here]] = self.value[here]
        return out

    def drop(self, bad: Tensor) -> None:
        self.value = masked(self.value, bad[self.owner])


class Total:
    """The sum of several contributions to the same parameter (tied weights, modules called more than once,
    past iterates). Norms need the cross terms between them."""

    def __init__(self, parts: Sequence[Contribution], orthogonal: bool = False) -> None:
        """orthogonal: the parts touch different coordinates, so that there are no cross terms."""
        self.parts, self.orthogonal = list(parts), orthogonal
        self.records = self.parts[0].records

    def norm2(self) -> Tensor:
        if self.orthogonal:
            return torch.stack([part.norm2() for part in self.parts]).sum(0)
        if not any(isinstance(part, (Outer, Lookup)) for part in self.parts):
            return self._dense_norm2()
        squared = torch.stack([part.norm2() for part in self.parts])
        total = squared.sum(0)
        for i, first in enumerate(self.parts):
            for second in self.parts[:i]:
                total = total + 2 * inner(first, second)
        return not_too_small(total, squared.sqrt().sum(0))

    def _dense_norm2(self) -> Tensor:
        """Each part is made dense once, where inner products would make it so once for every other part."""
        found = []
        for lo, hi in blocks(self.records, self.parts[0].dense(0, 1).numel()):
            parts = [by_record(part.dense(lo, hi)) for part in self.parts]
            lengths = torch.stack([squares(part).sqrt() for part in parts]).sum(0)
            found.append(not_too_small(squares(torch.stack(parts).sum(0)), lengths))
        return torch.cat(found)

    def weighted(self, weight: Tensor) -> Tensor:
        total = self.parts[0].weighted(weight)
        for part in self.parts[1:]:
            total = total + part.weighted(weight).reshape(total.shape)
        return total

    def dense(self, lo: int, hi: int) -> Tensor:
        total = self.parts[0].dense(lo, hi)
        for part in self.parts[1:]:
            total = total + part.dense(lo, hi).reshape(total.shape)
        return total

    def drop(self, bad: Tensor) -> None:
        for part in self.parts:
            part.drop(bad)


class Pulled:
    """A contribution to a tensor that was computed from the parameter: pulled back through that computation.

    isometric: the tensor is a view of the parameter's coordinates, each at most once, so that norms carry over.
    """

    def __init__(self, source: Tensor, leaf: Tensor, through: Contribution, isometric: bool) -> None:
        self.source, self.leaf, self.through, self.isometric = source, leaf, through, isometric
        self.records = through.records

    def _pull(self, cotangent: Tensor, batched: bool) -> Tensor:
        out = torch.autograd.grad(
            self.source, self.leaf, cotangent.to(self.source.dtype), retain_graph=True, is_grads_batched=batched
        )[0]
        return out.float() if out.dtype in (torch.bfloat16, torch.float16) else out

    def norm2(self) -> Tensor:
        if self.isometric:
            return self.through.norm2()
        parts = []
        for lo, hi in blocks(self.records, max(self.source.numel(), self.leaf.numel())):
            parts.append(squares(by_record(self.dense(lo, hi))))
        return torch.cat(parts)

    def weighted(self, weight: Tensor) -> Tensor:
        return self._pull(self.through.weighted(weight).reshape(self.source.shape), False)

    def dense(self, lo: int, hi: int) -> Tensor:
        cotangents = self.through.dense(lo, hi).reshape(hi - lo, *self.source.shape)
        try:
            return self._pull(cotangents, True)
        except RuntimeError:  # no batching rule for some step of the computation
            return torch.stack([self._pull(c, False) for c in cotangents])

    def drop(self, bad: Tensor) -> None:
        self.through.drop(bad)


def inner(a: Contribution, b: Contribution) -> Tensor:
    """(records,) the inner products of two contributions' gradients."""
    if isinstance(a, Lookup) and isinstance(b, Outer):
        return _lookup_outer(a, b)
    if isinstance(b, Lookup) and isinstance(a, Outer):
        return _lookup_outer(b, a)
    coordinates = a.dense(0, 1).numel()
    out = []
    for lo, hi in blocks(a.records, coordinates):
        x, y = by_record(a.dense(lo, hi)), by_record(b.dense(lo, hi))
        out.append((x * y).sum(1))
    return torch.cat(out)


def _lookup_outer(a: Lookup, b: Outer) -> Tensor:
    """An embedding tied to an output layer: Σ_j Σ_s (value_j · right_s) · left_s[index_j], record by record."""
    out = b.left.new_zeros(a.records)
    bounds = torch.searchsorted(a.owner, torch.arange(a.records + 1, device=a.owner.device)).tolist()
    for i in range(a.records):
        here = slice(bounds[i], bounds[i + 1])
        out[i] = (a.value[here] @ b.right[i].mT * b.left[i][:, a.index[here]].mT).sum()
    return out


def merged(parts: Sequence[Contribution]) -> Contribution:
    """One contribution out of several: positions joined where the forms allow it, else a Total."""
    if len(parts) == 1:
        return parts[0]
    outers = [p for p in parts if isinstance(p, Outer)]
    denses = [p for p in parts if isinstance(p, Dense)]
    lookups = [p for p in parts if isinstance(p, Lookup)]
    joined: list[Contribution] = [p for p in parts if not isinstance(p, (Outer, Dense, Lookup))]
    if lookups:
        joined.append(lookups[0] if len(lookups) == 1 else Lookup.join(lookups))
    if len(outers) > 1:
        joined.append(Outer(torch.cat([o.left for o in outers], 1), torch.cat([o.right for o in outers], 1)))
    else:
        joined += outers
    if denses:
        for other in denses[1:]:
            denses[0].add(other)
        joined.append(denses[0])
    return joined[0] if len(joined) == 1 else Total(joined)
