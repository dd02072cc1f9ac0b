"""A suite: methods that are compared at the same ε, δ and relation, over several seeds.

    title = "Fashion-MNIST"
    epsilons = [0.5, 1, 2, 3, 8]
    delta = 1e-5
    relation = "add-remove"
    seeds = [0, 1, 2]
    insecure_seeds = true                   # reproducible noise: for public data only
    baseline = "linear"                     # for the paired differences; default: the first private method

    [[methods]]
    name = "linear"
    recipe = "../recipes/NAME.toml"         # relative to the suite; or best = "fashion-mnist", a recipe of the package
    kind = "private"                        # or "opacus", or "plain": the same network without privacy
    set = ["train.lr=4"]                    # overrides at every ε
    at = { "1" = ["train.lr=2"] }           # overrides at one ε
    epsilons = [1, 3]                       # where it is run; default: at every ε
    assumes = "no public data"

The suite sets privacy.epsilon, privacy.delta, privacy.relation and the seeds; a recipe can't change them.

A comparison shows all runs, including those without privacy, and no ε covers them jointly. So the user's own data
([data] name = "csv" and the like) are refused, unless public_data = "…" says why the records need no protection.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from sordino.checks import brief
from sordino.errors import InputError, did_you_mean
from sordino.runs.best import best_recipe
from sordino.runs.recipe import Recipe
from sordino.shown import up

KINDS = {
    "private": "trained by sordino under its own accountant",
    "opacus": "trained by Opacus with its defaults, ε by Opacus's own accountant",
    "plain": "the same network without clipping and noise: not private",
}
_OWN_KEYS = ("privacy.epsilon", "privacy.delta", "privacy.relation", "privacy.insecure_seed", "run.seed")


@dataclass(frozen=True)
class Competitor:
    """One method of the comparison. `at` contains further overrides for single values of ε."""

    name: str
    recipe: str | None = None
    best: str | None = None
    kind: str = "private"
    set: tuple[str, ...] = ()
    at: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    epsilons: tuple[float, ...] = ()
    assumes: str = ""


@dataclass(frozen=True)
class Suite:
    """What is compared, at which ε, and with which seeds."""

    path: Path
    title: str
    epsilons: tuple[float, ...]
    delta: float
    methods: tuple[Competitor, ...]
    relation: str = "add-remove"
    seeds: tuple[int, ...] = (0, 1, 2)
    insecure_seeds: bool = False
    baseline: str = ""
    notes: str = ""
    allow_code: bool = False
    public_data: str = ""

    @classmethod
    def read(cls, path: Path, *, allow_code: bool = False) -> Suite:
        """The suite in a file; InputError for anything unknown, missing or of a wrong type."""
        try:
            document = tomllib.loads(path.read_text(encoding="utf8"))
        except FileNotFoundError:
            raise InputError(f"there is no suite {path}") from None
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{path} can't be read as TOML: {error}") from error
        try:
            return cls._of(path, document, allow_code)
        except InputError as error:
            raise error.within(str(path)) from error

    @classmethod
    def _of(cls, path: Path, document: Mapping[str, Any], allow_code: bool) -> Suite:
        own = [f.name for f in fields(cls) if f.name not in ("path", "allow_code")]
        _known(document, own, "key")
        for key in ("title", "epsilons", "delta", "methods"):
            if key not in document:
                raise InputError(f"a suite needs {key}")
        epsilons = _numbers(document["epsilons"], "epsilons")
        methods = document["methods"]
        if not isinstance(methods, list) or not methods:
            raise InputError("a suite needs [[methods]]")
        suite = cls(
            path,
            _text(document["title"], "title"),
            epsilons,
            _number(document["delta"], "delta"),
            tuple(_competitor(given, epsilons) for given in methods),
            _text(document.get("relation", "add-remove"), "relation"),
            _seeds(document.get("seeds", [0, 1, 2])),
            _flag(document.get("insecure_seeds", False), "insecure_seeds"),
            _text(document.get("baseline", ""), "baseline"),
            _text(document.get("notes", ""), "notes"),
            allow_code,
            _text(document.get("public_data", ""), "public_data"),
        )
        return suite._checked()

    def _checked(self) -> Suite:
        names = [one.name for one in self.methods]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise InputError(f"two methods are called {twice[0]!r}")
        if self.baseline and self.baseline not in names:
            raise InputError(f"baseline = {self.baseline!r}: {did_you_mean(self.baseline, names)}")
        return self

    @property
    def reference(self) -> str:
        """The method with which the others are compared."""
        private = [one.name for one in self.methods if one.kind == "private"]
        return self.baseline or (private or [self.methods[0].name])[0]

    def jobs(self) -> list[Job]:
        """All runs, in order: all methods at one ε and seed, then at the next."""
        return [
            Job(self, one, epsilon, seed)
            for seed in self.seeds
            for epsilon in self.epsilons
            for one in self.methods
            if epsilon in (one.epsilons or self.epsilons) and (one.kind != "plain" or epsilon == self.epsilons[0])
        ]


@dataclass(frozen=True, eq=False)
class Job:
    """One run of the suite, hashed by identity. A method without privacy has one for each seed, not for each ε."""

    suite: Suite
    method: Competitor
    epsilon: float
    seed: int

    @property
    def folder(self) -> str:
        """The name of the run directory, independent of which part of the suite is run."""
        plain = re.sub(r"[^A-Za-z0-9]+", "-", self.method.name).strip("-").lower()[:60]
        mark = sha256(self.method.name.encode()).hexdigest()[:6]
        where = "plain" if self.method.kind == "plain" else f"eps={up(self.epsilon)}"
        return f"{plain}-{mark}/{where},seed={self.seed}"

    @property
    def overrides(self) -> list[str]:
        """The overrides of the method and of the suite; the suite's come last and take precedence."""
        suite = self.suite
        given = [*self.method.set, *self.method.at.get(f"{up(self.epsilon)}", ())]
        for one in given:
            if one.partition("=")[0].strip() in (*_OWN_KEYS, "privacy.noise_multiplier"):
                raise InputError(f"{self.method.name}: {one.partition('=')[0]} is set by the suite")
        # a plain run does not use ε: it gets the same one in every part of a suite
        epsilon = 1.0 if self.method.kind == "plain" else self.epsilon
        own = [f"privacy.epsilon={epsilon!r}", f"privacy.delta={suite.delta!r}", f"run.seed={self.seed}"]
        own += [f'privacy.relation="{suite.relation}"']
        return [*given, *own, *([f"privacy.insecure_seed={self.seed}"] if suite.insecure_seeds else [])]

    def recipe(self) -> Recipe:
        """The recipe of this run."""
        method = self.method
        try:
            if method.best is not None:
                return best_recipe(method.best, self.epsilon).recipe(self.overrides)
            path = self.suite.path.parent / str(method.recipe)
            return Recipe.read(path, self.overrides, allow_code=self.suite.allow_code)
        except InputError as error:
            raise error.within(f"{method.name} at ε = {up(self.epsilon)}") from error


