"""When are two vectors of losses of the same rows the same? Relative to what a loss tells of its row.

A row's own loss is a poor measure where all rows share a large term: with 10⁴ added to every loss (a constant of a
likelihood, a penalty on the weights) an interaction that turned all gradients around moved no loss by more than 10⁻⁴ of
itself, and a record the sum by 19 clip norms. So a difference is also compared with how much losses differ from row to
row. Where single precision can't tell it from rounding, a copy of the model in double precision decides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.sums.memory import in_numpy

SMALL = 0.05
"""Differences are never compared with a smaller loss than this, unless all are smaller."""
SHARED = 16.0
"""A loss of more than so many times what losses differ from row to row is mostly a term that all rows share."""
ROUNDED = 2.0**-10
"""The part of such a loss with which differences are compared at least, for it is rounded as a whole."""
HIDDEN = 2.0**12
"""If typical losses are more than so many times their spread, single precision may hide what moves them."""


class Scale(NamedTuple):
    """typical: a loss of which a quarter are at least as large, so that a few records with large losses hide no
    difference of the others; not less than `least`. middle: the median. spread: how far a quarter of the losses are
    from it, at least. least: where single precision rounds."""

    typical: float
    middle: float
    spread: float
    least: float


def scale_of(base: Tensor) -> Scale:
    values = in_numpy(base).astype(np.float64)
    values = values[np.isfinite(values)]
    if not len(values):
        return Scale(1.0, 0.0, 1.0, 1.0)
    middle = float(np.median(values))
    sizes, distances = np.sort(np.abs(values)), np.sort(np.abs(values - middle))
    place, least = (3 * len(values) - 3) // 4, min(float(sizes[-1]), SMALL)
    return Scale(max(float(sizes[place]), least), middle, float(distances[place]), least)


def typical(base: Tensor) -> float:
    """The typical one of these losses or lengths."""
    return scale_of(base).typical


def hidden(base: Tensor) -> bool:
    """Are these losses in single precision so much alike that rounding may hide an interaction?"""
    scale = scale_of(base)
    return base.dtype != torch.float64 and scale.typical > HIDDEN * scale.spread


def apart(found: Tensor, base: Tensor, scale: Scale) -> float:
    """The largest difference between two vectors of losses, relative to the row's own loss or to a typical one, if that
    is larger, without what all rows share; infinite if only one is finite. scale: of all rows."""
    a, b = in_numpy(found), in_numpy(base)
    finite = np.isfinite(b)
    if (np.isfinite(a) != finite).any():
        return float("inf")
    a, b = a[finite], b[finite]
    with np.errstate(over="ignore"):
        size = np.abs(b)
        own = SHARED * np.maximum(np.abs(b - scale.middle), scale.spread)
        against = np.maximum(np.minimum(np.maximum(size, scale.typical), own), ROUNDED * size)
        gap = np.abs(a - b) / np.maximum(against, max(scale.least, 1e-12))
    return float(gap.max(initial=0.0))
