"""A plain loop over records (``brute_force``), and the comparison of the engine with it at the start of a training
run."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sordino.clipping import Clipping, L1Clip, L2LinfClip, PerLayerClip
from sordino.errors import Refused
from sordino.gradients.checks.neutral import neutral
from sordino.gradients.engine import Iterates, accumulate, clipped_sum, layers, row_loss
from sordino.gradients.rows import ClippedSum, Rows, call, checked, take, tree_map
from sordino.gradients.shards import Shards
from sordino.gradients.spectral import frozen, power_iterations
from sordino.gradients.state.generators import Numbers
from sordino.gradients.state.kept import put_back
from sordino.gradients.state.roots import roots_of
from sordino.gradients.survey import checked_parameters, survey
from sordino.gradients.tape.checkpoints import without_checkpoints


def brute_force(
    model: nn.Module,
    loss: Any,
    rows: Rows,
    clipping: Clipping,
    *,
    reduction: Literal["sum", "mean"] = "sum",
    chunk: int | None = None,
    iterates: Iterates | None = None,
) -> ClippedSum:
    """What ``clipped_sum`` must return, computed one row at a time with plain autograd.

    Args:
        model: As for ``clipped_sum``, like all arguments below.
        loss: A loss of outputs and targets.
        rows: The rows and the record of each.
        clipping: How a record's gradient is bounded.
        reduction: "sum" or "mean" over a record's rows.
        chunk: Accepted and ignored.
        iterates: (weights, factor) pairs at which gradients are computed.

    Returns:
        The clipped sum, in the model's precision.
    """
    parameters = checked_parameters(model)
    n, records = checked(rows)
    owner = torch.arange(n) if rows.record is None else rows.record
    steps: Iterates = [({}, 1.0)] if iterates is None else iterates
    per_row = row_loss(loss)
    twins = [(_at(model, values), factor) for values, factor in steps]
    roots = [roots_of(survey(twin).watched, per_row) for twin, _ in twins]
    names, groups = list(parameters), layers(parameters)
    numbers = Numbers()
    numbers.turn()  # those of the engine's first chunk
    kind = accumulate(next(iter(parameters.values())).dtype)
    sums = {k: torch.zeros_like(p, dtype=accumulate(p.dtype)) for k, p in parameters.items()}
    norms, losses = torch.zeros(records, dtype=kind), torch.zeros(n, dtype=kind)
    dropped = 0
    for i in range(records):
        gradient = {k: torch.zeros_like(s) for k, s in sums.items()}
        mine = torch.nonzero(owner == i).flatten().tolist()
        for r in mine:
            scale = 1.0 if rows.coefficient is None else float(rows.coefficient[r])
            scale = scale / len(mine) if reduction == "mean" else scale
            for (twin, factor), own in zip(twins, roots, strict=True):
                with frozen(power_iterations(twin)):
                    value, found = _row_gradient(twin, per_row, rows, r, n, names, own, numbers)
                losses[r] = value
                for k, g in zip(names, found, strict=True):
                    if g is not None:
                        gradient[k] += factor * scale * g.to(gradient[k].dtype)
        norms[i], kept = _clip(gradient, clipping, groups)
        if kept is None:
            dropped += 1
            continue
        for k in names:
            sums[k] += kept[k]
    return ClippedSum(sums, norms, dropped, losses)


def _at(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """The model itself, or a copy with some of its weights replaced."""
    if not values:
        return model
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if name in values:
                parameter.copy_(values[name])
    return twin


def _row_gradient(
    model: nn.Module,
    loss: Any,
    rows: Rows,
    r: int,
    n: int,
    names: Sequence[str],
    roots: Sequence[Any],
    numbers: Numbers | None = None,
) -> tuple[Tensor, Sequence[Tensor | None]]:
    inputs, targets = (take(t, torch.tensor([r]), n) for t in (rows.inputs, rows.targets))
    parameters = dict(model.named_parameters())
    with put_back(roots, numbers), torch.enable_grad(), without_checkpoints():
        value = loss(call(model, inputs), targets)
        if not value.requires_grad:
            return value.detach(), [None] * len(names)
        found = torch.autograd.grad(value.sum(), [parameters[k] for k in names], allow_unused=True)
    return value.detach(), found


def _clip(
    gradient: dict[str, Tensor], clipping: Clipping, groups: dict[str, list[str]]
) -> tuple[Tensor, dict[str, Tensor] | None]:
    flat = torch.cat([g.flatten() for g in gradient.values()])
    norm = flat.abs().sum() if isinstance(clipping, L1Clip) else flat.norm()
    if not bool(torch.isfinite(norm)):
        return norm, None
    if isinstance(clipping, PerLayerClip):
        bounds = clipping.bounds([sum(gradient[k].numel() for k in names) for names in groups.values()])
        out = {}
        for bound, names in zip(bounds, groups.values(), strict=True):
            own = torch.cat([gradient[k].flatten() for k in names]).norm()
            scale = min(1.0, bound / max(float(own), 1e-300))
            out.update({k: gradient[k] * scale for k in names})
        return norm, out
    factor = clipping.factors(norm[None])[0]
    out = {k: g * factor for k, g in gradient.items()}
    if isinstance(clipping, L2LinfClip):
        limit = clipping.coordinate_bound
        out = {k: g.clamp(-limit, limit) for k, g in out.items()}
    return norm, out


def verify(
    model: nn.Module,
    loss: Any,
    rows: Rows,
    clipping: Clipping,
    *,
    records: int = 3,
    tolerance: float = 1e-4,
    reduction: Literal["sum", "mean"] = "sum",
    iterates: Iterates | None = None,
) -> None:
    """Compares the engine with ``brute_force`` on the first few records.

    It checks three things: each row's loss is the same alone and within the batch (otherwise records interact); norms
    and clipped sums agree to ``tolerance``, relative to the largest entry; every trainable parameter received a
    gradient from some row of those given. Random numbers are replaced by fixed values during the comparison
    (``neutral.py``), which runs in float64 so that the kink of a ReLU does not cause a difference.

    Args:
        model: The model; it is not changed.
        loss: A loss of outputs and targets.
        rows: The rows and the record of each.
        clipping: How a record's gradient is bounded.
        records: How many records to compare.
        tolerance: The largest relative difference.
        reduction: "sum" or "mean" over a record's rows.
        iterates: (weights, factor) pairs at which gradients are computed.

    Raises:
        Refused: the results differ, or a trainable parameter receives no gradient.
    """
    some = _first(rows, records)
    n, _ = checked(some)
    survey(model)  # refuse an unsupported model before it is copied
    if n == 0:
        return
    try:
        twin, wide = copy.deepcopy(model).double(), _rows_double(some)
        steps = None if iterates is None else [({k: v.double() for k, v in w.items()}, f) for w, f in iterates]
        engine, oracle = _both(twin, loss, wide, clipping, reduction, steps, tolerance)
        some = wide
    except Refused:
        raise
    except (RuntimeError, TypeError):  # it can't be copied or does not run in float64: compare in its own precision
        twin = model
        engine, oracle = _both(model, loss, some, clipping, reduction, iterates, tolerance)
    silent = [k for k, s in engine.sums.items() if s.numel() and not bool(s.any()) and not bool(oracle.sums[k].any())]
    unused = _never_used(twin, loss, some, silent) if silent else []
    if unused:  # experts, and clusters of words, that the first records miss
        unused = _never_used(twin, loss, rows if twin is model else _rows_double(rows), unused)
    if unused:
        raise Refused(
            f"these trainable parameters received no gradient: {', '.join(unused)}; if the model does not use "
            "them, freeze them with requires_grad_(False)"
        )


def _both(
    model: nn.Module,
    loss: Any,
    rows: Rows,
    clipping: Clipping,
    reduction: Literal["sum", "mean"],
    iterates: Iterates | None,
    tolerance: float,
) -> tuple[ClippedSum, ClippedSum]:
    """The engine's and the loop's sums; raises Refused if they differ."""
    with neutral(), torch.random.fork_rng(devices=[]):
        engine = clipped_sum(model, loss, rows, clipping, reduction=reduction, iterates=iterates)
        oracle = brute_force(model, loss, rows, clipping, reduction=reduction, iterates=iterates)
        _compare(engine, oracle, tolerance)
    return engine, oracle


def _first(rows: Rows, records: int) -> Rows:
    """The rows of the first few records that have rows."""
    n, _ = checked(rows)
    owner = torch.arange(n) if rows.record is None else rows.record
    kept = torch.unique(owner)[:records]
    index = torch.nonzero(torch.isin(owner, kept)).flatten()
    inputs, targets = take(rows.inputs, index, n), take(rows.targets, index, n)
    coefficient = None if rows.coefficient is None else rows.coefficient[index]
    if rows.record is None:
        return Rows(inputs, targets, coefficient=coefficient)
    return Rows(inputs, targets, torch.searchsorted(kept, owner[index]), len(kept), coefficient)


def _rows_double(rows: Rows) -> Rows:
    def wide(t: Tensor) -> Tensor:
        return t.double() if t.dtype == torch.float32 else t

    return Rows(tree_map(wide, rows.inputs), tree_map(wide, rows.targets), rows.record, rows.records, rows.coefficient)


def _compare(engine: ClippedSum, oracle: ClippedSum, tolerance: float) -> None:
    def gap(a: Tensor, b: Tensor) -> float:
        a, b = (t.double().cpu().nan_to_num(0.0, 0.0, 0.0) for t in (a, b))
        return float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) if a.numel() else 0.0

    alone = gap(engine.losses, oracle.losses)
    if alone > tolerance:
        raise Refused(
            "a record's loss is not the same alone and within a batch, so records "
            "interact: look for a layer or a loss that computes over the batch dimension, and make it work row by row",
            private=f"the relative difference is {alone:.1e}",
        )
    if engine.dropped != oracle.dropped:
        raise Refused(
            "the engine drops other non-finite records than a plain loop does",
            private=f"{engine.dropped} records, the plain loop {oracle.dropped}",
        )
    wanted = {name: want for name, want in oracle.sums.items() if want.numel()}
    largest = max((float(want.abs().max()) for want in wanted.values()), default=0.0)
    for name, want in wanted.items():
        off = float((engine.sums[name].double() - want.double()).abs().max()) / max(largest, 1e-12)
        if off > tolerance:
            raise Refused(
                f"{name}: the engine's clipped sum differs from a plain loop over the records by more than "
                f"{tolerance:.0e}; the layer is not supported in this use: freeze it or write it in plain PyTorch",
                private=f"it differs by {off:.1e}",
            )
    off = gap(engine.norms, oracle.norms)
    if off > tolerance:
        raise Refused(
            f"the engine's record norms differ from a plain loop's by more than the tolerance {tolerance:.0e}",
            private=f"they differ by {off:.1e}",
        )


def _never_used(model: nn.Module, loss: Any, rows: Rows, names: Sequence[str]) -> list[str]:
    """Those of the named parameters on which no row's loss depends, according to autograd."""
    n, _ = checked(rows)
    unused, per_row = set(names), row_loss(loss)
    roots = roots_of(survey(model).watched, per_row)
    for r in range(n):
        if not unused:
            break
        _, found = _row_gradient(model, per_row, rows, r, n, names, roots)
        unused -= {k for k, g in zip(names, found, strict=True) if g is not None}
    return [k for k in names if k in unused]


