"""Checks a recipe with `[method] name = "dp-mac"`: what is trained, on which data, and under which plan.

    [features]  name = "none", or "dp-pca": components, noise_multiplier, scale, whiten; multiply (a public constant)
    [model]     name = "classifier" or "autoencoder"; hidden = [300]; activation
    [method]    order, curvature, value, bounding, split, bound, curvature_bound, value_bound, mu, radius,
                z_steps, z_lr, z_start, z_order, z_rate, w_steps, floor,
                thresholds_noise, thresholds_every, thresholds_quantile
    [train]     optimizer = "adam", "sgd" (momentum) or "cg"; lr, steps or epochs, scheduler, average, …

Pixels are used as they are, in [0, 1]: a public scale. Unknown keys, and keys that would be ignored, are errors.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sordino import data
from sordino.clipping import clipping_from_dict
from sordino.errors import InputError, Refused, did_you_mean
from sordino.methods.dp_mac.coefficients import CONCATENATED, Expansion
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.optimise import WSteps
from sordino.methods.dp_mac.pca import PcaBudget
from sordino.methods.dp_mac.thresholds import PrivateThresholds
from sordino.methods.dp_mac.training import Mac
from sordino.methods.dp_mac.words import WORDS
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.plan.core import Plan, Statistic
from sordino.plan.make import make_sampling
from sordino.training.loop import Settings
from sordino.training.settings import recipe_settings

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

_Z = {"z_steps": "steps", "z_lr": "lr", "z_start": "start", "z_order": "order", "z_rate": "rate", "mu": "mu"}
_Z |= {"radius": "radius"}
_EXPANSION = ("order", "curvature", "value", "bounding", "split")
_BOUNDS = {"bound": "gradient", "curvature_bound": "curvature", "value_bound": "value"}
_THRESHOLDS = {"thresholds_noise": "noise_multiplier", "thresholds_every": "every", "thresholds_quantile": "quantile"}


@dataclass(frozen=True)
class MacRecipe:
    """Everything that a DP-MAC run needs, except the records."""

    recipe: Recipe
    widths: tuple[int, ...]
    mac: Mac
    plan: Plan
    settings: Settings
    pca: PcaBudget | None
    multiply: float

    @property
    def autoencoder(self) -> bool:
        return self.recipe.model.name == "autoencoder"

    def network(self) -> Network:
        """A new network, initialised from the recipe's public seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.run.seed)
            activation = self.recipe.model.options.get("activation", "relu")
            return Network(self.widths, activation, "squared" if self.autoencoder else "sigmoid")


def read(recipe: Recipe, progress: bool | None = None, known: tuple[tuple[int, ...], int] | None = None) -> MacRecipe:
    """Checks the whole recipe; nothing is loaded or written. `known`: (shape, classes), once the data are read."""
    public = data.published(recipe.data)
    shape, classes = (public.shape, public.classes) if known is None else known
    if shape is None or classes is None:
        raise InputError("the plan of a dp-mac recipe depends on the shape of the data: read the data first")
    records = public.records
    pca, multiply = _features(recipe, records)
    pixels = math.prod(shape)
    inputs = pixels if pca is None else pca.components
    widths = _widths(recipe, inputs, classes)
    mac = _mac(recipe)
    plan = _plan(recipe, mac, len(widths) - 1, records, pca)
    made = MacRecipe(recipe, widths, mac, plan, recipe_settings(recipe, plan.steps, progress), pca, multiply)
    made.network()  # raises for a wrong activation
    return made


def _features(recipe: Recipe, records: int) -> tuple[PcaBudget | None, float]:
    section = recipe.features
    known = WORDS.features
    if section.name not in known:
        raise InputError(f"features {section.name!r} are not for dp-mac: {did_you_mean(section.name, known)}")
    options = dict(section.options)
    _only(options, known[section.name], "features")
    multiply = options.pop("multiply", 1.0)
    if not (isinstance(multiply, int | float) and math.isfinite(multiply) and multiply > 0):
        raise InputError(f"features.multiply = {multiply!r} must be a positive number")
    if section.name == "none":
        return None, float(multiply)
    for key in ("components", "noise_multiplier"):
        if key not in options:
            raise InputError(f"[features] dp-pca needs {key}")
    return PcaBudget(records=records, **options), float(multiply)


