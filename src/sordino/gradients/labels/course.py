"""Does a model that knows the number of its rows compute the same for every number? Compared in every pass.

A model that asks for a size may use it anywhere: as a factor, in a condition, in ``arange(len(x))``. A test in other
groups shows nothing as long as the effect is limited to rows that are not in the tested batch (``where(flag, h *
(-1) ** len(x), h)``). So what is compared is the *course* of a pass from its first question on: every operation on data
or parameters, with the numbers among its arguments, which tensors it gets, the content of constants, and the shape of
its result apart from the rows. Two passes with the same course, of which labels show that rows are independent,
compute the same function of each row, whatever their numbers of rows.

Left out are sizes that only give a shape (``view``, ``expand``, ``rand(n, d)``). Constants that differ from row to row
and meet data are *places*: the result depends on where a row is. Random ones, which every row has for itself, are told
apart by a pass in which all draws are equal (``assurance.py``). Operations whose result belongs to no single row are
left out: wherever it is used again, the batch is tested.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.labels import flow, flow_layers, moves, selections
from sordino.gradients.labels.book import Before
from sordino.gradients.labels.flow import flat
from sordino.gradients.labels.lineage import Axis, Lineage, Many
from sordino.gradients.labels.readings import unlike_any
from sordino.gradients.labels.versions import version
from sordino.gradients.labels.vocabulary import Kind, kind_of, names
from sordino.gradients.sums.memory import address, checksum

# whose whole numbers are sizes; others that draw have sizes in a tuple
_SIZES = frozenset(names("rand randn new_zeros new_ones new_empty"))
_DRAWS = frozenset(
    names("rand randn randint randperm normal bernoulli poisson multinomial rand_like randn_like randint_like rrelu")
    + names("uniform_ normal_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ dropout alpha_dropout")
)
_SHAPED = (moves.reshape, moves.expand, moves.repeat)  # the shape of the result tells all
_ALIKE = (
    *(flow.pointwise, flow.only_first, flow.choice, selections.getitem, selections.index_select),
    *(moves.expand, moves.repeat, moves.unsqueeze, moves.squeeze),
)
_MOVED = frozenset(names("permute transpose swapaxes swapdims t T H mT mH adjoint movedim moveaxis embedding"))
_LEADING = frozenset(names("conv1d conv2d conv3d linear layer_norm rms_norm group_norm"))  # dimension 0 is not summed
_BROADCAST = (flow.pointwise, flow.choice, flow_layers.attention)

_EXACT = (int, bool, str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(...))  # no floats: −0.0

# where rows are: (length of the dimension, before, after, the dimension from the right if arguments are broadcast)
Ways = tuple[tuple[int, int, int, int | None], ...]


class Course:
    """What one pass computes. steps: from the first question on. places: the numbers of the steps in which something
    that is no data differs from row to row."""

    def __init__(self, slots: Mapping[int, Any], fixed: Callable[[Tensor], bool]) -> None:
        """slots: of tensors, by their id. fixed: is it a parameter or a buffer?"""
        self.steps: list[Any] = []
        self.places: set[int] = set()
        self._slots, self._fixed = slots, fixed
        self._of: dict[int, tuple[int, int]] = {}  # the operation that made a tensor, and which of its results it is
        self._drawn: set[tuple[int, int]] = set()  # those that contain random numbers and no data
        self._contents: dict[Any, tuple[weakref.ref[Tensor], Any, bool]] = {}

    def given(self, tensors: Sequence[Tensor]) -> None:
        """The inputs and targets of the pass."""
        first: dict[Any, int] = {}  # a tensor that is given twice, as inputs and as targets, may be two views of it
        for k, t in enumerate(tensors):
            memory = (address(t), t.storage_offset(), t.shape, t.stride(), t.dtype) if address(t) else id(t)
            self._of[id(t)] = -1, first.setdefault(memory, k)

    def note(
        self,
        number: int,
        asked: bool,
        call: tuple[Any, Any, Any],
        out: Any,
        before: Sequence[Before],
        state: Callable[[Tensor], Before],
    ) -> None:
        """Called after an operation, the ``number``-th. asked: the model knows the number of rows. call: function and
        arguments. before: the tensors among them, as they were. state: how a tensor is now."""
        results = [out] if type(out) is Tensor else flat(out)
        if out is None and call[1] and isinstance(call[1][0], Tensor):
            results = [call[1][0]]  # an item was set
        if asked or not before:
            self._see(kind_of(call[0]), number, asked, call, results, before, state)
        for k, t in enumerate(results):
            self._of[id(t)] = number, k

    def _see(
        self, kind: Kind, number: int, asked: bool, call: Any, results: Any, before: Sequence[Before], state: Any
    ) -> None:
        data = slotted = False
        drawn = kind.name in _DRAWS and not _own_generator(call[1], call[2])
        for t, _, entry in before:
            if entry is not None:
                data = True
            elif id(t) in self._slots:
                slotted = True
            elif self._drawn and self._of.get(id(t)) in self._drawn:
                drawn = True
        if drawn and not data:
            self._drawn.update((number, k) for k in range(len(results)))
        if data and asked:
            labels = [None if (now := state(t)[2]) is None else now[1] for t in results]
            if not labels or any(type(found) is not Many for found in labels):
                self._record(kind, call, before, list(map(_apart_from_rows, results, labels)), data)
        elif asked and (slotted or drawn):
            self._record(kind, call, before, results, data)

    def _record(self, kind: Kind, call: tuple[Any, Any, Any], before: Sequence[Before], out: Any, data: bool) -> None:
        func, args, kwargs = call
        step: list[Any] = [func]
        ways: Ways | None = None
        chosen = _row_index(args, before[0][2]) if kind.rule is selections.getitem and data else None
        for t, _, entry in before:
            if t is chosen:
                step.append("rows")  # which rows they are, the label of the result shows
            elif entry is not None:
                step.append(self._of.get(id(t)))
            elif self._fixed(t):
                step.append(id(t))
            elif kind.writes and kind.name in _DRAWS and t is args[0]:
                step.append(None)  # what was there before is overwritten
            else:
                ways = (_ways(kind, before) if data else ()) if ways is None else ways
                step.append(self._which(t, ways))
        if kind.rule not in _SHAPED and (kwargs or len(args) != 1 or not isinstance(args[0], Tensor)):
            sizes = kind.name in _SIZES
            made = sizes or kind.name in _DRAWS or kind.name == "new_full"
            left_out = (Tensor, tuple, list, int) if sizes else (Tensor, tuple, list) if made else Tensor
            step += [_plain(a) for a in args if not isinstance(a, left_out)]
            step += [(key, _plain(a)) for key, a in kwargs.items() if key != "size" and not isinstance(a, Tensor)]
        if data:
            step += out
        elif kind.name not in _DRAWS and kind.rule not in _ALIKE and kind.name not in _MOVED:
            # of parameters or random numbers alone: values may tell how many there are
            shapes = [t.shape for t in (*(t for t, _, _ in before if not self._fixed(t)), *out)]
            apart = kind.name in _LEADING or kind.rule is moves.reshape
            apart = apart and len({shape[:1] for shape in shapes}) == 1 and min(map(len, shapes)) > 1
            step += [tuple(shape[1:] if apart else shape) for shape in shapes]
        self.steps.append(tuple(step))

    def _which(self, t: Tensor, rows: Ways) -> Any:
        """What identifies an argument that is no data: its content, or the operation that made it."""
        made = self._of.get(id(t))
        if id(t) not in self._slots and made not in self._drawn:
            key = id(t), version(t), rows
            if key not in self._contents or self._contents[key][0]() is not t:
                self._contents[key] = weakref.ref(t), *_content(t, rows)
            _, content, differs = self._contents[key]
        else:
            content, differs = made or id(t), bool(rows) and _without_rows(t, rows)[1]
        if differs:
            self.places.add(len(self.steps))
        return content

    def found(self) -> tuple[Any, ...] | None:
        """The course; None if the model has not asked for the number of rows. No hash of it: those of −1 and −2 are
        equal, and so are those of 1 and 2⁶¹."""
        return tuple(self.steps) if self.steps else None


def _own_generator(args: Any, kwargs: Any) -> bool:
    """Are numbers drawn from a generator that the model has made? Then they are known, as constants are."""
    return any(isinstance(a, torch.Generator) for a in (*args, *kwargs.values()))


def _row_index(args: Any, entry: Any) -> Tensor | None:
    """The index of the rows' dimension in ``x[rows, places]``, where x has its rows in one dimension."""
    items = args[1] if isinstance(args[1], tuple) else (args[1],)
    if entry is None or type(entry[1]) is not Axis or not all(type(i) in (int, slice, Tensor) for i in items):
        return None
    if len(items) <= entry[1].dim or any(type(i) is Tensor and i.dtype in (torch.bool, torch.uint8) for i in items):
        return None
    found = items[entry[1].dim]
    return found if type(found) is Tensor and sum(i is found for i in items) == 1 else None


