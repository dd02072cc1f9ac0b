"""Are gradients attributed to the right records? Compares them with plain autograd, and with those in other groups.

With random weights w, Σ w_i g_i from the engine's contributions must be plain autograd's gradient of Σ w_i L_i, at the
real number of rows. And the length of a record's gradient must not change if other records are left out or changed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from sordino.errors import Refused
from sordino.gradients.checks.interaction import (
    Data,
    changed,
    generator_of,
    in_double_of,
    losses_of,
    wide,
)
from sordino.gradients.checks.losses import typical
from sordino.gradients.checks.neutral import Neutral
from sordino.gradients.layers.convolution import Convolved
from sordino.gradients.layers.mapped import SameProducts
from sordino.gradients.measure import NotFinite
from sordino.gradients.passes import Found, Setup, contributions
from sordino.gradients.rows import Chunk, call, take
from sordino.gradients.shards import reading
from sordino.gradients.state.kept import put_back
from sordino.gradients.sums.contributions import Contribution, Outer
from sordino.gradients.sums.memory import give_back_freed_memory, in_numpy, lengths
from sordino.gradients.sums.narrow import narrow_sum
from sordino.gradients.sums.runs import RUN
from sordino.gradients.sums.totals import keep
from sordino.gradients.tape.checkpoints import without_checkpoints
from sordino.gradients.tape.refusals import Aside

TOLERANCE = {torch.float64: 1e-8, torch.float32: 2e-3}
NARROW = 0.05  # for coarser types


class Summed(NamedTuple):
    """Σ w_i g_i from the contributions of a pass, with random weights w, and the rows' squared lengths, by
    parameter."""

    weight: Tensor
    sums: dict[str, Tensor]
    squares: dict[str, Tensor]

    @property
    def total(self) -> Tensor:
        """(rows,) the squared lengths over all parameters."""
        return sum(self.squares.values(), torch.zeros(len(self.weight), dtype=torch.float64, device=self.weight.device))


class Gap(NamedTuple):
    """The parameter with the largest difference, and the difference relative to the length of the records'
    gradients."""

    parameter: str
    relative: float
    lengths: Tensor | None  # of all rows' gradients, if they are finite


def summed(setup: Setup, made: Found, rows: int) -> Summed | None:
    """Sums the gradients of a pass whose rows are its records, before they are clipped; None if some are not finite.

    What is compared is then what is released: no second pass has to be trusted to be like the first one. Squared norms
    are left in ``made.squares`` for the clipping.
    """
    for of in made.gradients.values():
        keep(of)  # the clipped sum is still to come
    with torch.no_grad():
        made.squares.update({name: g.norm2() for name, g in made.gradients.items()})
        found = Summed(_random_weights(setup, rows), {}, {n: t.double() for n, t in made.squares.items()})
        if not all(np.isfinite(in_numpy(t)).all() for t in (found.total, made.losses)):
            return None
        runs = np.append(np.arange(0, rows, RUN), rows) if rows > RUN else None
        for name, of in made.gradients.items():
            if isinstance(of, (Outer, Convolved)):
                of.runs = runs  # any blocks will do; those of the clipped sum are set afterwards
            found.sums[name] = _weighted(of, found.weight, setup.parameters[name])
            if isinstance(of, (Outer, Convolved)):
                of.runs = None
    return found


def compared(setup: Setup, data: Data, of: Summed, *, watched: bool = True) -> Gap | None:
    """Compares these sums with plain autograd; None if the pass draws random numbers, which would not be the same.
    watched: it is not known yet whether it does."""
    differences = _differences(setup, data, of.weight, of.sums, watched=watched)
    return None if differences is None else _largest_gap(of, differences)


def check_attribution(setup: Setup, data: Data, rows: int, found: Gap | None = None) -> Tensor | None:
    """Compares Σ w_i g_i from the engine's contributions with plain autograd of Σ w_i L_i, for random w.

    Args:
        setup: the model and its loss.
        data: the rows of the batch.
        rows: how many there are.
        found: the result of `compared`. Otherwise the gradients are computed again, with every row as its own record.

    Returns:
        The lengths of the rows' gradients; None if some are not finite.
    """
    gap = _attribution_gap(setup, data, rows) if found is None else found
    kind = next(iter(setup.parameters.values())).dtype
    if gap is None:
        return None
    if gap.relative <= TOLERANCE.get(kind, NARROW):
        return gap.lengths
    # the cause may be a kink or a long chain of roundings: decide in double precision
    finer = in_double_of(setup, data, lambda twin: _relative(_attribution_gap(twin, wide(data), rows)))
    if finer is not None and finer <= 1e-6:
        return gap.lengths
    if gap.relative <= NARROW and gap.relative <= TOLERANCE.get(_narrowest(setup, data), NARROW):
        return gap.lengths
    raise Refused(
        f"{gap.parameter}: with random weights on the records the engine's gradient differs from autograd's; the "
        "layer is not supported in this use: freeze it, or write it in plain PyTorch",
        private=f"it differs by {gap.relative:.1e}",
    )


class _Narrowest(TorchFunctionMode):
    """The narrowest type of numbers that a parameter or data is cast to."""

    kind: torch.dtype = torch.float64

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and out.dtype.itemsize < self.kind.itemsize:
            self.kind = out.dtype
        return out


def _narrowest(setup: Setup, data: Data) -> torch.dtype:
    """In which precision does the model itself compute (`weight.bfloat16()`, norms in single precision)? Its copy in
    double precision does as well, and decides nothing: gradients are rounded there, in another order by autograd."""
    with _Narrowest() as mode:
        losses_of(setup, data)
    return mode.kind  # type: ignore[no-any-return]


def _relative(gap: Gap | None) -> float:
    return 0.0 if gap is None else gap.relative


def _random_weights(setup: Setup, rows: int) -> Tensor:
    with _disable_current_modes():  # the model's random numbers are replaced, these must not be
        weight = 0.5 + torch.rand(rows, generator=generator_of(2)).numpy()
        positive = torch.rand(rows, generator=generator_of(3)).numpy() < 0.5
        return torch.from_numpy(np.where(positive, weight, -weight)).to(setup.device)


def _attribution_gap(setup: Setup, data: Data, rows: int) -> Gap | None:
    """None if there is nothing finite to compare."""
    weight = _random_weights(setup, rows)
    made = _by_row(setup, data, rows)
    if made is None:
        return None
    with torch.no_grad():
        of = Summed(weight, {}, {name: g.norm2().double() for name, g in made.gradients.items()})
        good = torch.isfinite(of.total) & torch.isfinite(made.losses)
        if not bool(good.all()):
            kept = torch.nonzero(good).flatten()
            if len(kept) < 2:
                return None
            rest = _attribution_gap(setup, _taken(data, kept, rows), len(kept))
            return None if rest is None else rest._replace(lengths=None)
        # each is released before the next, and all before autograd creates its activations
        for name in list(made.gradients):
            of.sums[name] = _weighted(made.gradients.pop(name), weight, setup.parameters[name])
    give_back_freed_memory()
    return _largest_gap(of, _differences(setup, data, weight, of.sums) or [])


def _largest_gap(of: Summed, differences: list[tuple[str, float]]) -> Gap:
    squared, total = in_numpy(of.weight) ** 2, of.total
    scale = float(np.sqrt((squared * in_numpy(total)).sum()))
    worst = ("", 0.0)
    for name, difference in differences:
        own = float(np.sqrt((squared * in_numpy(of.squares[name])).sum())) if name in of.squares else 0.0
        size = own + 1e-4 * scale
        if difference and (not size or difference / size > worst[1]):
            worst = name, difference / size if size else float("inf")
    return Gap(*worst, lengths([total])[0])


def _weighted(of: Contribution, weight: Tensor, parameter: Tensor) -> Tensor:
    """Σ_i w_i g_i, in single precision if the parameter has it."""
    if parameter.dtype == torch.float32 and parameter.device.type == "cpu":
        return narrow_sum(of, weight.double(), parameter)
    total = torch.zeros(parameter.shape, dtype=torch.float64, device=parameter.device)
    of.add_to(total, weight.double())
    return total


def _differences(
    setup: Setup, data: Data, weight: Tensor, mine: dict[str, Tensor], *, watched: bool = False
) -> list[tuple[str, float]] | None:
    """The difference between these sums and plain autograd's gradient of Σ w_i L_i, parameter by parameter.

    Each gradient is compared when it is computed, and not kept; for a sharded model, one group after the other is
    gathered. watched: None is returned if the forward pass draws random numbers.
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
            put_back(setup.roots, setup.memory.numbers),
            reading(setup.shards, group) as leaves,
        ):
            with Neutral() if watched else nullcontext() as mode, SameProducts():
                losses = setup.loss(call(setup.model, data[0]), data[1])
            if mode is not None and mode.drew:
                return None
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
    if gap > TOLERANCE.get(kind, NARROW):
        finer = in_double_of(setup, data, lambda twin: _length_gap(twin, wide(data), rows))
        gap = gap if finer is None else finer
    _refuse_other_lengths(setup, gap)


