"""Maps a recipe's sections to the parts of a run: optimizer, settings, clipping, statistics, plan.

These are functions from values to values; no data are read and nothing is written. Anything in a section that its part
does not know is an error here, before anything else happens.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TypeVar

import torch

from sordino import checks, data
from sordino.clipping import Clipping, clipping_from_dict
from sordino.errors import InputError, Refused, did_you_mean
from sordino.features.private import PrivateNormalisation
from sordino.plan.core import UNITS, Plan, Statistic
from sordino.plan.method import Method, Request
from sordino.plan.public import public_records
from sordino.registry import default as default_method
from sordino.registry import method_class, names_with
from sordino.runs.recipe import Recipe
from sordino.training.histogram import norm_histogram
from sordino.training.loop import Settings
from sordino.training.settings import recipe_settings
from sordino.training.updates import AveragingSGD

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


def method_of(recipe: Recipe) -> type[Method]:
    """The class of the recipe's method."""
    return method_class(recipe.method.name, "method.name")


def optimizer_of(recipe: Recipe) -> type[torch.optim.Optimizer] | None:
    """The optimizer that [train] names; None if the guarantee depends on the update, which [method] then describes."""
    section, method = recipe.train, method_of(recipe)
    method.check_recipe(recipe)
    if not method.holds_update:
        return one_of(OPTIMIZERS, section.optimizer, "train.optimizer")
    given = [
        key for key, default in (("optimizer", "sgd"), ("scheduler", "constant")) if getattr(section, key) != default
    ]
    given += ["lr"] if section.lr is not None else []
    given += [key for key in section.options if any(key in _options(known) for known in OPTIMIZERS.values())]
    if given:
        raise Refused(
            f"[train] {', '.join(given)}: the guarantee of {recipe.method.name} depends on the update, so the plan "
            "contains it: give lr (a number or a schedule) in [method]; its proof does not cover momentum, Adam or "
            "weight decay"
        )
    return None


def _options(optimizer: type[torch.optim.Optimizer] | None) -> list[str]:
    parameters = inspect.signature(optimizer).parameters if optimizer is not None else ()
    return [name for name in parameters if name not in ("params", "lr")]


def settings_of(
    recipe: Recipe, optimizer: type[torch.optim.Optimizer] | None, steps: int, progress: bool | None
) -> Settings:
    """The settings that [train] gives; InputError for a key that the optimizer does not have."""
    section, known = recipe.train, _options(optimizer)
    for key in section.options:
        if key not in known:
            own = [name for name in type(section).__dataclass_fields__ if name != "options"]
            raise InputError(f"unknown key in [train]: {key!r}: {did_you_mean(key, known + own)}")
    options = {**section.options, **method_of(recipe).optimizer_options(recipe, optimizer)}
    return recipe_settings(recipe, steps, progress, options)


def clipping_of(recipe: Recipe) -> Clipping:
    """The clipping that [clipping] describes."""
    section = recipe.clipping
    return clipping_from_dict({"name": section.name, "clip_norm": section.clip_norm, **section.options})


def private_normalisation(recipe: Recipe) -> PrivateNormalisation | None:
    """The private normalisation that [features] asks for; None if it asks for none."""
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


def private_records(recipe: Recipe) -> int:
    """The public number of private rows: the recipe's, else the dataset's published size minus its public rows."""
    section = recipe.public
    if section.given and not method_of(recipe).takes_public_rows:
        raise Refused(
            f"the method {recipe.method.name} does not use public rows: leave out [public], or use one of "
            f"{', '.join(names_with(lambda method: method.takes_public_rows))}"
        )
    total = data.published(recipe.data).records
    if recipe.data.records is not None:
        return total
    return total - (public_size(recipe) if section.given else 0)


def public_size(recipe: Recipe) -> int:
    """The number of rows that [public] sets aside: of the published size, so that it does not depend on the data."""
    section = recipe.public
    if data.is_own(recipe.data):
        if section.records is None:
            raise InputError("[public] of your own data needs records: how many of its rows are public")
        return section.records
    total = data.entry(recipe.data.name).records[0]
    return public_records(total, fraction=section.fraction, records=section.records)


