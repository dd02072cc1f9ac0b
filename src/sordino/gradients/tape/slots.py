"""Slots and their uses: what a tape (``tape.py``) records of a forward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.sums.contributions import Contribution
from sordino.gradients.sums.standardisation import Pull, pulled
from sordino.gradients.tape.layout import Frame, Layout

Emit = Callable[[Tensor, Frame], Iterable[tuple["Slot", Contribution]]]


@dataclass(eq=False, slots=True)
class Slot:
    """A parameter (``parents`` is its own name) or something computed from parameters and constants alone.

    value: detached; for a parameter that is divided over processes the whole, gathered on request.
    tensor: the same, connected to the leaves of its parameters in autograd's graph; for a parameter
    None until something is computed from it alone (``Tape.connected``).
    source: the parameter and the pull-back to it, if it is known in closed form.
    stretched: the slot that this one repeats along dimensions, aligned from the right. looked_up: the table and the
    constant indices whose lookup this is. tiled: the tensor that this one repeats along dimension 0.
    made: the operation on constants and parameters that made it, if there is a rule for that operation on data.
    """

    tensor: Tensor | None
    given: Tensor
    parents: frozenset[str]
    name: str | None = None
    source: tuple[Slot, Pull] | None = None
    stretched: Slot | None = None
    looked_up: tuple[Slot, Tensor] | None = None
    tiled: Tensor | None = None
    made: tuple[Any, Any, Any] | None = None
    whole: Callable[[Tensor], Tensor] | None = None

    @property
    def value(self) -> Tensor:
        return self.given if self.whole is None else self.whole(self.given)


@dataclass(eq=False, slots=True)
class Use:
    """One operation on slots and data. ``shape`` and ``lead`` describe the tensor whose gradient arrives.

    layout: where the rows are in that tensor; None if the program does not determine it.
    """

    func: Any
    slots: tuple[Slot, ...]
    shape: torch.Size
    lead: tuple[int, ...]
    emit: Emit
    held: tuple[tuple[Tensor, int], ...] = ()
    layout: Layout | None = None
    index: int = -1
    permute: tuple[int, ...] | None = None  # brings an arriving gradient into ``shape``
    tapped: weakref.ref[Tensor] | None = None  # the output, whose label gives the layout
    mapped: bool = False  # it represents one element of torch.vmap

    @property
    def label(self) -> str:
        return describe(self.func, self.slots)

    def release(self) -> None:
        """Releases the activations: this use is not needed any more."""
        self.emit, self.held, self.slots = nothing, (), ()


def describe(func: Any, slots: Sequence[Slot]) -> str:
    """For messages: the operation and its parameters."""
    names = sorted({n for s in slots for n in s.parents})
    return f"{getattr(func, '__name__', func)}({', '.join(names)})"


def nothing(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
    return []


def pulling_back(emit: Emit) -> Emit:
    """The same, with contributions to tensors whose pull-back is known converted to their parameters."""

    def pulling(gradient: Tensor, frame: Frame) -> Iterable[tuple[Slot, Contribution]]:
        for slot, part in emit(gradient, frame):
            yield (slot, part) if slot.source is None else (slot.source[0], pulled(part, slot.source[1]))

    return pulling


def not_implemented(label: str, error: NotImplementedError) -> Refused:
    """A refusal for operations that torch does not implement for nested, sparse and other special tensors."""
    return Refused(
        f"{label}: torch does not implement what per-record gradients need here, as for nested and sparse "
        f"tensors ({str(error)[:80] or 'not implemented'}); use padded and dense tensors"
    )


def hold(*tensors: Tensor) -> tuple[tuple[Tensor, int], ...]:
    return tuple([(t, t._version) for t in tensors])


def check_held(use: Use) -> None:
    """The inputs that a rule stored must not have been written to since."""
    for t, version in use.held:
        if t._version != version:
            raise Refused(
                f"{use.label}: its input was modified in place after the call; "
                "use the out-of-place version of the operation that follows (for example inplace=False)"
            )


class ModuleState(Protocol):
    """What a tape may query about tensors whose creation it did not intercept."""

    def constant(self, t: Tensor) -> bool:
        """Did it exist before the pass, and is it the same for all rows?"""

    def registered(self, t: Tensor) -> bool:
        """Is it a parameter or a buffer of the model or its loss?"""

    def open(self, t: Tensor) -> None:
        """Python gets access to its memory."""

    def wrote(self, t: Tensor) -> None:
        """An operation wrote to it; it had no label before. Raises Refused if its memory is that of the model."""
