"""Sweeps: one recipe over a grid of settings, with a run directory for each point.

    runs/NAME-sweep/runs/alpha=0.2,lr=0.5,seed=0/   a run directory for each point and seed
    runs/NAME-sweep/sweep.json                      the grid, every result, and the cost of the whole
    runs/NAME-sweep/heatmap.svg, sweep.html         the same as a page

Errors in a key or a value are found before anything runs. A run that fails is recorded, and the others continue. A
killed sweep continues where it stopped: finished runs are not repeated, others are resumed.

**What a sweep costs.** Looking at several runs costs the composition of all of them, and so does publishing one that
was chosen by looking, even at public test data: the choice depends on all the runs. `cost_of` computes it; it
counts every run of the grid in full, failed ones too. Only a run that was fixed before any result was seen costs just
its own ε. To choose at a lower cost, see `sordino.runs.selection`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from sordino.accounting.grids import Releases
from sordino.accounting.selection import Composed, composed_cost
from sordino.errors import InputError, SordinoError, did_you_mean
from sordino.files import json_bytes, make_folder, usable_folder, write_atomically
from sordino.plan import Plan
from sordino.report.sweep import write_page
from sordino.runs.build import clipping_of, method_of, plan_from, private_records
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.shown import up
from sordino.training.metrics import read_metrics
from sordino.training.progress import ProgressBar

METRICS = {"test_accuracy": True, "test_loss": False, "test_error": False}  # whether larger is better
_PLAIN = re.compile(r"[^A-Za-z0-9.=,_+-]")


@dataclass(frozen=True)
class SweptKey:
    """One key of the recipe and its values, in TOML notation."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> SweptKey:
        """`section.key=v1,v2,…`; a comma within brackets, braces or quotes does not separate values."""
        key, equals, given = text.partition("=")
        key, values = key.strip(), tuple(value.strip() for value in _parts(given))
        if not (equals and all(key.partition(".")) and all(values)):
            raise InputError(f"--over {text!r}: write section.key=value,value,…, for example train.lr=0.1,0.5")
        if len(set(values)) < len(values):
            raise InputError(f"--over {text!r}: a value is repeated")
        return cls(key, values)


def _parts(text: str) -> Iterator[str]:
    part, depth, quote = "", 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0 and not quote:
            yield part
            part = ""
        else:
            part += character
    yield part


@dataclass(frozen=True)
class Point:
    """One run of the grid. `seed` counts from 0 and is added to the recipe's seed."""

    settings: tuple[tuple[str, str], ...]
    seed: int = 0

    @property
    def overrides(self) -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in self.settings)

    @property
    def name(self) -> str:
        """The name of its directory: the last part of each key with its value; unique to the point."""
        readable = ",".join(
            [*(f"{key.rpartition('.')[2]}={value}" for key, value in self.settings), f"seed={self.seed}"]
        )
        plain = _PLAIN.sub("_", readable)
        if (
            plain == readable
            and len(plain) < 100
            and len({key.rpartition(".")[2] for key, _ in self.settings}) == len(self.settings)
        ):
            return plain
        return f"{plain[:100]}-{sha256(repr((self.settings, self.seed)).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class Sweep:
    """A recipe, a grid of settings, and the number of seeds for each point."""

    recipe: Path
    axes: tuple[SweptKey, ...]
    seeds: int = 1
    metric: str = "test_accuracy"
    overrides: tuple[str, ...] = ()
    allow_code: bool = False

    def __post_init__(self) -> None:
        keys = [axis.key for axis in self.axes]
        if not keys:
            raise InputError("a sweep needs at least one --over section.key=value,value,…")
        if len(set(keys)) < len(keys):
            raise InputError(
                f"--over repeats {next(k for k in keys if keys.count(k) > 1)}: give all its values at once"
            )
        if self.seeds < 1:
            raise InputError(f"--seeds must be at least 1, got {self.seeds}")
        if self.seeds > 1 and {"run.seed", "privacy.insecure_seed"} & set(keys):
            raise InputError("give either --seeds or --over a seed, not both")
        if self.metric not in METRICS:
            raise InputError(f"unknown metric {self.metric!r}: {did_you_mean(self.metric, METRICS)}")

    def points(self) -> list[Point]:
        grid = product(*([(axis.key, value) for value in axis.values] for axis in self.axes))
        return [Point(settings, seed) for settings in grid for seed in range(self.seeds)]

    def cover(self) -> list[Point]:
        """A few points in which every value of every key occurs."""
        longest = max(len(axis.values) for axis in self.axes)
        return [
            Point(tuple((axis.key, axis.values[min(index, len(axis.values) - 1)]) for axis in self.axes))
            for index in range(longest)
        ]

    def recipe_of(self, point: Point) -> Recipe:
        """The point's recipe. A seed changes the public seed, and the insecure one if the recipe has it."""
        overrides = [*self.overrides, *point.overrides]
        recipe = Recipe.read(self.recipe, overrides, allow_code=self.allow_code)
        if point.seed == 0:
            return recipe
        overrides.append(f"run.seed={recipe.run.seed + point.seed}")
        if recipe.privacy.insecure_seed is not None:
            overrides.append(f"privacy.insecure_seed={recipe.privacy.insecure_seed + point.seed}")
        return Recipe.read(self.recipe, overrides, allow_code=self.allow_code)

    def better(self, one: float, other: float) -> bool:
        return one > other if METRICS[self.metric] else one < other


