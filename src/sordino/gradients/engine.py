"""clipped_sum: per-record gradient norms and the clipped sum, from one forward and one backward pass per chunk."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino.clipping import Clipping, FlatClip, L1Clip, L2LinfClip, PerLayerClip
from sordino.errors import InputError
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.chunk_sizes import default_chunk, held_bytes
from sordino.gradients.layers.convolution import Convolved
from sordino.gradients.measure import NotFinite
from sordino.gradients.passes import Found, Loss, Setup, contributions
from sordino.gradients.rows import Chunk, ClippedSum, Rows, Scattered, checked, chunks, take
from sordino.gradients.shards import Shards, reading
from sordino.gradients.spectral import frozen
from sordino.gradients.state.pass_memory import PassMemory
from sordino.gradients.state.roots import roots_of
from sordino.gradients.sums.centring import centred
from sordino.gradients.sums.contributions import Contribution, Outer, add_dense
from sordino.gradients.sums.memory import blocks, by_record, keep_freed_memory, lengths
from sordino.gradients.sums.narrow import MOST, narrow_sum
from sordino.gradients.sums.products import whole_products
from sordino.gradients.sums.runs import stable
from sordino.gradients.survey import survey, survey_loss
from sordino.native.collector import collect_young, no_collection

Iterates = Sequence[tuple[Mapping[str, Tensor], float]]


@whole_products()
@no_collection()
def clipped_sum(
    model: nn.Module,
    loss: Any,
    rows: Rows,
    clipping: Clipping,
    *,
    reduction: Literal["sum", "mean"] = "sum",
    chunk: int | None = None,
    iterates: Iterates | None = None,
    centre: Mapping[str, Tensor] | None = None,
    keys: Tensor | None = None,
    assurance: Assurance | None = None,
    shards: Shards | None = None,
    narrow: bool = False,
) -> ClippedSum:
    """Σ over records of clip(gradient of the record), for every parameter that requires a gradient.

    A record's gradient is the sum (or mean) over its rows of coefficient · ∇loss. Every record's contribution is at
    most ``clipping.clip_norm`` (in ``clipping.norm``) for all data: records whose gradient is not finite contribute
    zero and are counted. Records without rows contribute zero. The model, its parameters and their .grad are not
    changed. Nothing here adds noise.

    Args:
        model: Any torch module whose records do not interact.
        loss: `loss(outputs, targets)` gives one value per row.
        rows: The rows and the record of each.
        clipping: How a record's gradient is bounded.
        reduction: "sum" or "mean" over a record's rows.
        chunk: The largest number of records in memory at once; the result does not depend on it; None:
            ``default_chunk``.
        iterates: (weights, factor) pairs: a record's gradient is the sum of factor · its gradient at those weights;
            parameters that ``weights`` does not contain are unchanged.
        centre: A public vector by parameter name, subtracted from every record's gradient (DOPE-SGD).
        keys: The number of each record in its data set, in increasing order, such that removing a record does not
            change the others' numbers. With keys some sums may be computed in single precision, by blocks, which is
            faster.
        assurance: Checks the engine against plain autograd, and records for interaction, whenever the program of a pass
            is new, and remembers what was checked.
        shards: For a model whose parameters are divided over processes: gathers them, and receives each chunk's sums.
        narrow: The sum is released without another one being added: then a sum over few records of parameters in single
            precision is rounded to single precision (``narrow.MOST``).

    Returns:
        The sums by parameter name, in double precision except with ``narrow``; norms and losses of single records,
        which are private.

    Raises:
        Refused: a scalar loss, BatchNorm in training mode, compiled modules, buffers written in the forward pass, or
            records that interact; the message says what to do instead.
        InputError: a value is wrong.
    """
    if reduction not in ("sum", "mean"):
        raise InputError(f"reduction must be 'sum' or 'mean', got {reduction!r}")
    if chunk is not None and chunk < 1:
        raise InputError(f"chunk must be at least 1 record, got {chunk}")
    n, records = checked(rows)
    if keys is not None and keys.shape != (records,):
        raise InputError(f"keys must have one number for each of {records} records, got {tuple(keys.shape)}")
    keep_freed_memory()
    parameters = (found := survey(model)).parameters
    once = centre is None and not isinstance(clipping, PerLayerClip)
    state = [*found.state, *(survey_loss(loss) if isinstance(loss, nn.Module) else [])]
    memory = PassMemory() if assurance is None else assurance.memory
    per_row = row_loss(loss)
    setup = Setup(model, per_row, parameters, state, once, memory, shards, roots_of(found.watched, per_row))
    steps: Iterates = [({}, 1.0)] if iterates is None else iterates
    first = next(iter(parameters.values()))
    kind = accumulate(first.dtype)
    sums: dict[str, Tensor] = {}
    norms, losses, dropped = Scattered(records), Scattered(n), 0
    size = chunk or default_chunk(model, found, rows, records)
    if chunk is None and size < records and assurance is not None and shards is None:
        if assurance.held is None:
            assurance.held = held_bytes(setup, rows, (n, records), steps, found.powers)
        size = default_chunk(model, found, rows, records, assurance.held)
    parts = chunks(rows, n, records, size, reduction == "mean")
    narrow = narrow and shards is None and records <= MOST and _all_single(parameters.values())
    for part, made, spare in examined(setup, rows, (n, records), parts, steps, found.powers, assurance):
        losses.put(part.index, _as(made.losses[: part.rows] if spare else made.losses, kind))
        many = part.records + spare
        gradients = made.gradients if centre is None else centred(made.gradients, centre, parameters, many)
        runs = None
        if keys is not None and isinstance(part.ids, slice) and part.records == records:
            runs = stable(keys.numpy())
            runs = np.append(runs, records + spare) if spare else runs
        with torch.no_grad():
            whole = narrow and part.records == records
            here, bad = add_clipped(
                *(gradients, clipping, parameters, sums, part.records, kind, runs, shards, spare, whole),
                known=made.squares if centre is None else {},
            )
        norms.put(part.ids, here)
        made.norms.append(here)
        dropped += bad
        made.gradients.clear()
    for name, p in parameters.items() if shards is None else ():
        sums[name] = sums.pop(name) if name in sums else _zeros(p)
    norm, loss_values = norms.whole(kind, first.device), losses.whole(kind, first.device)
    return ClippedSum(sums, norm, dropped, loss_values, narrowest(parameters.values()))


def examined(
    setup: Setup,
    rows: Rows,
    sizes: tuple[int, int],
    parts: Iterable[Chunk],
    steps: Iterates,
    powers: Sequence[Any],
    assurance: Assurance | None,
) -> Iterator[tuple[Chunk, Found, int]]:
    """Yields every chunk with its contributions and the number of padding records among them (the last ones); then runs
    the assurance's checks after the caller has summed them.

    sizes: the numbers of rows and records. A chunk whose rows can't be told apart because one of them is not finite is
    processed record by record. For a model that queries the number of rows a chunk is padded (``Assurance.room``).
    """
    n, records = sizes
    setup.memory.numbers.turns, waiting = 0, list(parts)
    if assurance is not None:
        assurance.begin(setup)
    while waiting:
        part = waiting.pop(0)
        collect_young()
        room = part.rows if assurance is None else assurance.room(part)
        full = part if room == part.rows else part.filled(room, n)
        data = take(rows.inputs, full.index, n), take(rows.targets, full.index, n)
        setup.memory.begin(part.rows if part.slots is None else 0)
        with frozen(powers):
            try:
                with reading(setup.shards):
                    made = contributions(setup, data, full, steps)
            except NotFinite:
                waiting = [*part.by_record(n, records), *waiting]
                continue
        if assurance is not None and made.sized and not assurance.sized:
            assurance.sized = True  # from its first chunk on, so that other processes pad the same chunks
            if assurance.room(part) != part.rows:
                waiting = [part, *waiting]
                continue
        if assurance is not None:
            assurance.prepare(setup, full, made)
        yield part, made, full.records - part.records
        if assurance is not None:
            with frozen(powers):
                assurance.examine(setup, data, full, made)


@whole_products()
@no_collection()
def per_record_gradients(
    model: nn.Module, loss: Any, rows: Rows, assurance: Assurance | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Every record's own gradient, (records, *shape) per trainable parameter, and the losses of the rows.

    Nothing is clipped: these are private values for callers that clip later (the momentum of single records). Memory is
    records × weights. A parameter on which the loss does not depend has zeros.
    """
    found = survey(model)
    parameters = found.parameters
    n, records = checked(rows)
    state = [*found.state, *(survey_loss(loss) if isinstance(loss, nn.Module) else [])]
    memory = PassMemory() if assurance is None else assurance.memory
    per_row = row_loss(loss)
    setup = Setup(model, per_row, parameters, state, memory=memory, roots=roots_of(found.watched, per_row))
    first = next(iter(parameters.values()))
    losses = torch.zeros(n, dtype=accumulate(first.dtype), device=first.device)
    whole = {k: torch.zeros(records, *p.shape, dtype=accumulate(p.dtype)) for k, p in parameters.items()}
    parts = chunks(rows, n, records, default_chunk(model, found, rows, records), False)
    for part, made, _ in examined(setup, rows, (n, records), parts, [({}, 1.0)], found.powers, assurance):
        losses[part.index] = made.losses[: part.rows].to(losses.dtype)
        with torch.no_grad():
            for name, gradient in made.gradients.items():
                dense = gradient.dense(0, part.records)
                whole[name][part.ids] = dense.reshape(part.records, *parameters[name].shape).to(whole[name].dtype)
    return whole, losses


