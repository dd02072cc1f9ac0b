"""Checks the arguments of `train` before anything else happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.plan.core import Plan
from sordino.registry import default
from sordino.training.loop import Settings
from sordino.training.updates import Update


def check_asked(
    model: Any, loss: Any, dataset: Any, plan: Any, *, optimizer: Any, lr: Any, settings: Any, callbacks: Any
) -> None:
    """Checks the type of every argument of `train`.

    Raises:
        InputError: an argument is wrong; the message says what to give instead.
    """
    if isinstance(model, type):
        raise InputError(f"model is the class {model.__name__}: give an instance, {model.__name__}(…)")
    if not isinstance(model, nn.Module):
        raise InputError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    if not callable(loss):
        raise InputError(
            f"loss = {checks.brief(loss)} is not a function: give one of (outputs, targets) with one value per row, "
            "such as torch.nn.functional.cross_entropy"
        )
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise InputError(f"loss is the class {loss.__name__}: give an instance, {loss.__name__}(…)")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError(
            "the model's weights have no values (they are on the device 'meta'): load them, or model.to_empty"
        )
    if not isinstance(plan, Plan):
        raise InputError(
            f"plan = {checks.brief(plan)} is not a plan: make one with a method's function, "
            f"such as sordino.{default()}(epsilon=…, delta=…, records=…, expected_batch=…, epochs=…)"
        )
    if isinstance(dataset, Mapping):
        raise InputError(
            "the dataset is a dict of columns: give a pair (inputs, targets); inputs may be a dict of tensors"
        )
    if isinstance(dataset, str | bytes | PathLike):
        raise InputError(
            "the dataset is a path: give its rows, a pair (inputs, targets); recipes read files ([data] path = …)"
        )
    if hasattr(dataset, "columns") and hasattr(dataset, "iloc"):
        raise InputError("the dataset is a data frame: give a pair (inputs, targets), frame[[…]] and frame[…]")
    if torch.is_inference_mode_enabled():
        raise InputError("torch.inference_mode is on, and nothing can be trained in it: call train outside of it")
    _check_update(optimizer, lr)
    if settings is not None and not isinstance(settings, Settings):
        raise InputError(f"settings = {checks.brief(settings)}: give sordino.Settings(chunk=…, eval_every=…, …)")
    if not isinstance(callbacks, list | tuple):
        raise InputError("callbacks must be a list: write callbacks=[…], also for a single one")


def _check_update(optimizer: Any, lr: Any) -> None:
    if isinstance(optimizer, Optimizer):
        raise InputError(
            "optimizer is an instance: give its class and lr=… (its options in Settings(optimizer_options=…)); the "
            "run creates the optimizer, so that it can be tested, saved and resumed"
        )
    if optimizer is not None and not callable(optimizer):
        raise InputError(
            f"optimizer = {checks.brief(optimizer)}: give a class, such as torch.optim.SGD (names are for recipes)"
        )
    if lr is not None and not isinstance(lr, Tensor) and checks.real("lr", lr) == 0:
        raise InputError("lr = 0 would spend the budget and leave the model as it is: give a positive step size")


def chosen_update(
    plan: Plan,
    model: nn.Module,
    loss: Callable[..., Tensor],
    optimizer: Callable[..., Optimizer] | None,
    lr: float | None,
    settings: Settings,
    public: Any,
) -> Update:
    """The caller's update if the guarantee does not depend on it, else the one that the plan prescribes."""
    method = plan.method
    if method.trained_by is not None:
        raise Refused(
            f"the guarantee of {method.name} covers its own training only: use {method.trained_by}, or a recipe"
        )
    given = {
        "an optimizer": optimizer is not None,
        "lr": lr is not None,
        "a scheduler": settings.scheduler is not None,
        **dict.fromkeys(settings.optimizer_options, True),
    }
    if method.holds_update and any(given.values()):
        raise Refused(
            f"the guarantee of {method.name} depends on the update, so the plan contains it: leave out "
            f"{', '.join(name for name, is_given in given.items() if is_given)}; step sizes are a schedule of the "
            "plan, and its proof does not cover momentum, Adam or weight decay"
        )
    if not method.holds_update and lr is None:
        raise InputError("give lr, the step size")
    update = method.update(plan, model, loss, public) or Update(plan, model, loss)
    if lr is not None:
        update.optimizer, update.lr = optimizer or torch.optim.SGD, lr
    return update
