"""The labels of one pass: which tensors hold data, and the row of each of their positions (``lineage.py``)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from sordino.errors import Refused
from sordino.gradients import selections, shards
from sordino.gradients.flow import Labels, flat
from sordino.gradients.lineage import MANY, Axis, Lineage, Many, Owners, aligned, merged
from sordino.gradients.readings import content_of, hash_of, unlike_any
from sordino.gradients.vocabulary import Kind, kind_of

Entry = tuple["weakref.ref[Tensor]", Lineage, bool, int]  # the tensor, its label, had it a gradient, its version
Before = tuple[Tensor, int, Entry | None]


def version(t: Tensor) -> int:
    try:
        return t._version
    except RuntimeError:  # inference tensors have none
        return 0


def _place(t: Tensor) -> int | None:
    """Where its memory is; None for one that has none of its own to show (within torch.func, or sparse)."""
    try:
        return t.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):
        return None


@functools.lru_cache(1 << 10)
def _foreign(node: Any) -> bool:
    """Is it the backward of an autograd.Function that is not ours?"""
    ours = getattr(getattr(node, "_forward_cls", None), "__module__", "").startswith("sordino.")
    return issubclass(node, BackwardCFunction) and not ours


_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Book:
    """Labels by tensor, for a pass over ``rows`` rows.

    read: a value of the data was brought out of a tensor (``item``), where it can't be followed.
    mixed: data of other rows took part, without a gradient, in something that has a label.
    crowded: some tensor has another dimension that is as long as the batch.
    crossed: an operation that combined values of a row with values that are certainly of several.
    hooked: something of the data has a hook, which may give another gradient than the program shows.
    asked: the program asked how many rows there are, or may have found out.
    cut: rows were taken by their places or permuted, so that what a row gets may depend on its place.
    opened: the memory of a tensor was given to Python, where writes to it are not seen.
    numbers: what was read, in its order, as hashes. What can't be compared with a later reading has one of its own.

    A label is that of a tensor as it is: with it, the version of the tensor is kept, which every write to its memory
    through autograd changes. A tensor with another version than the last operation left it with was written to where
    nobody looked (``z.imag = …``, a scripted function), and is refused.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._constants: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # tensors that were seen and hold no data
        self.read = self.mixed = self.crowded = self.hooked = False
        self.crossed: str | None = None
        self._name = ""
        self._unknown = False  # whether anything is labelled MANY
        self._of: dict[int, Entry] = {}
        self.answers: list[bool] = []  # to questions about several rows, in their order: they may decide what is done
        self.asked = self.opened = self.cut = False
        self.ruled = False  # a rule of ours is at work: what it reads goes nowhere else
        self.numbers: list[int] = []

    def suspect(self) -> None:
        """Rows take part in the choice of what others get (an index, a mask)."""
        self.mixed = True

    def lineage(self, t: Any) -> Lineage | None:
        found = self._of.get(id(t))
        if found is None or not isinstance(t, Tensor) or found[0]() is not t:
            return None
        if self.rows > 1 and t.requires_grad and (not found[2] or _foreign(type(t.grad_fn))):  # type: ignore[arg-type]
            self.put(t, MANY)  # returned by a function with a backward of its own: the rows of that are not known
            return MANY
        return found[1]

    def has(self, t: Tensor) -> bool:
        """Has it a label, which may be one from before it was written to?"""
        found = self._of.get(id(t))
        return found is not None and found[0]() is t

    def holds(self, t: Tensor) -> bool:
        """Does it hold data? Refused if it was written to since the last operation."""
        return self.entry(t) is not None

    def entry(self, t: Tensor) -> Entry | None:
        """What is known of a tensor that holds data, as it is now. Refused if it was written to since the last
        operation."""
        found = self._of.get(id(t))
        if found is None or found[0]() is not t:
            return None
        if found[3] != version(t):
            raise Refused(
                "a tensor that holds data was written to where sordino can't look (z.real = "
                "…, z.imag = …, in place by a custom, a scripted or a compiled function), so its records are not known "
                "any more; make a new tensor instead, by operations of torch: torch.complex(real, imaginary)",
                private=f"its shape is {tuple(t.shape)}",
            )
        return found

    def note(self, t: Tensor) -> None:
        """It was seen, and holds no data."""
        self._constants[id(t)] = weakref.ref(t), version(t)

    def hidden(self, t: Tensor) -> None:
        """It was computed from data where nobody looked. A custom function's forward pass is seen operation by
        operation; what a scripted function reads is not, so that it may have read anything."""
        self.put(t, MANY)
        if not _foreign(type(t.grad_fn)):  # type: ignore[arg-type]
            self.numbers.append(next(unlike_any))

    def brought(self, t: Tensor) -> None:
        """It came from where the program can't be followed (numpy), and may hold values that were read."""
        self.read = True
        self.numbers.append(content_of(t))

    def known(self, t: Tensor) -> bool:
        """Is it a constant, as it was left by the last operation on it?"""
        found = self._constants.get(id(t))
        return found is not None and found[0]() is t and found[1] == version(t)

    def state(self, t: Tensor) -> Before:
        """The tensor with its version and label, before an operation."""
        return t, version(t), self._entry(t)

    def _entry(self, t: Tensor) -> Entry | None:
        """What is known of this tensor; not of one that had its place in memory before."""
        found = self._of.get(id(t))
        return found if found is not None and found[0]() is t else None

    def put(self, t: Tensor, label: Lineage) -> None:
        if not t.numel():
            label = Owners(torch.full([1] * t.ndim, -1))  # nobody's
        self._of[id(t)] = weakref.ref(t), label, t.requires_grad, version(t)
        self.read = self.read or t.is_inference()  # such tensors have no versions: a write could not be noticed
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

    def join(self, tensors: Sequence[Any], shape: Sequence[int], combines: bool = True) -> Lineage | None:
        """The common label of tensors that are broadcast to ``shape``: that of the ones with a gradient, if others,
        which can't carry a gradient to a parameter, disagree with it. combines: the result is made of numbers, not of
        answers (comparisons)."""
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
        """Label the result of an operation on data. before: the tensors that it was given, as they were."""
        kind = kind_of(func)
        if kind.plain and type(out) is Tensor and (label := self._alike(before, out)) is not None:
            self.see_hooks()
            self.put(out, label)
            return
        if kind.reads:
            if self.ruled:
                return
            self.read = True
            if isinstance(out, bool) and not all(self._one_owner(t) for t in flat(args)):
                self.answers.append(out)
            self.numbers.append(hash_of(out))
            return
        if kind.own is not None:
            if kind.own == "requires_grad_" and id(args[0]) in self._of:
                self.put(args[0], self._of[id(args[0])][1])  # the same values, as a leaf
                return
            if kind.own == "__setitem__":
                self._overwrite(args[0], MANY if self.rows == 1 else selections.assigned(self, args, kwargs, out))
                return
            if kind.own == "__set__":
                self._attribute(getattr(func.__self__, "__name__", ""), *args)
        self.hooked = self.hooked or kind.hooks  # whoever asks for a place in the graph can put a hook there
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
        if isinstance(out, (tuple, list)) and any(not isinstance(self.lineage(t), Axis) for t in results):
            self.asked = True  # how many results there are may depend on the number of rows (unbind, split)

    def _alike(self, before: Sequence[Before], out: Tensor) -> Axis | None:
        """The label that all data among these tensors has, where each is as large as the result; None otherwise."""
        label: Axis | None = None
        shape = out.shape
        for t, _, entry in before:
            if entry is None:
                continue
            own = entry[1]
            if type(own) is not Axis or (label is not None and own != label) or t.shape != shape:
                return None
            if t.requires_grad and (not entry[2] or _foreign(type(t.grad_fn))):  # type: ignore[arg-type]
                return None
            label = own
        return label if self.rows > 1 else None

    def see_hooks(self) -> None:
        """Notes hooks on what autograd keeps for its way back."""
        top = _saved_hooks(True)
        if top is not None and shards.hooked(top):
            self.hooked = True

    def _replaced(self, func: Any, args: Any) -> None:
        """t.data = value: t has other numbers, and its place in the graph, with its label, as before."""
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
            self.mixed = True  # also the shape of its result may tell of all rows (unique, nonzero)
        if isinstance(labels, Many):
            labels = self._of_one_row(args, kwargs, out) or labels
        elif self._unknown and any(isinstance(self.lineage(t), Many) for t in (*flat(args), *flat(kwargs))):
            self.mixed = True
        return labels

    def _one_owner(self, t: Tensor) -> bool:
        label = self.lineage(t)
        return label is None or (isinstance(label, Owners) and label.own.numel() == 1)

    def _of_one_row(self, args: Any, kwargs: Any, out: Any) -> list[Lineage | None] | None:
        """Whatever is computed from one row alone belongs to it; None where the data is of several."""
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

    def _attribute(self, name: str, target: Tensor, value: Any = None) -> None:
        """target.data = value, target.real = value, target.imag = value."""
        if name in ("data", "real", "imag") and self.lineage(value) != self.lineage(target):
            self._overwrite(target, MANY)

    def _overwrite(self, t: Tensor, label: Lineage | None) -> None:
        """``t`` now holds what was written (``written`` sees to the tensors that share its memory)."""
        if label is not None:
            self.put(t, label)
        elif self.lineage(t) is not None:
            self.forget(t)

    def written(self, before: Sequence[Before], data: bool) -> None:
        """After an operation: every argument that it wrote to has a label for what it holds now, and tensors that share
        its memory hold that as well: their rows are not known any more, unless the label stayed the same."""
        for t, old, entry in before:
            now = version(t)
            if now == old and self._of.get(id(t)) is entry:  # nearly always: nothing was written
                continue
            found = self._entry(t)
            if now == old and (found is entry or (found and entry and found[1] == entry[1])):
                continue
            if found is not None and found[3] != now:  # no rule said what was written
                self.put(t, MANY)
                self.mixed = True
            elif found is None and now != old:
                self.note(t)
                if data:
                    self.put(t, MANY)
            self._shared(t, old, entry)

    def _shared(self, t: Tensor, old: int, entry: Entry | None) -> None:
        after = self._entry(t)
        label, was = (None if e is None else e[1] for e in (after, entry))
        same, now, place = label == was and not isinstance(label, Owners), version(t), _place(t)
        if place is None:
            return
        for ref, one, _, stored in [*self._of.values()]:
            other = ref()
            if other is None or other is t or (same and (stored != old or version(other) != now)):
                continue
            if _place(other) == place:
                self.put(other, one if same else MANY)
        for ref, stored in [*self._constants.values()] if entry is None else ():
            other = ref()
            if other is None or other is t or (after is None and (stored != old or version(other) != now)):
                continue
            if _place(other) == place:
                if after is None:
                    self.note(other)
                else:
                    self.put(other, MANY)
        base = t._base
        if base is not None and base is not t and not same and label is not None:
            self.put(base, MANY)
