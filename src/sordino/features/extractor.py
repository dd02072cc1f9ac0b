"""Extractors by name: maps a recipe's section to a function of one record at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sordino.data.files import data_directory, sha256_of_file
from sordino.data.glove import glove_file, read_glove
from sordino.errors import InputError, did_you_mean
from sordino.features import efficientnet, minilm
from sordino.features.bag import WordBag, by_rank, entries, whole
from sordino.features.cache import cached
from sordino.features.normalise import group_normalise, low_frequencies, record_normalise
from sordino.features.patches import Patches
from sordino.features.published import one_file
from sordino.features.scattering import Scattering2D
from sordino.features.synthetic import Whitening, whitening
from sordino.features.upright import upright
from sordino.features.words import OPTIONS

_PUBLISHED = {  # where the weights are, and the function that embeds with them
    "efficientnet-lite0": (efficientnet.FOLDER, efficientnet.FILE, efficientnet.GET),
    "minilm": (minilm.FOLDER, "model.safetensors", minilm.GET),
}
PART = 5000  # records whose features are stored in one file: a killed run continues after the last complete file
_NORMALISE = ("none", "group")
_RECORD = ("none", "record")
_PATCHES = ("side", "atoms", "grid", "threshold", "soften", "mirror")


@dataclass(frozen=True)
class Extractor:
    """A function of records, (n, ...) → (n, ...), that `build` makes.

    Args:
        spec: The name and all options, including defaults and the hash of the weights.
        chunk: The number of records in one pass.
        frequencies: The number of lowest frequencies kept of each map; None: all. Applied after the cache.
        whiten: The exponent of the whitening from synthetic images (sordino.features.synthetic); None: no whitening.
        alone: Whether each record's own mean is subtracted and the record scaled to length one.
        power: The exponent of the features of a published network, which are not negative. Applied after the cache.
        mirrored: Whether features of a published network are the mean of those of an image and of its mirror image.
        data_dir: Where the published networks are.
    """

    spec: Mapping[str, Any]
    chunk: int = 4096
    frequencies: int | None = None
    whiten: float | None = None
    alone: bool = False
    power: float = 1.0
    mirrored: bool = False
    data_dir: Path | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        if self.spec["name"] == "none":
            return _numbers(inputs)
        return self._last(self._both(self._maps, inputs), inputs.shape[1:], None)

    def _both(self, maps: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """The features, or their mean with those of the mirror images."""
        return (maps(inputs) + maps(inputs.flip(-1))) / 2 if self.mirrored else maps(inputs)

    def _maps(self, inputs: Tensor) -> Tensor:
        function = self._function()
        parts = (function(inputs[start : start + self.chunk]) for start in range(0, len(inputs), self.chunk))
        first = next(parts, None)
        if first is None:
            return function(inputs)
        out = first.new_empty(len(inputs), *first.shape[1:])  # one copy of the result, of any size
        out[: len(first)] = first
        for index, part in enumerate(parts, 1):
            out[index * self.chunk : index * self.chunk + len(part)] = part
        return out

    def _function(self) -> Callable[[Tensor], Tensor]:
        match self.spec["name"]:
            case "efficientnet-lite0":
                network = efficientnet.read(data_directory(self.data_dir))
                return partial(efficientnet.embed, network, resolution=self.spec["resolution"])
            case "minilm":
                return partial(minilm.read(data_directory(self.data_dir)).embed, tokens=self.spec["tokens"])
            case "word-bag":
                return self._bag()
            case "patches":
                return self._patches
            case _:
                return self._scattered

    def _bag(self) -> WordBag:
        weights = {}
        if "ranks" in self.spec:
            weights = by_rank(read_glove(data_directory(self.data_dir)).ids, self.spec["ranks"])
        return WordBag(self.spec["dimensions"], self.spec["power"], weights)

    def _patches(self, images: Tensor) -> Tensor:
        if self.spec.get("upright"):
            images = upright(images)
        maps = torch.cat([some(images) for some in _of_sides(self.spec)], 1)
        return maps if self.spec["power"] == 1 else maps ** self.spec["power"]  # maps are not negative

    def _scattered(self, images: Tensor) -> Tensor:
        maps = Scattering2D(self.spec["J"], self.spec["L"])(images)
        if "power" in self.spec:
            maps = maps.sign() * maps.abs() ** self.spec["power"]
        return group_normalise(maps, self.spec["groups"]) if self.spec["normalise"] == "group" else maps

    def _last(self, maps: Tensor, shape: tuple[int, ...], folder: Path | None) -> Tensor:
        if self.whiten is not None:
            plain = replace(self, whiten=None)
            return self._whitening(plain, tuple(shape), folder)(plain._last(maps, shape, folder))
        if self.power != 1:
            maps = maps**self.power
        if self.alone:
            return record_normalise(maps)
        return maps if self.frequencies is None else low_frequencies(maps, self.frequencies)

    def _whitening(self, plain: Extractor, shape: tuple[int, ...], folder: Path | None) -> Whitening:
        """The map from synthetic pictures: a public constant that is cached like features."""
        made = {**self.spec, "map": self.whiten, "frequencies": self.frequencies}

        def compute(_: Tensor) -> Tensor:
            found = whitening(plain, shape, float(self.whiten or 0))
            return torch.cat([found.mean[None], found.matrix])

        kept = cached(compute, made, torch.zeros(shape), folder)
        return Whitening(kept[0], kept[1:])

    def cached(self, inputs: Tensor, folder: Path | None, say: Callable[[str], None] | None = None) -> Tensor:
        """The features from the folder, else computed and stored there; `say` is called with the progress."""
        if self.spec["name"] == "none":
            return _numbers(inputs)
        if self.spec["name"] in _PUBLISHED:

            def kept(rows: Tensor) -> Tensor:
                return cached(self._maps, self.spec, rows, folder)

            out = []
            for start in range(0, max(len(inputs), 1), PART):
                if say is not None:
                    say(f"{self.spec['name']}: {start:,} of {len(inputs):,} records")
                out.append(self._both(kept, inputs[start : start + PART]))
            return self._last(torch.cat(out), inputs.shape[1:], folder)
        if self.spec["name"] == "word-bag":
            return self._words(inputs, folder)
        if self.spec["name"] == "patches":  # the whitened features are cached: whitening takes longer than reading them
            made = {**self.spec, "whiten": self.whiten}
            return cached(lambda rows: self._last(self._maps(rows), inputs.shape[1:], folder), made, inputs, folder)
        return self._last(cached(self._maps, self.spec, inputs, folder), inputs.shape[1:], folder)

    def _words(self, inputs: Tensor, folder: Path | None) -> Tensor:
        """Bags of words, cached by their entries: a hundredth of the numbers."""
        if folder is None:
            return self._maps(inputs)
        found = cached(lambda texts: entries(self._maps(texts)), {**self.spec, "kept": "entries"}, inputs, folder)
        return whole(found, len(inputs), self.spec["dimensions"])


def build(spec: Mapping[str, Any], data_dir: Path | None = None) -> Extractor:
    """The extractor that a recipe's [features] describes.

    The hash of a published network's weights is part of the specification, so that a cache made with other weights is
    not used.

    Args:
        spec: `name`, and options of that extractor.
        data_dir: Where published weights are; None: $SORDINO_DATA, else ./data.

    Returns:
        The extractor.

    Raises:
        InputError: the name or an option is unknown, a value is wrong, or weights are missing.
    """
    given = dict(spec)
    name = given.pop("name", "none")
    if name not in OPTIONS:
        raise InputError(f"features: unknown name {name!r}; {did_you_mean(name, OPTIONS)}")
    known = OPTIONS[name]
    for key in given:
        if key not in known:
            raise InputError(f"features {name!r}: unknown option {key!r}; {did_you_mean(key, known)}")
    full = {"name": name, **{key: value for key, value in known.items() if value is not None}, **given}
    frequencies, whiten = full.pop("frequencies", None), full.pop("whiten", None)
    alone = name in _PUBLISHED and _of_record(full.pop("normalise", "none"))
    mirrored = name in _PUBLISHED and _yes("mirror", full.pop("mirror", False), name)
    if name == "scattering":
        Scattering2D(full["J"], full["L"])
        if full["normalise"] not in _NORMALISE:
            raise InputError(
                f"features: unknown normalise {full['normalise']!r}; "
                f"{did_you_mean(full['normalise'], _NORMALISE)}. Statistics of the private records are "
                "released by sordino.features.private_statistics"
            )
        if not isinstance(full["groups"], int) or full["groups"] < 1:
            raise InputError(f"features: groups must be an integer of at least 1, not {full['groups']!r}")
        if frequencies is not None and (not isinstance(frequencies, int) or frequencies < 1):
            raise InputError(f"features: frequencies must be an integer of at least 1, not {frequencies!r}")
        if full["normalise"] != "group" and "groups" in given:
            raise InputError("features: groups is given, but normalise is not 'group': it would be ignored")
    for key, value in (("power", full.get("power", 1.0)), ("whiten", 0.0 if whiten is None else whiten)):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 4:
            raise InputError(f"features: {key} must be a number from 0 to 4, not {value!r}")
    if name == "patches":
        _of_sides(full)
        _yes("upright", full.get("upright", False), name)
    if name == "word-bag":
        _check_bag(full, data_dir)
    power = 1.0
    if name in _PUBLISHED:
        power = full.pop("power", 1.0)
        _check_published(name, full)
        folder, pattern, get = _PUBLISHED[name]
        full["weights"] = sha256_of_file(one_file(data_directory(data_dir) / folder, pattern, name, get))
    return Extractor(full, 4096, frequencies, whiten, alone, power, mirrored, data_dir)


def _check_bag(spec: dict[str, Any], data_dir: Path | None) -> None:
    """The word list is part of the specification, by its hash."""
    WordBag(spec["dimensions"], spec["power"])
    if "ranks" in spec:
        level = spec["ranks"]
        if isinstance(level, bool) or not isinstance(level, int | float) or not 0 < level <= 1:
            raise InputError(f"features 'word-bag': ranks must be a number above 0, at most 1, not {level!r}")
        spec["words"] = sha256_of_file(glove_file(data_directory(data_dir)))


def _of_sides(spec: Mapping[str, Any]) -> list[Patches]:
    """One map of patches for each side of a patch: `side` is one number or a list."""
    sides = spec["side"] if isinstance(spec["side"], list | tuple) else [spec["side"]]
    if not sides:
        raise InputError("features 'patches': side must be an integer, or a list with at least one")
    shared = {key: spec[key] for key in _PATCHES if key != "side"}
    return [Patches(side=side, **shared) for side in sides]


def _yes(key: str, value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"features {name!r}: {key} must be true or false, not {value!r}")
    return value


def _of_record(normalise: str) -> bool:
    if normalise not in _RECORD:
        raise InputError(f"features: unknown normalise {normalise!r}; {did_you_mean(str(normalise), _RECORD)}")
    return normalise == "record"


def _numbers(inputs: Tensor) -> Tensor:
    if inputs.dtype == torch.uint8:
        raise InputError('these texts are bytes, which no model here takes: give [features] name = "minilm"')
    return inputs


def _check_published(name: str, spec: Mapping[str, Any]) -> None:
    key, least, most = ("tokens", 4, 512) if name == "minilm" else ("resolution", 32, 512)
    value = spec[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise InputError(f"features {name!r}: {key} must be an integer from {least} to {most}, not {value!r}")
