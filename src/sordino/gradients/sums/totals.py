"""The sum of several contributions to one parameter, its norm, and the inner products that the norm needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.gradients.sums.contributions import CANCELLED, Contribution, Dense, Lookup, Outer
from sordino.gradients.sums.memory import CACHE_BYTES, blocks, by_record, squares

ADDED_BYTES = 32 << 20  # gradients of all records that are added up and kept


class Total:
    """The sum of several contributions to the same parameter (tied weights, modules called more than once,
    past iterates). Norms need the cross terms between the parts, or the gradients themselves: if these are small, the
    parts are added up, and what is added to a sum later is the vector whose norm was computed."""

    def __init__(self, parts: Sequence[Contribution], orthogonal: bool = False) -> None:
        """orthogonal: the parts have no coordinate in common, so there are no cross terms."""
        self.parts, self.orthogonal = list(parts), orthogonal
        self.records = self.parts[0].records

    def norm2(self) -> Tensor:
        if self.orthogonal:
            return torch.stack([part.norm2() for part in self.parts]).sum(0)
        if self._added():
            return self.parts[0].norm2()
        squared = torch.stack([part.norm2() for part in self.parts])
        lengths = squared.sqrt().sum(0)
        kinds = [_kind(part) for part in self.parts if isinstance(part, (Outer, Lookup))]
        if kinds:
            # relative error of squares and products
            error = 2.0**-36 if all(kind == torch.float64 for kind in kinds) else 2.0**-16
            total = squared.sum(0)
            for i, first in enumerate(self.parts):
                for second in self.parts[:i]:
                    total = total + 2 * inner(first, second)
            apart = 2 * self.slack() * lengths  # a part may enter one product rounded and another one exactly
            norm = (total.clamp_min(0) + error * lengths.square() + apart).sqrt()
        else:
            norm = self._dense_norm2().sqrt()
        return torch.maximum(norm + self.slack(), CANCELLED * lengths).square()

    def _added(self) -> bool:
        """Replaces the parts by one that holds the records' gradients, unless products are needed or it is large."""
        if len(self.parts) == 1 or any(isinstance(part, (Outer, Lookup)) for part in self.parts):
            return len(self.parts) == 1
        one = self.parts[0].dense(0, 1)
        if self.records * one.numel() * one.element_size() > ADDED_BYTES:
            return False
        own = next((part for part in self.parts if type(part) is Dense and part.owned), None)
        gradient = one.new_zeros(self.records, *one.shape[1:]) if own is None else own.gradient
        # the blocks in which `dense_norm2` asks: what is pulled back is kept for its other parameters
        width = max(one.numel(), *(by.size for part in self.parts if (by := getattr(part, "by", None))), 0)
        for lo, hi in blocks(self.records, width):
            for part in self.parts:
                if part is not own:
                    gradient[lo:hi] += part.dense(lo, hi).reshape(gradient[lo:hi].shape)
        self.parts = [Dense(gradient, owned=True)]
        return True

    def slack(self) -> Tensor | float:
        total: Tensor | float = 0.0
        for part in self.parts:
            total = total + part.slack()
        return total

    def _dense_norm2(self) -> Tensor:
        """Makes each part dense once; with inner products it would be made dense once for every other part. The parts
        are added in one piece of memory, some records at a time: a copy of each in double precision was new memory."""
        found, like = [], self.parts[0].dense(0, 1)
        coordinates = like.numel()
        for lo, hi in blocks(self.records, coordinates, 8):
            total = like.new_zeros((hi - lo, coordinates), dtype=torch.float64)
            for part in self.parts:
                dense = by_record(part.dense(lo, hi))
                for first, last in blocks(hi - lo, coordinates, 8, CACHE_BYTES):
                    total[first:last] += dense[first:last]
            found.append(squares(total))
        return torch.cat(found)

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        for part in self.parts:
            part.add_to(total, weight)

    def dense(self, lo: int, hi: int) -> Tensor:
        total = self.parts[0].dense(lo, hi)
        for part in self.parts[1:]:
            total = total + part.dense(lo, hi).reshape(total.shape)
        return total

    def drop(self, bad: Tensor) -> None:
        for part in self.parts:
            part.drop(bad)


def _kind(part: Outer | Lookup) -> torch.dtype:
    return part.left.dtype if isinstance(part, Outer) else part.value.dtype


def keep(of: Contribution) -> None:
    """Its gradients will be requested more than once: rows that it shares with another contribution must not be
    overwritten."""
    for part in of.parts if isinstance(of, Total) else [of]:
        if isinstance(part, (Outer, Dense)):
            part.keep()
        elif (through := getattr(part, "through", None)) is not None:
            keep(through)


def inner(a: Contribution, b: Contribution) -> Tensor:
    """(records,) the inner products of two contributions' gradients."""
    if isinstance(a, Lookup) and isinstance(b, Outer):
        return _lookup_outer(a, b)
    if isinstance(b, Lookup) and isinstance(a, Outer):
        return _lookup_outer(b, a)
    coordinates = a.dense(0, 1).numel()
    out = []
    for lo, hi in blocks(a.records, coordinates, 8):
        x, y = by_record(a.dense(lo, hi)).double(), by_record(b.dense(lo, hi)).double()
        out.append((x * y).sum(1))
    return torch.cat(out)


def _lookup_outer(a: Lookup, b: Outer) -> Tensor:
    """An embedding tied to an output layer: Σ_j Σ_s (value_j · right_s) · left_s[index_j], record by record."""
    out = b.left.new_zeros(a.records, dtype=torch.float64)
    bounds = torch.searchsorted(a.owner, torch.arange(a.records + 1, device=a.owner.device)).tolist()
    for i in range(a.records):
        here = slice(bounds[i], bounds[i + 1])
        rows = a.value[here].double() @ b.right[i].double().mT
        out[i] = (rows * b.left[i][:, a.index[here]].mT.double()).sum()
    return out


def merged(parts: Sequence[Contribution]) -> Contribution:
    """One contribution from several: positions are concatenated if the forms allow it; otherwise a Total."""
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
