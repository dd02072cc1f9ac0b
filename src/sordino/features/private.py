"""Private normalisation: statistics of the private records, released as part of a run and its plan.

    [features]
    private = "centre"          # or "channels", "whiten"
    private_noise = 30.0        # noise multiplier of each release
    private_bound = 63.0        # l2 bound on a record's contribution; public, never measured
    private_square_bound = 9.0  # the same for the means of squares ("channels" only)

| kind     | released                                                   | then                            |
|----------|------------------------------------------------------------|---------------------------------|
| centre   | the sum of the records' flattened features, once           | each feature less its mean      |
| channels | sums of spatial means, and of spatial means of squares     | (x − mean)/std for each channel |
| whiten   | the second moment Σ x xᵀ of records of norm at most 1       | see `whitened`                  |

The releases are recorded in the run's ledger before the first step, and the plan declares them (`statistic`), so its ε
covers them. The results are published with the run (statistics.safetensors): the model can't be used without them, and
a resumed run reads them there, because the same statistic must not be drawn twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from sordino.errors import InputError, SordinoError, did_you_mean
from sordino.features.moment import CHUNK, edge, private_second_moment
from sordino.features.normalise import PURPOSE, ChannelBudget, _clip, private_statistics, standardise
from sordino.files import write_atomically
from sordino.plan.core import ROUNDING_MARGIN, Plan, Statistic
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger

KINDS = ("centre", "channels", "whiten")
FILE = "statistics.safetensors"
WIDEST = 8192
"""Coordinates of a second moment: beyond it its eigenvectors would take many minutes and gigabytes."""


@dataclass(frozen=True)
class PrivateNormalisation:
    """Public constants of the normalisation."""

    kind: str
    noise_multiplier: float
    bound: float
    square_bound: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"features.private = {self.kind!r} is unknown: {did_you_mean(self.kind, KINDS)}")
        if (self.square_bound is not None) != (self.kind == "channels"):
            raise InputError("features.private_square_bound is needed by private = 'channels', and only by it")
        ChannelBudget(1, self.bound, self.square_bound or 1.0, self.noise_multiplier)  # checks the numbers

    def statistic(self) -> Statistic:
        """The statistic that the plan declares."""
        return Statistic(PURPOSE, self.noise_multiplier, count=2 if self.kind == "channels" else 1)

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raises InputError if the second moment of features of this shape would take too long."""
        width = math.prod(shape)
        if self.kind == "whiten" and width > WIDEST:
            raise InputError(
                f"features.private = 'whiten': these features have {width} coordinates, and the second moment of more "
                f"than {WIDEST} takes too long: choose fewer (atoms, frequencies, dimensions), or private = 'centre'"
            )

    def release(self, maps: Tensor, plan: Plan, source: RandomSource, ledger: Ledger) -> dict[str, Tensor]:
        """{"mean"[, "std"]} or {"directions", "factors"}: functions of the noisy sums. Records that are not finite
        contribute zero."""
        if self.kind == "channels":
            assert self.square_bound is not None
            budget = ChannelBudget(plan.records, self.bound, self.square_bound, self.noise_multiplier, plan.relation)
            found = private_statistics(maps, budget, source=source, ledger=ledger)
            return {"mean": found.mean, "std": found.std}
        if self.kind == "whiten":
            return _private_whitening(maps, self, plan, source, ledger)
        return {"mean": _private_mean(maps, self, plan, source, ledger)}


def normalised(maps: Tensor, statistics: dict[str, Tensor]) -> Tensor:
    """The maps minus their released mean, divided by their released standard deviation if there is one; or whitened by
    their released second moment."""
    if "directions" in statistics:
        return whitened(maps, statistics["directions"], statistics["factors"])
    if "std" in statistics:
        return standardise(maps, statistics["mean"], statistics["std"])
    return maps - statistics["mean"].view(maps.shape[1:]).to(maps)


