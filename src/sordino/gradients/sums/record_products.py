"""Products of matrices, one for each record, with their norms."""

from __future__ import annotations

import torch
from torch import Tensor

from sordino.gradients.sums.memory import squares
from sordino.native.kernels import compiled, readable
from sordino.native.threads import share, workers

SHARED = 1 << 24  # multiplications from which on the records are divided between threads


def record_products(left: Tensor, right: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Σ_s left_s ⊗ right_s of every record, (records, p, q), and their squared norms in double precision.

    left (records, S, p), right (records, S, q). out: contiguous memory for the products. In single precision the
    compiled loop computes the norms while the products are in the registers.
    """
    if out is None:
        out = left.new_empty((left.shape[0], left.shape[2], right.shape[2]))
    norm2 = _compiled(left, right, out)
    if norm2 is None:
        torch.bmm(left.mT, right, out=out)
        norm2 = squares(out.flatten(1))
    return out, norm2


def product_norms(left: Tensor, right: Tensor) -> Tensor | None:
    """The squared norms alone, without memory for the products; None if there is no compiled loop for them."""
    return _compiled(left, right, None)


def _compiled(left: Tensor, right: Tensor, out: Tensor | None) -> Tensor | None:
    (m, s, p), q = left.shape, right.shape[2]
    known = left.dtype == right.dtype == torch.float32 and readable(left) and readable(right) and m * s * p * q > 0
    kernels = compiled() if known else None
    if kernels is None:
        return None
    if right.stride(2) != 1:
        right = right.contiguous()
    norm2, strides = torch.empty(m, dtype=torch.float64), (*left.stride(), *right.stride()[:2])
    at, to, pieces = (left.data_ptr(), right.data_ptr()), norm2.data_ptr(), workers(m) if m * s * p * q > SHARED else 1

    def work(piece: int) -> None:
        lo, hi = m * piece // pieces, m * (piece + 1) // pieces
        here = at[0] + 4 * lo * strides[0], at[1] + 4 * lo * strides[3]
        place = 0 if out is None else out.data_ptr() + 4 * lo * p * q
        kernels.products(*here, (hi - lo, s, p, q), strides, place, to + 8 * lo)

    share(lambda: work, pieces)
    return norm2