def _all_single(parameters: Iterable[Tensor]) -> bool:
    return all(p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)


def narrowest(parameters: Iterable[Tensor]) -> torch.dtype | None:
    """float32 if no parameter is wider."""
    return torch.float32 if all(p.dtype.itemsize <= 4 for p in parameters) else None


def accumulate(dtype: torch.dtype) -> torch.dtype:
    """At least single precision."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def layers(parameters: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Parameter names by the module that owns them."""
    groups: dict[str, list[str]] = {}
    for name in parameters:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    return groups


def row_loss(loss: Any) -> Loss:
    """The loss with one value per row: torch's losses are called with reduction='none'. The argument is not changed."""
    if isinstance(loss, nn.Module):
        if getattr(loss, "reduction", "none") != "none":
            loss = copy.copy(loss)
            loss.reduction = "none"
        module: Loss = loss
        return module
    try:
        takes = _takes_reduction(loss)
    except TypeError:  # it can't be cached
        takes = _takes_reduction.__wrapped__(loss)
    return functools.partial(loss, reduction="none") if takes else loss


@functools.lru_cache(64)
def _takes_reduction(loss: Any) -> bool:
    try:
        return "reduction" in inspect.signature(loss).parameters
    except (TypeError, ValueError):
        return False


def add_clipped(
    gradients: dict[str, Contribution],
    clipping: Clipping,
    parameters: Mapping[str, Tensor],
    sums: dict[str, Tensor],
    records: int,
    kind: torch.dtype,
    runs: npt.NDArray[np.int64] | None = None,
    shards: Shards | None = None,
    spare: int = 0,
    narrow: bool = False,
    known: Mapping[str, Tensor] = {},
) -> tuple[Tensor, int]:
    """Add the clipped gradients of the chunk's records to ``sums``; returns (norms, how many were dropped).

    Norms, factors and sums are in double precision: docs/guarantees/noise.md, section 6. With `shards` each parameter's
    sum is passed on and not kept. spare: the number of padding gradients at the end, which have weight zero.
    narrow: these are all records, and sums are in single precision. known: squared norms that were computed before.
    Each gradient is released once it is summed.
    """
    total = records + spare

    def add_weighted(name: str, of: Contribution, weight: Tensor) -> None:
        if narrow:
            sums[name] = narrow_sum(of, weight, parameters[name])
        else:
            add(name, functools.partial(of.add_to, weight=weight))

    def add(name: str, to: Callable[[Tensor], object]) -> None:
        to(_sum(sums, name, parameters[name]))
        if shards is not None:
            shards.put(name, sums.pop(name))

    if isinstance(clipping, L1Clip):
        squares = {}
        norms = _l1(gradients, parameters, total)
        finite = bool(torch.isfinite(norms).all())  # one synchronisation for the chunk
    else:
        squares = {name: known[name] if name in known else g.norm2() for name, g in gradients.items()}
        norms, finite = lengths(list(squares.values())) if squares else (_none(parameters, total), True)
    bad = None if finite else ~torch.isfinite(norms)
    if bad is not None:
        for gradient in gradients.values():
            gradient.drop(bad)
    for gradient in gradients.values():
        if isinstance(gradient, (Outer, Convolved)):
            gradient.runs = runs
    dropped = 0 if bad is None else int(bad[:records].sum())
    shown = _shown(norms[:records] if spare else norms, kind)
    if isinstance(clipping, PerLayerClip):
        groups = layers(parameters)
        sizes = [sum(parameters[n].numel() for n in names) for names in groups.values()]
        for bound, names in zip(clipping.bounds(sizes), groups.values(), strict=True):
            here = [squares[n] for n in names if n in squares]
            if here:
                own, _ = lengths(here)
                factor = FlatClip(bound).factors(own if bad is None else own.masked_fill(bad, torch.inf))
                factor[records:] = 0
                for n in names:
                    if n in gradients:
                        add_weighted(n, gradients.pop(n), factor)
        return shown, dropped
    factor = clipping.factors(norms)
    if spare:
        factor[records:] = 0
    limit = clipping.coordinate_bound if isinstance(clipping, L2LinfClip) else None
    for name in list(gradients):
        gradient, size = gradients.pop(name), parameters[name].numel()
        if isinstance(clipping, L1Clip):  # the sum uses exactly the numbers whose norm was computed: parts may cancel
            add(name, lambda total, g=gradient, d=size: add_dense(g, total, factor, d))  # type: ignore[misc]
        elif limit is None:
            add_weighted(name, gradient, factor)
        else:
            add(name, lambda total, g=gradient, d=size: _truncated(g, total, factor, limit, d))  # type: ignore[misc]
    return shown, dropped


