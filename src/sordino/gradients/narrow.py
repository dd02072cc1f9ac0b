"""Sums in single precision, each coordinate added up in double precision and rounded once.

A sum in double precision takes twice the memory of the parameters, fresh in every step, and what is released from it
half as much again. Over few records it may be rounded before it is released (docs/guarantees/noise.md, section 6,
theorem 2): it is made a tile at a time, in memory that stays in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.gradients.contributions import Contribution, Dense, Lookup, Outer
from sordino.gradients.memory import Pool
from sordino.gradients.single import Shift

MOST = 2048
"""Records of a sum that may be rounded: 2 · MOST · 2⁻²⁴ clip norms of the margin."""


def narrow_sum(of: Contribution, weight: Tensor, parameter: Tensor, pool: Pool) -> Tensor:
    """Σ_i weight_i · g_i in the parameter's shape, in single precision.

    Args:
        of: the gradients of all records of the sum.
        weight: (records,) in double precision.
        parameter: whose gradients they are.
        pool: lends memory.
    """
    out = torch.empty(parameter.shape, dtype=torch.float32)
    if isinstance(of, (Outer, Dense, Lookup)) and not isinstance(of, Shift) and of.narrow_to(out, weight):
        return out
    total = pool.work(out.numel()).view(out.shape)
    of.add_to(total, weight)
    return out.copy_(total)
