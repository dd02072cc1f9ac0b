"""DP-PCA: principal directions of the private records, released with noise.

Each record is scaled to norm at most 1, x ← x/max(‖x‖, 1) after a division by the public `scale` (or to norm exactly 1,
"normalise"), and the second moment Σ x xᵀ is released with Gaussian noise (Dwork, Talwar, Thakurta, Zhang 2014,
"Analyze Gauss"). Adding or removing a record moves it by x xᵀ, whose Frobenius norm is ‖x‖² ≤ 1. It is released as its
upper triangle with the off-diagonal entries times √2, an isometry (`taylor.triangle`), so the l2 sensitivity is 1 and
the release is 1/σ-GDP under add/remove. Eigenvectors, eigenvalues, projection and scaling are post-processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.clipping import in_unit_ball
from sordino.errors import InputError
from sordino.methods.dp_mac.taylor import from_triangle, triangle
from sordino.plan.core import ROUNDING_MARGIN, Statistic
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger

PURPOSE = "dp-pca"
_CHUNK = 4096  # rows in memory at once


@dataclass(frozen=True)
class PcaBudget:
    """Public constants of a DP-PCA. `scale` None: every record is normalised to norm 1; else divided by `scale`."""

    components: int
    records: int
    noise_multiplier: float
    scale: float | None = None
    whiten: float = 0.0  # coordinate i is divided by its released root mean square to this power

    def __post_init__(self) -> None:
        for name in ("components", "records"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise InputError(f"DP-PCA: {name} must be a whole number of at least 1, not {getattr(self, name)!r}")
        for name in ("noise_multiplier", *(() if self.scale is None else ("scale",))):
            checks.positive(f"DP-PCA: {name}", getattr(self, name))
        checks.within("DP-PCA: whiten", self.whiten, 0, 1)

    def statistic(self) -> Statistic:
        """The statistic that a plan declares for it."""
        return Statistic(purpose=PURPOSE, noise_multiplier=self.noise_multiplier)


@dataclass(frozen=True, eq=False)
class Projection:
    """Released directions: `matrix` (in, components), applied to a record after projection into the unit ball."""

    matrix: Tensor
    scale: float | None

    def __call__(self, inputs: Tensor) -> Tensor:
        """(n, …) → (n, components)."""
        parts = [unit_rows(some, self.scale) @ self.matrix for some in torch.split(inputs, _CHUNK)]
        return torch.cat(parts)


def unit_rows(inputs: Tensor, scale: float | None) -> Tensor:
    """Each record as a float32 vector of norm at most 1, up to rounding; zero if it is not finite."""
    return in_unit_ball(inputs, scale).float()


def second_moment(inputs: Tensor, scale: float | None) -> Tensor:
    """Σ x xᵀ over the records, (in, in), in double precision."""
    width = inputs.flatten(1).shape[1]
    total = torch.zeros(width, width, dtype=torch.float64)
    for start in range(0, len(inputs), _CHUNK):
        rows = unit_rows(inputs[start : start + _CHUNK], scale).double()
        total += rows.T @ rows
    return total


def private_projection(inputs: Tensor, budget: PcaBudget, *, source: RandomSource, ledger: Ledger) -> Projection:
    """The directions of the `components` largest eigenvalues of the noisy second moment.

    Guarantee: one Gaussian release at sampling rate 1 with noise multiplier `budget.noise_multiplier`, l2 sensitivity 1
    under add/remove (a thousandth more is declared, for rounding). The plan must declare `budget.statistic()`.

    Raises:
        InputError: there are more components than coordinates.
    """
    width = inputs.flatten(1).shape[1]
    if budget.components > width:
        raise InputError(f"DP-PCA: {budget.components} components of records with {width} coordinates")
    noisy = release(
        {"triangle": triangle(second_moment(inputs, budget.scale))},
        sensitivity=1.0 + ROUNDING_MARGIN,
        norm="l2",
        noise=Gaussian(budget.noise_multiplier),
        source=source,
        ledger=ledger,
        entry=Entry(PURPOSE, 0, {"name": "poisson", "sampling_rate": 1.0}, "add-remove"),
    )["triangle"]
    return projection_of(noisy, budget)


def projection_of(noisy: Tensor, budget: PcaBudget) -> Projection:
    """Maps the released triangle to directions: post-processing."""
    values, vectors = torch.linalg.eigh(from_triangle(noisy.double()))
    order = torch.argsort(values, descending=True)[: budget.components]
    # noise alone reaches √(2d)·σ: an eigenvalue below that carries no information about the records
    floor = budget.noise_multiplier * math.sqrt(2 * len(values))
    root = (values[order].clamp_min(floor) / budget.records).sqrt()
    return Projection((vectors[:, order] * root.pow(-budget.whiten)).float(), budget.scale)
