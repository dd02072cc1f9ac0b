"""Normalisation of feature maps: without privacy cost, or released with noise.

- `group_normalise`: within one record, no parameters, nothing shared between records. No privacy cost.
- `standardise`: by constants per channel. No privacy cost if the constants are public.
- `private_statistics`: per-channel mean and mean of squares of the private records, released with Gaussian noise and
  recorded in the ledger. The plan must declare both releases; its ε includes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sordino.clipping import in_unit_ball
from sordino.errors import InputError

if TYPE_CHECKING:
    from sordino.randomness import RandomSource
    from sordino.release.ledger import Ledger

PURPOSE = "statistics"


def group_normalise(maps: Tensor, groups: int = 27, eps: float = 1e-5) -> Tensor:
    """Normalises the channels of each group of each record, jointly, to mean 0 and variance 1.

    There are no parameters. A constant group gives zeros. A record's result depends on that record only, so there is
    no privacy cost.

    Args:
        maps: (n, c, h, w) the feature maps.
        groups: The number of groups, which divides c.
        eps: Added to the variance.

    Returns:
        (n, c, h, w) the normalised maps.

    Raises:
        InputError: the groups do not divide the channels.
    """
    if maps.dim() < 2 or not isinstance(groups, int) or groups < 1 or maps.shape[1] % groups:
        raise InputError(
            f"group_normalise: {groups} groups do not divide the {maps.shape[1] if maps.dim() > 1 else 0} "
            f"channels of maps of shape {tuple(maps.shape)}"
        )
    return torch.nn.functional.group_norm(maps, groups, eps=eps)


def record_normalise(features: Tensor) -> Tensor:
    """Subtracts each record's own mean and scales the record to length one.

    A record's result depends on that record only, so there is no privacy cost.

    Args:
        features: (n, d) the features.

    Returns:
        (n, d) the normalised features.
    """
    centred = features - features.mean(1, keepdim=True)
    scaled: Tensor = centred / centred.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return scaled


def low_frequencies(maps: Tensor, count: int) -> Tensor:
    """The lowest frequencies of each map's orthonormal cosine transform (DCT-II).

    This is a fixed projection: no norm increases, and a record's result depends on that record only.

    Args:
        maps: (n, c, h, w) the feature maps.
        count: The number of frequencies in each direction.

    Returns:
        (n, c, count, count) the coefficients.

    Raises:
        InputError: the maps have fewer frequencies, or not four dimensions.
    """
    if maps.dim() != 4 or not 1 <= count <= min(maps.shape[2:]):
        raise InputError(f"low_frequencies: maps of shape {tuple(maps.shape)} do not have {count} frequencies")
    down, across = (_cosines(side, count).to(maps) for side in maps.shape[2:])
    return torch.einsum("nchw,uh,vw->ncuv", maps, down, across)


def _cosines(side: int, count: int) -> Tensor:
    """The first rows of the DCT-II matrix: orthonormal."""
    points = torch.arange(side, dtype=torch.float64) + 0.5
    rows = torch.cos(math.pi / side * torch.arange(count, dtype=torch.float64)[:, None] * points) * math.sqrt(2 / side)
    rows[0] /= math.sqrt(2)
    return rows


def standardise(maps: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(maps − mean) / std for each channel.

    Args:
        maps: (n, c, ...) the feature maps.
        mean: (c,) public constants or released statistics.
        std: (c,) public constants or released statistics, all positive.

    Returns:
        The standardised maps.

    Raises:
        InputError: `mean` or `std` has a wrong shape, or a standard deviation is not positive.
    """
    channels = maps.shape[1]
    if mean.shape != (channels,) or std.shape != (channels,):
        raise InputError(
            f"standardise: mean {tuple(mean.shape)} and std {tuple(std.shape)} must both have shape ({channels},)"
        )
    if not bool((std > 0).all()):
        raise InputError("standardise: a standard deviation is not positive")
    view = (1, channels) + (1,) * (maps.dim() - 2)
    return (maps - mean.view(view).to(maps)) / std.view(view).to(maps)


@dataclass(frozen=True)
class ChannelBudget:
    """Public constants of a private normalisation; nothing here may be measured from the records.

    Args:
        records: The public number of records, by which the noisy sums are divided.
        mean_bound: The l2 norm to which a record's vector of spatial means is clipped.
        square_bound: The l2 norm to which a record's vector of spatial means of squares is clipped.
        noise_multiplier: The standard deviation of each release's noise over its bound.
        relation: The neighbouring relation: add-remove or replace-one.
        floor: The smallest variance that is used (the noisy one may be negative).

    Raises:
        InputError: a value is out of its range.
    """

    records: int
    mean_bound: float
    square_bound: float
    noise_multiplier: float = 8.0
    relation: str = "add-remove"
    floor: float = 1e-3

    def __post_init__(self) -> None:
        if self.records < 1:
            raise InputError(f"private statistics: records must be at least 1, not {self.records}")
        for name in ("mean_bound", "square_bound", "noise_multiplier", "floor"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"private statistics: {name} must be positive and finite, not {value!r}")
        if self.relation not in ("add-remove", "replace-one"):
            raise InputError(f"private statistics: unknown relation {self.relation!r}; add-remove or replace-one")


@dataclass(frozen=True)
class ChannelStatistics:
    """Released statistics of feature maps.

    Args:
        mean: (c,) the mean of each channel.
        std: (c,) the standard deviation of each channel.
    """

    mean: Tensor
    std: Tensor


def private_statistics(
    maps: Tensor, budget: ChannelBudget, *, source: RandomSource, ledger: Ledger
) -> ChannelStatistics:
    """Releases the mean and the standard deviation of each channel, with noise.

    Formal guarantee: two Gaussian releases at sampling rate 1, each with noise multiplier `budget.noise_multiplier`, of
    sums over records of vectors clipped to a public bound (the noise is in units of that bound under either relation:
    docs/guarantees/dpsgd.md). Records whose vector is not finite contribute zero. The rest is post-processing. The plan
    must declare the releases (purpose "statistics", count 2); otherwise its guarantee does not cover them.

    Args:
        maps: (n, c, ...) the private feature maps.
        budget: The public constants.
        source: The source of the noise.
        ledger: The ledger that records both releases.

    Returns:
        The noisy statistics.
    """
    from sordino.plan import ROUNDING_MARGIN
    from sordino.release import Entry, Gaussian, release

    flat = maps.flatten(2) if maps.dim() > 2 else maps.unsqueeze(-1)
    averages = []
    for step, (vectors, bound) in enumerate(
        ((flat.mean(2), budget.mean_bound), (flat.square().mean(2), budget.square_bound))
    ):
        noisy = release(
            {"sum": _clip(vectors, bound).sum(0)},
            sensitivity=bound * (1 + ROUNDING_MARGIN),
            norm="l2",
            noise=Gaussian(budget.noise_multiplier),
            source=source,
            ledger=ledger,
            entry=Entry(PURPOSE, step, {"name": "poisson", "sampling_rate": 1.0}, budget.relation),
        )
        averages.append((noisy["sum"] / budget.records).to(maps.dtype))
    mean, square = averages
    return ChannelStatistics(mean, (square - mean.square()).clamp(min=budget.floor).sqrt())


def _clip(vectors: Tensor, bound: float) -> Tensor:
    """Rows of norm at most `bound` for all floats, in double precision; a row that is not finite becomes zero."""
    return in_unit_ball(vectors, bound) * bound
