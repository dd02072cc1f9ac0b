"""The best recipe known for a dataset at an ε, with the accuracy that was measured with it.

Each file of `sordino/recipes/best` holds one recipe ([recipe.data], [recipe.model], …), and for every ε at which it was
measured ([[known]]) the settings chosen for that ε on held-out training rows, the accuracy on the test rows, its
spread over the seeds, and the result file that has the runs.

An ε that was not measured takes the settings of the nearest one that was (by ratio); its noise is calibrated for the ε
that was asked for, so the guarantee holds, and nothing is said about its accuracy.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sordino.errors import InputError, did_you_mean
from sordino.runs.recipe import Recipe, with_overrides
from sordino.shown import up

DELTA = 1e-5
"""δ where none is given: of the sets here, every one has fewer than 100,000 training records."""


@dataclass(frozen=True)
class Known:
    """One measured point: mean test accuracy and its standard deviation over the seeds."""

    epsilon: float
    delta: float
    relation: str
    accuracy: float
    spread: float
    seeds: int
    settings: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.accuracy:.2%} ± {100 * self.spread:.2f} at ε = {up(self.epsilon)}, δ = {up(self.delta)}, "
            f"{self.relation} ({self.seeds} seeds)"
        )


@dataclass(frozen=True)
class Best:
    """A dataset's best recipe. `nearest` is the measured point whose settings are taken for `epsilon`."""

    dataset: str
    epsilon: float
    assumes: str
    source: str
    method: str
    known: tuple[Known, ...]
    nearest: Known
    document: Mapping[str, Any]

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe with the settings for `epsilon`, then these overrides.

        Args:
            overrides: `section.key=value`, as `--set` takes them.
        """
        own = [*self.nearest.settings, f"privacy.epsilon={self.epsilon!r}"]
        return Recipe.from_dict(with_overrides(self.document, [*own, *overrides]))

    def said(self) -> str:
        """What is known of its accuracy, for the command line."""
        if math.isclose(self.nearest.epsilon, self.epsilon):
            return f"{self.nearest}; {self.assumes}"
        return f"not measured at ε = {up(self.epsilon)}; the same settings gave {self.nearest}; {self.assumes}"


def best_names() -> list[str]:
    """The datasets that have one."""
    folder = files("sordino") / "recipes" / "best"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def best_recipe(dataset: str, epsilon: float) -> Best:
    """The best recipe known for a dataset at an ε.

    Args:
        dataset: one of `best_names()`.
        epsilon: the target.

    Raises:
        InputError: there is none for this dataset; the message lists those that have one. Or ε is not positive.
    """
    names = best_names()
    if dataset not in names:
        raise InputError(
            f"no recipe is known for the dataset {dataset!r}: {did_you_mean(dataset, names)}. For others write a "
            "recipe: sordino train RECIPE.toml"
        )
    if not 0 < epsilon < math.inf:
        raise InputError(f"--epsilon must be a positive number, got {epsilon}")
    text = (files("sordino") / "recipes" / "best" / f"{dataset}.toml").read_text(encoding="utf8")
    found = tomllib.loads(text)
    known = tuple(Known(**{**one, "settings": tuple(one["settings"])}) for one in found["known"])
    nearest = min(known, key=lambda one: abs(math.log(one.epsilon / epsilon)))
    return Best(dataset, epsilon, found["assumes"], found["source"], found["method"], known, nearest, found["recipe"])
