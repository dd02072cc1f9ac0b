"""Are gradients the same in other groups? For programs whose losses do not show it.

A model that reads a value or asks for a size may use it to decide which gradients pass (``detach``, ``no_grad``, a
custom backward pass): the losses are then the same in every group, and the gradients are not. Without such an operation
equal losses of all rows mean equal gradients, except by coincidence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sordino.errors import Refused
from sordino.gradients.checks.attribution import TOLERANCE, check_rest
from sordino.gradients.checks.interaction import ALIKE, Data, generator_of, in_double_of, wide
from sordino.gradients.checks.losses import typical
from sordino.gradients.checks.neutral import restart
from sordino.gradients.passes import Setup
from sordino.gradients.rows import call, take
from sordino.gradients.shards import reading
from sordino.gradients.state.kept import put_back
from sordino.gradients.tape.checkpoints import without_checkpoints
from sordino.gradients.tape.refusals import Aside

GROUPS = 8
"""The number of groups, which is even: where a parity of the whole batch is odd, one of the groups has another."""


def check_gradients(setup: Setup, data: Data, rows: int, number: int, lengths: Tensor | None = None) -> None:
    """Compares plain autograd's gradient of Σ w_i L_i over all rows, w random, with the sum over groups of them.

    number: of the test; each has other groups and weights. lengths: of the rows' gradients; long ones have small
    weights, so that they hide no difference of the others. Rows that are not finite are left out, and the lengths of
    the others are compared.

    Raises:
        Refused: they differ.
    """
    finite = None if lengths is None else torch.isfinite(lengths)
    if finite is not None and not bool(finite.all()):
        check_rest(setup, data, rows, finite.nonzero().flatten().cpu())
        return
    size = None if lengths is None else lengths.double().clamp_min(max(typical(lengths), 1e-12))
    gap = _gap(setup, data, rows, number, size)
    kind = next(iter(setup.parameters.values())).dtype
    if gap <= TOLERANCE.get(kind, 0.05):
        return
    finer = in_double_of(setup, data, lambda twin: _finer(setup, twin, data, rows, number, size))
    if finer is not None and finer <= 1e-6:
        return
    raise Refused(
        "the gradients of records are not the same when they are computed in other groups, though their losses are: "
        "a value or a size of the whole batch decides where gradients stop (detach, no_grad, a custom backward pass), "
        "so records interact; decide it row by row, or before training",
        private=f"the relative difference is {gap:.1e}",
    )


def _finer(setup: Setup, twin: Setup, data: Data, rows: int, number: int, size: Tensor | None) -> float | None:
    """The gap in double precision; None if the gradients over all rows are others there."""
    names, weight = list(setup.parameters), torch.ones(rows, device=setup.device)
    single, double = _weighted(setup, data, weight, names), _weighted(twin, wide(data), weight, names)
    apart = sum(float((a - b).square().sum()) for a, b in zip(single, double, strict=True))
    total = sum(float(t.square().sum()) for t in double)
    return _gap(twin, wide(data), rows, number, size) if apart <= ALIKE * total else None


def _gap(setup: Setup, data: Data, rows: int, number: int, size: Tensor | None) -> float:
    with _disable_current_modes():  # the model's random numbers are replaced, these must not be
        source = generator_of(64 * number + 48)
        order = torch.randperm(rows, generator=source)
        weight = (0.5 + torch.rand(rows, generator=source)) * (1 - 2 * torch.randint(2, (rows,), generator=source))
        weight = weight.to(setup.device) / (1.0 if size is None else size.to(setup.device) / size.min())
    places = [part.sort().values for part in order.tensor_split(min(rows, GROUPS))]
    difference = total = 0.0
    for names in [list(setup.parameters)] if setup.shards is None else setup.shards.groups:
        whole = _weighted(setup, data, weight, names)
        parts = [_weighted(setup, (take(data[0], g, rows), take(data[1], g, rows)), weight[g], names) for g in places]
        for one, *others in zip(whole, *parts, strict=True):
            difference += float((one - sum(others)).square().sum())
            total += max(float(one.square().sum()), *(float(t.square().sum()) for t in others))
    if total != total or difference != difference:
        return 0.0  # a record is not finite: it is dropped, and losses were compared
    return (difference / total) ** 0.5 if total else 0.0


def _weighted(setup: Setup, data: Data, weight: Tensor, names: Sequence[str]) -> list[Tensor]:
    """Plain autograd's gradients of Σ w_i L_i for these parameters, in double precision."""
    restart()
    with (
        Aside(setup.parameters),
        torch.enable_grad(),
        without_checkpoints(),
        put_back(setup.roots, setup.memory.numbers),
        reading(setup.shards, names) as leaves,
    ):
        given = [leaves.get(name, setup.parameters[name]) for name in names]
        losses = setup.loss(call(setup.model, data[0]), data[1])
        if not losses.requires_grad:
            return [torch.zeros_like(t, dtype=torch.float64) for t in given]
        found = torch.autograd.grad(losses, given, weight.to(losses.dtype), allow_unused=True)
    zero = torch.zeros((), dtype=torch.float64, device=setup.device)
    return [zero.expand(t.shape) if g is None else g.double() for t, g in zip(given, found, strict=True)]
