"""The best known recipe for a dataset at an ε, with its measured accuracy.

Each file of `sordino/recipes/best` lists, for every ε that was measured ([[known]]), the recipe, its accuracy on the
test rows, the spread over the seeds, and the result file with the runs. Its settings were chosen on held-out training
rows, at some ε between those chosen at others; never on test rows.

An ε that was not measured uses the recipe of the nearest measured one (by ratio); its noise is calibrated for the
requested ε, so the guarantee holds, but its accuracy is unknown.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from sordino.errors import InputError, did_you_mean
from sordino.runs.overrides import with_overrides
from sordino.runs.recipe import Recipe
from sordino.shown import up

DELTA = 1e-5
"""The default δ: every dataset here has fewer than 100,000 training records."""


@dataclass(frozen=True)
class Known:
    """One measured point: mean test accuracy and its standard deviation over the seeds."""

    epsilon: float
    delta: float
    relation: str
    accuracy: float
    seeds: int
    method: str
    assumes: str
    source: str
    recipe: Mapping[str, Any]
    spread: float | None = None  # None for a single seed

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {100 * self.spread:.2f}"
        runs = "a single run" if self.seeds == 1 else f"{self.seeds} seeds"
        return f"{self.accuracy:.2%}{spread} at ε = {up(self.epsilon)}, δ = {up(self.delta)}, {self.relation} ({runs})"


@dataclass(frozen=True)
class Best:
    """The best known recipe of a dataset. `nearest` is the measured point whose recipe is used for `epsilon`."""

    dataset: str
    epsilon: float
    known: tuple[Known, ...]
    nearest: Known

    def recipe(self, overrides: Sequence[str] = ()) -> Recipe:
        """The recipe for `epsilon`, then these overrides.

        Args:
            overrides: `section.key=value`, as for `--set`.

        Returns:
            The recipe, with noise calibrated for `epsilon` unless an override changes that.
        """
        own = [f"privacy.epsilon={self.epsilon!r}"]
        return Recipe.from_dict(with_overrides(self.nearest.recipe, [*own, *overrides]))

    def sentence(self) -> str:
        """What the recipe is, what it assumes, and which accuracy was measured."""
        found = f"the same settings gave {self.nearest}"
        if math.isclose(self.nearest.epsilon, self.epsilon):
            found = f"measured: {self.nearest}"
        else:
            found = f"not measured at ε = {up(self.epsilon)}; {found}"
        return f"{self.nearest.method} ({self.nearest.assumes}); {found}"


def best_names() -> list[str]:
    """The datasets that have a best known recipe."""
    folder = files("sordino") / "recipes" / "best"
    found = folder.iterdir() if folder.is_dir() else ()  # git does not store an empty folder
    return sorted(entry.name.removesuffix(".toml") for entry in found if entry.name.endswith(".toml"))


def best_recipe(dataset: str, epsilon: float) -> Best:
    """The best recipe known for a dataset at an ε.

    Args:
        dataset: One of `best_names()`.
        epsilon: The target.

    Returns:
        The recipe of the nearest measured ε.

    Raises:
        InputError: there is no recipe for this dataset (the message lists those that have one), or ε is not positive.
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
    known = tuple(Known(**one) for one in tomllib.loads(text)["known"])
    return Best(dataset, epsilon, known, min(known, key=lambda one: abs(math.log(one.epsilon / epsilon))))
