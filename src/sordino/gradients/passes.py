"""One forward and one backward pass over the rows of a chunk, and what every parameter's records got out of it."""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import Refused
from sordino.gradients.checkpoints import held
from sordino.gradients.contributions import Contribution, Dense, Pulled, Total, merged
from sordino.gradients.derived import Shared, reached
from sordino.gradients.layout import Axis, Frame, Layout, Positions, Whole, by_shape, fits, probed
from sordino.gradients.memory import Pool
from sordino.gradients.refusals import Aside, early, one_pass
from sordino.gradients.rows import Chunk, call, take, tensors
from sordino.gradients.rules import RULEBOOK
from sordino.gradients.tape import Slot, Tape, Use, check_held

Loss = Callable[[Any, Any], Tensor]
Values = Mapping[str, Tensor]
PROBE = 2  # rows of a probing pass


@dataclass(frozen=True)
class Setup:
    """What stays the same over all passes of a call."""

    model: nn.Module
    loss: Loss
    parameters: Mapping[str, nn.Parameter]
    buffers: Sequence[tuple[str, Tensor]]
    pool: Pool = field(default_factory=Pool)
    once: bool = False  # as in Frame
    loss_is_torchs: bool = False  # a function of its arguments alone, so there is nothing in it for the tape to see

    @property
    def device(self) -> str:
        return next(iter(self.parameters.values())).device.type

    @property
    def stack(self) -> int:
        """Rows that the model makes of each row it is given: a record's companions in batch normalisation."""
        return int(vars(self.model).get("rows_per_record", 1))


class Pass:
    """The forward pass over some rows, ready for one or several backward passes."""

    def __init__(self, setup: Setup, data: tuple[Any, Any], rows: int, values: Values, shared: frozenset[int]) -> None:
        inputs, targets = data
        self.tape = Tape(setup.model, setup.parameters, values, rows, shared, RULEBOOK)
        self.rows, self.setup = rows, setup
        versions = [(name, b, b._version) for name, b in setup.buffers]
        self.tape.arrived = early
        try:
            for t in itertools.chain(tensors(inputs), tensors(targets)):
                self.tape.mark(t)
            with Aside(setup.parameters), held(), nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
                with self.tape:
                    outputs = call(setup.model, inputs)
                seen = not setup.loss_is_torchs or any(self.tape.slot(t) is not None for t in tensors(outputs))
                with self.tape if seen else nullcontext():
                    self.losses = setup.loss(outputs, targets)
            _check_losses(self.losses, rows)
            _check_buffers(versions)
        except BaseException:
            self.tape.close()
            raise

    def close(self) -> None:
        self.tape.close()
        self.losses = self.losses.detach()

    def backward(self, weight: Tensor, arrived: Callable[[Use, Tensor], None], keep: bool = False) -> None:
        """Send Σ weight·loss back; ``arrived`` gets the gradient of every use. Gradient mode is off meanwhile."""
        tape = self.tape
        tape.arrived = one_pass(arrived)
        if not self.losses.requires_grad:
            raise Refused(
                "the loss does not depend on any trainable parameter through operations that sordino can see; "
                "check that the model is in use, not wrapped in no_grad, scripted or compiled"
            )
        watched = [*tape.leaves.items(), *self.setup.parameters.items()]
        with Aside(self.setup.parameters):
            found: Sequence[Tensor | None] = torch.autograd.grad(
                self.losses,
                [tape.token, *(t for _, t in watched)],
                weight if weight.dtype == self.losses.dtype else weight.to(self.losses.dtype),
                retain_graph=keep,
                allow_unused=True,
            )
        for (name, _), gradient in zip(watched, found[1:], strict=True):
            if gradient is not None:
                raise Refused(
                    f"{name}: it is used inside an operation that sordino can't look into (a custom autograd.Function, "
                    "a scripted or a compiled module); write that operation in plain PyTorch, or freeze the parameter"
                )


def _check_buffers(versions: Sequence[tuple[str, Tensor, int]]) -> None:
    for name, buffer, version in versions:
        if buffer._version != version:
            raise Refused(
                f"{name}: the forward pass writes to this buffer, so what it stores of the data leaves unprotected; "
                "put the module in eval mode or remove the buffer's update"
            )


def _check_losses(losses: Any, rows: int) -> None:
    got: Any = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if got != (rows,):
        raise Refused(
            f"the loss returned {got} for {rows} rows; it must return one value per row, shape ({rows},): "
            "use reduction='none' and reduce each row's own values (for example .flatten(1).mean(1))"
        )