def _as(t: Tensor, kind: torch.dtype) -> Tensor:
    """`to` without the call if there is nothing to do."""
    return t if t.dtype == kind else t.to(kind)


_SUM = torch.float64  # the type of norms, factors and sums, for any parameters


def _none(parameters: Mapping[str, Tensor], records: int) -> Tensor:
    return torch.zeros(records, dtype=_SUM, device=next(iter(parameters.values())).device)


def _zeros(parameter: Tensor) -> Tensor:
    """numpy's memory is not touched before it is written to: most of a large table is never written."""
    return torch.from_numpy(np.zeros(parameter.shape)).to(parameter.device)


def _sum(sums: dict[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    """The sum so far, to which is added."""
    if name not in sums:
        sums[name] = _zeros(parameter)
    return sums[name]


def _shown(norms: Tensor, kind: torch.dtype) -> Tensor:
    found = _as(norms, kind)  # in the precision of the parameters; a finite sum stays finite
    if kind != _SUM and bool((norms.cpu().numpy() > (most := torch.finfo(kind).max)).any()):
        found = torch.where(torch.isfinite(norms) & (norms > most), most, found)
    return found


def _l1(gradients: Mapping[str, Contribution], parameters: Mapping[str, Tensor], records: int) -> Tensor:
    norms = _none(parameters, records)
    for name, gradient in gradients.items():
        for lo, hi in blocks(records, parameters[name].numel()):
            norms[lo:hi] += torch.linalg.vector_norm(by_record(gradient.dense(lo, hi)), ord=1, dim=1, dtype=_SUM)
    return norms


def _truncated(gradient: Contribution, total: Tensor, factor: Tensor, limit: float, coordinates: int) -> None:
    """Σ_i clamp(factor_i · g_i, ± limit), in blocks of records. A product that overflows is zero, not ± limit."""
    for lo, hi in blocks(gradient.records, coordinates, 8):
        dense = by_record(gradient.dense(lo, hi)).double().mul_(factor[lo:hi, None])
        dense.masked_fill_(~torch.isfinite(dense).all(1, keepdim=True), 0)
        total += dense.clamp_(-limit, limit).sum(0).view(total.shape)
