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

Every tensor that holds data has a label (``lineage.py``): the row of each of its positions, followed through the
operations. A tensor with a gradient that the mode did not see being made (by a custom function) is data whose rows are
not known.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sordino.gradients.flow import flat
from sordino.gradients.labels import Before, Book
from sordino.gradients.layout import Layout, layout_of
from sordino.gradients.lineage import MANY, ROWS, Axis, Lineage, Many, permuted
from sordino.gradients.slots import Slot, Use, describe, hold, not_implemented, pulling_back
from sordino.gradients.standardisation import Pull
from sordino.gradients.taps import TOKEN, Stand, Tap, once
from sordino.gradients.vocabulary import ASKS, OPENS, SIZES, writes

_BETWEEN = ("torch._tensor", "torch.overrides")  # where torch hands a call of Tensor.__len__ on to a mode
# what is given beside the first argument gives its type, its device or its shape, and is not computed with
_SET_HOOKS: Any = Tensor._backward_hooks.__set__  # type: ignore[union-attr]
TYPE_ONLY = frozenset((Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as))


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
class Holders:
    """Names for messages: which module holds a tensor."""

    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Holders:
        named = [*model.named_parameters(), *model.named_buffers()]
        return cls({id(t): name.rpartition(".")[0] or "the model" for name, t in named})


@dataclass(frozen=True)
class Rulebook:
    """apply: runs an operation in which a slot takes part. adopt: makes a slot of a tensor that was computed from
    parameters alone where the mode did not look; False if it was not. guards: checks of operations on data."""

    apply: Callable[[Tape, Any, Any, Any, bool], Any]
    adopt: Callable[[Tape, Tensor], bool]
    guards: Mapping[Any, Callable[[Tape, Any, Any, Any], None]]


class ModuleState(Protocol):
    """What a tape may ask about tensors that it did not see being made."""

    def constant(self, t: Tensor) -> bool:
        """Was it made before the pass, and is it the same for all rows?"""

    def registered(self, t: Tensor) -> bool:
        """Is it a parameter or a buffer of the model or its loss?"""


