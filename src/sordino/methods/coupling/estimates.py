"""Estimates from public rows: their gradient, its spread, the loss's smoothness, the norms of records.

All of them are functions of public rows and of the current weights, which are released. They have no privacy cost and
need no clipping. Nothing here uses a private row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sordino.clipping import Clipping, FlatClip
from sordino.errors import InputError, Refused
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.engine import row_loss
from sordino.gradients.rows import call
from sordino.gradients.survey import checked_parameters
from sordino.training.updates import DividedModel

_UNBOUNDED = FlatClip(3e38)  # a clipping that leaves every finite gradient unchanged: the engine also returns the norms
Gradient = dict[str, Tensor]


@dataclass(frozen=True)
class Moments:
    """The spread of single records' gradients, and the effect of clipping on them, from public rows.

    trace: tr Σ of the gradients. clipped_trace, clipped_square: tr Σ and mean squared norm after clipping.
    shrinkage: κ, the factor by which clipping shortens in the least squares sense: it minimises Σ ‖clip(g) − κ g‖².
    bias: ‖E clip(g)/κ − E g‖², what a common factor does not correct; the noise of the estimate is subtracted.
    mean, rows: the mean gradient, and the number of rows.
    """

    trace: float
    clipped_trace: float
    clipped_square: float
    shrinkage: float
    bias: float
    mean: Gradient = field(repr=False)
    rows: int


_NOT_FINITE = (
    "the gradient of the public rows is not finite: a public row has a bad value, or the step size is too large "
    "(public gradients are not clipped)"
)


def mean_gradient(
    model: nn.Module, loss: Any, rows: Rows, shards: DividedModel | None = None
) -> tuple[Gradient, float]:
    """The mean gradient over the rows, by one backward pass, and the mean loss. InputError if not finite.

    With `shards`, of a model whose parameters are divided over processes, the gradient has the parameters' layout.
    """
    parameters = checked_parameters(model)

    def mean_loss() -> Tensor:
        return row_loss(loss)(call(model, rows.inputs), rows.targets).mean()

    if shards is not None:
        return shards.gradient(mean_loss)
    with torch.enable_grad():
        value = mean_loss()
        found = torch.autograd.grad(value, list(parameters.values()), allow_unused=True)
    gradient = {
        name: torch.zeros_like(p) if g is None else g.detach()
        for (name, p), g in zip(parameters.items(), found, strict=True)
    }
    if not all(bool(torch.isfinite(g).all()) for g in gradient.values()):
        raise InputError(_NOT_FINITE)
    return gradient, float(value.detach())


def gradient_and_norms(model: nn.Module, loss: Any, rows: Rows) -> tuple[Gradient, Tensor]:
    """The mean gradient over the rows and the norm of each row's gradient. Rows that are not finite are left out."""
    found = clipped_sum(model, loss, rows, _UNBOUNDED)
    return {name: value / len(found.norms) for name, value in found.sums.items()}, found.norms


def quantile_of_norms(norms: Tensor, quantile: float, otherwise: float) -> float:
    """The quantile of the finite norms; if that is zero, the largest norm; if all are zero, `otherwise`.

    Public rows that are fitted perfectly must not end a private run: any positive number is a valid threshold.
    InputError if no norm is finite.
    """
    finite = norms[torch.isfinite(norms)].double()
    if not len(finite):
        raise InputError(_NOT_FINITE)
    found, largest = float(torch.quantile(finite, quantile)), float(finite.max())
    return found if found > 0 else largest if largest > 0 else otherwise


def moments(model: nn.Module, loss: Any, rows: Rows, clipping: Clipping, scale: float = 1.0) -> Moments:
    """The spread of the rows' gradients before and after clipping, if records are scaled before clipping."""
    if clipping.name not in ("flat", "automatic", "normalised"):
        raise Refused(
            f"the error of a private gradient is estimated for clippings that scale a record as a whole, not for "
            f"{clipping.name}: use flat, automatic or normalised clipping, or another rule"
        )
    plain, norms = gradient_and_norms(model, loss, rows)
    scaled = Rows(rows.inputs, rows.targets, coefficient=torch.full((len(norms),), scale, dtype=norms.dtype))
    bent = {k: v / len(norms) for k, v in clipped_sum(model, loss, scaled, clipping).sums.items()}
    good = torch.isfinite(norms)
    lengths = torch.where(good, norms, torch.zeros_like(norms)).double()
    factors = torch.where(good, scale * clipping.factors(scale * norms), torch.zeros_like(norms)).double()
    return _moments(lengths, factors, plain, bent)


