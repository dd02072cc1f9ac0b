"""One small recipe for all tests: three steps on the embedded data, of which each test changes what it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import tomli_w

from sordino import data
from sordino.runs.recipe import Recipe

DOCUMENT: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "insecure_seed": 1},
    "sampling": {"expected_batch": 40},
    "train": {"steps": 3, "lr": 0.5},
}


def small_recipe(**sections: Mapping[str, Any]) -> Recipe:
    """The recipe with these keys in these sections; a key that is None is left out."""
    return Recipe.from_dict(_merged(sections))


def small_toml(**sections: Mapping[str, Any]) -> str:
    """The same as the text of a recipe file."""
    return tomli_w.dumps(_merged(sections))


def shorten_test_rows(patch: pytest.MonkeyPatch, rows: int = 100) -> None:
    """Datasets have no more test rows than these."""
    read = data.read

    def shortened(*args: object, **options: object) -> data.Dataset:
        found = read(*args, **options)  # type: ignore[arg-type]
        return replace(found, test=data.Split(found.test.inputs[:rows], found.test.targets[:rows]))

    patch.setattr(data, "read", shortened)


def _merged(sections: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {name: {**DOCUMENT.get(name, {}), **sections.get(name, {})} for name in {**DOCUMENT, **sections}}
    return {name: {key: value for key, value in part.items() if value is not None} for name, part in found.items()}
