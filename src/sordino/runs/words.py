"""Checks every name and key of a recipe before torch, scipy or a dataset is loaded.

So a misspelling is reported within a fraction of a second. Each part checks its own options again, with their values;
tests/runs/test_words.py checks that the tables here and those of the parts agree.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sordino import nets, registry
from sordino.checks import ACCOUNTANTS, RELATIONS, SAMPLERS
from sordino.data.catalogue import catalogue
from sordino.data.words import SOURCE_KEYS
from sordino.errors import InputError, Refused, did_you_mean
from sordino.features.words import OPTIONS as FEATURES

if TYPE_CHECKING:
    from sordino.runs.recipe import (
        ClippingSection,
        DataSection,
        FeaturesSection,
        MethodSection,
        ModelSection,
        TrainSection,
    )

SCHEDULERS = ("constant", "cosine", "linear")
AVERAGES = ("none", "ema", "tail")
UNITS = ("record", "user")
CLIPPINGS: Mapping[str, tuple[str, ...]] = {
    "flat": (),
    "automatic": ("gamma",),
    "normalised": (),
    "per-layer": ("split",),
    "l1": (),
    "l2-linf": ("p",),
}
REFUSED_CLIPPINGS = ("p-averaged", "p_averaged", "microbatch")
"""Known names that are refused with a reason (sordino.clipping)."""
NO_OWNERS = (
    'privacy.unit = "user", but the rows have no owners: name the column or array with their ids in [data], '
    'user = "…" (csv, parquet, hf, npz; images: a regular expression for names of files), or have your function '
    'return "users"'
)

_COMMON = ("weight_decay", "maximize", "foreach", "differentiable")
_ADAM = (*_COMMON, "betas", "eps", "capturable")
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "sgd": (*_COMMON, "momentum", "dampening", "nesterov", "fused"),
    "adam": (*_ADAM, "amsgrad", "fused", "decoupled_weight_decay"),
    "adamw": (*_ADAM, "amsgrad", "fused"),
    "nadam": (*_ADAM, "momentum_decay", "decoupled_weight_decay"),
    "rmsprop": (*_COMMON, "alpha", "eps", "momentum", "centered", "capturable"),
    "adagrad": (*_COMMON, "lr_decay", "initial_accumulator_value", "eps", "fused"),
    "averaging-sgd": (),
}
"""The optimizers of [train] and their options."""


def check_words(sections: Mapping[str, Any], keys: Mapping[str, Collection[str]]) -> None:
    """Checks all names, and the keys of those sections whose keys depend on a name.

    Args:
        sections: The given sections of the recipe, by name.
        keys: The keys that each section always has.

    Raises:
        InputError: a name or a key is unknown; the message names the nearest known one and lists all.
        Refused: users are to be the unit, but the rows have none.
    """
    method = sections.get("method")
    name = registry.default() if method is None else method.name
    _known("method.name", name, registry.names())
    own = registry.words(name)
    _check_data(sections["data"], keys["data"])
    if own is not None:
        _check_method(method, own, keys["method"])
        _check_part("model", sections["model"], own.models, {one: nets.options_of(one) for one in nets.names()}, keys)
        if "features" in sections:
            _check_part("features", sections["features"], own.features, FEATURES, keys)
        _check_train(sections["train"], own, keys["train"])
    if "clipping" in sections:
        _check_clipping(sections["clipping"], keys["clipping"])
    _known("sampling.name", sections["sampling"].name, SAMPLERS)
    privacy = sections["privacy"]
    _known("privacy.accountant", privacy.accountant, ACCOUNTANTS)
    _known("privacy.unit", privacy.unit, UNITS)
    if privacy.relation is not None:
        _known("privacy.relation", privacy.relation, RELATIONS)
    if privacy.unit == "user" and not _has_owners(sections["data"]):
        raise Refused(NO_OWNERS)


def _has_owners(section: DataSection) -> bool:
    """Whether its rows may have owners: those of the catalogue have none, those of files need the key `user`."""
    if section.name in SOURCE_KEYS:
        return "user" in section.options or "user" not in SOURCE_KEYS[section.name]
    return ":" in section.name


def _known(key: str, name: str, known: Iterable[str], also: str = "") -> None:
    names = list(known)
    if name not in names:
        raise InputError(f"{key} = {name!r} is unknown: {did_you_mean(name, names)}{also}")


def _keys(place: str, given: Iterable[str], known: Collection[str], common: Iterable[str]) -> None:
    for key in given:
        if key not in known:
            raise InputError(f"unknown key in {place}: {key!r}: {did_you_mean(key, {*known, *common})}")


def _check_data(section: DataSection, common: Collection[str]) -> None:
    if ":" in section.name:
        return
    sets = [one.name for one in catalogue()]
    _known("data.name", section.name, [*sets, *SOURCE_KEYS], ", or module:function with --allow-code")
    place = f"[data] of {section.name}"
    _keys(place, section.options, SOURCE_KEYS.get(section.name, ()), common)


def _check_method(section: MethodSection | None, own: registry.Words, common: Collection[str]) -> None:
    if section is None:
        return
    _keys(f"[method] of {section.name}", section.options, own.keys, common)
    for key, names in own.choices.items():
        if isinstance(section.options.get(key), str):
            _known(f"method.{key}", section.options[key], names)


def _check_part(
    place: str,
    section: ModelSection | FeaturesSection,
    own: Mapping[str, Collection[str]],
    common: Mapping[str, Collection[str]],
    keys: Mapping[str, Collection[str]],
) -> None:
    """Checks [model] or [features]: the method's own names if it has any, else the common ones."""
    if ":" in section.name:
        return
    known = own or common
    if section.name not in known:
        raise InputError(
            f"{place}.name = {section.name!r} is unknown: {did_you_mean(section.name, known)}"
            f"{_elsewhere(place, section.name, bool(own))}"
        )
    _keys(f"[{place}] of {section.name}", section.options, known[section.name], keys[place])


def _elsewhere(place: str, name: str, own: bool) -> str:
    """The methods that know the name, if this one does not."""
    part = {"model": "models", "features": "features"}[place]
    owners = [one for one in registry.names() if name in getattr(registry.words(one) or registry.Words(), part)]
    if owners:
        return f"; {name!r} is for the method {' or '.join(owners)}"
    if own:
        return "; this method has its own"
    others = {one: sorted(getattr(registry.words(one) or registry.Words(), part)) for one in registry.names()}
    return "".join(f"; with the method {one}: {', '.join(names)}" for one, names in others.items() if names)


def _check_train(section: TrainSection, own: registry.Words, common: Collection[str]) -> None:
    _known("train.optimizer", section.optimizer, own.optimizers or OPTIMIZERS)
    _known("train.scheduler", section.scheduler, SCHEDULERS)
    _known("train.average", section.average, AVERAGES)
    some = OPTIMIZERS.get(section.optimizer, ()) if not own.optimizers else ("momentum",)
    every = {key for keys in OPTIMIZERS.values() for key in keys}
    for key in section.options:
        if key not in every:  # another optimizer's key is refused later, with the reason
            raise InputError(f"unknown key in [train]: {key!r}: {did_you_mean(key, {*some, *common})}")


def _check_clipping(section: ClippingSection, common: Collection[str]) -> None:
    if section.name in REFUSED_CLIPPINGS:
        return
    _known("clipping.name", section.name, CLIPPINGS)
    _keys(f"[clipping] of {section.name}", section.options, CLIPPINGS[section.name], common)