def contributions(
    setup: Setup, data: tuple[Any, Any], chunk: Chunk, iterates: Sequence[tuple[Values, float]]
) -> tuple[dict[str, Contribution], Tensor]:
    """Every parameter's per-record gradient over the chunk, summed over the iterates; and the losses.

    Products of one iterate are added to those of the one before as they arrive: two are held at most, of one layer.
    """
    store: dict[Slot, list[Contribution]] = defaultdict(list)
    totals: dict[str, Dense] = {}
    leaves: dict[Slot, dict[str, Tensor]] = {}
    losses = torch.empty(0)
    ragged = chunk.slots is not None and bool((chunk.slots < 0).any())
    precise = _full_precision(setup.device)

    @functools.cache
    def framed(layout: Layout) -> Frame:
        return Frame(layout, chunk.rows, chunk.records, chunk.slots, ragged, setup.pool, setup.once)

    for values, factor in iterates:
        run, layouts = _forward(setup, data, chunk, values)
        kept = dict(run.tape.leaves)

        def arrived(use: Use, gradient: Tensor, layouts: Any = layouts, kept: Any = kept) -> None:
            check_held(use)
            with precise:
                for slot, part in use.emit(gradient, framed(layouts[use.index])):
                    if slot.name is not None and isinstance(part, Dense) and part.owned:
                        if slot.name in totals:
                            totals[slot.name].add(part)
                            setup.pool.free(part.gradient)
                            continue
                        totals[slot.name] = part
                    store[slot].append(part)
                    leaves[slot] = kept
            use.release()

        try:
            weight = torch.ones_like(run.losses) if chunk.weight is None else chunk.weight.to(run.losses.dtype)
            run.backward(weight if factor == 1.0 else weight * factor, arrived)
        finally:
            run.close()
        losses = run.losses
    return _by_parameter(store, leaves), losses


