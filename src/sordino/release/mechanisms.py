"""The noise of a release as frozen values: its distribution, its grid, and what the ledger records about it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sordino.errors import InputError, Refused
from sordino.randomness import RandomSource

Norm = Literal["l1", "l2"]


@dataclass(frozen=True)
class Gaussian:
    """N(0, σ²) on every coordinate, σ = noise_multiplier · l2 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[Norm] = "l2"
    grid_bits: ClassVar[int] = 6  # the grid is finer than the noise by this power of two

    def __post_init__(self) -> None:
        _check_multiplier(self.noise_multiplier)

    def to_dict(self) -> dict[str, Any]:
        """The noise as JSON-serialisable values."""
        return {"name": self.name, "noise_multiplier": self.noise_multiplier}


@dataclass(frozen=True)
class Laplace:
    """The density exp(−|x|/b)/2b on every coordinate, b = noise_multiplier · l1 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "laplace"
    norm: ClassVar[Norm] = "l1"
    grid_bits: ClassVar[int] = 32

    def __post_init__(self) -> None:
        _check_multiplier(self.noise_multiplier)

    def to_dict(self) -> dict[str, Any]:
        """The noise as JSON-serialisable values."""
        return {"name": self.name, "noise_multiplier": self.noise_multiplier}


Noise = Gaussian | Laplace


@dataclass(frozen=True)
class Entry:
    """What the ledger records about one release besides its noise."""

    purpose: str  # "gradient", "statistics", "histogram", ...
    step: int
    sampling: Mapping[str, Any]  # how the records were chosen, e.g. {"name": "poisson", "sampling_rate": 0.01}
    relation: str  # "add-remove" | "replace-one"


@dataclass(frozen=True)
class ReleaseGrid:
    """The public grid of a release: `spacing` is a power of two; σ (or b) of the noise is scale · spacing."""

    spacing: float
    scale: float


@functools.lru_cache
def release_grid(noise: Noise, sensitivity: float, coordinates: int, *, fine: bool = False) -> ReleaseGrid:
    """The grid of a release, and the scale of its noise in grid units. Both are public: they depend on no value.

    Raises:
        InputError: the sensitivity is not finite and positive, or the noise is beyond double precision.
        Refused: the noise would have to be more than doubled to cover the rounding to the grid.
    """
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise InputError(f"the sensitivity must be finite and positive, got {sensitivity}")
    width = noise.noise_multiplier * sensitivity
    if not 1e-280 < width < 1e280:
        raise InputError(
            f"noise_multiplier · sensitivity = {width:g} is beyond double precision; choose a clip_norm near 1"
        )
    bits = Laplace.grid_bits if fine else noise.grid_bits
    spacing = math.ldexp(1.0, math.frexp(width)[1] - 1 - bits)  # 2^⌊log₂ width⌋ · 2^−bits
    # rounding to the grid before the noise is added increases the sensitivity, in grid units, by this number
    moved = 0.0 if isinstance(noise, Gaussian) else float(coordinates)
    scale = noise.noise_multiplier * (sensitivity / spacing + moved)
    scale *= 1 + 2.0**-40  # at least the exact product, despite the roundings above and underflow (`_work_dtype`)
    if scale > 2.0 ** (bits + 2):
        raise Refused(
            f"{coordinates} coordinates with noise_multiplier {noise.noise_multiplier:g} would need more than twice "
            "the noise to cover the rounding to the grid; release fewer coordinates or lower the noise multiplier"
        )
    return ReleaseGrid(spacing, scale)


def fine_rounding(noise: Gaussian, sensitivity: float, coordinates: int) -> float:
    """The largest l2 distance by which the two roundings of a `fine` release move a vector.

    Args:
        noise: The noise of the release.
        sensitivity: The l2 sensitivity of the values.
        coordinates: The number of coordinates of the vector.

    Returns:
        g·√coordinates, where g is the spacing of the grid.
    """
    return release_grid(noise, sensitivity, coordinates, fine=True).spacing * math.sqrt(coordinates)


ENTRY_KEYS = frozenset((
    "kind", "purpose", "step", "mechanism", "noise_multiplier", "sensitivity", "norm", "sampling", "relation", "secure",
    "source", "coordinates", "time",
    "least_width", "earlier", "fine",  # only some releases
))  # fmt: skip
"""Every key that a release writes into the ledger."""


def ledger_entry(
    noise: Noise, sensitivity: float, entry: Entry, source: RandomSource, coordinates: int
) -> dict[str, Any]:
    """The ledger's entry for a release."""
    return {
        "kind": "release",
        "purpose": entry.purpose,
        "step": entry.step,
        "mechanism": noise.name,
        "noise_multiplier": noise.noise_multiplier,
        "sensitivity": sensitivity,
        "norm": noise.norm,
        "sampling": dict(entry.sampling),
        "relation": entry.relation,
        "secure": source.secure,
        "source": source.fingerprint,
        "coordinates": coordinates,
    }


def described_earlier(earlier: Mapping[int, float], step: int) -> dict[str, Any]:
    """What the ledger records about the earlier noise that a step adds again.

    Args:
        earlier: Coefficients of the noise of earlier steps, by step.
        step: The step that adds it.

    Returns:
        `noises`: the number of terms; `since`: the first of the earlier steps; `digest`: a hash of the coefficients
        and of their distances in steps.
    """
    terms = sorted((step - s, float(a).hex()) for s, a in earlier.items())
    digest = hashlib.sha256(json.dumps(terms).encode()).hexdigest()[:32]
    return {"noises": len(terms), "since": min(earlier, default=step), "digest": digest}


def _check_multiplier(noise_multiplier: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise InputError(
            f"noise_multiplier must be finite and positive, got {noise_multiplier}: nothing is released without noise "
            "(to train without privacy, use an ordinary training loop)"
        )
