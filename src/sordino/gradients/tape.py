"""The tape: one forward pass in which every operation that consumes a trainable parameter is seen.

A TorchFunctionMode looks at each call into torch. Three kinds of tensors matter to it:

- *slots*: trainable parameters, and tensors computed from parameters and constants alone (a weight-normalised
  kernel, a chunk of a packed projection, an interpolated position table). They are the same for every row.
- *data*: whatever was computed from the inputs.
- constants: everything else.

An operation on slots and constants makes a new slot. An operation on slots *and* data is a *use*: it runs with
detached slots, and a rule says what the gradient of its output (or of a leaf put in the slot's place) adds to
each record's gradient of the slot. The module that the operation was called from plays no part, so tied
weights, modules called twice and functional calls need no special care; nothing is patched, and nothing is
left on the model when the tape ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sordino.errors import Refused
from sordino.gradients.contributions import Contribution
from sordino.gradients.layout import Frame, Layout, merged_axis
from sordino.gradients.standardisation import Pull, pulled

Emit = Callable[[Tensor, Frame], Iterable[tuple["Slot", Contribution]]]


@dataclass(eq=False, slots=True)
class Slot:
    """A parameter (``parents`` is its own name) or something computed from parameters and constants alone.

    value: detached. tensor: the same, connected to the leaves of its parameters in autograd's graph; of a parameter,
    None until something is computed from it alone (``Tape.connected``).
    source: the parameter and the pull-back to it, where that is known in closed form.
    """

    tensor: Tensor | None
    value: Tensor
    parents: frozenset[str]
    name: str | None = None
    source: tuple[Slot, Pull] | None = None


@dataclass(eq=False, slots=True)
class Use:
    """One operation on slots and data. ``shape`` and ``lead`` describe the tensor whose gradient arrives."""

    func: Any
    slots: tuple[Slot, ...]
    shape: torch.Size
    lead: tuple[int, ...]
    emit: Emit
    held: tuple[tuple[Tensor, int], ...] = ()
    layout: Layout | None = None
    index: int = -1
    permute: tuple[int, ...] | None = None  # brings an arriving gradient into ``shape``
    candidate: int | None = None  # number among the stretched slots, for ``shared``

    @property
    def label(self) -> str:
        return describe(self.func, self.slots)

    def release(self) -> None:
        """Let go of the activations: nothing more will be asked of this use."""
        self.emit, self.held, self.slots = _nothing, (), ()


def describe(func: Any, slots: Sequence[Slot]) -> str:
    """For messages: the operation and its parameters."""
    names = sorted({n for s in slots for n in s.parents})
    return f"{getattr(func, '__name__', func)}({', '.join(names)})"


def _nothing(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
    return []


def _pulling(emit: Emit) -> Emit:
    """The same, with contributions to tensors whose pull-back is known brought to their parameters."""

    def pulling(gradient: Tensor, frame: Frame) -> Iterable[tuple[Slot, Contribution]]:
        for slot, part in emit(gradient, frame):
            yield (slot, part) if slot.source is None else (slot.source[0], pulled(part, slot.source[1]))

    return pulling


with torch.inference_mode(False):
    _ZERO = torch.zeros((), device="cpu")
    _TOKEN = _ZERO.clone().requires_grad_()  # gives a result a place in the graph; nothing is added to its .grad


class _Tap(torch.autograd.Function):
    """Identity on a fresh output that needs no gradient of its own; hands the arriving gradient to ``hook``."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, token: Tensor, hook: Callable[[Tensor], None]) -> Tensor:
        ctx.hook = hook
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        ctx.hook(gradient)
        return None, _ZERO, None