class Normaliser:
    """The statistics of one run: released when training starts, or read from the run's directory."""

    def __init__(self, settings: PrivateNormalisation, plan: Plan, folder: Path | None) -> None:
        self.settings, self.plan = settings, plan
        self.path = folder / FILE if folder is not None else None
        self.statistics: dict[str, Tensor] = {}

    def first(self, dataset: Any, source: RandomSource, ledger: Ledger) -> Any:
        """The dataset, normalised by its released statistics, which the plan declares."""
        if not self.statistics:
            self.statistics = self._read() or self._release(dataset.inputs, source, ledger)
        return self.apply(dataset)

    def restored(self) -> Callable[[Tensor], Tensor]:
        """The normalisation of a finished run, from the statistics that it published."""
        self.statistics = self._read() or {}
        if not self.statistics:
            raise InputError(f"{self.path} is missing: predictions need the statistics that the run released")
        return lambda maps: normalised(maps, self.statistics)

    def apply(self, dataset: Any) -> Any:
        """Another dataset, normalised with the same statistics."""
        if not self.statistics:
            raise SordinoError("the statistics have not been released yet")
        return replace(dataset, inputs=normalised(dataset.inputs, self.statistics))

    def _release(self, maps: Tensor, source: RandomSource, ledger: Ledger) -> dict[str, Tensor]:
        if ledger.last_step(PURPOSE) >= 0 and source.secure:
            raise SordinoError(
                f"{ledger.path}: the statistics were released, but the run was killed before they were written; "
                "drawing them again would be another release: start again in another directory"
            )
        found = self.settings.release(maps, self.plan, source, ledger)
        if self.path is not None:
            write_atomically(self.path, save({name: value.contiguous() for name, value in found.items()}))
        return found

    def _read(self) -> dict[str, Tensor] | None:
        if self.path is None or not self.path.exists():
            return None
        try:
            with safe_open(str(self.path), framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        except (OSError, SafetensorError) as error:
            raise SordinoError(f"{self.path} can't be read: {error}; start again in another directory") from error


def whitened(maps: Tensor, directions: Tensor, factors: Tensor) -> Tensor:
    """Each record's coordinate along every direction (d, k) times its factor (k,), and the record scaled to length one.

    Gradient descent on features of very unequal variances needs many steps, and each has noise. Directions are
    eigenvectors of the released second moment whose eigenvalue λ is above the noise's own, `edge`; factors are
    (edge/λ)^½, so that along them the records are as long as along those that the noise hides, which stay as they are.
    """
    out = torch.empty_like(maps)
    for rows, into in zip(torch.split(maps, CHUNK), torch.split(out, CHUNK), strict=True):
        flat = rows.flatten(1)
        some = flat + ((flat @ directions.to(flat)) * (factors.to(flat) - 1)) @ directions.to(flat).T
        into.copy_((some / some.norm(dim=1, keepdim=True).clamp(min=1e-12)).view_as(rows))
    return out


def _private_whitening(
    maps: Tensor, settings: PrivateNormalisation, plan: Plan, source: RandomSource, ledger: Ledger
) -> dict[str, Tensor]:
    settings.check_shape(maps.shape[1:])
    moment = private_second_moment(
        maps, settings.bound, settings.noise_multiplier, purpose=PURPOSE, relation=plan.relation, source=source,
        ledger=ledger,
    )  # fmt: skip
    found = shortening(moment, settings.noise_multiplier)
    return {name: value.to(maps.dtype) for name, value in found.items()}


def shortening(moment: Tensor, noise_multiplier: float) -> dict[str, Tensor]:
    """Directions and factors of `whitened`, from a released second moment and the multiplier of its noise."""
    values, vectors = torch.linalg.eigh(moment)
    least = edge(noise_multiplier, len(values))
    kept = values > least
    return {"directions": vectors[:, kept], "factors": (least / values[kept]).sqrt()}


def _private_mean(
    maps: Tensor, settings: PrivateNormalisation, plan: Plan, source: RandomSource, ledger: Ledger
) -> Tensor:
    """One Gaussian release, at sampling rate 1, of the sum of flattened features clipped to the public bound."""
    total = torch.zeros(maps[0].numel(), dtype=torch.float64)
    for rows in torch.split(maps.flatten(1), 4096):
        total += _clip(rows, settings.bound).sum(0)
    noisy = release(
        {"sum": total},
        sensitivity=settings.bound * (1 + ROUNDING_MARGIN),
        norm="l2",
        noise=Gaussian(settings.noise_multiplier),
        source=source,
        ledger=ledger,
        entry=Entry(PURPOSE, 0, {"name": "poisson", "sampling_rate": 1.0}, plan.relation),
    )
    return (noisy["sum"] / plan.records).to(maps.dtype)
