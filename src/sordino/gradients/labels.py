"""The labels of one pass: which tensors hold data, and the row of each of their positions (``lineage.py``)."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from sordino.gradients import selections
from sordino.gradients.flow import Labels, flat
from sordino.gradients.lineage import MANY, Lineage, Many, Owners, aligned, merged
from sordino.gradients.vocabulary import READS, name_of, rule_for, writes


@functools.lru_cache(1 << 10)
def _foreign(node: Any) -> bool:
    """Is it the backward of an autograd.Function that is not ours?"""
    ours = getattr(getattr(node, "_forward_cls", None), "__module__", "").startswith("sordino.")
    return issubclass(node, BackwardCFunction) and not ours


class Book:
    """Labels by tensor, for a pass over ``rows`` rows.

    read: a value of the data was brought out of a tensor (``item``), where it can't be followed.
    mixed: data of other rows took part, without a gradient, in something that has a label.
    crowded: some tensor has another dimension that is as long as the batch.
    crossed: an operation that combined values of a row with values that are certainly of several.
    hooked: something of the data has a hook, which may give another gradient than the program shows.
    constants: tensors that were seen and hold no data.
    """

    def __init__(self, rows: int, constants: Mapping[int, weakref.ref[Tensor]] | None = None) -> None:
        self.rows, self.constants = rows, {} if constants is None else constants
        self.read = self.mixed = self.crowded = self.hooked = False
        self.crossed: str | None = None
        self._name = ""
        self._unknown = False  # whether anything is labelled MANY
        self._of: dict[int, tuple[weakref.ref[Tensor], Lineage, bool]] = {}

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

    def holds(self, t: Tensor) -> bool:
        found = self._of.get(id(t))
        return found is not None and found[0]() is t

    def put(self, t: Tensor, label: Lineage) -> None:
        if not t.numel():
            label = Owners(torch.full([1] * t.ndim, -1))  # nobody's
        self._of[id(t)] = (weakref.ref(t), label, t.requires_grad)
        self._unknown = self._unknown or isinstance(label, Many)
        if not self.crowded and self.rows > 1 and t.shape.count(self.rows) > 1:
            self.crowded = True

    def forget(self, t: Tensor) -> None:
        self._of.pop(id(t), None)

    def alive(self) -> list[weakref.ref[Tensor]]:
        return [ref for ref, _, _ in self._of.values()]

    def clear(self) -> None:
        self._of.clear()

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

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Label the result of an operation on data."""
        if name_of(func) in READS:
            self.read = True
            return
        if getattr(func, "__name__", "") == "requires_grad_" and id(args[0]) in self._of:
            self.put(args[0], self._of[id(args[0])][1])  # the same values, as a leaf
            return
        if getattr(func, "__name__", "") == "__setitem__":
            self._overwrite(args[0], MANY if self.rows == 1 else selections.assigned(self, args, kwargs, out))
            return
        if getattr(func, "__name__", "") == "__set__":
            self._attribute(getattr(func.__self__, "__name__", ""), *args)
        self.hooked = self.hooked or func is Tensor.register_hook
        results = (out,) if isinstance(out, Tensor) else flat(out)
        if not results:
            self._replaced(func, args)
            return
        if self.rows == 1:
            for t in results:
                self.put(t, MANY)
            return
        self._put_all(func, args, kwargs, results, self._labels(func, args, kwargs, out))

    def _replaced(self, func: Any, args: Any) -> None:
        """t.data = value: t has other numbers, and its place in the graph, with its label, as before."""
        if getattr(func, "__name__", "") != "__set__" or getattr(func.__self__, "__name__", "") != "data":
            return
        old, new = self.lineage(args[0]), self.lineage(args[1])
        if old is None and new is not None:
            self.put(args[0], new)
        if new is not None and (new != old or isinstance(new, Owners)):
            self.mixed = True

    def _labels(self, func: Any, args: Any, kwargs: Any, out: Any) -> Labels:
        rule, self._name = rule_for(func), name_of(func)
        labels: Labels = MANY
        if rule is not None:
            labels = rule(self, args, kwargs, out)
        if isinstance(labels, Many):
            labels = self._of_one_row(args, kwargs, out) or labels
        elif self._unknown and any(isinstance(self.lineage(t), Many) for t in (*flat(args), *flat(kwargs))):
            self.mixed = True
        return labels

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

    def _put_all(self, func: Any, args: Any, kwargs: Any, results: Sequence[Tensor], labels: Labels) -> None:
        each: Iterable[Lineage | None] = labels if isinstance(labels, list) else [labels] * len(results)
        into = args[0] if writes(func) and args else kwargs.get("out")
        for t, label in zip(results, each, strict=False):
            if t is into:
                self._overwrite(t, label)
            elif label is None:
                self.forget(t)
            else:
                self.put(t, label)

    def _attribute(self, name: str, target: Tensor, value: Any = None) -> None:
        """target.data = value, target.real = value, target.imag = value."""
        if name in ("data", "real", "imag") and self.lineage(value) != self.lineage(target):
            self._overwrite(target, MANY)

    def _overwrite(self, t: Tensor, label: Lineage | None) -> None:
        """Tensors that share memory with ``t`` now hold what was written: their rows are not known any more, unless
        the label stays the same."""
        old = self.lineage(t)
        if label is not None:
            self.put(t, label)
        elif old is not None:
            self.forget(t)
        if label == old and not isinstance(label, Owners):
            return
        place = t.untyped_storage().data_ptr()
        held = self.alive()
        for ref in held if old is not None else (*held, *self.constants.values()):
            other = ref()
            if other is not None and other is not t and other.untyped_storage().data_ptr() == place:
                self.put(other, MANY)
        base = t._base
        if base is not None and base is not t and label is not None:
            self.put(base, MANY)
