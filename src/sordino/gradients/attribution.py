"""Are gradients attributed to the right records? Compares them with plain autograd, and with those in other groups.

With random weights w, Σ w_i g_i from the engine's contributions must be plain autograd's gradient of Σ w_i L_i, at the
real number of rows. And the length of a record's gradient must not change if other records are left out or changed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sordino.errors import Refused
from sordino.gradients.checkpoints import without_checkpoints
from sordino.gradients.contributions import Contribution
from sordino.gradients.interaction import Data, changed, generator_of, in_double, wide
from sordino.gradients.measure import NotFinite
from sordino.gradients.memory import give_back_freed_memory
from sordino.gradients.narrow import narrow_sum
from sordino.gradients.passes import Found, Setup, contributions
from sordino.gradients.refusals import Aside
from sordino.gradients.rows import Chunk, call, take
from sordino.gradients.shards import reading

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}  # coarser types are compared to a twentieth


def check_attribution(setup: Setup, data: Data, chunk: Chunk) -> Tensor | None:
    """Compares Σ w_i g_i from the engine's contributions with plain autograd of Σ w_i L_i, for random w.

    Returns:
        The lengths of the rows' gradients; None if some are not finite.
    """
    gap = _attribution_gap(setup, data, chunk.rows)
    kind = next(iter(setup.parameters.values())).dtype
    if gap is None:
        return None
    if gap.relative <= TOLERANCE.get(kind, 0.05):
        return gap.lengths
    if kind == torch.float32:  # the cause may be a kink or a long chain of roundings: decide in double precision
        twin = in_double(setup)
        if twin is not None:
            finer = _attribution_gap(twin, wide(data), chunk.rows)
            if finer is None or finer.relative <= 1e-6:
                return gap.lengths
    raise Refused(
        f"{gap.parameter}: with random weights on the records the engine's gradient differs from autograd's; the "
        "layer is not supported in this use: freeze it, or write it in plain PyTorch",
        private=f"it differs by {gap.relative:.1e}",
    )


class _Gap(NamedTuple):
    """The parameter with the largest difference, and the difference relative to the length of the records'
    gradients."""

    parameter: str
    relative: float
    lengths: Tensor | None  # of all rows' gradients, if they are finite


def _attribution_gap(setup: Setup, data: Data, rows: int) -> _Gap | None:
    """None if there is nothing finite to compare."""
    with _disable_current_modes():  # the model's random numbers are replaced, these must not be
        weight = 0.5 + torch.rand(rows, generator=generator_of(2))
        weight = torch.where(torch.rand(rows, generator=generator_of(3)) < 0.5, weight, -weight).to(setup.device)
    made = _by_row(setup, data, rows)
    if made is None:
        return None
    with torch.no_grad():
        squares = {name: g.norm2().double() for name, g in made.gradients.items()}
        total = sum(squares.values(), torch.zeros(rows, dtype=torch.float64, device=setup.device))
        good = torch.isfinite(total) & torch.isfinite(made.losses)
        if not bool(good.all()):
            kept = torch.nonzero(good).flatten()
            if len(kept) < 2:
                return None
            rest = _attribution_gap(setup, _taken(data, kept, rows), len(kept))
            return None if rest is None else rest._replace(lengths=None)
        mine = {}
        # each is released before the next, and all before autograd creates its activations
        for name in list(made.gradients):
            mine[name] = _weighted(made.gradients.pop(name), weight, setup.parameters[name])
    give_back_freed_memory()
    scale = float((weight.double().square() * total).sum().sqrt())
    worst = ("", 0.0)
    for name, difference in _differences(setup, data, weight, mine):
        own = float((weight.double().square() * squares[name]).sum().sqrt()) if name in squares else 0.0
        size = own + 1e-4 * scale
        if difference and (not size or difference / size > worst[1]):
            worst = name, difference / size if size else float("inf")
    return _Gap(*worst, total.sqrt())


def _weighted(of: Contribution, weight: Tensor, parameter: Tensor) -> Tensor:
    """Σ_i w_i g_i, in single precision if the parameter has it."""
    if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
        return narrow_sum(of, weight.double(), parameter)
    total = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
    of.add_to(total, weight.double())
    return total


def _differences(setup: Setup, data: Data, weight: Tensor, mine: dict[str, Tensor]) -> list[tuple[str, float]]:
    """The difference between these sums and plain autograd's gradient of Σ w_i L_i, parameter by parameter.

    Each gradient is compared when it is computed, and not kept; for a sharded model, one group after the other is
    gathered.
    """
    found: list[tuple[str, float]] = []

    def compare(name: str, parameter: Tensor) -> None:
        theirs, parameter.grad = parameter.grad, None
        if theirs is not None:
            ours = mine.pop(name, None)
            found.append((name, float((theirs if ours is None else ours.sub_(theirs)).norm())))

    for group in [list(setup.parameters)] if setup.shards is None else setup.shards.groups:
        with (
            Aside(setup.parameters),
            torch.enable_grad(),
            without_checkpoints(),
            reading(setup.shards, group) as leaves,
        ):
            losses = setup.loss(call(setup.model, data[0]), data[1])
            if not losses.requires_grad:
                continue  # they depend on no parameter of this group, or on no parameter in this batch
            given = {name: leaves.get(name, setup.parameters[name]) for name in group}
            hooks = [t.register_post_accumulate_grad_hook(partial(compare, n)) for n, t in given.items()]
            try:
                torch.autograd.backward(losses, weight.to(losses.dtype), inputs=list(given.values()))
            finally:
                for hook in hooks:
                    hook.remove()
    return [*found, *((name, float(total.norm())) for name, total in mine.items())]


def check_lengths(setup: Setup, data: Data, rows: int, known: Tensor | None = None) -> None:
    """Compares the lengths of the records' gradients in another group and order; raises Refused if they change.

    A custom backward pass (a custom function, a hook) may use other rows without an effect on the losses.
    known: the lengths, if they were computed with the same random numbers.
    """
    gap = _length_gap(setup, data, rows, known)
    kind = next(iter(setup.parameters.values())).dtype
    if gap > TOLERANCE.get(kind, 0.05) and kind == torch.float32 and (twin := in_double(setup)) is not None:
        gap = _length_gap(twin, wide(data), rows)
    if gap > TOLERANCE.get(kind, 0.05):
        raise Refused(
            "a record's gradient is not the same when the others of its batch change, so records interact: look for a "
            "custom backward pass or a hook that computes over the batch dimension",
            private=f"the relative difference is {gap:.1e}",
        )


def _length_gap(setup: Setup, data: Data, rows: int, known: Tensor | None = None) -> float:
    """How much the lengths of half of the rows change if of the rest only one row is kept, which is made large."""
    with _disable_current_modes():
        order = torch.randperm(rows, generator=generator_of(3))
    count = max(1, rows // 2)
    part, few = order[:count], torch.cat([order[:count], order[-1:]])
    whole = _lengths(setup, data, rows) if known is None else known
    beside = _lengths_beside(setup, _taken(data, few, rows), count + 1, count)
    found = [None if beside is None else beside[:count]]
    if beside is None or rows == count + 1:  # nothing was left out
        found.append(_lengths(setup, _taken(data, part, rows), count))
    if whole is None:
        return 0.0
    size = max(float(whole.nan_to_num(0, 0, 0).max()), 1e-12)
    return max(
        (float((whole[part] - t).nan_to_num(0, 0, 0).abs().max()) / size for t in found if t is not None), default=0.0
    )


def _lengths_beside(setup: Setup, data: Data, rows: int, row: int) -> Tensor | None:
    """The lengths if this row is made large; None if the model does not accept such a row.

    Next to a large gradient the others may be too small to be measured (``measure.py``): then the row is made a copy of
    its neighbour, and a refusal in that case is final.
    """
    try:
        return _lengths(setup, changed(data, row, "large"), rows)
    except (ValueError, RuntimeError, IndexError, ArithmeticError):
        return None
    except Refused:
        return _lengths(setup, changed(data, row, "copy"), rows)


def _lengths(setup: Setup, data: Data, rows: int) -> Tensor | None:
    """The length of each row's gradient; None if rows can't be told apart."""
    made = _by_row(setup, data, rows)
    if made is None:
        return None
    with torch.no_grad():
        none = torch.zeros(rows, dtype=torch.float64, device=setup.device)
        total = sum((g.norm2().double() for g in made.gradients.values()), none)
    return total.sqrt()


def _by_row(setup: Setup, data: Data, rows: int) -> Found | None:
    """The gradients with every row as its own record; None if rows can't be told apart."""
    each = Chunk(slice(0, rows), slice(0, rows), rows, rows, None, None)
    try:
        with reading(setup.shards):
            return contributions(replace(setup, once=False), data, each, [({}, 1.0)])
    except NotFinite:
        return None


def _taken(data: Data, part: Tensor, rows: int) -> Data:
    return take(data[0], part, rows), take(data[1], part, rows)
