"""Recipes: a training run as a TOML file. Every key is known and typed, and is required or has a default.

    [run]       name, seed, noise_free          [sampling]  name, expected_batch, cap
    [data]      name, records, …                [clipping]  name, clip_norm, …
    [features]  name, normalise, private, …      [privacy]   epsilon | noise_multiplier, delta, relation, …
    [model]     name, and its options           [method]    name, and what its guarantee depends on
    [train]     steps | epochs, optimizer, lr, …
    [public]    fraction | records, origin, seed, expected_batch, shared
    [augmentation]  views, crop, flip, erase, mixup, word_dropout, unknown_id, padding_id
    [instruments] every, rows, split, window, not_private
    [batch_clipping] companions, draws
    [declaration] unit, trust, tuning, public_sources, collection, contact, curator, curator_type, intended_use,
                  region, sector

An unknown key is an error that names the nearest known one; nothing is silently ignored.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import tomli_w

from sordino import registry
from sordino.checks import brief
from sordino.errors import InputError, Refused, did_you_mean
from sordino.plan.contribution import Augmentation
from sordino.runs.declaration import DeclarationSection
from sordino.runs.overrides import with_overrides
from sordino.runs.ranges import check_numbers
from sordino.runs.words import check_words


@dataclass(frozen=True)
class RunSection:
    name: str = "run"  # the name of the run directory and of the report; default: that of the recipe's file
    seed: int = 0  # the seed of initialisation and other public randomness; not of noise or sampling
    noise_free: bool = False  # also train without noise, for comparison: NOT private, for public data only

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and not set(self.name) & set('/\\:*?"<>|') and self.name == self.name.strip()
        if not plain or self.name.startswith(".") or not 1 <= len(self.name.encode(errors="replace")) <= 120:
            raise InputError(
                f"run.name = {brief(self.name)} names the run directory: give 1 to 120 printable characters without "
                "slashes, not beginning with a dot; for another place use --out"
            )


@dataclass(frozen=True)
class DataSection:
    name: str  # a dataset that `sordino data list` shows; csv, parquet, hf, npz, images; or module:function
    records: int | None = None  # public; default: the published size of the dataset. Required for your own data
    options: Mapping[str, Any] = field(default_factory=dict)  # path, target, classes, columns, …: of the source


@dataclass(frozen=True)
class PublicSection:
    """Rows of the training split that are declared public; `data.records` is then the number of the others."""

    fraction: float | None = None  # fraction of the training split; or give the number of records
    records: int | None = None  # the number of public rows; or give the fraction
    origin: str | None = None  # for the report; default: which rows of which dataset
    seed: int = 0  # the public seed that draws the rows, and the batch of each step
    expected_batch: int | None = None  # public rows in a step; default: as many as private ones
    shared: str = "refuse"  # private rows whose content is also public: "refuse", or "drop" them from the private rows

    @property
    def given(self) -> bool:
        return self.fraction is not None or self.records is not None


@dataclass(frozen=True)
class BatchClippingSection:
    """BatchNorm in which each private record is normalised with rows of [public] only (sordino.records.companions)."""

    companions: int | None = None  # public rows next to each record, at most [public] records; time grows with them
    draws: int = 10  # draws of companions, whose majority is the prediction in the test metrics

    @property
    def given(self) -> bool:
        return self.companions is not None


@dataclass(frozen=True)
class FeaturesSection:
    name: str = "none"  # scattering, patches, word-bag, efficientnet-lite0, minilm, dp-pca; none: no features
    private: str | None = None  # "centre", "channels" or "whiten": by statistics that the plan accounts for
    private_noise: float | None = None  # noise multiplier of each of these statistics
    private_bound: float | None = None  # public bound on the norm of a record (of its spatial means for "channels")
    private_square_bound: float | None = None  # the same for the mean of squares ("channels")
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSection:
    name: str  # a network: linear, mlp, mnist-cnn, resnet, …; or module:function(shape, classes, …)
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PrivacySection:
    delta: float  # δ in (0, 1)
    epsilon: float | None = None  # the target; or give noise_multiplier
    noise_multiplier: float | None = None  # standard deviation of the noise over the clip norm; or give epsilon
    relation: str | None = None  # add-remove or replace-one; default: that of the sampler
    accountant: str = "pld"  # pld or rdp
    insecure_seed: int | None = None  # makes the run reproducible, without a guarantee against anyone who knows it
    unit: str = "record"  # the unit of privacy: record, or user; then data.records and expected_batch count users
    rows_per_user: int | None = None  # largest number of a user's rows in a step; default: all of them
    examples_per_user: int | None = None  # rows are sampled, a user has at most this many; records counts rows
    norm_histogram: float | None = None  # noise multiplier of a released histogram of record norms for the report


@dataclass(frozen=True)
class MethodSection:
    name: str = field(default_factory=registry.default)  # a registered method
    options: Mapping[str, Any] = field(default_factory=dict)  # what the method's guarantee depends on, lr included


@dataclass(frozen=True)
class SamplingSection:
    expected_batch: int  # the expected number of records in a step
    name: str = "poisson"  # poisson, allocation, truncated-poisson, partition, without-replacement, cyclic
    cap: int | None = None  # the largest batch of truncated-poisson


@dataclass(frozen=True)
class ClippingSection:
    name: str = "flat"  # flat, per-layer, automatic, normalised, l2-linf, l1
    clip_norm: float = 1.0  # bound on the norm of one record's contribution to a sum
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainSection:
    lr: float | None = None  # the step size; in [method] instead if the guarantee depends on it
    steps: int | None = None  # the number of private steps; or give epochs
    epochs: float | None = None  # expected passes over the records; or give steps
    optimizer: str = "sgd"  # its options (momentum, weight_decay, …) are further keys of this section
    scheduler: str = "constant"  # schedule of the step size: constant, cosine or linear
    average: str = "none"  # average of the iterates that is published: none, ema or tail
    average_decay: float = 0.99  # decay of the exponential average (ema)
    average_tail: float = 0.5  # fraction of the steps, at the end, that is averaged (tail)
    eval_every: int = 0  # steps between two evaluations on the test data; 0: at the end only
    checkpoint_every: int = 100  # steps between two checkpoints; 0: never
    checkpoint_minutes: float = 5.0  # minutes between two checkpoints, if that comes first
    chunk: int = 512  # records in memory at once
    options: Mapping[str, Any] = field(default_factory=dict)  # momentum, weight_decay, …: of the optimizer


@dataclass(frozen=True)
class InstrumentsSection:
    """Readings of the effect of clipping during training: on public rows, or stored separately as not private."""

    every: int | None = None  # steps between two readings
    rows: int = 500  # number of rows to read
    split: str | None = None  # "public" (default: the rows of [public]) or "test", if its rows are public
    window: int = 0  # iterations over which the sampling noise is averaged, Fig. 5a of Xiao et al. 2023; 0: none
    not_private: bool = False  # read the private rows; the readings go to not_private.json

    @property
    def given(self) -> bool:
        return self.every is not None


OPEN_SECTIONS = ("data", "features", "model", "clipping", "train", "method")
"""Sections whose further keys are options of the part that they name, which checks them."""


@dataclass(frozen=True)
class Recipe:
    """A checked recipe: one attribute for each section."""

    data: DataSection
    model: ModelSection
    privacy: PrivacySection
    sampling: SamplingSection
    train: TrainSection
    run: RunSection = field(default_factory=RunSection)
    features: FeaturesSection = field(default_factory=FeaturesSection)
    method: MethodSection = field(default_factory=MethodSection)
    clipping: ClippingSection = field(default_factory=ClippingSection)
    public: PublicSection = field(default_factory=PublicSection)
    batch_clipping: BatchClippingSection = field(default_factory=BatchClippingSection)
    instruments: InstrumentsSection = field(default_factory=InstrumentsSection)
    augmentation: Augmentation = field(default_factory=Augmentation)
    declaration: DeclarationSection = field(default_factory=DeclarationSection)

    def __post_init__(self) -> None:
        if not self.augmentation.changes:
            return
        if "augmentation" not in registry.method_class(self.method.name, "method.name").covers:
            covered = registry.names_with(lambda method: "augmentation" in method.covers)
            raise Refused(
                f"[augmentation]: the method {self.method.name} does not use views of a record: leave the section out, "
                f"or use one of {', '.join(covered)}"
            )
        if self.features.name != "none":
            raise Refused(
                "[augmentation]: views are drawn of the model's inputs, and those are features of "
                f"{self.features.name}, not images or texts: leave out [features] or [augmentation]"
            )

    @classmethod
    def read(cls, path: Path | str, overrides: Sequence[str] = (), *, allow_code: bool = False) -> Recipe:
        """The recipe in a file; InputError names the file and the key that is unknown, missing or wrong.

        `overrides` are `section.key=value`, with values in TOML notation. `allow_code` allows names of the form
        module:function, whose code a run executes.
        """
        path = Path(path)
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows' editors begin with a mark
        except FileNotFoundError:
            raise InputError(f"there is no recipe {path}") from None
        except OSError as error:
            raise InputError(f"{path} can't be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a recipe: it is not UTF-8 text") from error
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, or extreme nesting
            why = error if isinstance(error, tomllib.TOMLDecodeError) else "a number is too long, or nesting too deep"
            raise InputError(f"{path} is not valid TOML: {why}") from error
        document = with_overrides(document, overrides)
        try:
            recipe = cls.from_dict(document, allow_code=allow_code)
            return recipe if "name" in document.get("run", {}) else recipe.called(path.stem)
        except InputError as error:
            raise error.within(str(path)) from error

    def called(self, name: str) -> Recipe:
        """The recipe of a run with this name; unchanged if no directory can be called so."""
        try:
            return replace(self, run=replace(self.run, name=name))
        except InputError:
            return self

    @classmethod
    def from_dict(cls, document: Mapping[str, Any], *, allow_code: bool = False) -> Recipe:
        """The recipe with these sections; InputError names a key that is unknown, missing or wrong."""
        sections = get_type_hints(cls)
        _no_unknown(document, sections, "section")
        _refuse_boundless(document, "")
        parsed = {
            name: parse_section(name, kind, document.get(name, {}))
            for name, kind in sections.items()
            if name in document or _is_required(cls, name)
        }
        check_words(parsed, {name: _own_keys(kind) for name, kind in sections.items()})
        if not allow_code:
            _refuse_code(parsed["data"], parsed["model"])
        check_numbers(parsed)
        recipe = cls(**parsed)
        method = registry.method_class(recipe.method.name, "method.name")
        if recipe.train.lr is None and not method.holds_update and "lr" not in recipe.method.options:
            raise InputError("[train] needs lr" + _near_misses(["lr"], recipe.train.options))
        if "public" in document and (recipe.public.fraction is None) == (recipe.public.records is None):
            raise InputError("[public] needs either fraction or records: how many rows of the training split")
        if "instruments" in document and not recipe.instruments.given:
            raise InputError("[instruments] needs every: the number of steps between two readings")
        return recipe

    def to_toml(self) -> str:
        """The complete recipe, with all defaults. Keys that are not set (None) are left out."""
        document = {}
        for section in fields(self):
            value = getattr(self, section.name)
            if (
                section.name in ("public", "instruments", "declaration") and not value.given
            ) or value == Augmentation():
                continue
            flat = {f.name: getattr(value, f.name) for f in fields(value) if f.name != "options"}
            document[section.name] = {k: v for k, v in flat.items() if v is not None} | dict(
                getattr(value, "options", {})
            )
        return tomli_w.dumps(document)


def _refuse_code(data: DataSection, model: ModelSection) -> None:
    """Refuses names of functions: a recipe alone must not make sordino run code."""
    for section, name in (("data", data.name), ("model", model.name)):
        if ":" in name:
            raise Refused(
                f"{section}.name = {name!r} names a function, and a run would execute its code: a recipe alone must "
                "not do that. If you trust the code, add --allow-code (in Python: Recipe.read(path, allow_code=True))"
            )


DEEPEST = 8


def _refuse_boundless(value: Any, place: str, depth: int = 0) -> None:
    """Refuses integers beyond 64 bits, numbers that are not finite, and extreme nesting."""
    if depth > DEEPEST:
        raise InputError(f"{place} is nested more than {DEEPEST} levels deep")
    if isinstance(value, Mapping):
        for key, entry in value.items():
            _refuse_boundless(entry, f"{place}.{key}".lstrip("."), depth + 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            _refuse_boundless(entry, place, depth + 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise InputError(f"{place} is a number beyond 64 bits: give a smaller one")
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{place} = {value} must be a finite number")


def _is_required(cls: type, name: str) -> bool:
    (spec,) = [f for f in fields(cls) if f.name == name]
    return spec.default is MISSING and spec.default_factory is MISSING


def _no_unknown(given: Mapping[str, Any], known: Mapping[str, Any], what: str) -> None:
    for key in given:
        if key not in known:
            raise InputError(f"unknown {what} {key!r}: {did_you_mean(key, known)}")


def _own_keys(kind: type) -> dict[str, Any]:
    """The keys that a section always has, with their types."""
    return {key: hint for key, hint in get_type_hints(kind).items() if key != "options"}


def parse_section(name: str, kind: type, given: Any) -> Any:
    """A section of a recipe as its dataclass; InputError names a key that is unknown, missing or wrong."""
    if not isinstance(given, Mapping):
        raise InputError(f"[{name}] must be a section, not {given!r}")
    hints = _own_keys(kind)
    known = {key: value for key, value in given.items() if key in hints}
    further = {key: value for key, value in given.items() if key not in hints}
    if name not in OPEN_SECTIONS:
        _no_unknown(further, hints, f"key in [{name}]:")
    missing = [key for key in hints if _is_required(kind, key) and key not in known]
    if missing:
        raise InputError(f"[{name}] needs {', '.join(missing)}" + _near_misses(missing, further))
    values = {key: _convert(f"{name}.{key}", hints[key], value) for key, value in known.items()}
    return kind(**values, **({"options": further} if name in OPEN_SECTIONS else {}))


def _near_misses(missing: Sequence[str], further: Mapping[str, Any]) -> str:
    near = [k for k in further if difflib.get_close_matches(k, missing, n=1, cutoff=0.6)]
    return f" (there is {near[0]!r}: a misspelling?)" if near else ""


def _convert(key: str, hint: Any, value: Any) -> Any:
    """The value converted to the declared type of the key; an int is accepted for a float."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(option, type) and isinstance(value, option) and isinstance(value, bool) == (option is bool):
            return value
    wanted = " or ".join(o.__name__ for o in options if o is not type(None))
    comma = float in options and re.fullmatch(r"[+-]?\d+,\d+", str(value))
    point = f": write {str(value).replace(',', '.')}, with a point" if comma else ""
    raise InputError(f"{key} = {brief(value)} must be of type {wanted}{point}")
