"""Do records interact? Their losses are computed again together with other records, and must not change.

Three tests. (1) The rows are computed in other groups and another order, with neutral random numbers (``neutral.py``):
this detects computations over the batch. (2) In the same batch and order and with the same random numbers, some rows
are changed: this also detects interactions that random numbers decide (which rows are mixed), and, in the rows that are
not changed, state that a pass leaves behind in tensors. (3) The original batch is computed after one with a large row:
this detects state that a pass leaves behind in Python objects. A changed row is large, missing (NaN), at the ends of
its range, all zero, or a copy of another row. Several rows are changed at once; if the model fails on them together,
they are changed one at a time.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from sordino.errors import Refused
from sordino.gradients.checks.losses import apart, hidden, scale_of
from sordino.gradients.checks.neutral import Draw, Neutral, recorded, restart
from sordino.gradients.passes import Setup
from sordino.gradients.rows import call, check_losses, take, tensors, tree_map
from sordino.gradients.shards import reading
from sordino.gradients.state.kept import put_back
from sordino.gradients.state.left import refuse_kept_values
from sordino.gradients.state.roots import roots_of
from sordino.gradients.survey import survey

Data = tuple[Any, Any]
Changes = tuple[str, ...]
EVERY: tuple[Changes, ...] = (("large", "zero"), ("ends", "copy"), ("missing",))
"""Rows that are changed together, each in one of these ways. NaN is tested alone: it would hide the others."""
FEW: tuple[Changes, ...] = (("large",),)
ALIKE = 0.01
"""The largest relative difference between a model and its copy in double precision."""
ALONE = 16
"""The number of rows up to which each is computed alone, where all rows of a batch are tested."""
_ROOM = 6  # if there are fewer rows, one is changed at a time


def generator_of(purpose: int) -> torch.Generator:
    """Numbers from the run's own randomness (the seed of its dropout masks), without drawing from it."""
    return torch.Generator().manual_seed((torch.initial_seed() + 0x9E3779B9 * purpose) % (1 << 63))


def check_groups(
    setup: Setup,
    data: Data,
    rows: int,
    variants: tuple[Changes, ...],
    number: int = 1,
    known: Tensor | None = None,
    *,
    after: bool = True,
) -> None:
    """Computes the losses in other groups, another order and together with changed rows, and once more as at first.

    Args:
        setup: The model and its loss.
        data: The rows.
        rows: Their number.
        variants: How rows are changed.
        number: Each test has its own number, which decides the order and the changed rows.
        known: The losses of the rows in the pass that is tested; None if it drew random numbers or had other weights.
            Losses in groups must be equal to these.
        after: Compute the rows also after a pass with a large row.

    Raises:
        Refused: Losses differ.
    """
    fitting = _fitting(variants, rows)
    doubtful = known is not None and hidden(known)

    def furthest(one: Setup, given: Data, base: Tensor | None) -> float:
        return _grouped(one, given, rows, fitting, 64 * number, base, after)

    _check(setup, data, furthest, known, doubtful)


def partitions(rows: int, purpose: int) -> list[list[Tensor]]:
    """Ways to divide the rows into groups, drawn from the run's own randomness: each row alone if they are few;
    otherwise by the rows, columns and diagonals of a square whose side is odd, in which their places are random.

    Two records share at most one of their three groups, so an effect of one record on another is seen, whatever it is.
    A parity is seen unless every line holds an even number of the records that count: never for two or four of them
    (four places that pair up by rows and by columns do not by diagonals), once in 3,000 batches for more, at most.
    """
    with _disable_current_modes():
        source = generator_of(purpose)
        if rows <= ALONE:
            return [list(torch.randperm(rows, generator=source)[:, None])]
        side = math.isqrt(rows - 1) + 1 | 1
        place = torch.randperm(side * side, generator=source)[:rows]
        high, wide = place // side, place % side
        lines = (high, wide, (high + wide) % side)
        found = [[(line == k).nonzero().flatten() for k in range(side)] for line in lines]
    return [[group for group in groups if len(group)] for groups in found]


