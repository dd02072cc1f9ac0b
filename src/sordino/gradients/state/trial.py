"""A pass on private records before training, to see whether the model and the loss fit the data.

It is no pass of the engine: nothing is labelled, and nothing is released. But what it leaves behind would be there in
every pass of the training. So attributes are put back; variables outside of the model, files and libraries must not
change if it reads values; and tensors that it computes from records and that live on are refused where they are used.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from sordino.gradients.labels.flow import flat
from sordino.gradients.labels.vocabulary import kind_of
from sordino.gradients.rows import tensors
from sordino.gradients.state.kept import put_back
from sordino.gradients.state.left import refuse_kept_values
from sordino.gradients.state.pass_memory import PassMemory


class _Followed(TorchFunctionMode):
    """Which tensors are computed from the given ones, and whether a value of any is read."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.read = False
        self.found: dict[int, weakref.ref[Tensor]] = {id(t): weakref.ref(t) for t in given}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any((ref := self.found.get(id(t))) is not None and ref() is t for t in flat((args, kwargs or {}))):
            kind = kind_of(func)
            self.read = self.read or kind.reads
            if not kind.name.startswith("new_") and not kind.name.endswith("_like"):  # of its shape only
                self.found |= {id(t): weakref.ref(t) for t in flat(out)}
        return out


@contextmanager
def trial(roots: Sequence[Any], given: Any) -> Iterator[None]:
    """Runs a model or a loss on these private tensors. roots: as in ``kept.py``.

    Raises:
        Refused: it left values of the records where a later pass could see them.
    """
    with put_back(roots, thorough=True) as state, _Followed(own := list(tensors(given))) as mode:
        yield
        if state is not None and (mode.read or state.hidden or state.seen.threads):
            assert state.libraries is not None
            refuse_kept_values(state, state.libraries, custom=False)
    PassMemory().leave(list(mode.found.values()), own)