def _competitor(given: Any, epsilons: tuple[float, ...]) -> Competitor:
    if not isinstance(given, Mapping):
        raise InputError("methods must be sections [[methods]]")
    _known(given, [f.name for f in fields(Competitor)], "key in [[methods]]:")
    if "name" not in given:
        raise InputError("every method of [[methods]] needs a name")
    name = _text(given["name"], "name")
    if ("recipe" in given) == ("best" in given):
        raise InputError(f"{name}: give either recipe, a file relative to the suite, or best, the name of a dataset")
    kind = _text(given.get("kind", "private"), "kind")
    if kind not in KINDS:
        raise InputError(f"{name}: kind = {kind!r}: {did_you_mean(kind, KINDS)}")
    at = given.get("at", {})
    if not isinstance(at, Mapping):
        raise InputError(f"{name}: at must be a table of ε = overrides")
    where = _numbers(given["epsilons"], "epsilons") if "epsilons" in given else ()
    named = {f"{_key(name, key):g}": _texts(value, f"{name}: at.{key}") for key, value in at.items()}
    for epsilon in [*where, *map(float, named)]:
        if epsilon not in epsilons:
            raise InputError(f"{name}: ε = {up(epsilon)} is not one of the suite's epsilons")
    paths = {key: _text(given[key], key) for key in ("recipe", "best") if key in given}
    changed, assumes = _texts(given.get("set", []), f"{name}: set"), _text(given.get("assumes", ""), "assumes")
    return Competitor(name, kind=kind, set=changed, at=named, epsilons=where, assumes=assumes, **paths)


def _key(name: str, key: str) -> float:
    try:
        return float(key)
    except ValueError:
        raise InputError(f"{name}: at.{key} must be named by a value of ε") from None


def _known(given: Mapping[str, Any], names: list[str], what: str) -> None:
    for key in given:
        if key not in names:
            raise InputError(f"unknown {what} {key!r}: {did_you_mean(key, names)}")


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{key} = {brief(value)} must be a text")
    return value


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{key} = {brief(value)} must be true or false")
    return value


def _texts(value: Any, key: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InputError(f'{key} = {brief(value)} must be a list of "section.key=value"')
    return tuple(value)


def _number(value: Any, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise InputError(f"{key} = {brief(value)} must be a positive number")
    return float(value)


def _numbers(value: Any, key: str) -> tuple[float, ...]:
    if not isinstance(value, list) or not value:
        raise InputError(f"{key} = {brief(value)} must be a list of positive numbers")
    found = tuple(_number(one, key) for one in value)
    if len(set(found)) < len(found):
        raise InputError(f"{key} = {brief(value)}: a value is repeated")
    return found


def _seeds(value: Any) -> tuple[int, ...]:
    whole = isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
    if not whole or not value or len(set(value)) < len(value):
        raise InputError(f"seeds = {brief(value)} must be a list of different whole numbers from 0")
    return tuple(value)