@dataclass(frozen=True)
class Checked:
    """A point with its recipe and plan."""

    point: Point
    recipe: Recipe
    plan: Plan

    def releases(self) -> Releases | None:
        """All releases of the run, if its method accounts for them; else None."""
        return self.plan.releases() if self.plan.method.composes else None


def check(
    sweep: Sweep, data_dir: Path | None = None, adjust: Callable[[Recipe], Recipe] = lambda recipe: recipe
) -> list[Checked]:
    """The recipe and plan of every point; every value is checked once with data and model; errors name the point.

    `adjust` changes each recipe before it is checked.
    """
    checked = []
    for point in sweep.points():
        with _named(point):
            recipe = adjust(sweep.recipe_of(point))
            checked.append(Checked(point, recipe, plan_of(recipe, data_dir)))
    cover = sweep.cover()
    for one in checked:
        if one.point in cover and not method_of(one.recipe).reads_own_data:  # such a plan has been checked with data
            with _named(one.point):
                prepare(one.recipe, data_dir, progress=False)
    return checked


@contextmanager
def _named(point: Point) -> Iterator[None]:
    """Adds the point of the grid to error messages."""
    try:
        yield
    except InputError as error:
        raise error.within(f"at {', '.join(point.overrides)}") from error


def plan_of(recipe: Recipe, data_dir: Path | None = None) -> Plan:
    """The plan of a run of the recipe; data are read only if the plan depends on their shape."""
    if method_of(recipe).needs_shape:
        return prepare(recipe, data_dir, progress=False).plan
    return plan_from(recipe, clipping_of(recipe), private_records(recipe))


def cost_of(checked: Sequence[Checked]) -> Composed:
    """The cost of looking at all of these runs."""
    releases = [one.releases() for one in checked]
    exact = all(one is not None for one in releases)  # then the ε of single runs is not needed
    epsilons = [math.inf if exact else one.plan.guarantee().epsilon for one in checked]
    return composed_cost(
        [
            (found, epsilon, one.plan.delta, one.plan.relation)
            for found, epsilon, one in zip(releases, epsilons, checked, strict=True)
        ]
    )


def run_sweep(
    sweep: Sweep, out: Path, *, jobs: int = 1, data_dir: Path | None = None, progress: bool | None = None
) -> dict[str, Any]:
    """Runs the grid in `out` and returns the content of sweep.json."""
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1, got {jobs}")
    usable_folder(out)
    checked = check(sweep, data_dir)
    _refuse_others(out, {one.point.name: one.recipe for one in checked})
    cost = cost_of(checked)
    make_folder(out / "runs")
    results: dict[Point, dict[str, Any]] = {}
    with ProgressBar(len(checked), shown=progress, label="runs") as bar:
        for one, result in _all(checked, out, jobs, data_dir):
            results[one.point] = _row(sweep, one, out, result)
            bar.advance(len(results))
            document = _document(sweep, checked, results, cost)
            write_atomically(out / "sweep.json", json_bytes(document))
    write_page(out, document)
    return document


def _refuse_others(out: Path, recipes: Mapping[str, Recipe]) -> None:
    """Refuses runs in the directory that this sweep would not count, or that another recipe made."""
    if out.exists() and any(out.iterdir()) and not (out / "runs").is_dir():
        raise InputError(f"{out} is not empty and contains no sweep: give another directory with --out")
    others = sorted(path.name for path in (out / "runs").glob("*") if path.name not in recipes)
    if others:
        raise InputError(
            f"{out} contains runs that are not in this grid ({others[0]}{', …' if len(others) > 1 else ''}). They were "
            "seen too, so they belong to the cost: add their values to the grid, or give another directory with --out"
        )
    for name, recipe in recipes.items():
        path = out / "runs" / name / "recipe.toml"
        if path.exists() and Recipe.read(path, allow_code=True) != recipe:
            raise InputError(f"{path} was made with another recipe: give another directory with --out")


