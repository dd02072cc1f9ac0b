"""Measures which row a position belongs to if the program does not determine it, in the same pass that is used.

Every row has two codes, random numbers between 1 and 2. There are three backward passes: of the losses themselves, and
of the losses times each code. A position that belongs to one row receives the same gradient each time, up to that row's
factors, which identify the row. A position that several rows reach does not: then records interact, and the pass is
refused.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.layout import Layout, Positions
from sordino.gradients.slots import Use

if TYPE_CHECKING:
    from sordino.gradients.passes import Pass

NEGLIGIBLE = 1e-5
"""Relative to the largest gradient at a use: smaller gradients can't be distinguished from rounding and are left
out."""


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
    number, digits = torch.arange(run.rows), []
    for place, digit in enumerate((number % base, number // base)):
        codes = _codes(base)
        digits.append(_digits(run, weight, codes, codes[digit], whole, last=place == 1))
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
    run: Pass, weight: Tensor, codes: Tensor, factor: Tensor, whole: dict[int, tuple[Use, Tensor]], last: bool
) -> dict[int, Tensor]:
    """The digit of every position (−1: its gradient is zero or negligible), from one backward pass."""
    found: dict[int, Tensor] = {}

    def compare(use: Use, arriving: Tensor) -> None:
        g = _positions(use, arriving.detach())
        if use.index not in whole:
            if bool(g.any()):
                raise _interact(use)
            return
        first = _positions(use, whole[use.index][1])
        found[use.index] = _digit(use, first, g, codes)

    run.backward(weight * factor.to(weight), compare, keep=not last)
    return found


def _positions(use: Use, gradient: Tensor) -> Tensor:
    """(leading dimensions, features)."""
    g = gradient if use.permute is None else gradient.permute(use.permute)
    g = torch.view_as_real(g.resolve_conj()) if g.is_complex() else g
    lead = g.shape[: len(use.lead)]
    return g.reshape(*lead, -1).to(torch.float64)


def _digit(use: Use, first: Tensor, g: Tensor, codes: Tensor) -> Tensor:
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
    if bool((~clean & ~negligible).any()):
        raise _interact(use)
    return torch.where(clean & (length > 0), place[nearest], -1)


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
