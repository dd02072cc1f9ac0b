"""The effect of clipping on the gradient, measured on rows: Xiao et al. 2023, Figs. 1, 3, 6, 7.

At the model's current weights, with g_i the gradient of row i and ∇F their mean:

    sampling noise   τ² = E‖g_i − ∇F‖² = E‖g_i‖² − ‖∇F‖²      (Definition 2.5)
    clipped share    Pr(‖g_i‖ > c)
    cosine           between ∇F and the mean of the clipped g_i (Fig. 7)

Two passes of the engine, one unclipped and one clipped; no row's gradient is ever stored. τ² is a difference: if the
rows agree to a millionth of their length it is 0 up to rounding.

Nothing here is private: the caller says whose rows they are. Public rows are declared (`public=`); all others need
`not_private=True`, and the reading keeps that mark. No guarantee depends on a reading.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sordino.clipping import AutomaticClip, Clipping, FlatClip, NormalisedClip
from sordino.errors import InputError, Refused
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.plan.contribution import Augmentation
from sordino.records.companions import with_companions
from sordino.records.reading import count_records, row_reader
from sordino.records.views import with_views

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
UNCLIPPED = FlatClip(1e30)


class NothingToMeasure(InputError):
    """The gradients are not finite at these weights: training has diverged, or the rows are damaged."""


@dataclass(frozen=True)
class Reading:
    """What the instruments measure at one set of weights.

    With `group` > 1 the gradient g_i is the mean over a group of that many rows, and "row" means such a group.

    Args:
        rows: The number of rows.
        origin: Where the rows come from.
        not_private: Whether the rows may be private: then the reading must not be published.
        group: The number of rows whose mean gradient is clipped; 1: single rows.
        loss: The mean loss.
        sampling_noise: τ².
        gradient_norm: ‖∇F‖.
        norm_quantiles: Quantiles of ‖g_i‖, before clipping.
        clip_norm: The clipping threshold c.
        clipped_share: The share of rows with ‖g_i‖ > c.
        clipped_gradient_norm: The norm of the mean of the clipped g_i.
        clipped_square: E‖clip(g_i)‖²; for clippings that act on parts of a gradient, the bound c².
        cosine: Between ∇F and the mean of the clipped g_i; None if one of them is zero, up to rounding.
    """

    rows: int
    origin: str
    not_private: bool
    group: int
    loss: float
    sampling_noise: float
    gradient_norm: float
    norm_quantiles: Mapping[str, float]
    clip_norm: float
    clipped_share: float
    clipped_gradient_norm: float
    clipped_square: float
    cosine: float | None

    @property
    def tau(self) -> float:
        return math.sqrt(self.sampling_noise)

    def to_dict(self) -> dict[str, Any]:
        """The reading as JSON-serialisable values, with the mark `not_private`."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """The numbers as a flat row for metrics.jsonl."""
        row = {
            "sampling_noise": self.sampling_noise,
            "gradient_norm": self.gradient_norm,
            "clipped_gradient_norm": self.clipped_gradient_norm,
            "clipped_share": self.clipped_share,
            **{f"norm_quantile_{q}": value for q, value in self.norm_quantiles.items()},
        }
        return row if self.cosine is None else {**row, "clip_cosine": self.cosine}


def measure(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    clipping: Clipping,
    *,
    public: str | None = None,
    not_private: bool = False,
    views: Augmentation | None = None,
    seed: int = 0,
) -> Reading:
    """Measures the effect of clipping at the model's weights, which are not changed.

    Rows whose gradient is not finite are left out. torch's global generator is not changed.

    Args:
        model: The model.
        loss: A loss of outputs and targets, one number per row.
        rows: A dataset as for `train`.
        clipping: The clipping to measure.
        public: Where the rows come from, if they are public.
        not_private: Measure although the rows are not declared public: the reading is then a function of the records
            without any noise. Give exactly one of `public` and `not_private`.
        views: If given, a row's gradient is the mean over random views of it, as self-augmentation clips it (Fig. 11).
        seed: The seed of views and dropout.

    Returns:
        The reading.

    Raises:
        InputError: not exactly one of `public` and `not_private` is given, or there are fewer than two rows with a
            finite gradient.
    """
    (found,) = measure_each(
        model, loss, rows, [clipping], public=public, not_private=not_private, views=views, seed=seed
    )
    return found


def measure_each(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    clippings: Sequence[Clipping],
    *,
    public: str | None = None,
    not_private: bool = False,
    views: Augmentation | None = None,
    seed: int = 0,
) -> list[Reading]:
    """`measure` for several clippings; the unclipped gradients are measured once for all of them."""
    origin = whose(public, not_private)
    everyone = all_rows(rows)
    seen = everyone if views is None else with_views(everyone, views, seed=seed, step=0)
    plain = mean_gradient(model, loss, seen, UNCLIPPED, seed)
    return [
        _read(plain, mean_gradient(model, loss, seen, clipping, seed), clipping, 1, origin, not_private)
        for clipping in clippings
    ]


def p_averaged(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    clipping: Clipping,
    p: int,
    *,
    public: str | None = None,
    not_private: bool = False,
    seed: int = 0,
) -> Reading:
    """Measures what happens if means over random groups of p rows are clipped (section 3.3, Figs. 3, 7).

    For diagnosis only.

    τ² falls by the factor p. It is not private at per-record noise: one record moves a group's clipped mean by up to
    2c, and there are only B/p groups, so for the same ε the noise per unit of gradient is 2p times that of per-record
    clipping under add-remove, p times under replace-one (docs/guarantees). Rows that fill no complete group are left
    out.

    Args:
        model: The model.
        loss: A loss of outputs and targets, one number per row.
        rows: A dataset as for `train`.
        clipping: The clipping of a group's mean gradient.
        p: The number of rows in a group, at most half of all rows.
        public: Where the rows come from, if they are public.
        not_private: Measure although the rows are not declared public.
        seed: The seed of the groups and of dropout.

    Returns:
        The reading, with `group` = p.

    Raises:
        InputError: p is out of its range, or not exactly one of `public` and `not_private` is given.
    """
    origin = whose(public, not_private)
    everyone = all_rows(rows)
    count = len(everyone.targets)
    if isinstance(p, bool) or not isinstance(p, int) or not 1 <= p <= count // 2:
        raise InputError(f"p = {p!r} must be a whole number from 1 to {count // 2}, half of the {count} rows")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: count - count % p]
    chosen = row_reader((everyone.inputs, everyone.targets))(order)
    group, share = torch.arange(len(order)) // p, torch.full((len(order),), 1 / p, dtype=torch.float64)
    grouped = Rows(chosen.inputs, chosen.targets, record=group, records=len(order) // p, coefficient=share)
    plain, clipped = (mean_gradient(model, loss, grouped, way, seed) for way in (UNCLIPPED, clipping))
    return _read(plain, clipped, clipping, p, origin, not_private)


def whose(public: str | None, not_private: bool) -> str:
    """Where the rows come from; InputError unless exactly one of the two arguments is given."""
    if public is not None and not_private:
        raise InputError("rows are either public or not: give public= or not_private=True, not both")
    if public is None and not not_private:
        raise Refused(
            "the instruments measure single records' gradients without noise: give public= (where these public rows "
            "come from), or not_private=True, and do not publish the results"
        )
    return "the private records, without noise" if public is None else public


def all_rows(rows: Any) -> Rows:
    count = count_records(rows)
    if count < 2:
        raise InputError(f"{count} rows show no sampling noise: give at least 2, better hundreds")
    return row_reader(rows)(torch.arange(count))


def _read(plain: Mean, clipped: Mean, clipping: Clipping, group: int, origin: str, not_private: bool) -> Reading:
    finite = torch.isfinite(plain.sums.norms)
    norms = plain.sums.norms[finite].double()
    if len(norms) < 2:
        raise NothingToMeasure(
            f"only {len(norms)} of the {len(finite)} rows have a finite gradient: nothing to measure"
        )
    square, length, short = float(norms.square().mean()), float(plain.mean.norm()), float(clipped.mean.norm())
    directed = length > 1e-6 * math.sqrt(square) and short > 0
    return Reading(
        rows=len(plain.sums.losses),
        origin=origin,
        not_private=not_private,
        group=group,
        loss=float(plain.sums.losses.double().mean()),
        sampling_noise=max(0.0, square - length**2),
        gradient_norm=length,
        norm_quantiles={str(q): float(torch.quantile(norms, q)) for q in QUANTILES},
        clip_norm=clipping.clip_norm,
        clipped_share=float((clipped.sums.norms[finite] > clipping.clip_norm).double().mean()),
        clipped_gradient_norm=short,
        clipped_square=_clipped_square(clipping, norms),
        cosine=float(plain.mean @ clipped.mean) / (length * short) if directed else None,
    )


@dataclass(frozen=True)
class Mean:
    """The mean gradient as one vector in double precision, and the engine's sum behind it."""

    mean: Tensor
    sums: ClippedSum


def mean_gradient(model: nn.Module, loss: Callable[..., Tensor], rows: Rows, clipping: Clipping, seed: int = 0) -> Mean:
    """The mean over the records with a finite gradient, each clipped by `clipping`, as one flat vector."""
    rows = with_companions(rows, model, seed=seed, step=0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sums = clipped_sum(model, loss, rows, clipping)
    count = max(1, len(sums.norms) - sums.dropped)
    return Mean(flat(sums.sums) / count, sums)


def flat(sums: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in sums.values()])


def _clipped_square(clipping: Clipping, norms: Tensor) -> float:
    if isinstance(clipping, FlatClip | AutomaticClip | NormalisedClip):
        return float((clipping.factors(norms) * norms).square().mean())
    return clipping.clip_norm**2
