"""Answers to questions about all rows (``if mask.all()``) that no single record decides.

What Python reads from several rows may reach any of them, so a batch in which it does is tested. An answer that would
be the same without any one of the records can't pass anything from that record to the others: "for all" if it holds,
or fails for two records; "for any" if it holds for two, or for none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.labels.lineage import Axis, Lineage, Owners, spread


class Answers:
    """The results of ``any`` and ``all`` over everything in a tensor. real: the number of rows that are records, one
    each, and no padding; 0 if a record may have several rows."""

    def __init__(self) -> None:
        self.real = 0
        self._steady: dict[int, weakref.ref[Tensor]] = {}

    def note(
        self, name: str, args: Any, label_of: Callable[[Any], Lineage | None], out: Sequence[Tensor], rows: int
    ) -> None:
        """Called after every operation with data; those that count are x.any() and x.all()."""
        if name not in ("any", "all") or len(args) != 1 or out[0].ndim:
            return
        x, label = args[0], label_of(args[0])
        if not isinstance(label, (Axis, Owners)) or torch._C._functorch.is_functorch_wrapped_tensor(x):
            return
        x = x.detach() != 0
        decisive = spread(label, x.shape, rows)[(x if name == "any" else ~x).cpu()]
        own = decisive[(decisive >= 0) & (decisive < self.real)]
        if not len(decisive) or bool((decisive < 0).any()) or (len(own) > 1 and int(own.min()) < int(own.max())):
            self._steady[id(out[0])] = weakref.ref(out[0])

    def steady(self, tensors: Sequence[Tensor]) -> bool:
        """Were all of these such answers that no single record decides?"""
        return bool(tensors) and all((ref := self._steady.get(id(t))) is not None and ref() is t for t in tensors)
