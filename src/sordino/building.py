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
from sordino.coupling import PublicUse, WarmUp, rule_from_dict
from sordino.errors import InputError, Refused, did_you_mean
from sordino.features.private import PrivateNormalisation
from sordino.hidden.recipe import check_recipe
from sordino.histogram import norm_histogram
from sordino.methods import Coupling, HiddenState, coupling, modelmix
from sordino.momentum import InnerMomentum, RecordMomentum
from sordino.plan import Plan, Statistic
from sordino.public import public_records
from sordino.recipe import Recipe
from sordino.schedule import Schedule
from sordino.training import Settings
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
        optimizer_options={**section.options, **_outer(recipe, optimizer)},
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


PUBLIC_METHODS = ("dpsgd", Coupling.name)
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


def check_companions(recipe: Recipe) -> None:
    """Refused or InputError for a [batch_clipping] that nothing covers or would be ignored."""
    section, method = recipe.batch_clipping, recipe.method.name
    if section.draws < 1:
        raise InputError(f"[batch_clipping] draws = {section.draws}: give at least 1")
    if not section.given:
        if section != type(section)():
            raise InputError("[batch_clipping] needs companions, the number of public rows beside each record")
        return
    if method != "dpsgd":
        raise Refused(
            f"[batch_clipping] is covered by the proof of dpsgd, not by that of {method}: leave one of them out"
        )
    if not recipe.public.given:
        raise Refused(
            "[batch_clipping] normalises private records with public ones, and the recipe declares none: say which in "
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
            f"[batch_clipping] companions = {section.companions}: give 1 to {most}, the number of public rows"
        )


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
    for key in recipe.method.options:
        if key not in RECORD_KEYS:
            raise InputError(f"unknown key in [method] of dpsgd: {key!r}: {did_you_mean(key, RECORD_KEYS)}")
    return Plan.dpsgd(
        **_common(recipe, clipping, records),
        **record_vector(recipe),
        cap=sampling.cap,
        relation=section.relation,
        accountant=section.accountant,
    )


RECORD_KEYS = ("inner_length", "inner_decay", "outer_kept", "record_momentum_kept")
"""[method] of dpsgd: how many past iterates join, the factor per iterate of age, the part of the released momentum that
a step keeps; Algorithm 1: the part of each record's own momentum that a step keeps."""


def record_vector(recipe: Recipe) -> dict[str, Any]:
    """What a record's one vector is made of: arguments of Plan.dpsgd."""
    options = recipe.method.options
    given = [key for key in ("inner_length", "inner_decay") if key in options]
    if len(given) == 1:
        raise InputError(
            "[method] inner_length (past iterates) and inner_decay (factor per iterate of age) go together"
        )
    kept = options.get("record_momentum_kept")
    return {
        "inner": InnerMomentum(options["inner_length"], options["inner_decay"]) if given else None,
        "augmentation": recipe.augmentation if recipe.augmentation.changes else None,
        "record_momentum": None if kept is None else RecordMomentum(kept),
    }


def _outer(recipe: Recipe, optimizer: type[torch.optim.Optimizer] | None) -> dict[str, Any]:
    """The optimizer's options that outer momentum comes to: M ← outer_kept · M + released sum is torch's SGD."""
    kept = recipe.method.options.get("outer_kept")
    if kept is None:
        return {}
    if optimizer is not torch.optim.SGD or "momentum" in recipe.train.options:
        raise InputError(
            "[method] outer_kept is the momentum of the optimizer sgd: give it once, and no other optimizer"
        )
    if isinstance(kept, bool) or not isinstance(kept, (int, float)) or not 0 <= kept < 1:
        raise InputError(
            f"outer_kept = {kept!r} must lie in [0, 1): the part of the released momentum that a step keeps"
        )
    return {"momentum": float(kept)}


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


BEFORE_NOISE = ("centring", "adaptive_clipping")
WARM_UP = {"warm_up": "steps", "warm_up_lr": "lr", "warm_up_momentum": "momentum"}


def _coupling(recipe: Recipe, clipping: Clipping, records: int) -> Plan:
    """The plan of a coupling recipe, its public rows still undeclared: their digest is known once they are read."""
    section, sampling, options = recipe.privacy, recipe.sampling, recipe.method.options
    if not recipe.public.given:
        raise InputError("the method coupling needs public rows: say which in [public] (fraction or records)")
    if recipe.features.private is not None:
        raise Refused("[features] private spends privacy on statistics that public rows give for free: leave it out")
    public_use(recipe, None)  # a rule or an option that is not known is found here
    return coupling.plan(
        public=None, centring=options.get("centring", False), quantile=options.get("adaptive_clipping"),
        **_common(recipe, clipping, records),
        cap=sampling.cap, relation=section.relation, accountant=section.accountant,
    )  # fmt: skip


def public_use(recipe: Recipe, rows: data.Split | None) -> PublicUse:
    """What [method] does with the public rows once gradients are released; the rest of it is in the plan."""
    options = {key: value for key, value in recipe.method.options.items() if key not in BEFORE_NOISE}
    warm_up = {name: options.pop(key) for key, name in WARM_UP.items() if key in options}
    projection = options.pop("projection", None)
    if warm_up and not {"steps", "lr"} <= set(warm_up):
        raise InputError("a warm-up on public rows needs warm_up (its steps) and warm_up_lr in [method]")
    return PublicUse(
        rows=data.Split(torch.zeros(1), torch.zeros(1)) if rows is None else rows,
        rule=rule_from_dict(options),
        expected_batch=recipe.public.expected_batch,
        warm_up=WarmUp(**warm_up) if warm_up else None,
        projection=projection,
        seed=recipe.public.seed,
    )


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
    Coupling.name: _coupling,
    HiddenState.name: _hidden,
}


def one_of(known: Mapping[str, T], name: str, key: str) -> T:
    if name not in known:
        raise InputError(f"{key} = {name!r} is unknown: {did_you_mean(name, known)}")
    return known[name]
