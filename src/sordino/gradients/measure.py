"""Measures which row a position belongs to if the program does not determine it, in the same pass that is used.

Every row has two codes, random numbers between 1 and 2. There are three backward passes: of the losses themselves, and
of the losses times each code. A position that belongs to one row receives the same gradient each time, up to that row's
factors, which identify the row. A position that several rows reach does not: then records interact, and the pass is
refused. Nor does a position whose gradient is zero but for rounding (a shift before a normalisation). A further
backward pass, of the losses times one factor for all rows, tells the two apart: with any rows exact gradients are
multiplied by that factor, and only rounding is not.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.tape.layout import Layout, Positions
from sordino.gradients.tape.slots import Use

if TYPE_CHECKING:
    from sordino.gradients.passes import Pass

NEGLIGIBLE = 1e-5
"""Relative to the largest gradient at a use: smaller gradients can't be distinguished from rounding and are left
out."""


UNIFORM = 1.375
"""The factor of all rows that shows rounding; its products are rounded otherwise."""
ROUNDING = 64.0
"""A gradient of at most so many times what rounding changes at its use is nothing but rounding ..."""
LEAST = {torch.float64: 2.0**-36, torch.float32: 2.0**-14}
"""... if it is also at most so large, relative to the largest gradient of the pass."""


class NotFinite(Exception):
    """A loss or gradient is not finite, so rows can't be told apart: each record must be processed separately."""


def measured(run: Pass, weight: Tensor) -> Iterator[tuple[Use, Tensor, Layout]]:
    """Every use with its gradient and the row of each of its positions. Raises NotFinite if a loss or gradient is
    not."""
    if not bool(torch.isfinite(run.losses).all()):
        raise NotFinite
    whole: dict[int, tuple[Use, Tensor]] = {}
    run.backward(weight, lambda use, g: whole.update({use.index: (use, g.detach().clone())}), keep=True)
    if not all(bool(torch.isfinite(g).all()) for _, g in whole.values()):
        raise NotFinite
    base = math.isqrt(run.rows - 1) + 1
    number, digits, doubtful = torch.arange(run.rows), [], False
    lengths: dict[int, float] = {}  # of the longest gradient whose row is not clear, by use
    for place, digit in enumerate((number % base, number // base)):
        codes = _codes(base)
        digits.append(_digits(run, weight, codes, codes[digit], whole, lengths, keep=place == 0 or doubtful))
        doubtful = bool(lengths) if place == 0 else doubtful
    if lengths:
        _check_rounding(run, weight, whole, lengths, freed=not doubtful)
    for index, (use, gradient) in whole.items():
        low, high = digits[0].get(index), digits[1].get(index)
        if low is None or high is None:
            continue
        row = torch.where((low < 0) | (high < 0), -1, low + base * high)
        if bool((row >= run.rows).any()):
            raise _interact(use)
        yield use, gradient, Positions(row.flatten())


def _codes(count: int) -> Tensor:
    """Random numbers between 1 and 2, at least half a step of 1/count apart, and at least a quarter step from 1: a
    gradient that does not change with the losses' weights belongs to no row. Not torch's: those may be fixed
    (``neutral.py``)."""
    drawn = random.Random(torch.initial_seed() + count)
    places = drawn.sample(range(count), count)
    return 1 + torch.tensor([place + 0.25 + 0.5 * drawn.random() for place in places], dtype=torch.float64) / count


def _digits(
    run: Pass,
    weight: Tensor,
    codes: Tensor,
    factor: Tensor,
    whole: dict[int, tuple[Use, Tensor]],
    lengths: dict[int, float],
    keep: bool,
) -> dict[int, Tensor]:
    """The digit of every position (−1: its gradient is zero, negligible or not clear), from one backward pass."""
    found: dict[int, Tensor] = {}

    def compare(use: Use, arriving: Tensor) -> None:
        g = _positions(use, arriving.detach())
        if use.index not in whole:
            if bool(g.any()):
                raise _interact(use)
            return
        first = _positions(use, whole[use.index][1])
        found[use.index], longest = _digit(first, g, codes)
        if longest:
            lengths[use.index] = max(lengths.get(use.index, 0.0), longest)

    run.backward(weight * factor.to(weight), compare, keep=keep)
    return found


def _check_rounding(
    run: Pass, weight: Tensor, whole: dict[int, tuple[Use, Tensor]], lengths: dict[int, float], freed: bool
) -> None:
    """Raises Refused unless the gradients that are not clear are nothing but rounding. freed: the graph is gone."""
    if freed:
        raise _interact(whole[next(iter(lengths))][0])
    largest = max(_longest(_positions(use, g)) for use, g in whole.values())
    rounding: dict[int, float] = {}

    def compare(use: Use, arriving: Tensor) -> None:
        if use.index in lengths:
            exact = UNIFORM * _positions(use, whole[use.index][1])
            rounding[use.index] = _longest(_positions(use, arriving.detach()) - exact)

    run.backward(weight * UNIFORM, compare)
    for index, longest in lengths.items():
        use, g = whole[index]
        if not longest <= min(ROUNDING * rounding.get(index, 0.0), LEAST.get(g.dtype, 0.0) * largest):
            raise _interact(use)


def _longest(positions: Tensor) -> float:
    lengths = positions.square().sum(-1)
    return float(lengths.max().sqrt()) if lengths.numel() else 0.0


def _positions(use: Use, gradient: Tensor) -> Tensor:
    """(leading dimensions, features)."""
    g = gradient if use.permute is None else gradient.permute(use.permute)
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    lead = g.shape[: len(use.lead)]
    return g.reshape(*lead, -1).to(torch.float64)


def _digit(first: Tensor, g: Tensor, codes: Tensor) -> tuple[Tensor, float]:
    """(the digit of every position, the length of the longest gradient whose digit is not clear)."""
    size = first.square().sum(-1)
    ratio = (first * g).sum(-1) / size.clamp_min(torch.finfo(torch.float64).tiny)
    rest = (g - ratio.unsqueeze(-1) * first).square().sum(-1).sqrt()
    length = size.sqrt()
    largest = float(length.max()) if length.numel() else 0.0
    ordered, place = torch.sort(codes.double().to(first.device))
    nearest = torch.searchsorted(ordered, ratio.contiguous()).clamp_max(len(codes) - 1)
    below = (nearest - 1).clamp_min(0)
    nearest = torch.where((ratio - ordered[below]).abs() < (ratio - ordered[nearest]).abs(), below, nearest)
    tolerance = 0.1 / len(codes)
    clean = ((ratio - ordered[nearest]).abs() < tolerance) & (rest <= tolerance * length)
    negligible = torch.maximum(length, rest) <= NEGLIGIBLE * largest
    unclear = torch.maximum(length, rest)[~clean & ~negligible]
    return torch.where(clean & (length > 0), place[nearest], -1), float(unclear.max()) if unclear.numel() else 0.0


def _interact(use: Use) -> Refused:
    if use.mapped:
        return Refused(
            f"{use.label}: torch.vmap runs over another dimension than the rows here, so each of its elements uses the "
            "parameter for all rows, whose contributions can't be separated; map over the rows (in_dims names their "
            "dimension), or call the function on the whole tensor without torch.vmap"
        )
    return Refused(
        f"{use.label}: the gradient of a record's loss reaches positions of other records here, so records interact, "
        "or rows lie along a dimension that this operation reduces or combines; find the earlier operation that "
        "mixes the batch and replace it, or move the rows to dimension 0"
    )