def _refuse_other_lengths(setup: Setup, gap: float) -> None:
    if gap > TOLERANCE.get(next(iter(setup.parameters.values())).dtype, 0.05):
        raise Refused(
            "a record's gradient is not the same when the others of its batch change, so records interact: look for a "
            "custom backward pass or a hook that computes over the batch dimension, or for a value that decides where "
            "gradients stop",
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
    return max((_apart(t, whole[part]) for t in found if t is not None), default=0.0)


def _apart(found: Tensor, whole: Tensor) -> float:
    """The largest difference of lengths, relative to a row's own or a typical one: a long one hides no other."""
    gap = (whole - found).nan_to_num(0, 0, 0).abs() / whole.nan_to_num(0, 0, 0).clamp_min(max(typical(whole), 1e-12))
    return float(gap.max()) if len(gap) else 0.0


def check_rest(setup: Setup, data: Data, rows: int, kept: Tensor) -> None:
    """Compares the lengths of these rows' gradients without the others, which are not finite; raises Refused if they
    are not the same: plain autograd has no gradients there."""
    whole, alone = _lengths(setup, data, rows), _lengths(setup, _taken(data, kept, rows), len(kept))
    if whole is not None and alone is not None:
        _refuse_other_lengths(setup, _apart(alone, whole[kept]))


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
