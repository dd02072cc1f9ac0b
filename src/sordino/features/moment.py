"""The second moment of private records, released once with noise; what is made of it is post-processing.

Each record is scaled to norm at most 1, x ← x/max(‖x‖, scale) (or to norm exactly 1 if `scale` is None), and
S = Σ x xᵀ is released with symmetric Gaussian noise (Dwork, Talwar, Thakurta, Zhang 2014, "Analyze Gauss"). Adding or
removing a record moves S by x xᵀ, whose Frobenius norm is ‖x‖² ≤ 1; replacing one by another moves it by less than 2.
S is released as its upper triangle with the off-diagonal entries times √2 (`triangle`), an isometry from the Frobenius
norm to l2, so the l2 sensitivity is 1 and the release is 1/σ-GDP under add/remove.

Noise alone has eigenvalues up to about √(2d)·σ for d coordinates (`edge`): a released eigenvalue below that says
nothing about the records.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sordino.clipping import in_unit_ball
from sordino.plan.core import ROUNDING_MARGIN
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger

CHUNK = 4096  # rows in memory at once


def unit_rows(inputs: Tensor, scale: float | None) -> Tensor:
    """Each record as a float32 vector of norm at most 1, up to rounding; zero if it is not finite."""
    return in_unit_ball(inputs, scale).float()


def second_moment(inputs: Tensor, scale: float | None) -> Tensor:
    """Σ x xᵀ over the records, (d, d), in double precision."""
    width = inputs.flatten(1).shape[1]
    total = torch.zeros(width, width, dtype=torch.float64)
    for start in range(0, len(inputs), CHUNK):
        rows = unit_rows(inputs[start : start + CHUNK], scale).double()
        total += rows.T @ rows
    return total


def private_second_moment(
    inputs: Tensor,
    scale: float | None,
    noise_multiplier: float,
    *,
    purpose: str,
    relation: str,
    source: RandomSource,
    ledger: Ledger,
) -> Tensor:
    """The noisy second moment (d, d), symmetric, in double precision.

    Guarantee: one Gaussian release at sampling rate 1 with this noise multiplier and l2 sensitivity 1 (a thousandth
    more is declared, for rounding; the noise is in units of one record's contribution under either relation:
    docs/guarantees/dpsgd.md). The plan must declare it as a `Statistic` of the same purpose.
    """
    noisy = release(
        {"triangle": triangle(second_moment(inputs, scale))},
        sensitivity=1.0 + ROUNDING_MARGIN,
        norm="l2",
        noise=Gaussian(noise_multiplier),
        source=source,
        ledger=ledger,
        entry=Entry(purpose, 0, {"name": "poisson", "sampling_rate": 1.0}, relation),
    )
    return from_triangle(noisy["triangle"].double())


def edge(noise_multiplier: float, width: int) -> float:
    """The largest eigenvalue that noise alone reaches, up to small fluctuations: off-diagonal entries have the
    variance σ²/2, and the spectrum of such a matrix ends at 2·√d·σ/√2 (Wigner's semicircle)."""
    return noise_multiplier * math.sqrt(2 * width)


def triangle(matrix: Tensor) -> Tensor:
    """(…, d, d) symmetric → (…, d·(d+1)/2) with the Frobenius norm as its l2 norm."""
    row, column, scale = triangle_of(matrix.shape[-1], matrix)
    return matrix[..., row, column] * scale


def from_triangle(vector: Tensor) -> Tensor:
    """The inverse of `triangle`."""
    size = (math.isqrt(8 * vector.shape[-1] + 1) - 1) // 2
    row, column, scale = triangle_of(size, vector)
    matrix = vector.new_zeros(*vector.shape[:-1], size, size)
    matrix[..., row, column] = vector / scale
    matrix[..., column, row] = vector / scale
    return matrix


def triangle_of(size: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows and columns of the entries of `triangle`, and what they are multiplied by."""
    row, column = torch.triu_indices(size, size, device=like.device).unbind(0)
    scale = torch.where(row == column, 1.0, math.sqrt(2.0)).to(like.dtype)
    return row, column, scale
