"""Rows in an order that the data decides (tokens sorted by their expert), and back again: a proof that no value passes
from one row to another on the way.

``order = ids.argsort()`` depends on all rows, and so does the place of every row in ``h[order]``. What is computed
there is each row's own all the same if it is computed alike for every place and returns to where it came from. For an
order π, the actual indices of this pass, a tensor is a *member* along a dimension if

    t = u.index_select(dim, π)

where u, which is never computed, is what the same operations give without the order: every place of u is computed from
its own row. π itself is a member (u is 0, 1, 2, …), and so are the sorted values. The steps (``order_steps.py``)
preserve this equation, or lead back to u; each is decided by the values of this pass, in every pass. Any other
operation on a member (a slice, a sum over the places, a table of places, ``item``) ends the proof: the rows count as
exchanging values, and are tested in every batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from sordino.gradients.labels.flow import Labelled, flat
from sordino.gradients.labels.lineage import MIXED, Lineage, owners
from sordino.gradients.labels.order_steps import Given, Order, Step, step_of
from sordino.gradients.labels.versions import foreign, version
from sordino.gradients.labels.vocabulary import Kind


class Labels(Labelled, Protocol):
    """What is needed of the labels of a pass (``labels.Book``)."""

    mixed: bool

    def put(self, t: Tensor, label: Lineage) -> None:
        """Gives a tensor this label."""

    def blank(self, t: Tensor) -> bool:
        """Does it contain constants, and have its rows by its shape alone?"""


@dataclass(frozen=True, eq=False)
class Member:
    """A tensor that is ordered along ``dim``, in this version. loose: it was computed from the order alone, so that
    without a proof it depends on all rows (MIXED)."""

    ref: weakref.ref[Tensor]
    version: int
    graded: bool
    order: Order
    dim: int
    loose: bool

    def holds(self, t: Tensor) -> bool:
        """Is it what it was when it was recorded? Not if it was written to, or if a custom function returned it."""
        if t.requires_grad and (not self.graded or foreign(type(t.grad_fn))):  # type: ignore[arg-type]
            return False
        return self.version == version(t)


@dataclass(frozen=True, eq=False)
class Verdict:
    """About one operation on members, before it runs. mixed: whether rows exchanged values before it. lent: the labels
    of members that are MIXED during the operation."""

    step: Step | None
    order: Order
    mixed: bool
    lent: Sequence[tuple[Tensor, int, Lineage]] = ()


class Orders:
    """The members of one pass. granted: the running operation's effect on the rows is proven. proving: its results are
    members, or return to their places."""

    def __init__(self, book: Labels) -> None:
        self._book = book
        self._of: dict[int, Member] = {}
        self.granted = self.proving = False

    def __bool__(self) -> bool:
        return bool(self._of)

    def begin(self, key: Tensor, label: Lineage, places: Tensor, values: Tensor | None) -> bool:
        """key was sorted: ``places`` are the indices, ``values`` the sorted numbers, if they are to be followed."""
        own = owners(label, key.shape, self._book.rows).expand(key.shape)  # type: ignore[arg-type]
        order = Order(places.detach().clone(), key.detach().clone(), own)
        for t in (places,) if values is None else (places, values):
            self._add(t, order, 0, loose=True)
        return True

    def _add(self, t: Tensor, order: Order, dim: int, loose: bool) -> None:
        self._of[id(t)] = Member(weakref.ref(t), version(t), t.requires_grad, order, dim, loose)

    def member(self, t: Tensor) -> Member | None:
        found = self._of.get(id(t))
        return found if found is not None and found.ref() is t else None

    def judge(self, kind: Kind, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Verdict | None:
        """Called before an operation on ``tensors``. None: no member is among them."""
        found = {id(t): m for t in tensors if (m := self.member(t)) is not None}
        if not found:
            return None
        members = [(t, found[id(t)]) for t in {id(t): t for t in tensors if id(t) in found}.values()]
        order, step, mixed = members[0][1].order, None, self._book.mixed
        if all(m.holds(t) and m.order is order for t, m in members):
            dims = {id(t): m.dim for t, m in members}
            step = step_of(self._book, Given(kind, args, kwargs, tensors, dims, order, self._blank))
        if step is None:
            return Verdict(None, order, mixed, self._lend(members))
        self.granted, self.proving = step.clean, True
        loose = step.loose and all(m.loose for _, m in members)
        return Verdict(replace(step, loose=loose), order, mixed)

    def _blank(self, t: Tensor) -> bool:
        return self._book.lineage(t) is None or self._book.blank(t)

    def _lend(self, members: Sequence[tuple[Tensor, Member]]) -> list[tuple[Tensor, int, Lineage]]:
        """No step: what was computed from the order alone depends on all rows; the rest is no member any more, and rows
        exchange values."""
        lent = []
        for t, m in members:
            if m.loose and m.holds(t):
                label = self._book.lineage(t)
                assert label is not None
                lent.append((t, m.version, label))
                self._book.put(t, MIXED)
            else:
                del self._of[id(t)]
                self._book.mixed = True
                if m.loose:
                    self._book.put(t, MIXED)
        return lent

    def settle(self, verdict: Verdict, out: Any) -> None:
        """Called when the operation has run."""
        self.granted = self.proving = False
        for t, before, label in verdict.lent:
            if version(t) == before:
                self._book.put(t, label)
            else:
                self._of.pop(id(t), None)
        step = verdict.step
        if step is None:
            return
        if step.clean:
            self._book.mixed = verdict.mixed
        if step.dim is None:
            return
        for t in flat(out):
            dim = step.place(t, len(verdict.order.places))
            if dim is None:
                self._book.mixed = True
            else:
                self._add(t, verdict.order, dim, step.loose)

    def end(self, losses: Tensor) -> None:
        """Losses that are still in an order of the data are not proven to be each row's own."""
        if self.member(losses) is not None:
            self._book.mixed = True

    def clear(self) -> None:
        self._of.clear()
