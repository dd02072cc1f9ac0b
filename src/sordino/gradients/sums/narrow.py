"""Sums in single precision: each coordinate is summed in double precision and rounded once.

A sum in double precision needs twice the memory of the parameters, newly allocated in every step, and the released
value half as much again. Over few records the sum may be rounded before its release (docs/guarantees/noise.md, section
6, theorem 2): one parameter after the other, slice by slice, and for tables one row after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.gradients.sums.contributions import Contribution

MOST = 2048
"""Records of a sum that may be rounded: this uses 2 · MOST · 2⁻²⁴ clip norms of the margin."""


def narrow_sum(of: Contribution, weight: Tensor, parameter: Tensor) -> Tensor:
    """Σ_i weight_i · g_i in the parameter's shape, in single precision.

    Args:
        of: the per-record gradients of all records of the sum.
        weight: (records,) in double precision.
        parameter: the parameter that they belong to.
    """
    out = torch.empty(parameter.shape, dtype=torch.float32)
    rounded = getattr(of, "narrow_to", None)  # some forms round where they sum
    if rounded is not None and rounded(out, weight):
        return out
    if (cut := getattr(of, "sliced", None)) is not None:
        flat = out.view(-1)
        for lo, hi, part in cut():
            part.add_to(total := torch.zeros(hi - lo, dtype=torch.float64), weight)
            flat[lo:hi] = total
        return out
    total = torch.zeros(out.shape, dtype=torch.float64)
    of.add_to(total, weight)
    return out.copy_(total)
