"""torch.func inside a model: vmap over the rows, and jacobians, gradients and products of them within it.

Inside torch.vmap a function receives one row, and a rule could not tell the rows from the other arguments. So each
parameter is replaced by one copy for every element that vmap runs over, which needs no memory until its gradient
arrives; that gradient has the rows among its dimensions. Derivatives inside the function are computed by torch as
usual.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch import pyfunctorch

from sordino.errors import Refused
from sordino.gradients.labels.flow import flat, replace
from sordino.gradients.labels.lineage import MANY
from sordino.gradients.layers.elementwise import stand_in
from sordino.gradients.tape.slots import Slot, describe
from sordino.gradients.tape.tape import Tape


def active() -> bool:
    """Is a torch.func transform active?"""
    return torch._C._are_functorch_transforms_active()


def inside(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on slots within a transform, whatever its other arguments."""
    levels = [t for t in pyfunctorch.retrieve_all_functorch_interpreters() if t.key() == functorch.TransformType.Vmap]
    slots = [s for s in map(tape.slot, flat((args, kwargs))) if s is not None]
    if not levels and tape.rows > 1:
        raise Refused(
            f"{describe(func, slots)}: torch.func differentiates a function of several rows here, and the rows' "
            "contributions to its parameters can't be separated; differentiate a function of one row and map it over "
            "the rows, torch.vmap(torch.func.grad(function))(rows), with the parameters used inside"
        )

    def batched(t: Tensor) -> Tensor:
        slot = tape.slot(t)
        return t if slot is None else _copies(tape, func, slot, levels)

    return tape.mark(func(*replace(args, batched), **replace(kwargs, batched)))


def _copies(tape: Tape, func: Any, slot: Slot, levels: list[Any]) -> Tensor:
    """The slot's value for every element of every vmap, without these dimensions, as the inner function sees it."""
    with pyfunctorch.temporarily_clear_interpreter_stack():
        out = stand_in(tape, func, slot, (*(t.batch_size() for t in levels), *slot.value.shape), MANY)
        tape.uses[-1].mapped = True
    for level in levels:
        out = functorch._add_batch_dim(out, 0, level.level())
    return out