class _Stand(torch.autograd.Function):
    """A slot's value stretched to ``shape`` without memory; hands the gradient of the stretched tensor to ``hook``."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, shape: Sequence[int], hook: Callable[[Tensor], None]) -> Tensor:
        ctx.hook = hook
        return value.expand(shape).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        ctx.hook(gradient)
        return None, _ZERO, None, None


# what is given beside the first argument gives its type, its device or its shape, and is not computed with
TYPE_ONLY = frozenset((Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as))
_RESHAPES = frozenset((Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape))


def _flat(args: Iterable[Any]) -> Iterable[Tensor]:
    for a in args:
        if isinstance(a, Tensor):
            yield a
        elif isinstance(a, (list, tuple)):
            yield from _flat(a)
        elif isinstance(a, dict):
            yield from _flat(a.values())


def replace(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, list):
        return [replace(t, fn) for t in tree]
    if isinstance(tree, tuple) and type(tree) is tuple:
        return tuple(replace(t, fn) for t in tree)
    if isinstance(tree, dict):
        return {k: replace(v, fn) for k, v in tree.items()}
    return tree


@dataclass
class Owners:
    """Names for messages: which module holds a tensor."""

    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Owners:
        named = [*model.named_parameters(), *model.named_buffers()]
        return cls({id(t): name.rpartition(".")[0] or "the model" for name, t in named})


@dataclass(frozen=True)
class Rulebook:
    """apply: runs an operation in which a slot takes part. adopt: makes a slot of a tensor that was computed from
    parameters alone where the mode did not look; False if it was not. guards: checks of operations on data."""

    apply: Callable[[Tape, Any, Any, Any, bool], Any]
    adopt: Callable[[Tape, Tensor], bool]
    guards: Mapping[Any, Callable[[Tape, Any, Any, Any], None]]


class Tape(TorchFunctionMode):
    """Records the uses of one forward pass over ``rows`` rows."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        rows: int,
        shared: frozenset[int],
        rules: Rulebook,
    ) -> None:
        """parameters: the trainable ones. values: the weights to run with, by name. shared: stretched slots to be
        treated as common to all rows although their shape suggests otherwise."""
        super().__init__()
        self.model, self.rows, self.shared, self.rules = model, rows, shared, rules
        self.uses: list[Use] = []
        self.arrived: Callable[[Use, Tensor], None] = lambda use, gradient: None
        self.token = _TOKEN
        self.candidates = 0  # slots stretched to the number of rows, so far
        self.crowded = False  # some tensor has several dimensions that could be the rows
        self._data: dict[int, weakref.ref[Tensor]] = {}
        self._merged: dict[int, tuple[weakref.ref[Tensor], Layout]] = {}
        self._slots: dict[int, Slot] = {}
        self._alive: list[Tensor] = []
        self.leaves: dict[str, Tensor] = {}  # of the parameters that something was computed from
        for name, parameter in parameters.items():
            value = values.get(name, parameter).detach()
            self._slots[id(parameter)] = Slot(None, value, frozenset((name,)), name)

    # what a rule may ask

    def slot(self, t: Any) -> Slot | None:
        return self._slots.get(id(t)) if isinstance(t, Tensor) else None

    def is_data(self, t: Any) -> bool:
        ref = self._data.get(id(t))
        return ref is not None and ref() is t

    def value(self, t: Any) -> Any:
        """Detached value of a slot; anything else unchanged."""
        slot = self._slots.get(id(t))
        return t if slot is None else slot.value

    def values(self, tree: Any) -> Any:
        return replace(tree, self.value)

    def mark(self, tree: Any) -> Any:
        """Note that these tensors are data."""
        for t in (tree,) if isinstance(tree, Tensor) else _flat((tree,)):
            self._data[id(t)] = weakref.ref(t)
            if not self.crowded and (t.shape.count(self.rows) > 1 or self.rows * self.rows in t.shape[:-1]):
                self.crowded = self.rows > 1
        return tree

    def _note_merged(self, before: Tensor, after: Tensor) -> None:
        """Remember where the rows went when leading dimensions, the rows among them, became one."""
        if self.rows > 1 and after.shape != before.shape and len(after.shape):
            layout = merged_axis(before.shape, after.shape, self.rows)
            if layout is not None:
                self._merged[id(after)] = (weakref.ref(after), layout)

    def merged(self, t: Tensor) -> Layout | None:
        """The layout of a tensor that was just flattened from a shape that left no doubt."""
        found = self._merged.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def tap(self, output: Tensor, use: Use) -> Tensor:
        """Have the gradient of ``output`` delivered to the use."""
        self._add(use)
        if output.requires_grad:
            output.register_hook(lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        else:
            output = _Tap.apply(output, self.token, lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        self.mark(output)
        return output

    def stand(self, slot: Slot, shape: Sequence[int], use: Use) -> Tensor:
        """A leaf of this shape in the place of the slot, with its gradient delivered to the use."""
        self._add(use)
        out = _Stand.apply(slot.value, self.token, tuple(shape), lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        self.mark(out)
        return out  # type: ignore[no-any-return]

    def carrier(self, like: Tensor, shape: Sequence[int], use: Use) -> Tensor:
        """A tensor of zeros that only carries a gradient to the use."""
        self._add(use)
        zero = like.new_zeros(())
        out = _Stand.apply(zero, self.token, tuple(shape), lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        return out  # type: ignore[no-any-return]

    def _add(self, use: Use) -> None:
        for slot in use.slots:
            if slot.source is not None:
                use.emit = _pulling(use.emit)
                break
        made = [s.tensor for s in use.slots if s.name is None and s.tensor is not None]
        if made:  # one that is written to after its use has another graph by the time it is pulled back through
            use.held = (*use.held, *hold(*made))
        use.index = len(self.uses)
        self.uses.append(use)

    def derive(self, func: Callable[..., Any], args: Any, kwargs: Any, source: tuple[Slot, Pull] | None = None) -> Any:
        """An operation without data: its floating results are new slots."""
        slots = [s for s in map(self.slot, _flat((args, kwargs))) if s is not None]
        graph = lambda t: self.connected(s) if (s := self._slots.get(id(t))) is not None else t  # noqa: E731
        out = func(*replace(args, graph), **replace(kwargs, graph))
        parents = frozenset().union(*(s.parents for s in slots))
        for t in _flat((out,)):
            if t.requires_grad and id(t) not in self._slots:
                self.add_slot(t, parents, source)
        return out

    def add_slot(self, t: Tensor, parents: frozenset[str], source: tuple[Slot, Pull] | None = None) -> None:
        """Note that this tensor was computed from these parameters and constants alone."""
        self._slots[id(t)] = Slot(t, t.detach(), parents, source=source)
        self._alive.append(t)

    def connected(self, slot: Slot) -> Tensor:
        """The slot in autograd's graph; a parameter becomes a leaf when it is first asked for."""
        if slot.tensor is None:
            assert slot.name is not None
            slot.tensor = self.leaves[slot.name] = slot.value.detach().requires_grad_()
            self._slots[id(slot.tensor)] = slot
        return slot.tensor

    def close(self) -> None:
        """Let go of everything. Hooks in autograd's graph refer to the tape and the tape to the graph: a circle that
        Python's collector can't see, so it is cut here."""
        for use in self.uses:
            use.release()
        self.uses.clear()
        self.leaves.clear()
        self._slots.clear()
        self._data.clear()
        self._merged.clear()
        self._alive.clear()
        self.arrived = lambda use, gradient: None

    # the mode

    def _seen(self, args: Iterable[Any], slotted: bool, data: bool) -> tuple[bool, bool]:
        """Is there a slot, and is there data, among these arguments?"""
        for a in args:
            if isinstance(a, Tensor):
                key = id(a)
                if key in self._slots:
                    slotted = True
                elif self.is_data(a):
                    data = True
                elif a.requires_grad:  # made where the mode does not look
                    if self.rules.adopt(self, a):
                        slotted = True
                    else:
                        self.mark(a)
                        data = True
            elif isinstance(a, (list, tuple)):
                slotted, data = self._seen(a, slotted, data)
            elif isinstance(a, dict):
                slotted, data = self._seen(a.values(), slotted, data)
        return slotted, data

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        slotted, data = self._seen(args, False, False)
        if kwargs:
            slotted, data = self._seen(kwargs.values(), slotted, data)
        if data and func in self.rules.guards:
            self.rules.guards[func](self, func, args, kwargs)
        if not slotted:
            out = func(*args, **kwargs)
            if not data or (func in TYPE_ONLY and not self.is_data(args[0])):
                return out
            if func in _RESHAPES:
                self._note_merged(args[0], out)
            return self.mark(out)
        if not torch.is_grad_enabled():
            out = func(*self.values(args), **self.values(kwargs))
            return self.mark(out) if data else out
        return self.rules.apply(self, func, args, kwargs, data)


def hold(*tensors: Tensor) -> tuple[tuple[Tensor, int], ...]:
    return tuple([(t, t._version) for t in tensors])


def check_held(use: Use) -> None:
    """The inputs that a rule kept must not have been written to since."""
    for t, version in use.held:
        if t._version != version:
            raise Refused(
                f"{use.label}: its input was modified in place after the call; "
                "use the out-of-place version of the operation that follows (for example inplace=False)"
            )
