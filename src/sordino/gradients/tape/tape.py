"""The tape: intercepts, during one forward pass, every operation that uses a trainable parameter.

A TorchFunctionMode receives each call into torch. It distinguishes three kinds of tensors:

- *slots*: trainable parameters, and tensors computed from parameters and constants alone (a weight-normalised
  kernel, a chunk of a packed projection, an interpolated position table). They are the same for every row.
- *data*: whatever was computed from the inputs.
- constants: everything else.

An operation on slots and constants makes a new slot. An operation on slots *and* data is a *use*: it runs with
detached slots, and a rule computes from the gradient of its output (or of a leaf that replaces the slot) each
record's gradient with respect to the slot. The module that called the operation is irrelevant, so tied
weights, modules called twice and functional calls need no special treatment; nothing is patched, and nothing is
left on the model when the tape ends.

Every tensor that contains data has a label (``lineage.py``): the row of each of its positions, propagated through the
operations. A tensor with a gradient whose creation the mode did not intercept (by a custom function) is data whose rows
are not known.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sordino.gradients.labels.book import Before, Book
from sordino.gradients.labels.course import Course
from sordino.gradients.labels.flow import argument, flat, replace
from sordino.gradients.labels.lineage import MANY, ROWS, Axis, Lineage, Many, permuted
from sordino.gradients.labels.vocabulary import ASKS, OPENS, SETS_CONTENT, SETS_GRAD, SIZES, kind_of, writes
from sordino.gradients.sums.standardisation import Pull
from sordino.gradients.tape.beneath import any_own, depth, own_code, refuse_mode, unknown
from sordino.gradients.tape.layout import Layout, layout_of
from sordino.gradients.tape.refusals import trained_in_a_pass
from sordino.gradients.tape.slots import ModuleState, Slot, Use, describe, hold, not_implemented, pulling_back
from sordino.gradients.tape.taps import TOKEN, Stand, Tap, once

# the modules through which torch passes a call of Tensor.__len__ to a mode
_BETWEEN = ("torch._tensor", "torch.overrides")
_SET_HOOKS: Any = Tensor._backward_hooks.__set__  # type: ignore[union-attr]
# the further arguments of these only give a type, a device or a shape
TYPE_ONLY = frozenset((Tensor.to, Tensor.type_as, Tensor.view_as, Tensor.reshape_as))


@dataclass(frozen=True)
class Rulebook:
    """apply: runs an operation that uses a slot. adopt: makes a slot of a tensor that was computed from parameters
    alone by an operation that was not intercepted; False if it was not. guards: checks of operations on data."""

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
        rules: Rulebook,
        held: ModuleState,
        whole: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """parameters: the trainable ones. values: the weights to run with, by name. held: knows the tensors that
        existed before the pass. whole: gathers a parameter that is divided over processes."""
        super().__init__()
        self.model, self.rows, self.rules, self.held = model, rows, rules, held
        self.uses: list[Use] = []
        self.program: list[Any] = []  # the operations in order, without those that a rule performs
        self.halted = False  # whether an operation without gradients (no_grad) had arguments that have one
        self._inside = 0  # nesting depth of running rules
        self._depth, self._own = depth(), False  # whether a tensor's class defines the operation on it itself
        # classes of parameters that are divided over processes: operations get the whole tensors
        self._divided = frozenset(map(type, parameters.values())) if whole is not None else frozenset[type]()
        self.arrived: Callable[[Use, Tensor], None] = lambda use, gradient: None
        self.token = TOKEN
        self._slots: dict[int, Slot] = {}
        self.book, self.course = Book(rows), Course(self._slots, held.registered)
        self._alive: list[Tensor] = []
        self.roots: dict[int, Tensor] = {}  # data that requires a gradient and was computed from nothing that does
        self.leaves: dict[str, Tensor] = {}  # for the parameters that something was computed from
        for name, parameter in parameters.items():
            value = values.get(name, parameter)
            value = value.detach() if whole is None else value
            self._slots[id(parameter)] = Slot(None, value, frozenset((name,)), name, whole=whole)

    def slot(self, t: Any) -> Slot | None:
        return self._slots.get(id(t)) if isinstance(t, Tensor) else None

    def is_data(self, t: Any) -> bool:
        return self.book.holds(t)

    def lineage(self, t: Any) -> Lineage | None:
        return self.book.lineage(t)

    def joined(self, tensors: Iterable[Any], shape: Sequence[int]) -> Lineage:
        """The label of data that is broadcast to ``shape``; MANY if it is not known, or if the pass has a single
        row."""
        if self.rows == 1:
            return MANY
        found = self.book.join([t for t in tensors if isinstance(t, Tensor)], shape)
        return MANY if found is None else found

    def leading(self, x: Tensor, trailing: int) -> Axis | None:
        """The label of x if its rows lie before the last ``trailing`` dimensions, which an operation with parameters
        alone combines: then the result has the same label. None: `follow` must determine it."""
        label = self.book.lineage(x)
        return label if type(label) is Axis and label.dim < x.ndim - trailing and self.rows > 1 else None

    def value(self, t: Any) -> Any:
        """Detached value of a slot; anything else unchanged."""
        slot = self._slots.get(id(t))
        return t if slot is None else slot.value

    def values(self, tree: Any) -> Any:
        return replace(tree, self.value)

    def mark(self, tree: Any, label: Lineage = MANY) -> Any:
        """Record that these tensors are data with this label."""
        for t in flat(tree):
            self.book.put(t, label)
        return tree

    def mark_rows(self, tree: Any) -> None:
        """Inputs and targets: dimension 0 contains the rows."""
        self.course.given(flat(tree))
        for t in flat(tree):
            if own_code(type(t)):
                unknown(self.book, t)
            elif t.ndim:
                self.book.put(t, ROWS)
            else:
                self.book.note(t)

    def tap(self, output: Tensor, use: Use, label: Lineage | None = None) -> Tensor:
        """Have the gradient of ``output`` delivered to the use. label: that of the output, if the rule knows it;
        otherwise it is determined when the operation returns."""
        self._add(use)
        if output._is_view():  # an in-place operation on a view would remove the tap from the graph
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
        """Replaces a slot by a leaf of this shape, whose gradient is delivered to the use. label: that of the leaf,
        whose dimensions the use may permute."""
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
        """A tensor of zeros whose only purpose is to carry a gradient to the use."""
        return self.stand(like.new_zeros(()), shape, use, label)

    def _add(self, use: Use) -> None:
        for slot in use.slots:
            if slot.source is not None:
                use.emit = pulling_back(use.emit)
                break
        made = [s.tensor for s in use.slots if s.name is None and s.tensor is not None]
        if made:  # if it is written to after its use, its graph differs when it is pulled back
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
        """An operation without data: its floating-point results are new slots."""
        slots = [s for s in map(self.slot, flat((args, kwargs))) if s is not None]
        graph = lambda t: self.connected(s) if (s := self._slots.get(id(t))) is not None else t  # noqa: E731
        out = func(*replace(args, graph), **replace(kwargs, graph))
        parents = frozenset().union(*(s.parents for s in slots))
        for t in flat(out):
            if t.requires_grad and id(t) not in self._slots:
                self.add_slot(t, parents, source, stretched, looked_up, tiled, made)
        return out

    def add_slot(self, t: Tensor, parents: frozenset[str], *more: Any) -> None:
        """Record that this tensor was computed from these parameters and constants alone. more: further fields."""
        self._slots[id(t)] = Slot(t, t.detach(), parents, None, *more)
        self._alive.append(t)

    def connected(self, slot: Slot) -> Tensor:
        """The slot in autograd's graph; a parameter becomes a leaf when it is first requested."""
        if slot.tensor is None:
            assert slot.name is not None
            slot.tensor = self.leaves[slot.name] = slot.value.detach().requires_grad_()
            self._slots[id(slot.tensor)] = slot
        return slot.tensor

    def close(self) -> None:
        """Releases all references. Hooks in autograd's graph refer to the tape and the tape to the graph: a cycle that
        Python's collector can't detect, so it is broken here."""
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

    def _seen(self, args: Iterable[Any], before: list[Before]) -> tuple[bool, bool]:
        """(is there a slot among these arguments, is there data). before: receives every tensor in its present
        state."""
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
                elif a.requires_grad and self.rules.adopt(self, a):  # made by an operation that was not intercepted
                    slotted = True
                else:
                    data = self._is_data(a) or data
                    self._note_root(a)
                before.append(book.state(a))
            elif type(a) is slice:
                data = self._bounds(a) or data
            elif isinstance(a, (list, tuple, dict)):
                found = self._seen(a.values() if isinstance(a, dict) else a, before)
                slotted, data = slotted or found[0], data or found[1]
        return slotted, data

    def _bounds(self, places: slice) -> bool:
        """Is a bound of this slice data? Torch converts it to a number where the mode is not active."""
        found = [t for t in (places.start, places.stop, places.step) if isinstance(t, Tensor) and self.book.holds(t)]
        for t in found:
            self.book.brought(t)
        return bool(found)

    def _note_root(self, t: Tensor) -> None:
        """Autograd runs only what leads to a requested tensor: if data was made to require a gradient in the forward
        pass (Wav2Vec2, enable_input_require_grads of peft), no gradient would reach the uses of that data otherwise."""
        if t.requires_grad and t.is_leaf:
            self.roots[id(t)] = t

    def _is_data(self, t: Tensor) -> bool:
        """For a tensor whose creation was not intercepted: with a gradient it is data whose rows are not known. Without
        one no gradient can reach a parameter through it: it is a constant, though it may contain values that were read
        from data."""
        self._own = self._own or (type(t) is not Tensor and type(t) not in self._divided and own_code(type(t)))
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
        if func == _SET_HOOKS:  # torch calls this under a lock while it wraps a tensor: no query of it is allowed here
            self.book.hooked = self.book.hooked or args[1] is not None
            return func(*args, **kwargs)
        if depth() != self._depth:
            refuse_mode()
        before: list[Before] = []
        self._own = bool(types) and any_own(t for t in types if t not in self._divided)
        slotted, data = self._seen((*args, *kwargs.values()) if kwargs else args, before)
        own = self._own and data
        if not self._inside:
            self.program.append(func)
            if not torch.is_grad_enabled():
                self.halted = self.halted or slotted or any(t.requires_grad for t, *_ in before)
        if data and func is Tensor.register_hook and len(args) > 1:
            args = (args[0], once(args[1]), *args[2:])
        if data and func in self.rules.guards:
            self.rules.guards[func](self, func, args, kwargs)
        if func in SETS_CONTENT and args[1] is not None:
            self.held.wrote(args[0])
        if func in OPENS:
            self.book.opened = True
            self.held.open(args[0])
        if data and len(before) > 1:
            self.book.scalars(func, before)
        orders, verdict = self.book.orders, None
        if orders and not self._inside:
            verdict = orders.judge(kind_of(func), args, kwargs, [t for t, *_ in before])
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
            if data:
                self.book.failed()
            raise
        if own:
            unknown(self.book, out)
        for t in self.book.written(before, data):
            self.held.wrote(t)
        if verdict is not None:
            orders.settle(verdict, out)
        if not self._inside:
            self.course.note(len(self.program), self.book.asked, (func, args, kwargs), out, before, self.book.state)
        return out

    def _size_asked(self, t: Tensor) -> None:
        """Record that the model's own code queried a size that may be the number of rows.

        torch's modules and ours use sizes to reshape and to allocate, in the same way for any number of rows.
        """
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _BETWEEN:
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "sordino"):
            return
        self.book.asked = id(t) not in self._slots and not self.held.registered(t)

    def _applied(self, func: Any, args: Any, kwargs: Any, data: bool) -> Any:
        """Runs an operation that uses a slot."""
        if func in SETS_GRAD and not argument(args, kwargs, 1, "requires_grad", default=True):
            raise trained_in_a_pass(describe(func, [s for s in map(self.slot, flat(args)) if s is not None]))
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
        for t in (out,) if type(out) is Tensor else flat(out):
            if not self.book.has(t):
                self.book.note(t)

    def _label(self, func: Any, args: Any, kwargs: Any, out: Any, before: int) -> None:
        """Labels what a rule returned, and determines the layouts of the uses that the rule left open."""
        results = (out,) if type(out) is Tensor else flat(out)
        if not all(map(self.book.has, results)) or writes(func):  # also into an item of it
            self.book.follow(func, args, kwargs, out)
        else:
            self.book.see_hooks()
        for use in self.uses[before:]:
            tapped = use.tapped() if use.tapped is not None else None
            if tapped is not None and use.layout is None:
                label = self.book.lineage(tapped)
                use.layout = None if label is None else self._layout(use, label)
