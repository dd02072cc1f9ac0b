"""THE ONE DOOR: the only place where noise meets something computed from private records.

Formal guarantee. Let f(D) be the values (all tensors as one vector of d coordinates) and let neighbouring
data sets satisfy ‖f(D) − f(D′)‖ ≤ sensitivity in the stated norm. What `release` returns is a function of

    Gaussian:  round((f(D) + noise)/g)·g,    noise ~ N(0, σ²)^d    with σ = noise_multiplier · sensitivity
    Laplace:   round(f(D)/g)·g + noise,      noise ~ Laplace(b)^d  with b = noise_multiplier · (sensitivity + g·d)

where g is a public power of two that depends on noise_multiplier and sensitivity only (σ·2⁻⁷ < g ≤ σ·2⁻⁶ for
Gaussian noise, b·2⁻³³ < g ≤ b·2⁻³² for Laplace noise, up to the summand g·d).
Gaussian: the real Gaussian mechanism, rounded afterwards. The rounding is exact, as if the real sum were at hand
(`Stream.rounded_sum`), so it is post-processing and needs no noise of its own; it adds at most g²/12 ≤ 2·10⁻⁵·σ² to
the variance of a result and nothing to its mean.
Laplace: rounding moves each value by at most g/2, so the rounded values have sensitivity at most sensitivity + g·d.
Either way the noise multiplier is exactly the one given, and no digit of the result betrays the value below the
noise (Mironov 2012; Casacuberta et al. 2022; docs/guarantees/noise.md).

`widths` adds independent uniform noise: coordinate i gets w_i·(U − ½) on top, with public w_i ≥ 0 (ModelMix: the
random mixing of two iterates is their mean and this noise; docs/guarantees/modelmix.md). U has 53 digits and the sum
is made in double precision, which moves a value by less than 2⁻⁵⁰ of itself: the plan's margin for rounding covers it.

`fine` is for values that stay hidden and are computed with further (docs/guarantees/hidden_state.md): there rounding is
no post-processing, so it has to be small. g is then σ·2⁻³² or less, and what is released is round(f(D)/g)·g + noise
rounded to the same grid: the Gaussian mechanism on values that were moved by at most g·√d/2, and moved after it by as
much again. `fine_rounding` is the sum of both; the caller adds it to the sensitivity.

`earlier` adds noise of earlier steps once more: with the coefficients a_s of steps s < t what is released is
round((f(D) + σ·(Z_t + Σ_s a_s·Z_s))/g)·g, where Z_s is the very vector of real Gaussians that step s added
(`mixture`). It is rounded once, exactly, so it is a function of f(D) + σ·(Z_t + Σ a_s Z_s) on real numbers; whoever
passes `earlier` accounts for the steps together. Noise is regenerated from its address: purpose, step, and a salt
that lives as long as the ledger is open. Every step s must stand in the ledger with the same key, noise, sensitivity
and number of coordinates, else its noise is not what was added there, and the release is refused.

The ledger entry is on disk before the value is returned: no entry without noise, no noise without entry.

| edge case                                       | result                                             |
|-------------------------------------------------|----------------------------------------------------|
| noise_multiplier 0, negative, NaN or infinite    | InputError: there is no way out without noise       |
| a value that is NaN or infinite                  | SordinoError before anything is recorded            |
| ledger not writable                              | SordinoError, nothing returned                      |
| the values of an empty batch (zeros)             | noise alone, recorded like any other release        |
| tensors without elements beside others           | returned as they are; no values at all: InputError  |
| a width that is negative or not finite           | InputError before anything is recorded              |
| `fine` with Laplace noise or with widths         | Refused: no proof needs it                          |
| `earlier` with Laplace noise, widths or `fine`   | Refused: no proof needs it                          |
| `earlier` names a step of another key or session | Refused: its noise is gone                          |
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.errors import InputError, Refused, SordinoError
from sordino.native import boxmuller
from sordino.native.kernels import Parts, compiled, readable
from sordino.native.ownership import alone
from sordino.native.pages import buffer
from sordino.randomness import RandomSource, Stream
from sordino.randomness.mixture import rounded_mixture
from sordino.release.ledger import Ledger

Array = npt.NDArray[Any]
Norm = Literal["l1", "l2"]
_BLOCK = boxmuller.BLOCK  # coordinates in work at a time; the memory beside the result is a few of these
_FLOAT32_GRIDS = (2.0**-60, 2.0**60)  # where float32 divides by the grid without a loss that matters: _work_dtype
_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
_TORCH = {dtype: kind for kind, dtype in _NUMPY.items()}
_RELATIONS = ("add-remove", "replace-one")


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
    """The public grid of a release: `spacing` is a power of two, the noise has scale · spacing as its σ or b."""

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
    widths: Mapping[str, Tensor] | None = None,
    fine: bool = False,
    factor: float = 1.0,
    in_place: bool = False,
    dtype: torch.dtype | None = None,
    earlier: Mapping[int, float] | None = None,
) -> dict[str, Tensor]:
    """The values with noise, each with its shape and dtype, after the release is on record.

    The caller vouches for `sensitivity` (in `norm`, under `entry.relation`); everything else is checked.
    What is returned is multiplied by `factor`, a public number (one over the plan's divisor): post-processing.
    in_place: the caller gives the values away. Where nothing but `values` holds them, they are overwritten.
    dtype: of what is returned, where that is not the values' own: rounded to it after the noise, post-processing.
    earlier: the coefficients of the noise of earlier steps; {} where there is none yet but later steps will use this
    one's again. None: the noise of this step is used once.
    """
    gaussian = isinstance(noise, Gaussian)
    spent = in_place and gaussian and widths is None and not fine and alone(values)
    _check_request(noise, norm, entry)
    kinds = {value.dtype for value in values.values()}
    wanted = kinds if dtype is None else {dtype}
    coordinates = _check_values(values, kinds)
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(f"what is released has a floating-point type, got {dtype}")
    width = None if widths is None else _check_widths(values, widths)
    if fine and (width is not None or not gaussian):
        raise Refused("a fine release is proven for Gaussian noise alone, without uniform noise or Laplace noise")
    if earlier is not None and (fine or width is not None or not gaussian):
        raise Refused("earlier noise is added to plain Gaussian noise alone, without uniform noise or a fine grid")
    lattice = choose_lattice(noise, sensitivity, coordinates, fine=fine)
    if earlier is not None:
        _check_earlier(earlier, noise, sensitivity, coordinates, source, ledger, entry)
        spent = False
    exact = fine or width is not None or earlier is not None
    parts, own = _parts(values, torch.float64 if exact else _work_dtype(kinds, noise, lattice))
    _check_range(values, dtype, parts, lattice, entry, 0.0 if width is None else float(width.max()), factor)
    more: dict[str, Any] = {} if width is None else {"least_width": float(width.min())}
    if earlier is not None:
        more = {"earlier": described_earlier(earlier, entry.step)}
    ledger.record(line_of(noise, sensitivity, entry, source, coordinates) | more | ({"fine": True} if fine else {}))
    if earlier is not None:
        mixed = buffer((coordinates,), torch.float32 if wanted == {torch.float32} else torch.float64)
        _add_mixture(parts, mixed, earlier, lattice, source, ledger, entry, factor)
        return _shaped(values, dtype, mixed)
    fresh = salt(source)
    stream = source.stream(f"release/{entry.purpose}{fresh}", entry.step)
    if width is not None:
        drawn = source.stream(f"release/{entry.purpose}/uniform{fresh}", entry.step).uniform(coordinates)
        parts = Parts.of([parts.joined() + width * (drawn - 0.5)])
    if spent and own and wanted == kinds:
        stream.rounded_sum_of(parts, parts, lattice.scale, lattice.spacing, factor)
        return dict(values)
    result = torch.float32 if wanted == {torch.float32} else _TORCH[parts.dtype]
    return _shaped(values, dtype, _with_noise(parts, noise, lattice, stream, fine, factor, result))


def described_earlier(earlier: Mapping[int, float], step: int) -> dict[str, Any]:
    """What the ledger says of the earlier noise in a step: how many, since which step, and a digest of lags and
    coefficients."""
    terms = sorted((step - s, float(a).hex()) for s, a in earlier.items())
    digest = hashlib.sha256(json.dumps(terms).encode()).hexdigest()[:32]
    return {"noises": len(terms), "since": min(earlier, default=step), "digest": digest}


def _add_mixture(
    parts: Parts,
    out: Tensor,
    earlier: Mapping[int, float],
    lattice: Lattice,
    source: RandomSource,
    ledger: Ledger,
    entry: Entry,
    factor: float,
) -> None:
    """The parts with this step's noise and that of the earlier steps, from their addresses; rounded once."""
    own = f"/{ledger.salt}" if source.secure else ""
    terms = [(1.0, entry.step), *((float(a), s) for s, a in sorted(earlier.items(), reverse=True))]
    streams = [(a, source.stream(f"release/{entry.purpose}/again{own}", s)) for a, s in terms]
    rounded_mixture(parts.arrays(), out.numpy(), streams, lattice.scale, lattice.spacing, factor)


def _check_earlier(
    earlier: Mapping[int, float],
    noise: Noise,
    sensitivity: float,
    coordinates: int,
    source: RandomSource,
    ledger: Ledger,
    entry: Entry,
) -> None:
    """Refuses earlier noise that can't be made again as it was."""
    wanted = {
        "mechanism": noise.name, "noise_multiplier": noise.noise_multiplier, "sensitivity": sensitivity,
        "coordinates": coordinates, "source": source.fingerprint,
    }  # fmt: skip
    for step, a in earlier.items():
        if not (0 <= step < entry.step and math.isfinite(a)):
            raise InputError(f"earlier noise of step {entry.step} is that of steps before it, got {step}: {a}")
        known = ledger.find(entry.purpose, step, now=source.secure)
        if known is None or "earlier" not in known or any(known.get(key) != value for key, value in wanted.items()):
            raise Refused(
                f"step {entry.step} adds the noise of step {step} once more, and the ledger does not hold that step "
                "with the same key, noise and coordinates, made since it was opened: that noise is gone. Begin anew "
                "from the first step of a round, without earlier noise"
            )


def line_of(noise: Noise, sensitivity: float, entry: Entry, source: RandomSource, coordinates: int) -> dict[str, Any]:
    """What the ledger says of a release."""
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


def salt(source: RandomSource) -> str:
    """Noise that meets two values gives away their difference. A seeded source repeats itself, which is its purpose; a
    secure one must not, even if a caller takes it through two ledgers."""
    return f"/{os.urandom(16).hex()}" if source.secure else ""


def fine_rounding(noise: Gaussian, sensitivity: float, coordinates: int) -> float:
    """How far, in l2, the two roundings of a fine release move one vector of that many coordinates at most."""
    return choose_lattice(noise, sensitivity, coordinates, fine=True).spacing * math.sqrt(coordinates)


@functools.lru_cache
def choose_lattice(noise: Noise, sensitivity: float, coordinates: int, *, fine: bool = False) -> Lattice:
    """The grid and the scale of the noise on it. Public: depends on no value."""
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise InputError(f"the sensitivity must be finite and positive, got {sensitivity}")
    width = noise.noise_multiplier * sensitivity
    if not 1e-280 < width < 1e280:
        raise InputError(
            f"noise_multiplier · sensitivity = {width:g} is beyond double precision; choose a clip_norm near 1"
        )
    bits = Laplace.grid_bits if fine else noise.grid_bits
    spacing = math.ldexp(1.0, math.frexp(width)[1] - 1 - bits)  # 2^⌊log₂ width⌋ · 2^−bits
    moved = 0.0 if isinstance(noise, Gaussian) else float(coordinates)  # by rounding to the grid before the noise
    scale = noise.noise_multiplier * (sensitivity / spacing + moved)
    scale *= 1 + 2.0**-40  # at least the exact product, whatever the rounding above, underflow in _work_dtype included
    if scale > 2.0 ** (bits + 2):
        raise Refused(
            f"{coordinates} coordinates with noise_multiplier {noise.noise_multiplier:g} would need more than twice "
            "the noise to cover the rounding to the grid; release fewer coordinates or lower the noise multiplier"
        )
    return Lattice(spacing, scale)


def _work_dtype(kinds: Set[torch.dtype], noise: Noise, lattice: Lattice) -> torch.dtype:
    """float32 for Gaussian noise on values no wider, else float64. A public choice: by dtypes and grid alone.

    Division by the power of two g is exact unless it underflows (or the platform takes subnormal numbers for zero):
    that moves a value by less than 2⁻¹²⁶·max(1, g), so the sensitivity grows by less than 2⁻⁷²·√d·noise_multiplier
    of itself for a g in `_FLOAT32_GRIDS`. The 2⁻⁴⁰ in `choose_lattice` covers that.
    """
    low, high = _FLOAT32_GRIDS
    narrow = all(kind.itemsize <= 4 for kind in kinds)
    if isinstance(noise, Gaussian) and narrow and low <= lattice.spacing <= high:
        return torch.float32
    return torch.float64


def _with_noise(
    parts: Parts, noise: Noise, lattice: Lattice, stream: Stream, fine: bool, factor: float, dtype: torch.dtype
) -> Tensor:
    """The parts in one vector, with noise; that of a coordinate goes by its place. In this dtype where that is
    possible without another pass, otherwise in that of the parts."""
    if isinstance(noise, Gaussian) and not fine:  # g · round(v/g + s·Z): the mechanism, rounded
        out = buffer((parts.size,), dtype)
        stream.rounded_sum_of(parts, _vectors([out]), lattice.scale, lattice.spacing, factor)
        return out
    flat = torch.from_numpy(parts.joined())
    _add_rounded(flat, lattice, stream.rounded_laplace if isinstance(noise, Laplace) else stream.rounded_normal)
    return flat if factor == 1.0 else flat.mul_(factor)


def _shaped(values: Mapping[str, Tensor], dtype: torch.dtype | None, flat: Tensor) -> dict[str, Tensor]:
    """The vector in pieces that have the shapes of the values, and their dtypes if no other is wanted."""
    shaped, start = {}, 0
    for name, value in values.items():
        shaped[name] = flat.as_strided(value.shape, _strides(value), start)
        start += value.numel()
    if all(value.is_cpu and (dtype or value.dtype) == flat.dtype for value in values.values()):
        return shaped
    return {name: piece.to(values[name].device, dtype or values[name].dtype) for name, piece in shaped.items()}


def _strides(value: Tensor) -> Sequence[int]:
    """Of the value's shape, row by row."""
    return value.stride() if value.is_contiguous() else torch.empty(value.shape, device="meta").stride()


def _add_rounded(flat: Tensor, lattice: Lattice, draw: Callable[[Tensor, float], None]) -> None:
    """g · (round(v/g) + round(s·noise)): a function of the mechanism on the rounded values.

    The sum of two integers in double precision is their true sum, rounded: a function of the sum alone, once two
    negative zeros (which would tell the sign of the value) are made one positive zero.
    """
    work = torch.empty(min(flat.numel(), _BLOCK), dtype=torch.float64)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        drawn = work[: block.numel()]
        draw(drawn, lattice.scale)
        block.mul_(1.0 / lattice.spacing).round_().add_(drawn).add_(0.0).mul_(lattice.spacing)


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


def _check_values(values: Mapping[str, Tensor], kinds: Set[torch.dtype]) -> int:
    if not all(kind.is_floating_point for kind in kinds):
        name, kind = next((name, v.dtype) for name, v in values.items() if not v.dtype.is_floating_point)
        raise InputError(f"{name!r} has dtype {kind}; only real floating-point values can be released")
    coordinates = sum(value.numel() for value in values.values())
    if coordinates == 0:
        raise InputError("there is nothing to release: no tensor has an element")
    return coordinates


def _check_widths(values: Mapping[str, Tensor], widths: Mapping[str, Tensor]) -> Array:
    """The widths as one vector in the order of the values."""
    if set(widths) != set(values) or any(widths[name].shape != value.shape for name, value in values.items()):
        raise InputError("the uniform noise needs a width for every coordinate of every value, in the same shapes")
    flat = _parts({name: widths[name] for name in values}, torch.float64)[0].joined()
    if not (np.isfinite(flat).all() and (flat >= 0).all()):
        raise InputError("a width of uniform noise is negative or not finite; nothing was released")
    return flat


def _parts(values: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Parts, bool]:
    """The values as vectors, in the order of the mapping; and whether in their own memory, where that has this form."""
    tensors = list(values.values())
    own = all(t.dtype == dtype and t.is_contiguous() and readable(t) for t in tensors)
    if not own:
        tensors = [(t.detach().reshape(-1).to("cpu", dtype) + 0.0).contiguous() for t in tensors]  # a sum has memory
    return _vectors(tensors), own


def _vectors(tensors: Sequence[Tensor]) -> Parts:
    """The memory of contiguous tensors of one dtype."""
    places = [(t.data_ptr(), t.numel()) for t in tensors]
    return Parts(places, _NUMPY[tensors[0].dtype], lambda: [t.detach().view(-1).numpy() for t in tensors])


@functools.cache
def _end(kind: torch.dtype) -> float:
    """The largest finite number."""
    return torch.finfo(kind).max


def _largest(parts: Parts) -> float:
    """The largest magnitude, NaN with a NaN."""
    kernels = compiled()
    if kernels is not None:
        return kernels.largest(parts)
    return float(np.max([np.maximum(-part.min(), part.max()) for part in parts.arrays() if part.size]))


def _check_range(
    values: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    parts: Parts,
    lattice: Lattice,
    entry: Entry,
    width: float,
    factor: float,
) -> None:
    """Refuses what is not finite, or would not be with noise, in the dtype of the work or of the result."""
    if not 1e-12 < factor < 1e12:  # so that a step of any grid stays an ordinary float32
        raise InputError(f"what is released can be multiplied by a number between 1e-12 and 1e12, got {factor}")
    reach = lattice.spacing * lattice.scale * 64 + width  # no noise ever gets there
    most = _end(_TORCH[parts.dtype]) / 4 * lattice.spacing
    ends = {name: _end(dtype or value.dtype) / max(1.0, factor) for name, value in values.items()}
    narrowest = min(ends.values())
    if _largest(parts) <= min(most, narrowest - reach):  # not with a NaN
        return
    for name, value in values.items():
        if value.numel() == 0:
            continue
        low, high = (float(x) for x in torch.aminmax(value.detach()))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise SordinoError(
                f"the value {name!r} of {entry.purpose!r}, step {entry.step}, is not finite; "
                "nothing was released. Records with a non-finite gradient must contribute zero.",
                private=f"min {low}, max {high}",
            )
        here = max(-low, high)
        if here + reach > ends[name] or here > most:
            raise Refused(
                f"the value {name!r} is so large that with this noise it leaves the range of {dtype or value.dtype}; "
                "use a wider dtype, or a smaller clip_norm",
                private=f"it reaches {here:g}",
            )
