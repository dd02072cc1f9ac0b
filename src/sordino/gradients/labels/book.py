"""The labels of one pass: which tensors contain data, and the row of each of their positions (``lineage.py``)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients import shards
from sordino.gradients.labels import selections
from sordino.gradients.labels.answers import Answers
from sordino.gradients.labels.flow import Labels, constant, flat, sorting
from sordino.gradients.labels.lineage import MANY, Axis, Lineage, Many, Owners, aligned, merged
from sordino.gradients.labels.orders import Orders
from sordino.gradients.labels.readings import content_of, hash_of, unlike_any
from sordino.gradients.labels.versions import foreign, version
from sordino.gradients.labels.vocabulary import Kind, kind_of
from sordino.gradients.sums.memory import address

# the tensor, its label, whether it had a gradient, its version
Entry = tuple["weakref.ref[Tensor]", Lineage, bool, int]
Before = tuple[Tensor, int, Entry | None]

_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Book:
    """Labels by tensor, for a pass over ``rows`` rows.

    read: a value of the data was converted to a Python number (``item``), where it can't be followed. absent: it
    was asked for a number that is in no row, which is the answer for each part of the batch as well. mixed: data of
    other rows influenced, without a gradient, something that has a label. crowded: some tensor has another dimension
    that is as long as the batch. crossed: an operation that combined values of one row with values that certainly
    belong to several. hooked: a tensor with data has a hook, which may return another gradient than the program shows.
    foreign: a function with its own backward pass was used. asked: the program queried the number of rows, or could
    have inferred it. cut: rows were selected by position or permuted, so that a row's result may depend on its place.
    placed: the same, except where it is proven that they return to their places. opened: Python was given access to a
    tensor's memory, where writes are not intercepted. stopped: a value was read from a tensor with a gradient, which
    does not pass what is made of it. numbers: hashes of what was read, in order; unique if one record may decide it.

    A label is valid for one version of a tensor. The version is stored with it; every write to the tensor's memory
    through autograd changes it. A tensor whose version is not the one that the last intercepted operation left was
    written to outside of the mode (``z.imag = …``, a scripted function), and is refused.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._constants: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # intercepted tensors that contain no data
        self.read = self.absent = self.mixed = self.crowded = self.hooked = self.foreign = False
        self.crossed: str | None = None
        self._name, self._unknown = "", False  # of the running operation; whether any label is MANY
        self._of: dict[int, Entry] = {}
        self.answers: list[bool] = []  # to questions about several rows, in order: they may determine control flow
        self.asked = self.opened = self.cut = self.placed = self.stopped = False
        self.ruled = False  # one of our rules is running: the values that it reads are not used elsewhere
        self.numbers: list[int] = []
        self._blank: dict[int, weakref.ref[Tensor]] = {}  # constants that have their rows by their shape alone
        self.orders, self.given = Orders(self), Answers()

    def suspect(self) -> None:  # some rows influence which values other rows receive (an index, a mask)
        self.mixed = True

    def by_place(self) -> None:
        self.placed = self.cut = True

    def lineage(self, t: Any) -> Lineage | None:
        found = self._of.get(id(t))
        if found is None or not isinstance(t, Tensor) or found[0]() is not t:
            return None
        if self.rows > 1 and t.requires_grad and (not found[2] or foreign(type(t.grad_fn))):  # type: ignore[arg-type]
            self.foreign = True
            self.put(t, MANY)  # returned by a function with its own backward: its rows are not known
            return MANY
        return found[1]

    def ordered(self, key: Tensor, label: Lineage, places: Tensor, values: Tensor | None) -> bool:
        """Rows were sorted by ``key``: where they go is followed (``orders.py``). False inside of a rule."""
        return not self.ruled and self.orders.begin(key, label, places, values)

    def granted(self) -> bool:  # the running operation is proven to treat each row by itself
        return self.orders.granted

    def has(self, t: Tensor) -> bool:
        """Does it have a label, possibly one from before the last write?"""
        return self._entry(t) is not None

    def holds(self, t: Tensor) -> bool:
        return self.entry(t) is not None

    def entry(self, t: Tensor) -> Entry | None:
        """The entry of a tensor that contains data, in its present version. Refused if it was written to since the last
        operation."""
        found = self._of.get(id(t))
        if found is None or found[0]() is not t:
            return None
        if found[3] != version(t):
            raise Refused(
                "a tensor that contains data was written to where sordino can't intercept it (z.real = "
                "…, z.imag = …, in place by a custom, a scripted or a compiled function), so its records are not known "
                "any more; make a new tensor by torch operations instead: torch.complex(real, imaginary)",
                private=f"its shape is {tuple(t.shape)}",
            )
        return found

    def note(self, t: Tensor) -> None:  # it was intercepted and contains no data
        self._constants[id(t)] = weakref.ref(t), version(t)

    def hidden(self, t: Tensor) -> None:
        """It was computed from data by an operation that was not intercepted. The forward pass of a custom function is
        intercepted operation by operation; that of a scripted function is not, so it may have read any value."""
        self.put(t, MANY)
        self.foreign = True
        if not foreign(type(t.grad_fn)):  # type: ignore[arg-type]
            self.numbers.append(next(unlike_any))

    def brought(self, t: Tensor) -> None:
        """Its values are used where no label follows: it comes from numpy, or is a size, a bound or a factor."""
        self.read = True
        self.numbers.append(content_of(t) if self._entry(t) is None else next(unlike_any))

    def failed(self) -> None:  # a model that catches the error knows something
        self.asked, self.read, self.orders.granted = True, True, False
        self.numbers.append(next(unlike_any))

    def scalars(self, func: Any, before: Sequence[Before]) -> None:
        """Numbers that an operation takes from tensors as sizes or factors: ``x.roll(n, 1)``."""
        if kind_of(func).joins or self.ruled:
            return
        for t, _, entry in before[1:]:
            if entry is not None and not t.ndim:
                self.brought(t)

    def known(self, t: Tensor) -> bool:
        """Is it a constant that was not written to since the last operation on it?"""
        found = self._constants.get(id(t))
        return found is not None and found[0]() is t and found[1] == version(t)

    def state(self, t: Tensor) -> Before:
        """The tensor with its version and label, before an operation."""
        return t, version(t), self._entry(t)

    def _entry(self, t: Tensor) -> Entry | None:
        """The entry of this tensor; not that of an earlier tensor with the same id."""
        found = self._of.get(id(t))
        return found if found is not None and found[0]() is t else None

    def put(self, t: Tensor, label: Lineage) -> None:
        if not t.numel():
            label = Owners(torch.full([1] * t.ndim, -1))  # nobody's
        self._of[id(t)] = weakref.ref(t), label, t.requires_grad, version(t)
        self.read = self.read or t.is_inference()  # such tensors have no versions: a write would go unnoticed
        if not isinstance(label, Axis):
            self._unknown = self._unknown or isinstance(label, Many)
            self.cut = True
        if not self.crowded and self.rows > 1 and t.shape.count(self.rows) > 1:
            self.crowded = True

    def forget(self, t: Tensor) -> None:
        self._of.pop(id(t), None)

    def alive(self) -> list[weakref.ref[Tensor]]:
        return [entry[0] for entry in self._of.values()]

    def clear(self) -> None:
        self._of.clear()
        self._constants.clear()
        self.orders.clear()

    def join(self, tensors: Sequence[Any], shape: Sequence[int], combines: bool = True) -> Lineage | None:
        """The common label of tensors that are broadcast to ``shape``. If those without a gradient disagree, it is that
        of the others: no gradient passes there. combines: the result consists of numbers, not of comparisons."""
        found: list[Lineage] = []
        graded: list[Lineage] = []
        for t in tensors:
            label = self.lineage(t)
            if label is None:
                continue
            if t.ndim != len(shape) and not isinstance(label, Many):
                label = aligned(label, t.shape, shape, self.rows)
            found.append(label)
            if t.requires_grad:
                graded.append(label)
        if not found:
            return None
        if len(found) == 1:
            return found[0]
        label = merged(found, shape, self.rows)
        if not isinstance(label, Many):
            return label
        if label.certain and combines and any(not isinstance(one, Many) for one in found):
            self.crossed = self.crossed or self._name
        if graded and len(graded) < len(found):
            label = merged(graded, shape, self.rows)
            self.mixed = True
        return label

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any, before: Sequence[Before] = ()) -> None:
        """Labels the result of an operation on data. before: its argument tensors, as they were before the call."""
        kind = kind_of(func)
        if kind.plain and type(out) is Tensor and (label := self._alike(before, out)) is not None:
            self.see_hooks()
            self.put(out, label)
            return
        if kind.reads:
            if self.ruled:
                return
            self.stopped = self.stopped or any(t.requires_grad for t in flat(args))
            if isinstance(out, bool) and not all(self._one_owner(t) for t in flat(args)):
                self.answers.append(out)
                if not out and self.rows > 1 and kind.name == "__contains__" and self._in_no_row(*args):
                    self.absent = True
                    return
            self.read = True
            self.numbers.append(hash_of(out) if self.given.steady(flat(args)) else next(unlike_any))
            return
        if self._blank and args and (kind.writes or kind.own is not None):
            self._fill(args, kwargs)
        if kind.own is not None:
            if kind.own == "requires_grad_" and id(args[0]) in self._of:
                self.put(args[0], self._of[id(args[0])][1])  # the same values, as a leaf
                return
            if kind.own == "__setitem__":
                self._overwrite(args[0], MANY if self.rows == 1 else selections.assigned(self, args, kwargs, out))
                return
            if kind.own == "__set__":
                self._attribute(getattr(func.__self__, "__name__", ""), *args)
        self.hooked = self.hooked or kind.hooks  # code that holds a node of the graph can attach a hook to it
        self.see_hooks()
        results = flat(out)
        if not results:
            self._replaced(func, args)
            if out is not None and not kind.hooks:  # torch.numel, is_same_size, …
                self.asked = True
                self.numbers.append(hash_of(out))
            return
        if self.rows == 1:
            for t in results:
                self.put(t, MANY)
            return
        self._put_all(kind, args, kwargs, results, self._labels(kind, args, kwargs, out))
        self.given.note(kind.name, args, self.lineage, results, self.rows)
        if isinstance(out, (tuple, list)) and any(not isinstance(self.lineage(t), Axis) for t in results):
            self.asked = True  # the number of results may depend on the number of rows (unbind, split)

    def _fill(self, args: Any, kwargs: Any) -> None:
        """Data is written into zeros of the batch's shape: it determines the rows."""
        if self.blank(args[0]) and any(map(self.has, (*flat(args[1:]), *flat(kwargs)))):
            self.forget(args[0])
            del self._blank[id(args[0])]  # from now on it contains data

    def blank(self, t: Any) -> bool:
        """Does it contain constants, and have its rows by its shape alone?"""
        return id(t) in self._blank and self._blank[id(t)]() is t

    def _in_no_row(self, t: Tensor, value: Any) -> bool:
        """Does "not in t" hold for each part of the batch as well, since no position of t belongs to several rows?

        Then no group of rows could show an effect of the answer. Another one makes another program, which is tested.
        """
        return not isinstance(self.lineage(t) or MANY, Many) and not isinstance(value, Tensor)

    def _alike(self, before: Sequence[Before], out: Tensor) -> Axis | None:
        """The label that all data among these tensors shares, if each is as large as the result; None otherwise."""
        label: Axis | None = None
        shape = out.shape
        for t, _, entry in before:
            if entry is None:
                continue
            own = entry[1]
            hidden = t.requires_grad and (not entry[2] or foreign(type(t.grad_fn)))  # type: ignore[arg-type]
            if type(own) is not Axis or (label is not None and own != label) or t.shape != shape or hidden:
                return None
            label = own
        return label if self.rows > 1 else None

    def see_hooks(self) -> None:
        """Detects hooks on the tensors that autograd saves."""
        top = _saved_hooks(True)
        self.hooked = self.hooked or (top is not None and shards.hooked(top))

    def _replaced(self, func: Any, args: Any) -> None:
        """t.data = value: t has new numbers, while its node in the graph and its label are unchanged."""
        if getattr(func, "__name__", "") != "__set__" or getattr(func.__self__, "__name__", "") != "data":
            return
        old, new = self.lineage(args[0]), self.lineage(args[1])
        if old is None and new is not None:
            self.put(args[0], new)
        if new is not None and (new != old or isinstance(new, Owners)):
            self.mixed = True

    def _labels(self, kind: Kind, args: Any, kwargs: Any, out: Any) -> Labels:
        self._name = kind.name
        labels: Labels = MANY
        if kind.rule is not None:
            labels = kind.rule(self, args, kwargs, out)
        else:
            self.mixed = True  # the shape of its result may also depend on all rows (unique, nonzero)
        if isinstance(labels, Many):
            labels = self._of_one_row(args, kwargs, out) or labels
        elif self._unknown and any(isinstance(self.lineage(t), Many) for t in (*flat(args), *flat(kwargs))):
            self.mixed = True
        return labels

    def _one_owner(self, t: Tensor) -> bool:
        label = self.lineage(t)
        return label is None or (isinstance(label, Owners) and label.own.numel() == 1)

    def _of_one_row(self, args: Any, kwargs: Any, out: Any) -> list[Lineage | None] | None:
        """Whatever is computed from one row alone belongs to that row; None if the data belongs to several."""
        rows: set[int] = set()
        for t in (*flat(args), *flat(kwargs)):
            label = self.lineage(t)
            if label is None:
                continue
            if not isinstance(label, Owners) or label.own.numel() != 1:
                return None
            rows.add(int(label.own))
        if len(rows) != 1 or rows == {-1}:
            return None
        return [Owners(torch.full([1] * t.ndim, next(iter(rows)))) for t in flat(out)]

    def _put_all(self, kind: Kind, args: Any, kwargs: Any, results: Sequence[Tensor], labels: Labels) -> None:
        each: Iterable[Lineage | None] = labels if isinstance(labels, list) else [labels] * len(results)
        into = args[0] if kind.writes and args else kwargs.get("out")
        for t, label in zip(results, each, strict=False):
            if t is into:
                self._overwrite(t, label)
            elif label is None:
                self.forget(t)
                self.note(t)
            else:
                self.put(t, label)
                if kind.rule is constant:
                    self._blank[id(t)] = weakref.ref(t)
                elif isinstance(label, Owners) and kind.rule is not sorting and not self.orders.proving:
                    self.placed = self.placed or bool((label.own >= 0).any())

    def _attribute(self, name: str, target: Tensor, value: Any = None) -> None:
        """target.data = value, target.real = value, target.imag = value."""
        if name in ("data", "real", "imag") and self.lineage(value) != self.lineage(target):
            self._overwrite(target, MANY)

    def _overwrite(self, t: Tensor, label: Lineage | None) -> None:
        """``t`` now contains what was written (``written`` handles the tensors that share its memory)."""
        if label is not None:
            self.put(t, label)
        elif self.lineage(t) is not None:
            self.forget(t)

    def written(self, before: Sequence[Before], data: bool) -> list[Tensor]:
        """After an operation: every argument that it wrote to gets a label for its new values. For other tensors that
        share the memory the rows are not known any more, unless the label is unchanged. Returns what had no label."""
        constants: list[Tensor] = []
        for t, old, entry in before:
            now = version(t)
            if now == old and self._of.get(id(t)) is entry:  # the usual case: nothing was written
                continue
            found = self._entry(t)
            if now == old and (found is entry or (found and entry and found[1] == entry[1])):
                continue
            if entry is None and now != old:
                constants.append(t)
            if found is not None and found[3] != now:  # no rule described the write
                self.put(t, MANY)
                self.mixed = True
            elif found is None and now != old:
                self.note(t)
                if data:
                    self.put(t, MANY)
            self._shared(t, old, entry)
        return constants

    def _shared(self, t: Tensor, old: int, entry: Entry | None) -> None:
        after = self._entry(t)
        label, was = (None if e is None else e[1] for e in (after, entry))
        same, now, place = label == was and not isinstance(label, Owners), version(t), address(t)
        if place is None:
            return
        for ref, one, _, stored in [*self._of.values()]:
            other = ref()
            if other is None or other is t or (same and (stored != old or version(other) != now)):
                continue
            if address(other) == place:
                self.put(other, one if same else MANY)
        for ref, stored in [*self._constants.values()] if entry is None else ():
            other = ref()
            if other is None or other is t or (after is None and (stored != old or version(other) != now)):
                continue
            if address(other) == place:
                if after is None:
                    self.note(other)
                else:
                    self.put(other, MANY)
        base = t._base
        if base is not None and base is not t and not same and label is not None:
            self.put(base, MANY)
