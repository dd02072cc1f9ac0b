"""torch.func inside a model: vmap over the rows, and jacobians, gradients and products of them within it.

Inside torch.vmap a function sees one row, and a rule could not tell the rows from what it is given. So each parameter
is replaced there by a copy for every element that vmap runs over, which costs no memory until its gradient arrives;
and that gradient has the rows among its dimensions. Derivatives inside the function are taken by torch as usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import pyfunctorch

from sordino.errors import Refused
from sordino.gradients.elementwise import stand_in
from sordino.gradients.flow import flat
from sordino.gradients.lineage import MANY
from sordino.gradients.slots import Slot, describe
from sordino.gradients.tape import Tape, replace


def active() -> bool:
    """Does a transform of torch.func run?"""
    return torch._C._are_functorch_transforms_active()


def inside(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on slots within a transform, whatever else it is given."""
    levels = [t for t in pyfunctorch.retrieve_all_functorch_interpreters() if t.key() == functorch.TransformType.Vmap]
    slots = [s for s in map(tape.slot, flat((args, kwargs))) if s is not None]
    if not levels and tape.rows > 1:
        raise Refused(
            f"{describe(func, slots)}: torch.func differentiates a function of several rows here, and the rows' shares "
            "of its parameters can't be told apart; differentiate a function of one row and map it over the rows, "
            "torch.vmap(torch.func.grad(function))(rows), with the parameters used inside"
        )

    def batched(t: Tensor) -> Tensor:
        slot = tape.slot(t)
        return t if slot is None else _copies(tape, func, slot, levels)

    return tape.mark(func(*replace(args, batched), **replace(kwargs, batched)))


def _copies(tape: Tape, func: Any, slot: Slot, levels: list[Any]) -> Tensor:
    """The slot's value for every element of every vmap, as the function within sees it: without those dimensions."""
    with pyfunctorch.temporarily_clear_interpreter_stack():
        out = stand_in(tape, func, slot, (*(t.batch_size() for t in levels), *slot.value.shape), MANY)
        tape.uses[-1].mapped = True
    for level in levels:
        out = functorch._add_batch_dim(out, 0, level.level())
    return out
