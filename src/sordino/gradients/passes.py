"""One forward and one backward pass over the rows of a chunk, and the per-record contributions to every parameter."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import Refused
from sordino.gradients.labels.lineage import ROWS
from sordino.gradients.labels.readings import unlike_any
from sordino.gradients.labels.vocabulary import NO_GRAD, STOPS
from sordino.gradients.layers.derived import reached
from sordino.gradients.layers.rules import RULEBOOK
from sordino.gradients.measure import measured
from sordino.gradients.rows import Chunk, call, check_losses, tensors, tree_map
from sordino.gradients.shards import Shards
from sordino.gradients.state.generators import renew
from sordino.gradients.state.kept import put_back
from sordino.gradients.state.left import leaves, refuse_kept_values
from sordino.gradients.state.pass_memory import ModuleTensors, PassMemory
from sordino.gradients.sums.contributions import Contribution, Dense
from sordino.gradients.sums.totals import Total, merged
from sordino.gradients.survey import Held, check_state
from sordino.gradients.tape.checkpoints import without_checkpoints
from sordino.gradients.tape.layout import Frame, Layout, Whole
from sordino.gradients.tape.pulled import Pullback, Pulled, Viewed
from sordino.gradients.tape.refusals import Aside, early, one_pass, trained_in_a_pass
from sordino.gradients.tape.slots import Slot, Use, check_held, not_implemented
from sordino.gradients.tape.tape import Tape

Loss = Callable[[Any, Any], Tensor]
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class Setup:
    """What is the same in all passes of a call."""

    model: nn.Module
    loss: Loss
    parameters: Mapping[str, nn.Parameter]
    state: Sequence[Held]
    once: bool = False  # as in Frame
    memory: PassMemory = field(default_factory=PassMemory)
    shards: Shards | None = None  # of a model whose parameters are divided over processes
    roots: Sequence[Any] = ()  # what is searched for Python state, as in kept.py

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device


class Pass:
    """The forward pass over some rows, ready for one or several backward passes.

    proven: the program shows that loss i depends on row i alone, and where the rows are at every use.
    independent: moreover no value was read from a tensor, so only the number of rows can influence a row's result.
    alike: the same for every part of this batch: all that was read is that a number is in none of its rows.
    operations: a hash of what is computed, in order, and of the answers to questions about several rows. program: the
    same, and whether another dimension is as long as the batch, which might mislead the engine. sized: the computation
    may depend on the number of rows or on their positions. numbers: a hash of the values that were read, if any.
    cut: the rows of some tensor do not lie in order along one dimension. opened: the model has a tensor's memory.
    stops: the program may stop or change gradients: equal losses do not mean equal gradients. custom: the backward pass
    runs Python code (hooks, custom functions), which may use any row's values. reads: values of the data may be where
    no label follows them, also if there is only one row.
    """

    def __init__(self, setup: Setup, data: tuple[Any, Any], rows: int, values: Values) -> None:
        inputs, targets = (tree_map(_without_gradient, t) for t in data)
        model = setup.model
        modules = [m for m in (model, setup.loss) if isinstance(m, nn.Module)]
        held = ModuleTensors(modules, setup.state, setup.memory)
        whole = None if setup.shards is None else setup.shards.whole
        self.tape = Tape(model, setup.parameters, values, rows, RULEBOOK, held, whole)
        self.rows, self.setup = rows, setup
        self.given = [*tensors(inputs), *tensors(targets)]
        self.held, self._versions = held, [one.version for one in setup.state]
        seed = torch.initial_seed()
        self.tape.arrived = early
        try:
            self.tape.mark_rows((inputs, targets))
            self.tape.book.given.real = setup.memory.real
            graded = nullcontext() if torch.is_grad_enabled() else torch.enable_grad()
            with Aside(setup.parameters), without_checkpoints(), graded, self.tape:
                outputs = call(model, inputs)
                self.losses = setup.loss(outputs, targets)
            check_losses(self.losses, rows)
            self.check_written()
            _check_trained(setup)
            _check_seed(seed)
            _check_crossed(self.tape.book.crossed)
            self.tape.book.orders.end(self.losses)
            label = self.tape.book.lineage(self.losses) if self.tape.book.holds(self.losses) else None
        except BaseException as error:
            self.tape.close()
            if not isinstance(error, Refused):
                self.check_written()  # what a model that fails has written must not be saved with its state
            raise
        book = self.tape.book
        known = label == ROWS and not book.hooked
        self.proven = rows == 1 or (known and all(use.layout is not None for use in self.tape.uses))
        self.alike = rows == 1 or (known and not (book.read or book.mixed))
        self.independent = rows == 1 or (self.alike and not book.absent)
        self.operations = hash((tuple(self.tape.program), tuple(book.answers), self.proven))
        self.program = hash((self.operations, book.crowded))
        self.sized = book.asked or (rows > 1 and (book.cut or not self.independent))
        self.opened, self.custom = book.opened, book.hooked or book.foreign
        self.reads = not self.independent or book.read or self.custom
        if rows > 1 and (book.mixed or self.custom or book.placed or setup.memory.left or not known):  # new every time
            book.numbers.append(next(unlike_any))
        self.course, self.places, self.cut = self.tape.course.found(), frozenset(self.tape.course.places), book.cut
        self.numbers = hash(tuple(book.numbers)) if book.numbers else None
        # no_grad stops only what has a gradient: the tape knows it if it has intercepted every operation
        stops = STOPS.difference((NO_GRAD,) if self.independent and not self.tape.halted else ())
        self.stops = not self.proven or book.hooked or book.stopped or not stops.isdisjoint(self.tape.program)

    def close(self) -> None:
        self.setup.memory.leave(self.tape.book.alive(), self.given)
        self.tape.close()
        self.losses = self.losses.detach()

    def hides(self) -> None:
        """A part ran where calls are not intercepted (in a thread, scripted): any value may have been read."""
        self.reads = True
        if self.rows > 1:
            self.independent, self.alike, self.sized, self.numbers = False, False, True, next(unlike_any)

    def check_written(self) -> None:
        """Raises Refused if a parameter or buffer was written to since the pass began."""
        check_state(self.setup.state, self._versions)
        self.held.check_opened()

    def backward(self, weight: Tensor, arrived: Callable[[Use, Tensor], None], keep: bool = False) -> None:
        """Backward pass of Σ weight·loss, without gradient mode; ``arrived`` receives the gradient of every use."""
        tape = self.tape
        tape.arrived = one_pass(arrived)
        if not self.losses.requires_grad:
            if self.setup.memory.graded:
                return  # they did in other batches: no record of this one uses a parameter
            raise Refused(
                "the loss does not depend on any trainable parameter through operations that sordino can intercept; "
                "check that the model is in use, not wrapped in no_grad, scripted or compiled"
            )
        self.setup.memory.graded = True
        watched = [*tape.leaves.items(), *self.setup.parameters.items()]
        if self.custom:
            self.held.open_all()
        try:
            with Aside(self.setup.parameters):
                found: Sequence[Tensor | None] = torch.autograd.grad(
                    self.losses,
                    [*(t for _, t in watched), tape.token, *tape.roots.values()],
                    weight if weight.dtype == self.losses.dtype else weight.to(self.losses.dtype),
                    retain_graph=keep,
                    allow_unused=True,
                )
        finally:
            if self.custom:
                self.check_written()
                _check_trained(self.setup)
        for (name, _), gradient in zip(watched, found, strict=False):
            if gradient is not None:
                raise Refused(
                    f"{name}: it is used inside an operation that sordino can't intercept (a custom autograd.Function, "
                    "a scripted or compiled module, an argument of torch.func's vmap or jvp); write that operation in "
                    "plain PyTorch, or freeze the parameter"
                )


def _without_gradient(t: Tensor) -> Tensor:
    return t.detach() if t.requires_grad else t


def _check_crossed(operation: str | None) -> None:
    if operation is not None:
        raise Refused(
            f"{operation}: combines values of one record with values computed over several (a mean, a maximum, "
            "a ranking over the batch, or another record), so records interact; make it work row by row, over the "
            "other dimensions only"
        )


def _check_seed(before: int) -> None:
    if torch.initial_seed() != before:
        raise Refused(
            "the forward pass seeds torch's random generator, so anyone who knows the seed knows the masks of this "
            "and later batches, and removing a record shifts those of all later ones; remove "
            "torch.manual_seed, so that the run's secret randomness is used"
        )


def _check_trained(setup: Setup) -> None:
    for held in setup.state:
        if held.tensor.requires_grad is not held.trained:
            raise trained_in_a_pass(held.name)


@dataclass(frozen=True)
class Found:
    """The result of a chunk's passes: every parameter's contributions, the losses, and properties of the program.

    operations, program, …, stops, cut: as in `Pass`, of all iterates together. course, places: as in ``course.py``.
    again: the losses are those of the present weights, so that another pass must reproduce them. squares: squared norms
    of the contributions, if they were computed before they are clipped. norms: those of the records, when they are.
    """

    gradients: dict[str, Contribution]
    losses: Tensor
    operations: int
    program: int
    proven: bool
    independent: bool
    alike: bool
    sized: bool
    numbers: int | None
    opened: bool
    stops: bool
    again: bool
    norms: list[Tensor] = field(default_factory=list)
    course: Any = None
    cut: bool = False
    places: frozenset[int] = frozenset()
    squares: dict[str, Tensor] = field(default_factory=dict)


def contributions(setup: Setup, data: tuple[Any, Any], chunk: Chunk, iterates: Sequence[tuple[Values, float]]) -> Found:
    """Every parameter's per-record gradient over the chunk, summed over the iterates, and the losses. Products of an
    iterate are added to those of the previous one as they arrive: at most two products of a layer exist at once."""
    gathered = _Gathered(setup, chunk)
    found: list[Pass] = []
    losses, memory = torch.empty(0), setup.memory
    for values, factor in iterates:
        torchs = memory.began = torch.get_rng_state()
        with put_back(setup.roots, memory.numbers, memory.numbers.needed) as state:
            if state is not None and state.libraries is not None:
                memory.libraries = state.libraries
            run = Pass(setup, data, chunk.rows, values)
            try:
                weight = torch.ones_like(run.losses) if chunk.weight is None else chunk.weight.to(run.losses.dtype)
                weight = weight if factor == 1.0 else weight * factor
                gathered.leaves = dict(run.tape.leaves)
                if run.proven or chunk.records == 1:
                    run.backward(weight, lambda use, g: gathered.add(use, g, use.layout))
                else:
                    with torch.no_grad():
                        for use, gradient, layout in measured(run, weight):
                            gathered.add(use, gradient, layout)
            except NotImplementedError as error:
                raise not_implemented("the backward pass", error) from error
            finally:
                run.close()
            if state is not None and (state.hidden or state.seen.threads):
                run.hides()
            if run.reads:
                renew(torchs, memory.numbers.turns)
                refuse_kept_values(state, memory.libraries, run.custom)
            elif run.tape.book.asked and not memory.left:
                memory.left = leaves(state, memory.libraries)
        memory.state = state
        memory.numbers.after(run.reads, run.sized)
        losses = run.losses
        found.append(run)
    read = [run.numbers for run in found if run.numbers is not None]
    return Found(
        _by_parameter(gathered.store, gathered.leaves_of),
        losses,
        operations=hash(tuple(run.operations for run in found)),
        program=hash(tuple(run.program for run in found)),
        proven=all(run.proven for run in found),
        independent=all(run.independent for run in found),
        alike=all(run.alike for run in found),
        sized=any(run.sized for run in found),
        numbers=hash(tuple(read)) if read else None,
        opened=any(run.opened for run in found),
        stops=any(run.stops for run in found),
        again=len(iterates) == 1 and not iterates[0][0],
        course=found[0].course if len({run.course for run in found}) == 1 else next(unlike_any),
        places=frozenset().union(*(run.places for run in found)),
        cut=any(run.cut for run in found),
    )


class _Gathered:
    """Collects contributions as gradients arrive."""

    def __init__(self, setup: Setup, chunk: Chunk) -> None:
        self.setup, self.chunk = setup, chunk
        self.store: dict[Slot, list[Contribution]] = defaultdict(list)
        self.totals: dict[str, Dense] = {}
        self.leaves_of: dict[Slot, dict[str, Tensor]] = {}
        self.leaves: dict[str, Tensor] = {}
        self.ragged = chunk.slots is not None and bool((chunk.slots < 0).any())
        self.precise = _full_precision(setup.device.type)
        self.frames: dict[Layout, Frame] = {}

    def frame(self, layout: Layout | None) -> Frame:
        chunk, setup = self.chunk, self.setup
        if chunk.records == 1:  # all positions belong to the one record
            return Frame(Whole(), 1, 1, None, False, setup.once)
        assert layout is not None
        if layout not in self.frames:
            self.frames[layout] = Frame(layout, chunk.rows, chunk.records, chunk.slots, self.ragged, setup.once)
        return self.frames[layout]

    def add(self, use: Use, gradient: Tensor, layout: Layout | None) -> None:
        check_held(use)
        try:
            with self.precise:
                for slot, part in use.emit(gradient, self.frame(layout)):
                    self._keep(slot, part)
        except NotImplementedError as error:
            raise not_implemented(use.label, error) from error
        use.release()

    def _keep(self, slot: Slot, part: Contribution) -> None:
        if slot.name is not None and isinstance(part, Dense) and part.owned:
            total = self.totals.setdefault(slot.name, part)
            if total is not part:
                return total.add(part)
        self.store[slot].append(part)
        self.leaves_of[slot] = self.leaves


def _full_precision(device: str) -> AbstractContextManager[Any]:
    """A context in which the rules run without autocast; an empty one if autocast is off."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def _by_parameter(
    store: Mapping[Slot, Sequence[Contribution]], leaves: Mapping[Slot, Mapping[str, Tensor]]
) -> dict[str, Contribution]:
    """Converts contributions to slots into contributions to the parameters from which the slots were computed."""
    named = {slot.name: parts for slot, parts in store.items() if slot.name is not None}
    if len(named) == len(store):  # every slot is a parameter, at one iterate
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
        by: Pullback | None = None
        for name, leaf in found.items():
            region = _region(tensor, leaf) if len(found) == 1 else None
            if region is None:
                # one object for all parents: merging adds in place
                by = by or Pullback(tensor, list(found.values()), merged(parts))
                pulled[name].append(Pulled(leaf, by))
            else:
                views[name][region].extend((slot, part) for part in parts)
    out: dict[str, Contribution] = {}
    for name in dict.fromkeys((*direct, *views, *pulled)):  # in order of arrival: the order of a set varies
        regions = []
        for pairs in views[name].values():
            slot = pairs[0][0]
            regions.append(Viewed(_connected(slot), leaves[slot][name], merged([part for _, part in pairs])))
        if regions and not direct[name] and not pulled[name] and _disjoint(list(views[name])):
            out[name] = regions[0] if len(regions) == 1 else Total(regions, orthogonal=True)
        else:
            own = [merged(direct[name])] if direct[name] else []
            parts = [*own, *regions, *pulled[name]]
            out[name] = parts[0] if len(parts) == 1 else Total(parts)
    return out


def _connected(slot: Slot) -> Tensor:
    assert slot.tensor is not None, "only a parameter may lack a node in the graph"
    return slot.tensor


Region = tuple[int, tuple[int, ...], tuple[int, ...]]


def _region(view: Tensor, leaf: Tensor) -> Region | None:
    """(offset, sizes, strides) if ``view`` contains coordinates of ``leaf``, each at most once; else None."""
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
