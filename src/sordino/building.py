"""From a recipe's sections to the values that a run is made of: optimizer, settings, clipping, statistics, plan.

Functions from values to values; no data is read and nothing is written. Whatever a section says that its part does
not know is an error here, before anything else happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from sordino import data
from sordino.clipping import Clipping, clipping_from_dict
from sordino.errors import InputError, Refused, did_you_mean
from sordino.features.private import PrivateNormalisation
from sordino.hidden.recipe import check_recipe
from sordino.histogram import norm_histogram
from sordino.methods import HiddenState, modelmix
from sordino.plan import Plan, Statistic
from sordino.public import public_records
from sordino.recipe import Recipe
from sordino.schedule import Schedule
from sordino.train import Settings
from sordino.updates import Averaging, AveragingSGD

T = TypeVar("T")

OPTIMIZERS: Mapping[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "averaging-sgd": AveragingSGD,
}
SCHEDULERS: Mapping[str, Callable[..., Any] | None] = {
    "constant": None,
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),
    "linear": lambda optimizer, steps: LinearLR(optimizer, 1.0, 1e-3, total_iters=steps),
}


def optimizer_of(recipe: Recipe) -> type[torch.optim.Optimizer] | None:
    """What [train] names; None where the method's guarantee depends on the update, and [method] holds it."""
    section = recipe.train
    if recipe.method.name == HiddenState.name:
        check_recipe(recipe)
        return None
    if "lr" not in recipe.method.options:
        return one_of(OPTIMIZERS, section.optimizer, "train.optimizer")
    given = [
        key for key, default in (("optimizer", "sgd"), ("scheduler", "constant")) if getattr(section, key) != default
    ]
    given += ["lr"] if section.lr is not None else []
    given += [key for key in section.options if any(key in _options(known) for known in OPTIMIZERS.values())]
    if given:
        raise Refused(
            f"[train] {', '.join(given)}: the guarantee of {recipe.method.name} depends on the update, so the plan "
            "holds it: give lr (a number or a schedule) in [method]; its proof covers neither momentum nor Adam nor "
            "weight decay"
        )
    return None


def _options(optimizer: type[torch.optim.Optimizer] | None) -> list[str]:
    parameters = inspect.signature(optimizer).parameters if optimizer is not None else ()
    return [name for name in parameters if name not in ("params", "lr")]


def settings_of(
    recipe: Recipe, optimizer: type[torch.optim.Optimizer] | None, steps: int, progress: bool | None
) -> Settings:
    section, known = recipe.train, _options(optimizer)
    for key in section.options:
        if key not in known:
            own = [name for name in type(section).__dataclass_fields__ if name != "options"]
            raise InputError(f"unknown key in [train]: {key!r}: {did_you_mean(key, known + own)}")
    schedule = one_of(SCHEDULERS, section.scheduler, "train.scheduler")
    return Settings(
        optimizer_options=section.options,
        scheduler=partial(schedule, steps=steps) if schedule else None,
        averaging=Averaging(section.average, decay=section.average_decay, tail=section.average_tail),  # type: ignore[arg-type]
        chunk=section.chunk,
        eval_every=section.eval_every,
        checkpoint_every=section.checkpoint_every,
        checkpoint_minutes=section.checkpoint_minutes,
        seed=recipe.run.seed,
        progress=progress,
    )


def clipping_of(recipe: Recipe) -> Clipping:
    section = recipe.clipping
    return clipping_from_dict({"name": section.name, "clip_norm": section.clip_norm, **section.options})


def private_normalisation(recipe: Recipe) -> PrivateNormalisation | None:
    section = recipe.features
    if section.private is None:
        given = [key for key in ("noise", "bound", "square_bound") if getattr(section, f"private_{key}") is not None]
        if given:
            raise InputError(f"[features] private_{given[0]} is given, but not private: it would be ignored")
        return None
    if section.private_noise is None or section.private_bound is None:
        raise InputError("[features] private needs private_noise (its noise multiplier) and private_bound (public)")
    return PrivateNormalisation(
        section.private, section.private_noise, section.private_bound, section.private_square_bound
    )


