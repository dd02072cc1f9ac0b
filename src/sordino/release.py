"""THE ONE DOOR: the only place where noise meets something computed from private records.

Formal guarantee. Let f(D) be the values (all tensors as one vector of d coordinates) and let neighbouring
data sets satisfy ‖f(D) − f(D′)‖ ≤ sensitivity in the stated norm. What `release` returns is a function of

    round(f(D)/g)·g + noise,     noise ~ N(0, σ²)^d   with σ = noise_multiplier · (sensitivity + g·√d)
                                 or Laplace(b)^d      with b = noise_multiplier · (sensitivity + g·d)

where g is a power of two that depends on noise_multiplier and sensitivity only (σ·2⁻²⁹ < g ≤ σ·2⁻²⁸, for
Laplace 2⁻³³ and 2⁻³²). Rounding moves each value by at most g/2, so the rounded values have sensitivity at
most sensitivity + g·√d (l2) or + g·d (l1): the mechanism is the Gaussian (Laplace) mechanism with exactly
the given noise multiplier, post-processed. Sum and noise are added as integers, so no digit of the result
betrays the value below the noise (Mironov 2012; Casacuberta et al. 2022; docs/guarantees/noise.md).
The extra noise is a relative noise_multiplier·√d·2⁻²⁸: 4·10⁻⁶ for a million parameters.

The ledger entry is on disk before the value is returned: no entry without noise, no noise without entry.

| edge case                                       | result                                             |
|-------------------------------------------------|----------------------------------------------------|
| noise_multiplier 0, negative, NaN or infinite    | InputError: there is no way out without noise       |
| a value that is NaN or infinite                  | SordinoError before anything is recorded            |
| ledger not writable                              | SordinoError, nothing returned                      |
| the values of an empty batch (zeros)             | noise alone, recorded like any other release        |
| tensors without elements beside others           | returned as they are; no values at all: InputError  |
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sordino.errors import InputError, Refused, SordinoError
from sordino.ledger import Ledger
from sordino.randomness import RandomSource, Stream

Norm = Literal["l1", "l2"]
_BLOCK = 1 << 15  # coordinates in work at a time; the memory beside the result is a few of these in double precision
_RELATIONS = ("add-remove", "replace-one")


@dataclass(frozen=True)
class Gaussian:
    """N(0, σ²) on every coordinate, σ = noise_multiplier · l2 sensitivity."""

    noise_multiplier: float
    name: ClassVar[str] = "gaussian"
    norm: ClassVar[Norm] = "l2"
    grid_bits: ClassVar[int] = 28  # the grid is finer than the noise by this power of two

    def __post_init__(self) -> None:
        _check_multiplier(self.noise_multiplier)

    def to_dict(self) -> dict[str, Any]:
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
        return {"name": self.name, "noise_multiplier": self.noise_multiplier}


Noise = Gaussian | Laplace


@dataclass(frozen=True)
class Entry:
    """What the ledger records of one release besides the noise itself."""

    purpose: str  # "gradient", "statistics", "histogram", ...
    step: int
    sampling: Mapping[str, Any]  # how the records were chosen, e.g. {"name": "poisson", "sampling_rate": 0.01}
    relation: str  # "add-remove" | "replace-one"


@dataclass(frozen=True)
class Lattice:
    """The public grid of a release: `spacing` is a power of two, the noise is round(scale · Z) · spacing."""

    spacing: float
    scale: float


def release(
    values: Mapping[str, Tensor],
    *,
    sensitivity: float,
    norm: Norm,
    noise: Noise,
    source: RandomSource,
    ledger: Ledger,
    entry: Entry,
) -> dict[str, Tensor]:
    """The values with noise, each with its shape and dtype, after the release is on record.

    The caller vouches for `sensitivity` (in `norm`, under `entry.relation`); everything else is checked.
    """
    _check_request(noise, norm, entry)
    coordinates = _check_values(values)
    lattice = choose_lattice(noise, sensitivity, coordinates)
    _check_range(values, lattice, entry)
    ledger.record(
        {
            "kind": "release",
            "purpose": entry.purpose,
            "step": entry.step,
            "mechanism": noise.name,
            "noise_multiplier": noise.noise_multiplier,
            "sensitivity": sensitivity,
            "norm": norm,
            "sampling": dict(entry.sampling),
            "relation": entry.relation,
            "secure": source.secure,
            "coordinates": coordinates,
        }
    )
    # Noise that meets two values gives away their difference. A seeded source repeats itself, which is its purpose;
    # a secure one must not, even if a caller takes it through two ledgers.
    salt = f"/{os.urandom(16).hex()}" if source.secure else ""
    stream = source.stream(f"release/{entry.purpose}{salt}", entry.step)
    return _add_noise(values, noise, lattice, stream)


def choose_lattice(noise: Noise, sensitivity: float, coordinates: int) -> Lattice:
    """The grid and the scale of the noise on it. Public: depends on no value."""
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise InputError(f"the sensitivity must be finite and positive, got {sensitivity}")
    width = noise.noise_multiplier * sensitivity
    if not 1e-280 < width < 1e280:
        raise InputError(
            f"noise_multiplier · sensitivity = {width:g} is beyond double precision; choose a clip_norm near 1"
        )
    spacing = math.ldexp(1.0, math.frexp(width)[1] - 1 - noise.grid_bits)  # 2^⌊log₂ width⌋ · 2^−bits
    moved = math.sqrt(coordinates) if noise.norm == "l2" else float(coordinates)
    scale = noise.noise_multiplier * (sensitivity / spacing + moved)
    scale *= 1 + 2.0**-50  # at least the exact product, whatever the rounding of the line above
    if scale > 2.0 ** (noise.grid_bits + 2):
        raise Refused(
            f"{coordinates} coordinates with noise_multiplier {noise.noise_multiplier:g} would need more than twice "
            "the noise to cover the rounding to the grid; release fewer coordinates or lower the noise multiplier"
        )
    return Lattice(spacing, scale)


def _add_noise(values: Mapping[str, Tensor], noise: Noise, lattice: Lattice, stream: Stream) -> dict[str, Tensor]:
    """round(v/g) + integer noise, times g: one pass in blocks over all tensors in the order of the mapping."""
    draw = stream.rounded_normal if isinstance(noise, Gaussian) else stream.rounded_laplace
    result = {name: torch.empty_like(v, memory_format=torch.contiguous_format) for name, v in values.items()}
    total = sum(v.numel() for v in values.values())
    work = torch.empty(min(total, _BLOCK), dtype=torch.float64)
    drawn = torch.empty_like(work)
    for sources, targets in _blocks(values, result):
        sizes = [source.numel() for source in sources]
        block, fresh = work[: sum(sizes)], drawn[: sum(sizes)]
        for part, source in zip(torch.split(block, sizes), sources, strict=True):
            part.copy_(source)
        draw(fresh, lattice.scale)
        block.mul_(1.0 / lattice.spacing).round_()  # exact: the spacing is a power of two
        # The sum of two integers in double precision is their true sum, rounded: a function of the sum alone,
        # once two negative zeros (which would tell the sign of the value) are made one positive zero.
        block.add_(fresh).add_(0.0)
        block.mul_(lattice.spacing)
        for part, target in zip(torch.split(block, sizes), targets, strict=True):
            target.copy_(part)
    return result


def _blocks(values: Mapping[str, Tensor], result: Mapping[str, Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The pieces of values and results that make up consecutive blocks of `_BLOCK` coordinates."""
    sources: list[Tensor] = []
    targets: list[Tensor] = []
    room = _BLOCK
    for name, value in values.items():
        source, target = value.detach().reshape(-1), result[name].view(-1)
        while source.numel() >= room:
            yield [*sources, source[:room]], [*targets, target[:room]]
            source, target = source[room:], target[room:]
            sources, targets, room = [], [], _BLOCK
        if source.numel():
            sources.append(source)
            targets.append(target)
            room -= source.numel()
    if sources:
        yield sources, targets


