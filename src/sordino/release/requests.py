"""Checks of what `release` and `release_shard` are asked to do, and the values as flat vectors in memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.errors import InputError, Refused, SordinoError
from sordino.native.kernels import compiled, readable
from sordino.native.parts import Parts
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger
from sordino.release.mechanisms import Entry, Noise, Norm, ReleaseGrid

_NUMPY: dict[torch.dtype, np.dtype[Any]] = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}
TORCH = {dtype: kind for kind, dtype in _NUMPY.items()}
_RELATIONS = ("add-remove", "replace-one")


def check_request(noise: Noise, norm: Norm, entry: Entry) -> None:
    """Refuses a sensitivity in another norm than the noise is calibrated to, and unknown relations."""
    if norm != noise.norm:
        raise Refused(
            f"{noise.name} noise is calibrated to the {noise.norm} sensitivity, but the sensitivity is given in "
            f"{norm}; clip in {noise.norm} or choose the other mechanism"
        )
    if entry.relation not in _RELATIONS:
        raise InputError(f"relation must be one of {', '.join(_RELATIONS)}, got {entry.relation!r}")


def check_values(values: Mapping[str, Tensor], kinds: Set[torch.dtype]) -> int:
    """Checks that all `kinds`, the dtypes of the values, are real floating-point types; counts the coordinates."""
    if not all(kind.is_floating_point for kind in kinds):
        name, kind = next((name, v.dtype) for name, v in values.items() if not v.dtype.is_floating_point)
        raise InputError(f"{name!r} has dtype {kind}; only real floating-point values can be released")
    coordinates = sum(value.numel() for value in values.values())
    if coordinates == 0:
        raise InputError("there is nothing to release: no tensor has an element")
    return coordinates


def check_earlier(
    earlier: Mapping[int, float],
    noise: Noise,
    sensitivity: float,
    coordinates: int,
    source: RandomSource,
    ledger: Ledger,
    entry: Entry,
) -> None:
    """Refuses noise of earlier steps that can't be regenerated exactly as it was added.

    Raises:
        InputError: a step is not before this one, or a coefficient is not finite.
        Refused: the ledger does not hold a step with the same key, noise and number of coordinates.
    """
    wanted = {
        "mechanism": noise.name, "noise_multiplier": noise.noise_multiplier, "sensitivity": sensitivity,
        "coordinates": coordinates, "source": source.fingerprint,
    }  # fmt: skip
    for step, a in earlier.items():
        if not (0 <= step < entry.step and math.isfinite(a)):
            raise InputError(f"the earlier noise of step {entry.step} must come from steps before it, got {step}: {a}")
        known = ledger.find(entry.purpose, step, now=source.secure)
        if known is None or "earlier" not in known or any(known.get(key) != value for key, value in wanted.items()):
            raise Refused(
                f"step {entry.step} adds the noise of step {step} again, but the ledger does not hold that step with "
                "the same key, noise and number of coordinates, recorded since it was opened: that noise can't be "
                "regenerated. Restart at the first step of a round, without earlier noise"
            )


def flat_widths(values: Mapping[str, Tensor], widths: Mapping[str, Tensor]) -> npt.NDArray[Any]:
    """The widths of the uniform noise as one checked vector, in the order of the values."""
    if set(widths) != set(values) or any(widths[name].shape != value.shape for name, value in values.items()):
        raise InputError("the uniform noise needs a width for every coordinate of every value, in the same shapes")
    flat = flat_parts({name: widths[name] for name in values}, torch.float64)[0].joined()
    if not (np.isfinite(flat).all() and (flat >= 0).all()):
        raise InputError("a width of uniform noise is negative or not finite; nothing was released")
    return flat


def flat_parts(values: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Parts, bool]:
    """(vectors of `dtype` in the order of the values, whether they are the values' own memory and not copies)."""
    tensors = list(values.values())
    own = all(t.dtype == dtype and t.is_contiguous() and readable(t) for t in tensors)
    if not own:
        # Adding 0.0 makes the copy occupy real storage: `values` may hold an expanded zero.
        tensors = [(t.detach().reshape(-1).to("cpu", dtype) + 0.0).contiguous() for t in tensors]
    return vectors(tensors), own


def vectors(tensors: Sequence[Tensor]) -> Parts:
    """The memory of contiguous tensors of one dtype, as vectors."""
    places = [(t.data_ptr(), t.numel()) for t in tensors]
    return Parts(places, _NUMPY[tensors[0].dtype], lambda: [t.detach().view(-1).numpy() for t in tensors])


@functools.cache
def _largest_finite(kind: torch.dtype) -> float:
    return torch.finfo(kind).max


def largest_magnitude(parts: Parts) -> float:
    """The largest absolute value; NaN if any entry is NaN."""
    kernels = compiled()
    if kernels is not None:
        return kernels.largest(parts)
    return float(np.max([np.maximum(-part.min(), part.max()) for part in parts.arrays() if part.size]))


def check_range(
    values: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    parts: Parts,
    grid: ReleaseGrid,
    entry: Entry,
    width: float,
    factor: float,
) -> None:
    """Refuses values that are not finite, or that noise may take out of the range of the working or result dtype."""
    if not 1e-12 < factor < 1e12:  # so that one grid step of any release stays a normal float32
        raise InputError(f"the factor on a released value must lie between 1e-12 and 1e12, got {factor}")
    # Gaussian noise of this generator never exceeds 17σ; Laplace noise exceeds 64b with probability e⁻⁶⁴.
    reach = grid.spacing * grid.scale * 64 + width
    most = _largest_finite(TORCH[parts.dtype]) / 4 * grid.spacing
    ends = {name: _largest_finite(dtype or value.dtype) / max(1.0, factor) for name, value in values.items()}
    narrowest = min(ends.values())
    if largest_magnitude(parts) <= min(most, narrowest - reach):  # false if any entry is NaN
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
                f"the value {name!r} is so large that noise may take it out of the range of {dtype or value.dtype}; "
                "use a wider dtype, or a smaller clip_norm",
                private=f"it reaches {here:g}",
            )