PUBLIC_METHODS = ("dpsgd",)
"""Methods under which rows may be set aside as public; the others' proofs or trainings know nothing of them."""


def private_records(recipe: Recipe) -> int:
    """The public number of private rows: what the recipe says, else the set's published size less its public rows."""
    section = recipe.public
    if section.given and recipe.method.name not in PUBLIC_METHODS:
        raise Refused(
            f"the method {recipe.method.name} makes no use of public rows: leave [public] out, or use one of "
            f"{', '.join(PUBLIC_METHODS)}"
        )
    if recipe.data.records is not None:
        return recipe.data.records
    return data.entry(recipe.data.name).records[0] - (public_size(recipe) if section.given else 0)


def public_size(recipe: Recipe) -> int:
    """How many rows [public] sets aside: of the published size, so that it is the same whatever the data holds."""
    section, total = recipe.public, data.entry(recipe.data.name).records[0]
    return public_records(total, fraction=section.fraction, records=section.records)


def public_origin(recipe: Recipe) -> str:
    section = recipe.public
    return (
        section.origin or f"rows of the training split of {recipe.data.name}, drawn by the public seed {section.seed}"
    )


def statistics_of(recipe: Recipe) -> tuple[Statistic, ...]:
    """What the recipe releases beside the steps."""
    rate = recipe.sampling.expected_batch / private_records(recipe)
    histogram = recipe.privacy.norm_histogram
    private = private_normalisation(recipe)
    return (
        *(() if histogram is None else (norm_histogram(histogram, rate),)),
        *(() if private is None else (private.statistic(),)),
    )


def _hidden(recipe: Recipe, clipping: Clipping, records: int) -> Plan:
    raise AssertionError("made when the number of features is known: prepare()")


def _dpsgd(recipe: Recipe, clipping: Clipping, records: int) -> Plan:
    section, sampling = recipe.privacy, recipe.sampling
    if recipe.method.options:
        raise InputError(f"the method dpsgd has no options, got {', '.join(recipe.method.options)}")
    return Plan.dpsgd(
        **_common(recipe, clipping, records), cap=sampling.cap, relation=section.relation, accountant=section.accountant
    )


def _modelmix(recipe: Recipe, clipping: Clipping, records: int) -> Plan:
    section, options = recipe.privacy, dict(recipe.method.options)
    known = ("lr", "tau_over_lr", "noise_factors")
    for key in options:
        if key not in known:
            raise InputError(f"unknown key in [method]: {key!r}: {did_you_mean(key, known)}")
    if "lr" not in options:
        raise InputError("[method] needs lr: the guarantee of modelmix depends on the step size, so the plan holds it")
    if recipe.sampling.cap is not None:
        raise InputError("cap belongs to truncated-poisson sampling, which ModelMix's proof does not cover")
    schedules: dict[str, Any] = {key: Schedule.from_dict(value) for key, value in options.items()}
    return modelmix.plan(**_common(recipe, clipping, records), **schedules, relation=section.relation or "add-remove")


def _common(recipe: Recipe, clipping: Clipping, records: int) -> dict[str, Any]:
    """What every method's plan is made of."""
    section, sampling = recipe.privacy, recipe.sampling
    return {
        "epsilon": section.epsilon,
        "noise_multiplier": section.noise_multiplier,
        "delta": section.delta,
        "records": records,
        "expected_batch": sampling.expected_batch,
        "steps": recipe.train.steps,
        "epochs": recipe.train.epochs,
        "clipping": clipping,
        "sampling": sampling.name,
        "insecure_seed": section.insecure_seed,
        "statistics": statistics_of(recipe),
    }


PLANS: Mapping[str, Callable[[Recipe, Clipping, int], Plan]] = {
    "dpsgd": _dpsgd,
    "modelmix": _modelmix,
    HiddenState.name: _hidden,
}


def one_of(known: Mapping[str, T], name: str, key: str) -> T:
    if name not in known:
        raise InputError(f"{key} = {name!r} is unknown: {did_you_mean(name, known)}")
    return known[name]