def _check_multiplier(noise_multiplier: float) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise InputError(
            f"noise_multiplier must be finite and positive, got {noise_multiplier}; nothing leaves without noise "
            "(a training without privacy does not go through the release)"
        )


def _check_request(noise: Noise, norm: Norm, entry: Entry) -> None:
    if norm != noise.norm:
        raise Refused(
            f"{noise.name} noise is calibrated to the {noise.norm} sensitivity, but the sensitivity is given in "
            f"{norm}; clip in {noise.norm} or choose the other mechanism"
        )
    if entry.relation not in _RELATIONS:
        raise InputError(f"relation must be one of {', '.join(_RELATIONS)}, got {entry.relation!r}")


def _check_values(values: Mapping[str, Tensor]) -> int:
    for name, value in values.items():
        if not value.dtype.is_floating_point:
            raise InputError(f"{name!r} has dtype {value.dtype}; only real floating-point values can be released")
    coordinates = sum(value.numel() for value in values.values())
    if coordinates == 0:
        raise InputError("there is nothing to release: no tensor has an element")
    return coordinates


def _check_range(values: Mapping[str, Tensor], lattice: Lattice, entry: Entry) -> None:
    """Refuses what is not finite, or would not be with noise."""
    reach = lattice.spacing * lattice.scale * 64  # no noise ever gets there
    for name, value in values.items():
        if value.numel() == 0:
            continue
        low, high = (float(x) for x in torch.aminmax(value.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise SordinoError(
                f"the value {name!r} of {entry.purpose!r}, step {entry.step}, is not finite (min {low}, max {high}); "
                "nothing was released. Records with a non-finite gradient must contribute zero."
            )
        largest = max(-low, high)
        if largest + reach > torch.finfo(value.dtype).max or not math.isfinite(largest / lattice.spacing):
            raise Refused(
                f"the value {name!r} reaches {largest:g}: with this noise it leaves the range of {value.dtype}; use a "
                "wider dtype, or a smaller clip_norm"
            )
