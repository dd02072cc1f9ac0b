"""`release` adds noise to values computed from private records. Only `release_shard` does so too, for part of a vector.

Formal guarantee. Let f(D) be the values (all tensors as one vector of d coordinates) and let neighbouring datasets
satisfy ‖f(D) − f(D′)‖ ≤ sensitivity in the stated norm. What `release` returns is a function of

    Gaussian:  round((f(D) + noise)/g)·g,    noise ~ N(0, σ²)^d    with σ = noise_multiplier · sensitivity
    Laplace:   round(f(D)/g)·g + noise,      noise ~ Laplace(b)^d  with b = noise_multiplier · (sensitivity + g·d)

where g is a public power of two that depends on noise_multiplier and sensitivity only (σ·2⁻⁷ < g ≤ σ·2⁻⁶ for
Gaussian noise, b·2⁻³³ < g ≤ b·2⁻³² for Laplace noise, up to the summand g·d).
Gaussian: the real-valued Gaussian mechanism, rounded afterwards. The rounding is exact, as if the real sum were
available (`Stream.rounded_sum`), so it is post-processing and needs no noise of its own; it adds at most
g²/12 ≤ 2·10⁻⁵·σ² to the variance of a result and nothing to its mean.
Laplace: rounding moves each value by at most g/2, so the rounded values have sensitivity at most sensitivity + g·d.
In both cases the noise multiplier is exactly the one given, and no digit of the result reveals the value below the
noise (Mironov 2012; Casacuberta et al. 2022; docs/guarantees/noise.md).

`widths` adds independent uniform noise: coordinate i also gets w_i·(U − ½), with public w_i ≥ 0 (randomly mixing two
iterates is their mean plus this noise; docs/guarantees/modelmix.md). U has 53 digits and the sum is computed in double
precision, which changes a value by less than a relative 2⁻⁵⁰: the plan's margin for rounding covers it.

`fine` is for values that stay hidden and are used in further computation (docs/guarantees/hidden_state.md). There
rounding is not post-processing, so it has to be small: g is σ·2⁻³² or less, and the result is round(f(D)/g)·g + noise,
rounded to the same grid. That is the Gaussian mechanism on values moved by at most g·√d/2, whose result is moved by at
most g·√d/2 again. `fine_rounding` is the sum of both; the caller adds it to the sensitivity.

`earlier` adds the noise of earlier steps again: with coefficients a_s for steps s < t the result is
round((f(D) + σ·(Z_t + Σ_s a_s·Z_s))/g)·g, where Z_s is the vector of real Gaussians that step s added (`mixture`). It
is rounded once, exactly, so it is a function of f(D) + σ·(Z_t + Σ a_s Z_s) on real numbers; a caller that passes
`earlier` accounts for the steps jointly. Noise is regenerated from its address: purpose, step, and a salt that exists
while the ledger is open. The ledger must hold every step s with the same key, noise, sensitivity and number of
coordinates. Otherwise the regenerated noise is not what was added there, and the release is refused.

The ledger entry is on disk before the value is returned: every entry has noise, and all noise has an entry.

| edge case                                         | result                                              |
|---------------------------------------------------|-----------------------------------------------------|
| noise_multiplier 0, negative, NaN or infinite     | InputError: nothing is released without noise       |
| a value that is NaN or infinite                   | SordinoError before anything is recorded            |
| ledger not writable                               | SordinoError, nothing returned                      |
| the values of an empty batch (zeros)              | noise alone, recorded like any other release        |
| tensors without elements, next to others          | returned unchanged; if all are empty: InputError    |
| a width that is negative or not finite            | InputError before anything is recorded              |
| `fine` with Laplace noise or with widths          | Refused: proven for Gaussian noise only             |
| `earlier` with Laplace noise, widths or `fine`    | Refused: proven for Gaussian noise only             |
| `earlier` names a step of another key or session  | Refused: its noise can't be regenerated             |
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from sordino.errors import InputError, Refused
from sordino.native import boxmuller
from sordino.native.ownership import alone
from sordino.native.parts import Parts
from sordino.randomness import RandomSource, Stream
from sordino.randomness.mixture import rounded_mixture
from sordino.release.ledger import Ledger
from sordino.release.mechanisms import (
    Entry,
    Gaussian,
    Laplace,
    Noise,
    Norm,
    ReleaseGrid,
    described_earlier,
    ledger_entry,
    release_grid,
)
from sordino.release.requests import (
    TORCH,
    check_earlier,
    check_range,
    check_request,
    check_values,
    flat_parts,
    flat_widths,
    vectors,
)

_BLOCK = boxmuller.BLOCK  # coordinates processed at a time; extra memory is a few blocks of this size
_FLOAT32_GRIDS = (2.0**-60, 2.0**60)  # grids for which float32 is precise enough: see _work_dtype


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
    """Adds noise to the values and returns them once the ledger entry is on disk.

    Args:
        values: Real floating-point tensors, computed from private records.
        sensitivity: The bound on the change between neighbouring datasets, in `norm` and under `entry.relation`. The
            caller guarantees it; everything else is checked here.
        norm: The norm of the sensitivity; it must be the one that the noise is calibrated to.
        noise: The distribution of the noise.
        source: Where the noise is drawn from.
        ledger: Where the release is recorded.
        entry: What the ledger records about it.
        widths: Widths of additional uniform noise, in the shapes of the values.
        fine: Round to a grid of 2⁻³² of the noise, for values that stay hidden.
        factor: A public number that the result is multiplied by (one over the plan's divisor): post-processing.
        in_place: The caller does not use the values again: where nothing else refers to them, they are overwritten.
        dtype: The dtype of the result; None keeps that of each value. Rounding to it is post-processing.
        earlier: Coefficients of the noise of earlier steps; {} if there are none yet but later steps will use this
            step's noise again. None: the noise of this step is used once.

    Returns:
        The noisy values, with the names and shapes of the given ones.

    Raises:
        InputError: a value, width, factor or relation is not allowed.
        Refused: the guarantee does not cover the request.
        SordinoError: a value is not finite, or the ledger can't be written.
    """
    gaussian = isinstance(noise, Gaussian)
    spent = in_place and gaussian and widths is None and not fine and alone(values)
    check_request(noise, norm, entry)
    kinds = {value.dtype for value in values.values()}
    wanted = kinds if dtype is None else {dtype}
    coordinates = check_values(values, kinds)
    if dtype is not None and not dtype.is_floating_point:
        raise InputError(f"the dtype of a released value must be a floating-point type, got {dtype}")
    width = None if widths is None else flat_widths(values, widths)
    if fine and (width is not None or not gaussian):
        raise Refused("a fine release is proven for Gaussian noise only, not for uniform or Laplace noise")
    if earlier is not None and (fine or width is not None or not gaussian):
        raise Refused("earlier noise is proven for Gaussian noise only, without uniform noise and on an ordinary grid")
    grid = release_grid(noise, sensitivity, coordinates, fine=fine)
    if earlier is not None:
        check_earlier(earlier, noise, sensitivity, coordinates, source, ledger, entry)
        spent = False
    exact = fine or width is not None or earlier is not None
    parts, own = flat_parts(values, torch.float64 if exact else _work_dtype(kinds, noise, grid))
    check_range(values, dtype, parts, grid, entry, 0.0 if width is None else float(width.max()), factor)
    more: dict[str, Any] = {} if width is None else {"least_width": float(width.min())}
    if earlier is not None:
        more = {"earlier": described_earlier(earlier, entry.step)}
    if fine:
        more["fine"] = True
    ledger.record(ledger_entry(noise, sensitivity, entry, source, coordinates) | more)
    if earlier is not None:
        mixed = torch.empty(coordinates, dtype=torch.float32 if wanted == {torch.float32} else torch.float64)
        _add_mixture(parts, mixed, earlier, grid, source, ledger, entry, factor)
        return _shaped(values, dtype, mixed)
    fresh = salt(source)
    stream = source.stream(f"release/{entry.purpose}{fresh}", entry.step)
    if width is not None:
        drawn = source.stream(f"release/{entry.purpose}/uniform{fresh}", entry.step).uniform(coordinates)
        parts = Parts.of([parts.joined() + width * (drawn - 0.5)])
    if spent and own and wanted == kinds:
        stream.rounded_sum_of(parts, parts, grid.scale, grid.spacing, factor)
        return dict(values)
    result = torch.float32 if wanted == {torch.float32} else TORCH[parts.dtype]
    if gaussian and not fine and dtype == result and all(value.is_cpu for value in values.values()):
        # a tensor of its own for each value: they fit into memory that is free, where one vector would take new memory
        noisy = {name: torch.empty(value.shape, dtype=result) for name, value in values.items()}
        stream.rounded_sum_of(parts, vectors(list(noisy.values())), grid.scale, grid.spacing, factor)
        return noisy
    return _shaped(values, dtype, _with_noise(parts, noise, grid, stream, fine, factor, result))


def _add_mixture(
    parts: Parts,
    out: Tensor,
    earlier: Mapping[int, float],
    grid: ReleaseGrid,
    source: RandomSource,
    ledger: Ledger,
    entry: Entry,
    factor: float,
) -> None:
    """Adds this step's noise and that of earlier steps, regenerated from their addresses, to the parts; rounds once."""
    own = f"/{ledger.salt}" if source.secure else ""
    terms = [(1.0, entry.step), *((float(a), s) for s, a in sorted(earlier.items(), reverse=True))]
    streams = [(a, source.stream(f"release/{entry.purpose}/again{own}", s)) for a, s in terms]
    rounded_mixture(parts.arrays(), out.numpy(), streams, grid.scale, grid.spacing, factor)


def salt(source: RandomSource) -> str:
    """Random text that makes the noise of a secure source fresh; empty for a seeded source, which must repeat itself.

    The same noise on two values would reveal their difference. A secure source must not repeat noise, even if a caller
    uses it with two ledgers.
    """
    return f"/{os.urandom(16).hex()}" if source.secure else ""


def _work_dtype(kinds: Set[torch.dtype], noise: Noise, grid: ReleaseGrid) -> torch.dtype:
    """float32 for Gaussian noise on values of at most 32 bits, else float64. Public: depends on dtypes and grid only.

    Division by the power of two g is exact unless it underflows (or the platform flushes subnormal numbers to zero).
    Underflow moves a value by less than 2⁻¹²⁶·max(1, g), so for a g in `_FLOAT32_GRIDS` the relative growth of the
    sensitivity is less than 2⁻⁷²·√d·noise_multiplier. The 2⁻⁴⁰ in `release_grid` covers that.
    """
    low, high = _FLOAT32_GRIDS
    narrow = all(kind.itemsize <= 4 for kind in kinds)
    if isinstance(noise, Gaussian) and narrow and low <= grid.spacing <= high:
        return torch.float32
    return torch.float64


def _with_noise(
    parts: Parts, noise: Noise, grid: ReleaseGrid, stream: Stream, fine: bool, factor: float, dtype: torch.dtype
) -> Tensor:
    """The parts as one vector, with noise that depends on a coordinate's position only, not on its value.

    The result has the given dtype where that needs no second pass, else the dtype of the parts.
    """
    if isinstance(noise, Gaussian) and not fine:  # g · round(v/g + s·Z): the mechanism, rounded
        out = torch.empty(parts.size, dtype=dtype)
        stream.rounded_sum_of(parts, vectors([out]), grid.scale, grid.spacing, factor)
        return out
    flat = torch.from_numpy(parts.joined())
    _add_rounded(flat, grid, stream.rounded_laplace if isinstance(noise, Laplace) else stream.rounded_normal)
    return flat if factor == 1.0 else flat.mul_(factor)


def _shaped(values: Mapping[str, Tensor], dtype: torch.dtype | None, flat: Tensor) -> dict[str, Tensor]:
    """The vector cut into tensors with the shapes of the values, and with their dtypes unless `dtype` is given."""
    shaped, start = {}, 0
    for name, value in values.items():
        shaped[name] = flat.as_strided(value.shape, _strides(value), start)
        start += value.numel()
    if all(value.is_cpu and (dtype or value.dtype) == flat.dtype for value in values.values()):
        return shaped
    return {name: piece.to(values[name].device, dtype or values[name].dtype) for name, piece in shaped.items()}


def _strides(value: Tensor) -> Sequence[int]:
    """The row-major strides of the value's shape."""
    return value.stride() if value.is_contiguous() else torch.empty(value.shape, device="meta").stride()


def _add_rounded(flat: Tensor, grid: ReleaseGrid, draw: Callable[[Tensor, float], None]) -> None:
    """flat ← g · (round(flat/g) + round(s·noise)): a function of the mechanism's result on the rounded values.

    The sum of two integers in double precision is their true sum, rounded, so it depends on the sum only. Adding 0.0
    turns −0 into +0: the sum of two negative zeros would otherwise reveal the sign of the value.
    """
    work = torch.empty(min(flat.numel(), _BLOCK), dtype=torch.float64)
    for start in range(0, flat.numel(), _BLOCK):
        block = flat[start : start + _BLOCK]
        drawn = work[: block.numel()]
        draw(drawn, grid.scale)
        block.mul_(1.0 / grid.spacing).round_().add_(drawn).add_(0.0).mul_(grid.spacing)