def _all(
    checked: Sequence[Checked], out: Path, jobs: int, data_dir: Path | None
) -> Iterator[tuple[Checked, dict[str, Any]]]:
    """Each point with the result of its run, in the order in which they end."""
    places = {one.point: out / "runs" / one.point.name for one in checked}
    if jobs == 1:
        for one in checked:
            yield one, run_one(one.recipe, places[one.point], data_dir)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        waiting = {pool.submit(run_one, one.recipe, places[one.point], data_dir): one for one in checked}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        except BaseException as error:
            pool.shutdown(wait=False, cancel_futures=True)  # otherwise the waiting runs would still be made
            if isinstance(error, BrokenProcessPool):
                raise SordinoError("a process of the sweep was killed; start it again to continue it") from None
            raise


def run_one(recipe: Recipe, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """The content of the run's result.json, with the last metrics; or {"error": why it failed}."""
    try:
        result = run_recipe(recipe, folder, resume=True, data_dir=data_dir, progress=False)
        rows = read_metrics(folder / "metrics.jsonl")
        return {**(rows[-1] if rows else {}), **result}
    except SordinoError as error:  # a failed run must not stop the others
        return {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # its message may contain private values, and the result is stored
        return {"error": f"{type(error).__name__}; run this setting by itself to see more"}


def _row(sweep: Sweep, one: Checked, out: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    value = result.get(sweep.metric)
    error = result.get("error") or (None if _finite(value) else f"the run has no finite {sweep.metric}")
    return {
        "settings": {key: toml_value(text) for key, text in one.point.settings},
        "seed": one.recipe.run.seed,
        "folder": f"runs/{one.point.name}",
        "status": "failed" if error else "finished",
        "error": error,
        "value": None if error else value,
        **{key: result.get(key) for key in ("epsilon", "delta", "relation", "noise_multiplier", "seconds")},
    }


def described(sweep: Sweep) -> dict[str, Any]:
    """What was swept, for sweep.json."""
    return {
        "recipe": sweep.recipe.name,
        "overrides": list(sweep.overrides),
        "over": {axis.key: [toml_value(text) for text in axis.values] for axis in sweep.axes},
        "seeds": sweep.seeds,
        "metric": sweep.metric,
    }


def _document(
    sweep: Sweep, checked: Sequence[Checked], results: Mapping[Point, Mapping[str, Any]], cost: Composed
) -> dict[str, Any]:
    rows = [results[one.point] for one in checked if one.point in results]
    table = _table(rows)
    known = [row for row in table if row["mean"] is not None]
    pick = max if METRICS[sweep.metric] else min
    secure = all(one.plan.insecure_seed is None for one in checked)
    return {
        **described(sweep),
        "larger_is_better": METRICS[sweep.metric],
        "paid": False,
        "secure": secure,
        "complete": len(rows) == len(checked),
        "cost": {**_plain(asdict(cost)), "runs": len(checked), "sentence": sentence(sweep, cost, secure)},
        "best": pick(known, key=lambda row: row["mean"]) if known else None,
        "table": table,
        "runs": rows,
    }


def _table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of each setting."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(json.dumps(row["settings"]), []).append(row)
    table = []
    for group in groups.values():
        values = [row["value"] for row in group if row["value"] is not None]
        table.append(
            {
                "settings": group[0]["settings"],
                "mean": statistics.fmean(values) if values else None,
                "deviation": statistics.stdev(values) if len(values) > 1 else None,
                "finished": len(values),
                "failed": len(group) - len(values),
            }
        )
    return table


def sentence(sweep: Sweep, cost: Composed, secure: bool) -> str:
    """The cost of the sweep as a sentence."""
    runs = len(sweep.points())
    if cost.relation is None:
        return f"The {runs} runs have no common cost: {cost.rule}."
    text = (
        f"Publishing all {runs} results, or a model or a setting that was chosen by looking at them, is "
        f"(ε = {up(cost.epsilon)}, δ = {up(cost.delta)})-DP under {cost.relation} ({cost.rule}). Choosing by public "
        "test data does not reduce this cost. A run that was fixed before any result was seen costs just its own ε. "
        "With --pay a random number of runs is made and the best one is released, at one ε for all."
    )
    if any(axis.key.startswith(("data.", "public.")) for axis in sweep.axes):
        text += " It covers records that are private in every run: the swept keys change which rows those are."
    return text if secure else f"{text} The runs used insecure seeds: none of this holds against anyone who knows them."


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def toml_value(text: str) -> Any:
    """The value of a text; a bare word is a string, as on the command line."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
