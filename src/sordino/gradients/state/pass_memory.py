"""Tensors that outlive a pass: those of earlier batches, which must not be used again, and those that modules hold."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor, nn

from sordino.errors import Refused
from sordino.gradients.rows import tensors
from sordino.gradients.state.generators import Numbers
from sordino.gradients.state.kept import Taken
from sordino.gradients.state.libraries import Libraries
from sordino.gradients.sums.memory import address
from sordino.gradients.survey import Held, written_to

_carried: list[weakref.ref[Tensor]] = []  # of all trainings and checks: a model may keep what another pass left


class PassMemory:
    """What a training keeps from one pass to the next. Tensors that contained data of earlier batches, also of checks
    before the training, are known to all of them."""

    def __init__(self) -> None:
        self.numbers = Numbers()  # of Python's and numpy's generators
        self.libraries = Libraries()  # as they were before the last pass in which they were compared
        self.state: Taken | None = None  # of Python's objects before the last pass
        self.began: Tensor | None = None  # the state of torch's generator before the last pass
        self.real = 0  # the rows of the pass that are records, one each, and no padding; 0 if that is not known
        self.left = False  # whether a pass that asked for the number of rows changed anything outside of the model
        self.graded = False  # whether the losses of any pass depended on a parameter
        self._constants: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def begin(self, real: int) -> None:
        """Called before a chunk's passes. real: as the attribute."""
        self.numbers.turn()
        self.real = real

    def leave(self, data: Sequence[weakref.ref[Tensor]], given: Sequence[Tensor]) -> None:
        """data: tensors that contained data in the pass. given: its inputs and targets, which the caller may use again.

        References are kept as long as the tensors live, so a tensor is recognised after any number of passes.
        """
        theirs = {id(t) for t in given}
        new = [ref for ref in data if (t := ref()) is not None and id(t) not in theirs]
        _carried[:] = [*(ref for ref in _carried if ref() is not None), *new]

    def is_constant(self, t: Tensor, held: ModuleTensors) -> bool:
        """Did it exist before this pass, without data of an earlier batch in it?"""
        if any(ref() is t for ref in _carried):
            raise Refused(
                "a tensor that was computed from an earlier batch is used again: what the model keeps between batches "
                "(a queue, a cache, a moving average) contains records without noise: remove it",
                private=f"its shape is {tuple(t.shape)}",
            )
        if held.registered(t):
            return True  # a pass that writes to these is refused
        known = self._constants.get(id(t))
        if known is not None and known[0]() is t:
            return known[1] == t._version
        self._constants[id(t)] = weakref.ref(t), t._version  # the next pass compares the version
        return held.kept(t)


class ModuleTensors:
    """The tensors that modules hold, searched once in a pass, when the first is requested.

    Searching all modules for each tensor took a tenth of MaxViT's step. Tensors that a module receives later are not
    included.
    """

    def __init__(self, modules: Sequence[nn.Module], state: Sequence[Held], memory: PassMemory) -> None:
        self._modules, self._state, self._memory = modules, state, memory
        self._registered: dict[int, Tensor] | None = None
        self._places: dict[int, Held] | None = None
        self._opened: dict[int, tuple[Held, int]] = {}
        self._kept: dict[int, Tensor] | None = None

    def constant(self, t: Tensor) -> bool:
        """Did it exist before the pass, and is it the same for all rows?"""
        return self._memory.is_constant(t, self)

    def registered(self, t: Tensor) -> bool:
        """Is it a parameter or a buffer?"""
        if self._registered is None:
            self._registered = {id(held.tensor): held.tensor for held in self._state}
        return self._registered.get(id(t)) is t

    def kept(self, t: Tensor) -> bool:
        """Is it in any attribute of a module, or in a list or dict there?"""
        if self._kept is None:
            found = (t for root in self._modules for m in root.modules() for t in tensors(list(vars(m).values())))
            self._kept = {id(t): t for t in found}
        return self._kept.get(id(t)) is t

    def open(self, t: Tensor) -> None:
        """Python gets access to its memory: if that belongs to a parameter or a buffer, its content is recorded."""
        found = self._sharing(t)
        if found is not None and id(found) not in self._opened:
            self._opened[id(found)] = found, found.content

    def open_all(self) -> None:
        """Code runs that is not intercepted: the content of all parameters and buffers is recorded."""
        for held in self._state:
            self._opened.setdefault(id(held), (held, held.content))

    def wrote(self, t: Tensor) -> None:
        """An operation wrote to this tensor. Raises Refused if it shares its memory with a parameter or a buffer that
        has another version counter (``buffer.data``); to others `check_state` applies."""
        found = self._sharing(t)
        if found is not None:
            raise written_to(found.name)

    def check_opened(self) -> None:
        """Raises Refused if a parameter or buffer whose memory was opened has another content now."""
        for held, content in self._opened.values():
            if held.content != content:
                raise written_to(held.name)

    def _sharing(self, t: Tensor) -> Held | None:
        if self._places is None:
            self._places = {p: held for held in self._state if (p := address(held.tensor))}
        place = address(t)
        return None if not place else self._places.get(place)