def check_companions(recipe: Recipe) -> None:
    """Raises Refused or InputError if no proof covers [batch_clipping], or if the section would be ignored."""
    section, method = recipe.batch_clipping, recipe.method.name
    if section.draws < 1:
        raise InputError(f"[batch_clipping] draws must be at least 1, got {section.draws}")
    if not section.given:
        if section != type(section)():
            raise InputError("[batch_clipping] needs companions, the number of public rows next to each record")
        return
    if "companions" not in method_of(recipe).covers:
        covered = ", ".join(names_with(lambda known: "companions" in known.covers))
        raise Refused(
            f"[batch_clipping] is covered by the proof of {covered}, not by that of {method}: leave one of them out"
        )
    if not recipe.public.given:
        raise Refused(
            "[batch_clipping] normalises private records with public rows, but the recipe declares none: say which in "
            "[public] (records = 100)"
        )
    if recipe.features.private is not None:
        raise Refused(
            "[features] private normalises records by statistics that their companions would not have: leave it out "
            "with [batch_clipping]"
        )
    most = public_size(recipe)
    if not 1 <= (section.companions or 0) <= most:
        raise InputError(
            f"[batch_clipping] companions must lie between 1 and {most}, the number of public rows; got "
            f"{section.companions}"
        )


def public_origin(recipe: Recipe) -> str:
    """Where the rows of [public] come from, for the plan and the report."""
    section = recipe.public
    return (
        section.origin or f"rows of the training split of {recipe.data.name}, drawn by the public seed {section.seed}"
    )


def statistics_of(recipe: Recipe) -> tuple[Statistic, ...]:
    """The releases of a recipe besides its steps."""
    rate = recipe.sampling.expected_batch / private_records(recipe)
    histogram = recipe.privacy.norm_histogram
    private = private_normalisation(recipe)
    return (
        *(() if histogram is None else (norm_histogram(histogram, rate),)),
        *(() if private is None else (private.statistic(),)),
    )


def check_unit(recipe: Recipe) -> None:
    """Refuses combinations whose guarantee would not be about users although the recipe asks for it."""
    if checks.choice("privacy.unit", recipe.privacy.unit, UNITS) != "user":
        for name in ("rows_per_user", "examples_per_user"):
            if getattr(recipe.privacy, name) is not None:
                raise InputError(f'privacy.{name} needs unit = "user": without it a row is a record')
        return
    if recipe.privacy.examples_per_user is not None and recipe.method.name != default_method():
        raise Refused(f"privacy.examples_per_user is accounted for the method {default_method()} only")
    if not method_of(recipe).protects_users:
        raise Refused(
            f'privacy.unit = "user": the method {recipe.method.name} treats a row as a record; use one of '
            f"{', '.join(names_with(lambda method: method.protects_users))}"
        )
    if recipe.features.private is not None or recipe.public.given:
        raise Refused(
            'privacy.unit = "user": private statistics of features and [public] rows work row by row, and a user '
            "has several rows: leave out [features] private and [public]"
        )


def plan_from(
    recipe: Recipe,
    clipping: Clipping,
    records: int,
    shape: tuple[int, ...] | None = None,
    classes: int | None = None,
) -> Plan:
    """The plan of a recipe, made by its method. `shape` and `classes` of the data are for methods that need them."""
    method = method_of(recipe)
    method.check_recipe(recipe)
    check_unit(recipe)
    plan = method.from_recipe(Request(recipe, clipping, records, statistics_of(recipe), shape, classes))
    checks.refuse_empty_delta(plan.delta, plan.records)
    return plan


def one_of(known: Mapping[str, T], name: str, key: str) -> T:
    if name not in known:
        raise InputError(f"{key} = {name!r} is unknown: {did_you_mean(name, known)}")
    return known[name]