def check_some(setup: Setup, data: Data, rows: int, losses: Tensor | None, number: int, every: bool) -> None:
    """Computes the losses of rows in smaller groups and another order; raises Refused if they are not the batch's.

    Args:
        setup: The model and its loss.
        data: The rows of the batch.
        rows: The number of rows.
        losses: The losses of the pass that is tested; None if it drew random numbers or had other weights: then they
            are computed again, with neutral random numbers.
        number: The number of the test, which decides the groups.
        every: Test all rows, in the groups of `partitions`; otherwise the first, the last and a quarter of all rows.
    """
    with _disable_current_modes():
        order = torch.randperm(rows, generator=generator_of(64 * number + 32))
    some = [torch.unique(torch.cat([order[: rows // 4], torch.tensor([0, rows - 1])])).flip(0)]
    parts = [group for way in partitions(rows, 64 * number + 32) for group in way] if every else some

    def furthest(one: Setup, given: Data, base: Tensor | None) -> float:
        base = losses_of(one, given) if base is None else base
        found, scale = (
            [(_alone(one, (take(given[0], g, rows), take(given[1], g, rows))), g) for g in parts],
            scale_of(base),
        )
        return max(apart(losses, base[group], scale) for losses, group in found)

    _check(setup, data, furthest, losses, losses is not None and hidden(losses))


def refuse_other_losses(found: Tensor, known: Tensor) -> None:
    """Raises Refused if the losses of the same batch are not those that are known."""
    if apart(found, known, scale_of(known)) > 0.01:
        raise Refused(
            "the losses of records are not the same when they are computed again, though no random numbers are drawn: "
            "records interact, or the model keeps something from one pass to the next; remove it"
        )


def _alone(setup: Setup, data: Data) -> Tensor:
    """The losses of these rows; raises Refused if the model fails on them."""
    try:
        return losses_of(setup, data)
    except (ValueError, RuntimeError, IndexError, ArithmeticError) as error:
        raise fails_in_groups(error) from error


def fails_in_groups(error: Exception) -> Refused:
    """The model works on the batch and fails on fewer of its rows."""
    return Refused(
        "the model fails on the same records in other groups, so its computation depends on their number, or on "
        "what it keeps from one batch to the next; make it work row by row",
        private=f"{type(error).__name__}: {error}",
    )


def check_places(
    setup: Setup,
    data: Data,
    rows: int,
    variants: tuple[Changes, ...],
    number: int = 1,
    known: Tensor | None = None,
    *,
    still: bool = False,
) -> None:
    """Changes some rows in place and computes the losses with the same random numbers; raises Refused if the losses of
    the other rows change. number, known: as of `check_groups`. still: no random numbers are drawn."""
    fitting, first = _fitting(variants, rows), 64 * number + 16
    _check(setup, data, lambda one, given, base: _in_place(one, given, rows, fitting, first, base, still), known)


def _fitting(variants: tuple[Changes, ...], rows: int) -> list[Changes]:
    return list(variants) if rows >= _ROOM else [(way,) for ways in variants for way in ways]


def _check(
    setup: Setup,
    data: Data,
    furthest: Callable[[Setup, Data, Tensor | None], float],
    known: Tensor | None = None,
    doubtful: bool = False,
) -> None:
    """Raises Refused if losses move. known: the losses to compare with, if no pass has to be made for them. doubtful:
    single precision may not show it, so that a copy in double precision is asked as well, if there can be one."""
    if known is not None and not doubtful and furthest(setup, data, known) <= _tolerance(setup):
        return
    gap = furthest(setup, data, None)
    moved = gap > _tolerance(setup)
    if moved or doubtful:
        finer = in_double_of(setup, data, lambda twin: furthest(twin, wide(data), None))
        if moved if finer is None else finer > 1e-7:
            raise _moved(gap if finer is None else finer)
    if known is not None:
        refuse_other_losses(losses_of(setup, data), known)


def _moved(gap: float) -> Refused:
    if gap == float("inf"):
        return Refused(
            "a record that is not finite (NaN) makes losses of other records non-finite: their values are combined, as "
            "in attention over several records that are packed into one sequence, where a weight of zero times NaN is "
            "NaN; give each record a row of its own, or set masked values to zero before they are multiplied"
        )
    return Refused(
        "a record's loss is not the same when the others of its batch change, so records interact: look for a layer or "
        "a loss that computes over the batch dimension, or that keeps something from one batch to the next, and make "
        "it work row by row",
        private=f"the relative difference is {gap:.1e}",
    )


def _tolerance(setup: Setup) -> float:
    return {torch.float64: 1e-8, torch.float32: 1e-4}.get(next(iter(setup.parameters.values())).dtype, 0.05)


def losses_of(setup: Setup, data: Data) -> Tensor:
    """The losses of a pass by itself. Raises Refused if it leaves something outside of the model, when it is known that
    the model reads values: rows that are changed for a test are private, too."""
    with put_back(setup.roots, setup.memory.numbers) as state:
        found = _next_losses(setup, data)
        if setup.memory.numbers.read:
            refuse_kept_values(state, setup.memory.libraries, custom=False)
    return found


def _next_losses(setup: Setup, data: Data) -> Tensor:
    """The losses of a pass that sees what earlier ones left in Python objects."""
    leaves = () if setup.shards is None else setup.shards.groups[0]
    restart()
    # gradients are enabled as in training: a model may query them, or attach hooks to its activations
    with torch.enable_grad(), reading(setup.shards, leaves):
        losses = setup.loss(call(setup.model, data[0]), data[1])
    check_losses(losses, len(next(tensors((data[1], data[0])))))
    return losses.detach()


def decisive_draws(setup: Setup, data: Data, rows: int, began: Tensor | None) -> list[Draw]:
    """The random numbers of a pass that are the same for all rows, and may have decided which way it went. began: the
    state of torch's generator before it."""
    half = torch.arange(max(1, rows // 2))
    few = take(data[0], half, rows), take(data[1], half, rows)
    return recorded(lambda whole: losses_of(setup, data if whole else few), began)


def _fixed(setup: Setup, data: Data, still: bool) -> Tensor:
    """The losses with random numbers that are the same in every call. still: torch draws none."""
    with nullcontext() if still else Neutral(None):
        return losses_of(setup, data)


def _grouped(
    setup: Setup, data: Data, rows: int, variants: list[Changes], first: int, known: Tensor | None, after: bool
) -> float:
    """The largest relative change of a loss. Variants are computed in small groups until the model has accepted one
    completely, the others in two groups."""
    base = _alone(setup, data) if known is None else known
    size, worst, small = scale_of(base), 0.0, True
    number, todo = 0, list(variants)
    while todo:
        ways = todo.pop(0)
        order, given, extreme = _some_changed(data, rows, ways, first + number)
        number += 1
        cuts = sorted({1, min(4, rows - 1), rows // 2}) if small else [max(1, rows // 3)]
        complete = True
        for part in torch.tensor_split(order, cuts):
            if not len(part):
                continue
            others = ~torch.isin(part, extreme)
            try:
                found = losses_of(setup, tuple(take(t, part, rows) for t in given))
            except (ValueError, RuntimeError, IndexError, ArithmeticError) as error:
                if bool(others.all()):
                    raise fails_in_groups(error) from error
                complete = False  # the model rejects the changed rows: a distribution or a solver checks its arguments
                continue
            worst = max(worst, apart(found[others], base[part][others], size))
        if not complete:
            todo = [*([()] if small and () not in todo else []), *_one_by_one(ways), *todo]
        small = small and not complete
    if not after or (known is not None and not setup.roots):
        # the next test, in place, detects what these passes left behind in tensors: only its changed rows differ, and
        # the model can't know which they will be
        return worst
    return max(worst, apart(_after_another(setup, data), base, size))


def _after_another(setup: Setup, data: Data) -> Tensor:
    """The losses of a pass that follows one with a large row, and sees what that one left in Python objects."""
    numbers = setup.memory.numbers
    with put_back(setup.roots, numbers) as state:
        if state is None:
            return _next_losses(setup, data)
        with contextlib.suppress(ValueError, RuntimeError, IndexError, ArithmeticError):
            _next_losses(setup, changed(data, 0, "large"))
        with numbers.drawing(state.generators):
            return _next_losses(setup, data)


def _one_by_one(ways: Changes) -> list[Changes]:
    return [(way,) for way in ways] if len(ways) > 1 else []


def _in_place(
    setup: Setup, data: Data, rows: int, variants: list[Changes], first: int, known: Tensor | None, still: bool
) -> float:
    base = _fixed(setup, data, still) if known is None else known
    size, worst = scale_of(base), 0.0
    number, todo, again = 0, list(variants), known is not None
    while todo:
        ways = todo.pop(0)
        _, given, extreme = _some_changed(data, rows, ways, first + number)
        number += 1
        try:
            found = _fixed(setup, given, still)
        except (ValueError, RuntimeError, IndexError, ArithmeticError):
            todo = [*_one_by_one(ways), *todo]
            continue
        others = ~torch.isin(torch.arange(rows), extreme)
        worst, again = max(worst, apart(found[others], base[others], size)), False
    return worst if not again else max(worst, apart(_fixed(setup, data, still), base, size))


def _some_changed(data: Data, rows: int, ways: Changes, number: int) -> tuple[Tensor, Data, Tensor]:
    """(an order of the rows, the data with one row changed in each of these ways, those rows)."""
    with _disable_current_modes():
        source = generator_of(4 + number)
        order = torch.randperm(rows, generator=source)
        extreme = order[torch.randperm(rows, generator=source)[: len(ways)]]
    for row, way in zip(extreme.tolist(), ways, strict=True):
        data = changed(data, row, way)
    return order, data, extreme


def changed(data: Data, row: int, variant: str) -> Data:
    """Inputs and targets with one row changed: unlike all others, or equal to its neighbour."""

    def change(t: Tensor) -> Tensor:
        if not t.ndim or not t.numel():
            return t
        t = t.clone()
        if variant == "copy":
            t[row] = t[row - 1]  # −1 is the last
        elif t.is_floating_point() or t.is_complex():
            sign = 1 if variant == "large" else -1
            far = 1e3 * (1 + t[row].abs()) * sign
            t[row] = torch.nan if variant == "missing" else 0 if variant == "zero" else far
        elif t.dtype == torch.bool:
            t[row] = variant not in ("ends", "zero")
        else:
            t[row] = t.min() if variant in ("ends", "zero") else t.max()
        return t

    return tree_map(change, data[0]), tree_map(change, data[1])


def wide(data: Data) -> Data:
    inputs, targets = (tree_map(lambda t: t.double() if t.dtype == torch.float32 else t, tree) for tree in data)
    return inputs, targets


def in_double_of(setup: Setup, data: Data, measure: Callable[[Setup], float | None]) -> float | None:
    """What is measured on a copy in double precision; None for parameters that are not in single precision, where the
    model can't be copied or does not run in double precision (constants of its own, or of its loss), and where the copy
    has other losses: a model that looks at bits or types may do something else in double precision."""
    twin = in_double(setup) if next(iter(setup.parameters.values())).dtype == torch.float32 else None
    try:
        return None if twin is None or not _alike(setup, twin, data) else measure(twin)
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):  # a hook may belong to the original
        return None


def _alike(setup: Setup, twin: Setup, data: Data) -> bool:
    """Has the copy in double precision the same losses, up to rounding?"""
    with Neutral():
        single, double = losses_of(setup, data), losses_of(twin, wide(data))
    return apart(single, double, scale_of(double)) <= ALIKE


def in_double(setup: Setup) -> Setup | None:
    """The same with a copy of the model in double precision; None if it can't be copied."""
    if setup.shards is not None:
        return None
    try:
        twin = copy.deepcopy(setup.model).double()
        loss = copy.deepcopy(setup.loss).double() if isinstance(setup.loss, nn.Module) else setup.loss
    except (RuntimeError, TypeError):
        return None
    found = survey(twin)
    roots = roots_of(found.watched, loss)
    return replace(setup, model=twin, loss=loss, parameters=found.parameters, state=found.state, roots=roots)