class Tape(TorchFunctionMode):
    """Records the uses of one forward pass over ``rows`` rows."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        rows: int,
        rules: Rulebook,
        held: ModuleState,
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """parameters: the trainable ones. values: the weights to run with, by name. held: knows the tensors that were
        there before the pass. whole: gathers a parameter that is divided."""
        super().__init__()
        self.model, self.rows, self.rules, self.held = model, rows, rules, held
        self.uses: list[Use] = []
        self.program: list[Any] = []  # the operations, in order; without those that a rule makes of one
        self._inside = 0  # rules at work
        self.arrived: Callable[[Use, Tensor], None] = lambda use, gradient: None
        self.token = TOKEN
        self.book = Book(rows)
        self._slots: dict[int, Slot] = {}
        self._alive: list[Tensor] = []
        self.roots: dict[int, Tensor] = {}  # data that requires a gradient and was computed from nothing that does
        self.leaves: dict[str, Tensor] = {}  # of the parameters that something was computed from
        for name, parameter in parameters.items():
            value = values.get(name, parameter)
            value = value.detach() if whole is None else value
            self._slots[id(parameter)] = Slot(None, value, frozenset((name,)), name, whole=whole)

    # what a rule may ask

    def slot(self, t: Any) -> Slot | None:
        return self._slots.get(id(t)) if isinstance(t, Tensor) else None

    def is_data(self, t: Any) -> bool:
        return self.book.holds(t)

    def lineage(self, t: Any) -> Lineage | None:
        return self.book.lineage(t)

    def joined(self, tensors: Iterable[Any], shape: Sequence[int]) -> Lineage:
        """The label of data that is broadcast to ``shape``; MANY where it is not known, or a single row's pass."""
        if self.rows == 1:
            return MANY
        found = self.book.join([t for t in tensors if isinstance(t, Tensor)], shape)
        return MANY if found is None else found

    def leading(self, x: Tensor, trailing: int) -> Axis | None:
        """The label of x, where its rows lie before the last ``trailing`` dimensions, which an operation with
        parameters alone mixes: then it is that of the result as well. None: `follow` has to find out."""
        label = self.book.lineage(x)
        return label if type(label) is Axis and label.dim < x.ndim - trailing and self.rows > 1 else None

    def value(self, t: Any) -> Any:
        """Detached value of a slot; anything else unchanged."""
        slot = self._slots.get(id(t))
        return t if slot is None else slot.value

    def values(self, tree: Any) -> Any:
        return replace(tree, self.value)

    def mark(self, tree: Any, label: Lineage = MANY) -> Any:
        """Note that these tensors are data, with this label."""
        for t in flat(tree):
            self.book.put(t, label)
        return tree

    def mark_rows(self, tree: Any) -> None:
        """Inputs and targets: dimension 0 holds the rows."""
        for t in flat(tree):
            if t.ndim:
                self.book.put(t, ROWS)
            else:
                self.book.note(t)

    def tap(self, output: Tensor, use: Use, label: Lineage | None = None) -> Tensor:
        """Have the gradient of ``output`` delivered to the use. label: that of the output, where the rule knows it;
        otherwise it is found when the operation returns."""
        self._add(use)
        if output._is_view():  # an in-place operation on a view would leave the tap out of the graph
            output = torch.ops.aten._unsafe_view(output, output.shape)
        if output.requires_grad:
            output.register_hook(lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        else:
            output = Tap.apply(output, self.token, lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        if label is None:
            use.tapped = weakref.ref(output)
        else:
            self.book.put(output, label)
            use.layout = self._layout(use, label)
        return output

    def stand(self, value: Tensor, shape: Sequence[int], use: Use, label: Lineage) -> Tensor:
        """A leaf of this shape in the place of a slot, with its gradient delivered to the use. label: that of the
        leaf, whose dimensions the use may permute."""
        self._add(use)
        out = Stand.apply(value, self.token, tuple(shape), lambda g: self.arrived(use, g))  # type: ignore[no-untyped-call]
        self.book.put(out, label)
        use.layout = self._layout(use, label)
        return out  # type: ignore[no-any-return]

    def _layout(self, use: Use, label: Lineage) -> Layout | None:
        """label: that of the tensor whose gradient arrives, before the use permutes it."""
        moved = label if use.permute is None or isinstance(label, Many) else permuted(label, use.permute)
        return layout_of(moved, use.shape, use.lead, self.rows)

    def carrier(self, like: Tensor, shape: Sequence[int], use: Use, label: Lineage) -> Tensor:
        """A tensor of zeros that only carries a gradient to the use."""
        return self.stand(like.new_zeros(()), shape, use, label)

    def _add(self, use: Use) -> None:
        for slot in use.slots:
            if slot.source is not None:
                use.emit = pulling_back(use.emit)
                break
        made = [s.tensor for s in use.slots if s.name is None and s.tensor is not None]
        if made:  # one that is written to after its use has another graph by the time it is pulled back through
            use.held = (*use.held, *hold(*made))
        use.index = len(self.uses)
        self.uses.append(use)

    def derive(
        self,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        source: tuple[Slot, Pull] | None = None,
        stretched: Slot | None = None,
        looked_up: tuple[Slot, Tensor] | None = None,
        tiled: Tensor | None = None,
        made: tuple[Any, Any, Any] | None = None,
    ) -> Any:
        """An operation without data: its floating results are new slots."""
        slots = [s for s in map(self.slot, flat((args, kwargs))) if s is not None]
        graph = lambda t: self.connected(s) if (s := self._slots.get(id(t))) is not None else t  # noqa: E731
        out = func(*replace(args, graph), **replace(kwargs, graph))
        parents = frozenset().union(*(s.parents for s in slots))
        for t in flat(out):
            if t.requires_grad and id(t) not in self._slots:
                self.add_slot(t, parents, source, stretched, looked_up, tiled, made)
        return out

    def add_slot(self, t: Tensor, parents: frozenset[str], *more: Any) -> None:
        """Note that this tensor was computed from these parameters and constants alone. more: further fields."""
        self._slots[id(t)] = Slot(t, t.detach(), parents, None, *more)
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
        self.roots.clear()
        self._slots.clear()
        self.book.clear()
        self.program.clear()
        self._alive.clear()
        self.arrived = lambda use, gradient: None

    # the mode

    def _seen(self, args: Iterable[Any], before: list[Before]) -> tuple[bool, bool]:
        """Is there a slot, and is there data, among these arguments? before: gets every tensor, as it is now."""
        slotted = data = False
        book, slots = self.book, self._slots
        for a in args:
            if isinstance(a, Tensor):
                if id(a) in slots:
                    slotted = True
                elif (held := book.entry(a)) is not None:
                    data = True
                    self._note_root(a)
                    before.append((a, held[3], held))
                    continue
                elif a.requires_grad and self.rules.adopt(self, a):  # made where the mode does not look
                    slotted = True
                else:
                    data = self._is_data(a) or data
                    self._note_root(a)
                before.append(book.state(a))
            elif isinstance(a, (list, tuple, dict)):
                found = self._seen(a.values() if isinstance(a, dict) else a, before)
                slotted, data = slotted or found[0], data or found[1]
        return slotted, data

    def _note_root(self, t: Tensor) -> None:
        """Autograd runs only what leads to a tensor that it is asked for: where data was made to require a gradient in
        the forward pass (Wav2Vec2, enable_input_require_grads of peft), nothing would reach the uses behind it."""
        if t.requires_grad and t.is_leaf:
            self.roots[id(t)] = t

    def _is_data(self, t: Tensor) -> bool:
        """A tensor that nobody saw being made: with a gradient it is data whose rows are not known. Without one, none
        can reach a parameter through it: it serves as a constant, though it may hold what was read from data."""
        if t.requires_grad:
            self.book.hidden(t)
            return True
        if not self.book.known(t):
            if not self.held.constant(t):
                self.book.brought(t)
            self.book.note(t)
        return False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ASKS:
            if func in SIZES and not self.book.asked:
                self._size_asked(args[0])
            return func(*args, **kwargs)
        if (
            func == _SET_HOOKS
        ):  # torch itself, while it shows a tensor to Python under a lock: nothing may be asked of it
            self.book.hooked = self.book.hooked or args[1] is not None
            return func(*args, **kwargs)
        before: list[Before] = []
        slotted, data = self._seen((*args, *kwargs.values()), before)
        if not self._inside:
            self.program.append(func)
        if data and func is Tensor.register_hook and len(args) > 1:
            args = (args[0], once(args[1]), *args[2:])
        if data and func in self.rules.guards:
            self.rules.guards[func](self, func, args, kwargs)
        if func in OPENS:
            self.book.opened = True
        try:
            if not slotted or not torch.is_grad_enabled():
                out = func(*self.values(args), **self.values(kwargs)) if slotted else func(*args, **kwargs)
                if data:
                    self.book.follow(func, args, kwargs, out, before)
                else:
                    self._note_constants(out)
            else:
                out = self._applied(func, args, kwargs, data)
        except Exception:
            self.book.asked = self.book.read = True  # an error that the model catches tells it a size, or a value
            raise
        self.book.written(before, data)
        return out

    def _size_asked(self, t: Tensor) -> None:
        """Notes that the model's own code asked for the size of a tensor which may hold the number of rows.

        torch's modules, and ours, use sizes to reshape and to allocate, for any number of rows alike.
        """
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "sordino"):
            return
        self.book.asked = id(t) not in self._slots and not self.held.registered(t)

    def _applied(self, func: Any, args: Any, kwargs: Any, data: bool) -> Any:
        """An operation in which a slot takes part."""
        first = len(self.uses)
        self._inside += 1
        self.book.ruled = True
        try:
            out = self.rules.apply(self, func, args, kwargs, data)
        except NotImplementedError as error:
            slots = [s for s in map(self.slot, flat((args, kwargs))) if s is not None]
            raise not_implemented(describe(func, slots), error) from error
        finally:
            self._inside -= 1
            self.book.ruled = self._inside > 0
        if data:
            self._label(func, args, kwargs, out, first)
        return out

    def _note_constants(self, out: Any) -> None:
        for t in flat(out):
            if not self.book.has(t):
                self.book.note(t)

    def _label(self, func: Any, args: Any, kwargs: Any, out: Any, before: int) -> None:
        """Labels of what a rule returned, and with them the layouts of the uses that it left open."""
        if not all(map(self.book.has, flat(out))) or writes(func):  # also into an item of it
            self.book.follow(func, args, kwargs, out)
        else:
            self.book.see_hooks()
        for use in self.uses[before:]:
            tapped = use.tapped() if use.tapped is not None else None
            if tapped is not None and use.layout is None:
                label = self.book.lineage(tapped)
                use.layout = None if label is None else self._layout(use, label)