def _full_precision(device: str) -> AbstractContextManager[Any]:
    """No autocast in the rules, however often it is entered; where there is none, nothing is."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _forward(setup: Setup, data: tuple[Any, Any], chunk: Chunk, values: Values) -> tuple[Pass, dict[int, Layout]]:
    """The pass over the chunk and the layout of each of its uses, measured where the shape leaves a doubt."""
    shared: frozenset[int] = frozenset()
    while True:
        run = Pass(setup, data, chunk.rows, values, shared)
        try:
            found, more = _layouts(setup, data, chunk, values, run, shared)
        except BaseException:
            run.close()
            raise
        if found is not None:
            return run, found
        run.close()
        shared = shared | more


def _layouts(
    setup: Setup, data: tuple[Any, Any], chunk: Chunk, values: Values, run: Pass, shared: frozenset[int]
) -> tuple[dict[int, Layout] | None, frozenset[int]]:
    """The layout of each use; or None and the stretched slots that turned out to be common to all rows."""
    layouts: dict[int, Layout] = {}
    stack = setup.stack
    for use in run.tape.uses:
        layout = use.layout or by_shape(use.shape, use.lead, chunk.rows, stack)
        if layout is not None:
            layouts[use.index] = layout
    doubtful = run.tape.crowded and run.tape.candidates > len(shared)
    if len(layouts) == len(run.tape.uses) and not doubtful:
        return layouts, frozenset()
    measured = _probe(setup, data, chunk, values, run, shared)
    if measured is not None:
        return measured, frozenset()
    layouts, mixed = _measure(run)
    if not mixed:
        return layouts, frozenset()
    more = frozenset(u.candidate for u in mixed if u.candidate is not None) - shared
    if not more:
        raise Refused(
            f"{mixed[0].label}: the gradient of a record's loss reaches positions of other records here, so records "
            "interact; find the operation before it that mixes the batch and replace it"
        )
    return None, more


def _active(use: Use, gradient: Tensor) -> Tensor:
    """Where, over the leading dimensions, the gradient is not zero."""
    g = gradient if use.permute is None else gradient.permute(use.permute)
    return (g != 0).flatten(len(use.lead)).any(-1) if g.ndim > len(use.lead) else g != 0


def _probe(
    setup: Setup, data: tuple[Any, Any], chunk: Chunk, values: Values, run: Pass, shared: frozenset[int]
) -> dict[int, Layout] | None:
    """Layouts measured on two rows, if the pass over two rows is the same and each answer is the only one possible."""
    if chunk.rows <= PROBE:
        return None
    inputs, targets = (take(t, slice(0, PROBE), chunk.rows) for t in data)
    with torch.random.fork_rng(devices=[]):
        small = Pass(setup, (inputs, targets), PROBE, values, shared)
    try:
        return _compared(run.tape.uses, small, chunk.rows)
    finally:
        small.close()


def _compared(uses: Sequence[Use], small: Pass, rows: int) -> dict[int, Layout] | None:
    others = small.tape.uses
    if [(u.label, len(u.shape)) for u in uses] != [(u.label, len(u.shape)) for u in others]:
        return None
    masks: dict[int, list[Tensor]] = defaultdict(list)
    for row in range(PROBE):
        one = torch.zeros(PROBE)
        one[row] = 1
        small.backward(one, lambda use, g: masks[use.index].append(_active(use, g)), keep=row + 1 < PROBE)
    layouts: dict[int, Layout] = {}
    for use, other in zip(uses, others, strict=True):
        options = probed(masks.get(use.index, []), other.lead)
        options = [o for o in options if fits(o, use.shape, rows, PROBE, other.shape)]
        if len(options) != 1:
            return None
        layouts[use.index] = options[0]
    return layouts


def _measure(run: Pass) -> tuple[dict[int, Layout], list[Use]]:
    """The row of every position, bit by bit: the gradients of the losses of those rows whose number has bit k set.

    Returns also the uses where a position's gradient comes from several rows.
    """
    number = torch.arange(run.rows)
    whole: dict[int, Tensor] = {}
    row: dict[int, Tensor] = {}
    mixed: dict[int, Use] = {}

    def first(use: Use, g: Tensor) -> None:
        whole[use.index] = g.detach().clone()
        row[use.index] = torch.zeros_like(_active(use, g), dtype=torch.int64)

    run.backward(torch.ones(run.rows), first, keep=True)
    for bit in range(max(1, (run.rows - 1).bit_length())):

        def compare(use: Use, g: Tensor, bit: int = bit) -> None:
            here, total = _active(use, g), whole[use.index]
            rest = total - g.detach()
            row[use.index] |= here.long() << bit
            small = 1e-4 * (total.abs() + g.abs().amax() * 1e-2)
            if bool((here & _active(use, torch.where(rest.abs() > small, rest, 0))).any()):
                mixed[use.index] = use

        run.backward((number >> bit & 1).to(torch.get_default_dtype()), compare, keep=True)
    layouts: dict[int, Layout] = {}
    for use in run.tape.uses:
        if use.index not in whole:
            layouts[use.index] = Whole() if run.rows == 1 else Axis(0)  # no gradient ever arrives
            continue
        active = _active(use, whole[use.index])
        layouts[use.index] = Positions(torch.where(active, row[use.index], -1).flatten())
    return layouts, list(mixed.values())


def _by_parameter(
    store: Mapping[Slot, Sequence[Contribution]], leaves: Mapping[Slot, Mapping[str, Tensor]]
) -> dict[str, Contribution]:
    """Contributions to slots, brought to the parameters that the slots were computed from."""
    named = {slot.name: parts for slot, parts in store.items() if slot.name is not None}
    if len(named) == len(store):  # each parameter itself, at one iterate
        return {name: merged(parts) for name, parts in named.items()}
    direct: dict[str, list[Contribution]] = defaultdict(list)
    views: dict[str, dict[Any, list[tuple[Slot, Contribution]]]] = defaultdict(lambda: defaultdict(list))
    pulled: dict[str, list[Contribution]] = defaultdict(list)
    for slot, parts in store.items():
        if slot.name is not None:
            direct[slot.name].extend(parts)
            continue
        tensor = _connected(slot)
        found = reached(tensor, leaves[slot])
        through: Contribution | None = None
        for name, leaf in found.items():
            region = _region(tensor, leaf) if len(found) == 1 else None
            if region is None:
                # one object for all parents: merging adds in place, and a sum may overwrite what it was taken of
                through = through or (merged(parts) if len(found) == 1 else Shared(merged(parts)))
                pulled[name].append(Pulled(tensor, leaf, through, False))
            else:
                views[name][region].extend((slot, part) for part in parts)
    out: dict[str, Contribution] = {}
    for name in dict.fromkeys((*direct, *views, *pulled)):  # in the order of arrival: a set has another one each time
        regions = []
        for pairs in views[name].values():
            slot = pairs[0][0]
            regions.append(Pulled(_connected(slot), leaves[slot][name], merged([part for _, part in pairs]), True))
        if regions and not direct[name] and not pulled[name] and _disjoint(list(views[name])):
            out[name] = regions[0] if len(regions) == 1 else Total(regions, orthogonal=True)
        else:
            own = [merged(direct[name])] if direct[name] else []
            parts = [*own, *regions, *pulled[name]]
            out[name] = parts[0] if len(parts) == 1 else Total(parts)
    return out


def _connected(slot: Slot) -> Tensor:
    assert slot.tensor is not None, "only a parameter may have no place in the graph"
    return slot.tensor


Region = tuple[int, tuple[int, ...], tuple[int, ...]]


def _region(view: Tensor, leaf: Tensor) -> Region | None:
    """(offset, sizes, strides) if ``view`` shows coordinates of ``leaf``, each at most once; else None."""
    if view.dtype != leaf.dtype or view.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr():
        return None
    if view.numel() == 0 or view.is_conj() or view.is_neg():
        return None
    reach = 0
    for stride, size in sorted((st, si) for st, si in zip(view.stride(), view.shape, strict=True) if si > 1):
        if stride <= reach:
            return None
        reach += (size - 1) * stride
    return int(view.storage_offset()), tuple(view.shape), tuple(view.stride())


def _disjoint(regions: Sequence[Region]) -> bool:
    spans = sorted((o, o + sum((s - 1) * t for s, t in zip(si, st, strict=True))) for o, si, st in regions)
    return all(a[1] < b[0] for a, b in itertools.pairwise(spans))