def _widths(recipe: Recipe, inputs: int, classes: int) -> tuple[int, ...]:
    section = recipe.model
    if section.name not in WORDS.models:
        raise InputError(f"model {section.name!r} is not one of dp-mac: {did_you_mean(section.name, WORDS.models)}")
    _only(section.options, WORDS.models[section.name], "model")
    if section.name == "autoencoder" and recipe.features.name != "none":
        raise InputError("an autoencoder reconstructs its own inputs: features must be 'none'")
    hidden = section.options.get("hidden", [300])
    if not isinstance(hidden, list | tuple) or not hidden:
        raise InputError(f"model.hidden = {hidden!r} must be a list of widths, with at least one")
    return (inputs, *hidden, inputs if section.name == "autoencoder" else classes)


def _mac(recipe: Recipe) -> Mac:
    options, train = dict(recipe.method.options), recipe.train
    _only(options, WORDS.keys, "method")
    _only(train.options, ("momentum",), "train")
    if train.lr is None:
        raise InputError("[train] needs lr")
    thresholds = {_THRESHOLDS[key]: options[key] for key in _THRESHOLDS if key in options}
    if thresholds and not {"noise_multiplier", "every"} <= set(thresholds):
        raise InputError("private thresholds need thresholds_noise and thresholds_every in [method]")
    expansion = Expansion(**{key: options[key] for key in _EXPANSION if key in options})
    bounds = {_BOUNDS[key]: options[key] for key in _BOUNDS if key in options}
    for part in bounds:
        if part not in expansion.parts:
            raise InputError(f"[method] bounds the {part}, which this expansion does not have: it would be ignored")
    return Mac(
        z=ZSteps(**{_Z[key]: options[key] for key in _Z if key in options}),
        expansion=expansion,
        w=WSteps(
            train.optimizer,
            train.lr,
            options.get("w_steps", 1),
            options.get("floor", 1.0),
            train.options.get("momentum", 0.0),
        ),
        bounds=bounds,
        private=PrivateThresholds(**thresholds) if thresholds else None,
    )


def _plan(recipe: Recipe, mac: Mac, layers: int, records: int, pca: PcaBudget | None) -> Plan:
    privacy, sampling, train = recipe.privacy, recipe.sampling, recipe.train
    clipping = {"name": recipe.clipping.name, "clip_norm": recipe.clipping.clip_norm, **recipe.clipping.options}
    if clipping_from_dict(clipping) != CONCATENATED:
        raise Refused("[clipping] is not for dp-mac: a record's vector has norm 1, and [method] bounds its parts")
    if sampling.name != "poisson" or sampling.cap is not None or privacy.relation not in (None, "add-remove"):
        raise Refused("DP-MAC is proven for Poisson sampling under add-remove only")
    if privacy.norm_histogram is not None:
        raise InputError("privacy.norm_histogram is not supported by dp-mac: leave it out (see thresholds_noise)")
    if (train.steps is None) == (train.epochs is None):
        raise InputError("give either train.steps or train.epochs, not both and not neither")
    rate = make_sampling("poisson", sampling.expected_batch, records).to_dict()["sampling_rate"]
    steps = train.steps if train.steps is not None else math.ceil((train.epochs or 0) / rate - 1e-9)
    statistics: list[Statistic] = [] if pca is None else [pca.statistic()]
    if mac.private is not None:
        statistics.append(mac.private.statistic(steps, rate))
    return Plan.dp_mac(
        parts=mac.parts(layers),
        delta=privacy.delta,
        records=records,
        expected_batch=sampling.expected_batch,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        steps=steps,
        accountant=privacy.accountant,
        insecure_seed=privacy.insecure_seed,
        statistics=statistics,
    )


def _only(options: Mapping[str, Any], known: Collection[str], section: str) -> None:
    for key in options:
        if key not in known:
            raise InputError(f"unknown key in [{section}]: {key!r}: {did_you_mean(key, known)}")
