"""What `train` was given, held against what it takes: a mistake is one sentence before anything else happens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InputError
from sordino.plan.core import Plan
from sordino.registry import default
from sordino.training.loop import Settings


def check_asked(
    model: Any, loss: Any, dataset: Any, plan: Any, *, optimizer: Any, lr: Any, settings: Any, callbacks: Any
) -> None:
    """Checks that every argument of `train` is of its kind.

    Raises:
        InputError: one is not; the message says what to give instead.
    """
    if isinstance(model, type):
        raise InputError(f"model is the class {model.__name__}: give an instance, {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    if not callable(loss):
        raise InputError(
            f"loss = {checks.brief(loss)} is no function: give one of (outputs, targets) with one value per row, such "
            "as torch.nn.functional.cross_entropy"
        )
    if not isinstance(plan, Plan):
        raise InputError(
            f"plan = {checks.brief(plan)} is no plan: make one with a method's function, "
            f"such as sordino.{default()}(epsilon=…, delta=…, records=…, expected_batch=…, epochs=…)"
        )
    if isinstance(dataset, Mapping):
        raise InputError(
            "the dataset is a dict of columns: give a pair (inputs, targets); inputs may be a dict of tensors"
        )
    _check_update(optimizer, lr)
    if settings is not None and not isinstance(settings, Settings):
        raise InputError(f"settings = {checks.brief(settings)}: give sordino.Settings(chunk=…, eval_every=…, …)")
    if not isinstance(callbacks, list | tuple):
        raise InputError("callbacks is a list: write callbacks=[…], also for a single one")


def _check_update(optimizer: Any, lr: Any) -> None:
    if isinstance(optimizer, Optimizer):
        raise InputError(
            "optimizer is an instance: give its class and lr=… (its options in Settings(optimizer_options=…)), for the "
            "run makes it itself, so that it can be rehearsed, saved and resumed"
        )
    if optimizer is not None and not callable(optimizer):
        raise InputError(
            f"optimizer = {checks.brief(optimizer)}: give a class, such as torch.optim.SGD (names are for recipes)"
        )
    if lr is not None and not isinstance(lr, Tensor):
        checks.real("lr", lr)
