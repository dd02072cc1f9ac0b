"""Squared norms of sums of products, from the inner products of their factors.

The bounds of the rounding errors are in docs/guarantees/noise.md, section 6 (theorem 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

PART = 256  # features per inner product in single precision


def gram(left: Tensor, right: Tensor) -> Tensor:
    """(m,) Σ_st (l_s·l_t)(r_s·r_t) in double precision, for left (m, S, p) and right (m, S, q)."""
    a, b = left.double(), right.double()
    return torch.bmm(a, a.mT).mul_(torch.bmm(b, b.mT)).sum((1, 2)).clamp_min_(0)


def gram_by_parts(left: Tensor, right: Tensor) -> Tensor:
    """The same in single precision: inner products of at most PART features, summed in double precision."""
    return _inner_products(left).mul_(_inner_products(right)).sum((1, 2)).clamp_min_(0)


def _inner_products(t: Tensor) -> Tensor:
    """(m, S, S) in double precision."""
    total = torch.bmm(t[:, :, :PART], t[:, :, :PART].mT).double()
    for lo in range(PART, t.shape[2], PART):
        part = t[:, :, lo : lo + PART]
        total += torch.bmm(part, part.mT)
    return total