class _Unsummed:
    """Shards that discard the sums: for a comparison that does not use them."""

    def __init__(self, shards: Shards) -> None:
        self.groups, self.whole, self.reading = shards.groups, shards.whole, shards.reading

    def put(self, name: str, total: Tensor) -> None:
        """Discards the sum."""


def verify_shards(
    model: nn.Module, loss: Any, rows: Rows, clipping: Clipping, shards: Shards, *, records: int = 3
) -> None:
    """`verify` for a model whose parameters are divided over processes: compares losses and norms of the first few
    records.

    The plain loop gathers one group of parameters at a time. Sums are compared with plain autograd for every new
    program (``assurance.py``). The comparison runs in the model's own precision, because no copy of the model is made.

    Raises:
        Refused: the results differ, or a trainable parameter receives no gradient.
    """
    some = _first(rows, records)
    n, count = checked(some)
    if n == 0:
        return
    owner = torch.arange(n) if some.record is None else some.record
    per_row, l1 = row_loss(loss), isinstance(clipping, L1Clip)
    with neutral(), torch.random.fork_rng(devices=[]):
        engine = clipped_sum(model, loss, some, clipping, shards=_Unsummed(shards))
        norms, losses, used = torch.zeros(count, dtype=torch.float64), torch.zeros(n, dtype=torch.float64), set()
        for i, group in itertools.product(range(count), shards.groups):
            total = torch.zeros(())
            with torch.enable_grad(), without_checkpoints(), shards.reading(group) as leaves:
                for r in torch.nonzero(owner == i).flatten().tolist():
                    scale = 1.0 if some.coefficient is None else float(some.coefficient[r])
                    inputs, targets = (take(t, torch.tensor([r]), n) for t in (some.inputs, some.targets))
                    value = per_row(call(model, inputs), targets)
                    losses[r] = value.detach().double().sum()
                    total = total + scale * value.sum()
                if not total.requires_grad:
                    continue
                found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            used |= {name for name, g in zip(leaves, found, strict=True) if g is not None}
            norms[i] += sum(
                float(g.double().abs().sum() if l1 else g.double().square().sum()) for g in found if g is not None
            )
    oracle = ClippedSum({}, norms if l1 else norms.sqrt(), engine.dropped, losses)
    _compare(engine, oracle, 1e-3)
    if unused := [name for group in shards.groups for name in group if name not in used]:
        raise Refused(
            f"these trainable parameters received no gradient: {', '.join(unused)}; if the model does not use "
            "them, freeze them with requires_grad_(False)"
        )