def _moments(norms: Tensor, factors: Tensor, plain: Gradient, bent: Gradient) -> Moments:
    """Computed from the norms, the factor on each gradient, and the two means."""
    n, squares = len(norms), norms.square()
    square, clipped = float(squares.mean()), float((factors.square() * squares).mean())
    if not square > 0:
        return Moments(0.0, 0.0, 0.0, 1.0, 0.0, plain, n)
    shrinkage = float((factors * squares).mean()) / square
    unbias = n / max(n - 1, 1)
    off = {name: bent[name].double() / shrinkage - value.double() for name, value in plain.items()}
    residual = float(((factors / shrinkage - 1).square() * squares).mean())
    length = _square(off)
    return Moments(
        trace=unbias * max(0.0, square - _square(plain)),
        clipped_trace=unbias * max(0.0, clipped - _square(bent)),
        clipped_square=clipped,
        shrinkage=shrinkage,
        bias=max(0.0, length - max(0.0, residual - length) / max(n - 1, 1)),
        mean=plain,
        rows=n,
    )


def lasting_error(model: nn.Module, loss: Any, rows: Rows, held: Moments, records: int) -> tuple[float, float]:
    """(‖E over the public set − E over the distribution‖², tr Σ of the public set), from some of its rows and from
    held-back rows.

    The noise of both means is subtracted. At least tr Σ / n of the held-back rows, the error of a set of `records` rows
    before anything was fitted to it.
    """
    gradient, norms = gradient_and_norms(model, loss, rows)
    n, square = len(norms), float(norms[torch.isfinite(norms)].double().square().sum()) / len(norms)
    trace = n / max(n - 1, 1) * max(0.0, square - _square(gradient))
    apart = _square({name: value.double() - held.mean[name].double() for name, value in gradient.items()})
    measured = apart - held.trace / held.rows - trace * max(0.0, 1 / n - 1 / records)
    return max(measured, held.trace / records), trace


def smoothness(model: nn.Module, loss: Any, rows: Rows, *, iterations: int = 15, seed: int = 0) -> float:
    """L at the current weights: |largest eigenvalue| of the Hessian of the mean loss, by power iteration.

    A local value, and a lower bound: the L of Assumption 4.1 is a bound over all weights, which can't be measured.
    """
    parameters = list(checked_parameters(model).values())
    with torch.enable_grad():
        value = row_loss(loss)(call(model, rows.inputs), rows.targets).mean()
        first = torch.autograd.grad(value, parameters, create_graph=True, allow_unused=True)
    used = [(p, g) for p, g in zip(parameters, first, strict=True) if g is not None and g.requires_grad]
    if not used:
        raise Refused("the loss is linear in the weights, so its smoothness is 0: give `smoothness`, or another rule")
    generator = torch.Generator().manual_seed(seed)
    direction = [torch.randn(p.shape, generator=generator).to(p) for p, _ in used]
    found = 0.0
    for _ in range(iterations):
        length = _length(direction)
        direction = [d / length for d in direction]
        product = torch.autograd.grad(
            [g for _, g in used], [p for p, _ in used], direction, retain_graph=True, materialize_grads=True
        )
        direction = [d.detach() for d in product]
        found = _length(direction)
        if found == 0.0:
            break
    return found


def loss_spread(model: nn.Module, loss: Any, rows: Rows) -> tuple[float, float]:
    """(mean, variance) of the loss over the rows."""
    with torch.no_grad():
        values = row_loss(loss)(call(model, rows.inputs), rows.targets).double()
    return float(values.mean()), float(values.var()) if len(values) > 1 else 0.0


def _square(gradient: Mapping[str, Tensor]) -> float:
    return sum(float(value.double().square().sum()) for value in gradient.values())


def _length(tensors: list[Tensor]) -> float:
    return float(torch.stack([t.double().square().sum() for t in tensors]).sum().sqrt())