def _ways(kind: Kind, before: Sequence[Before]) -> Ways:
    """Where the rows of the data are. A parameter or a buffer has the same shape for every number of rows."""
    aligned = kind.rule in _BROADCAST
    found = {
        (t.shape[e[1].dim], e[1].before, e[1].after, e[1].dim - t.ndim if aligned else None)
        for t, _, e in before
        if e is not None and type(e[1]) is Axis
    }
    return tuple(found)


def _without_rows(t: Tensor, rows: Ways) -> tuple[Tensor, bool]:
    """(the tensor with one row along dimensions that may be that of the rows, whether rows differ)."""
    t, differs = t.detach(), False
    for dim in range(t.ndim):
        for length, before, after, place in rows:
            if t.shape[dim] != length or length < 2 or not t.numel() or place not in (None, dim - t.ndim):
                continue
            parts = t.unflatten(dim, (before, length // (before * after), after))  # type: ignore[no-untyped-call]
            if parts.stride(dim + 1) and bool((parts != parts.narrow(dim + 1, 0, 1)).any()):
                differs = True
            else:
                t = parts.select(dim + 1, 0).flatten(dim, dim + 1)
            break
    return t, differs


def _content(t: Tensor, rows: Ways) -> tuple[Any, bool]:
    """(a hash of the content, without dimensions along which it is constant; whether it differs from row to row)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(t) or t.layout != torch.strided or t.is_inference():
        return "unknown", True
    t, differs = _without_rows(t, rows)
    for dim in range(t.ndim):
        one = t.narrow(dim, 0, 1) if t.shape[dim] > 1 else t
        if one is not t and (t.stride(dim) == 0 or bool((t == one).all())):
            t = one
    return (t.dtype, tuple(t.shape), checksum(t.contiguous())), differs


def _apart_from_rows(t: Tensor, label: Lineage | None) -> Any:
    """The shape of a result without its rows, and where they are."""
    if type(label) is not Axis:
        return t.ndim, t.dtype, t.requires_grad
    shape, place = t.shape, label.dim
    return label, t.dtype, t.requires_grad, shape[:place], shape[place + 1 :]


def _plain(value: Any) -> Any:
    """A copy of an argument that is equal only to that of the same value (0.0 and −0.0 differ); tensors in it are
    recorded by themselves. What is not known equals nothing, so the batch is tested."""
    kind = type(value)
    if value is None or kind in _EXACT:
        return kind, value
    if isinstance(value, (int, float, complex, str)):
        return kind, repr(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple((key, _plain(v)) for key, v in value.items())
    if isinstance(value, slice):
        return "slice", _plain(value.start), _plain(value.stop), _plain(value.step)
    if isinstance(value, (np.ndarray, np.generic)):
        return str(value.dtype), value.shape, value.tobytes()
    return "tensor" if isinstance(value, Tensor) else next(unlike_any)
