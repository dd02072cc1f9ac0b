"""DP-PCA: principal directions of the private records, from their second moment (`features.moment`), which is released
with noise. Eigenvectors, eigenvalues, projection and scaling are post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InputError
from sordino.features.moment import CHUNK, edge, private_second_moment, unit_rows
from sordino.plan.core import Statistic
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger

PURPOSE = "dp-pca"


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
        parts = [unit_rows(some, self.scale) @ self.matrix for some in torch.split(inputs, CHUNK)]
        return torch.cat(parts)


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
    noisy = private_second_moment(
        inputs, budget.scale, budget.noise_multiplier, purpose=PURPOSE, relation="add-remove", source=source,
        ledger=ledger,
    )  # fmt: skip
    return projection_of(noisy, budget)


def projection_of(noisy: Tensor, budget: PcaBudget) -> Projection:
    """Maps the released second moment to directions: post-processing."""
    values, vectors = torch.linalg.eigh(noisy)
    order = torch.argsort(values, descending=True)[: budget.components]
    root = (values[order].clamp_min(edge(budget.noise_multiplier, len(values))) / budget.records).sqrt()
    return Projection((vectors[:, order] * root.pow(-budget.whiten)).float(), budget.scale)
