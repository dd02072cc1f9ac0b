"""Tests the update before anything is released, so that an optimizer that fails on its settings costs nothing.

Two updates with gradients of ones, on copies of the weights, with a separate optimizer and scheduler: the run itself is
not touched, and nothing depends on the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from sordino.errors import InputError, SordinoError
from sordino.training.state import refuse_unsaveable

_UPDATES = 2  # errors with momentum occur in the second


def refuse_infinite(options: Mapping[str, Any]) -> None:
    """InputError for the first option that is, or contains, a number that is not finite."""
    for name, value in options.items():
        for part in value if isinstance(value, list | tuple) else (value,):
            if isinstance(part, float) and not math.isfinite(part):
                raise InputError(f"{name} = {value!r}: numbers must be finite")


def rehearse(
    make: Callable[[list[nn.Parameter]], Optimizer],
    trained: Iterable[Tensor],
    scheduler: Callable[[Optimizer], LRScheduler] | None,
    *,
    saved: bool,
) -> None:
    """Tests the update. An optimizer that uses other parameters than the given ones is not tested.

    Raises:
        InputError: an update fails, gives weights that are not finite, or (with `saved`) has a state that can't be
            saved.
    """
    copies = [nn.Parameter(tensor.detach().clone()) for tensor in trained]
    finite = [bool(copy.isfinite().all()) for copy in copies]
    try:
        optimizer = make(copies)
        known = {id(copy) for copy in copies}
        if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
            return
        schedule = scheduler(optimizer) if scheduler is not None else None
        for _ in range(_UPDATES):
            for copy in copies:
                copy.grad = torch.ones_like(copy)
            optimizer.step()
            if schedule is not None:
                schedule.step()
        if saved:
            refuse_unsaveable(optimizer.state_dict())
    except SordinoError:
        raise
    except Exception as error:  # a third-party optimizer may raise anything
        raise InputError(f"the optimizer failed in a test before anything was released: {error}") from error
    for copy, was_finite in zip(copies, finite, strict=True):
        if was_finite and not bool(copy.isfinite().all()):
            raise InputError(
                "a test of the optimizer, before anything was released, gave weights that are not finite: check "
                "lr, momentum and its other options"
            )
