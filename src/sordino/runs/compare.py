"""Compares methods at equal ε, δ and relation, over several seeds: `sordino compare SUITE.toml`.

    runs/NAME-compare/runs/METHOD/eps=1,seed=0.toml           the recipe of each run
    runs/NAME-compare/runs/METHOD/eps=1,seed=0/               its run directory (private methods)
    runs/NAME-compare/runs/METHOD/eps=1,seed=0.outcome.json   its outcome
    runs/NAME-compare/compare.json                            everything, with command, commit, versions and settings
    runs/NAME-compare/compare.html                            the page, made from compare.json

Each run is a separate process with one thread. Errors in a recipe are found before anything runs. A killed comparison
continues where it stopped: finished runs are not repeated, private ones are resumed. Looking at all runs costs their
composition, as for a sweep; the suites here use public data.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from sordino import features
from sordino.data.code import is_code
from sordino.data.sources import SOURCES
from sordino.errors import InputError, Refused, SordinoError
from sordino.files import json_bytes, make_folder, read_json, usable_folder, write_atomically
from sordino.plan import Plan
from sordino.report.compare import render, write_page
from sordino.runs.build import method_of, optimizer_of, settings_of
from sordino.runs.compare_suite import KINDS, Job, Suite
from sordino.runs.origin import origin
from sordino.runs.prepared import work_of
from sordino.runs.recipe import Recipe
from sordino.runs.results import environment
from sordino.runs.sweep import plan_of
from sordino.shown import up

RESULT, PAGE = "compare.json", "compare.html"
Shown = Callable[[Mapping[str, Any]], None]


def run_suite(
    suite: Suite,
    out: Path,
    *,
    command: str,
    jobs: int = 1,
    data_dir: Path | None = None,
    show: Shown | None = None,
    collect: bool = False,
    earlier: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Runs a suite.

    Args:
        suite: What is compared.
        out: A new directory, or that of the same suite, which is then continued.
        command: The command that makes the result, stored in it.
        jobs: Runs at a time, each in a process with one thread.
        data_dir: Where the datasets are.
        show: Called with the document at the start and after every run.
        collect: Run nothing; the result contains the runs that exist, and says how many are missing.
        earlier: An earlier result (`read_result`): its runs with the same settings are taken from it.

    Returns:
        The content of compare.json, which is also written.

    Raises:
        InputError: a recipe is wrong, or `out` contains something else; nothing was run.
    """
    if jobs < 1:
        raise InputError(f"--jobs must be at least 1, got {jobs}")
    usable_folder(out)
    recipes = checked(suite, data_dir)
    _refuse_others(out, recipes)
    about = origin(command)
    make_folder(out / "runs")
    outcomes = {} if earlier is None else taken(earlier, suite, recipes)
    outcomes |= {job: found for job in recipes if (found := _outcome(out, job)) is not None}
    document = result_of(suite, recipes, outcomes, about)
    if show is not None:
        show(document)
    if collect and not outcomes:
        raise InputError(f"{out} contains no finished run of this suite: there is nothing to collect")
    waiting = {job: recipe for job, recipe in recipes.items() if job not in outcomes and not collect}
    for job, found in _all(out, waiting, jobs, data_dir):
        outcomes[job] = found
        document = result_of(suite, recipes, outcomes, about)
        write_atomically(out / RESULT, json_bytes(document))
        if show is not None:
            show(document)
    write_atomically(out / RESULT, json_bytes(document))
    write_page(out / PAGE, document)
    return document


def checked(suite: Suite, data_dir: Path | None = None) -> dict[Job, Recipe]:
    """The recipe of every run, after making its plan at the suite's ε, δ and relation; errors name the method."""
    recipes = {}
    for job in suite.jobs():
        recipes[job] = recipe = job.recipe()
        if not suite.public_data.strip() and (is_code(recipe.data.name) or recipe.data.name in SOURCES):
            raise Refused(
                f"{job.method.name}: [data] is your own, and a comparison shows every run, including those without "
                "privacy, with no joint ε: tune with `sordino sweep`, which pays for the choice; or say in "
                'public_data = "…" of the suite why these records need no protection'
            )
        if job.seed != suite.seeds[0]:
            continue  # the plan was checked with another seed
        try:
            plan = _plan(recipe, data_dir)
        except InputError as error:
            raise error.within(f"{job.method.name} at ε = {up(job.epsilon)}") from error
        if job.method.kind == "private" and (plan.delta, plan.relation) != (suite.delta, suite.relation):
            raise InputError(
                f"{job.method.name} has δ = {up(plan.delta)} and {plan.relation}, but the suite has δ = "
                f"{up(suite.delta)} and {suite.relation}: both must be equal for a comparison"
            )
    return recipes


def _plan(recipe: Recipe, data_dir: Path | None) -> Plan:
    """The plan, after all checks that need no data: optimizer, schedule, features."""
    method = method_of(recipe)
    if method.reads_own_data:
        return work_of(recipe, data_dir, False).plan
    optimizer, plan = optimizer_of(recipe), plan_of(recipe, data_dir)
    settings_of(recipe, optimizer, plan.steps, False)
    features.build({"name": recipe.features.name, **recipe.features.options}, data_dir)
    return plan


def _places(out: Path, job: Job) -> tuple[Path, Path, Path]:
    """(run directory, recipe, outcome) of a run."""
    folder = out / "runs" / job.folder
    return folder, folder.with_name(folder.name + ".toml"), folder.with_name(folder.name + ".outcome.json")


def _outcome(out: Path, job: Job) -> dict[str, Any] | None:
    """The outcome of a finished run; None if it has to be made, or failed before."""
    path = _places(out, job)[2]
    if not path.exists():
        return None
    found = read_json(path, "an outcome")
    return None if "error" in found else found


def taken(earlier: Mapping[str, Any], suite: Suite, recipes: Mapping[Job, Recipe]) -> dict[Job, dict[str, Any]]:
    """The outcomes in an earlier result whose method, settings, ε and seed are those of a run here.

    Each keeps the commit that made it. The version of torch is stated once for a result, so it must be the same.
    """
    theirs, here = earlier["environment"].get("torch"), environment()["torch"]
    if theirs != here:
        raise InputError(f"the earlier result was made with torch {theirs}, and here is {here}: run it again")
    if earlier.get("insecure_seeds") != suite.insecure_seeds:
        raise InputError("the earlier result and the suite differ in insecure_seeds: run it again")
    settings = {one["name"]: (one["kind"], one["settings"]) for one in earlier["methods"]}
    made = {(run["method"], run["target_epsilon"], run["seed"]): run for run in earlier["runs"] if "error" not in run}
    found = {}
    for job, recipe in recipes.items():
        name, kind, aim = job.method.name, job.method.kind, None if job.method.kind == "plain" else job.epsilon
        run, (same, known) = made.get((name, aim, job.seed)), settings.get(name, (None, {}))
        if run is not None and same == kind and known.get(up(job.epsilon)) == _settings(recipe):
            found[job] = {k: v for k, v in run.items() if k not in ("method", "target_epsilon", "seed")}
    return found


def _refuse_others(out: Path, recipes: Mapping[Job, Recipe]) -> None:
    """Refuses a directory with a run of another recipe: its outcome does not belong to this suite."""
    if out.exists() and any(out.iterdir()) and not (out / "runs").is_dir():
        raise InputError(f"{out} is not empty and contains no comparison: give another directory with --out")
    for job, recipe in recipes.items():
        path = _places(out, job)[1]
        if path.exists() and Recipe.read(path, allow_code=True) != recipe:
            raise InputError(
                f"{path} was made with another recipe: give another directory with --out, or delete this run"
            )


def _all(
    out: Path, recipes: Mapping[Job, Recipe], jobs: int, data_dir: Path | None
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each run with its outcome, in the order in which they end."""
    pool = ThreadPoolExecutor(jobs)
    try:
        waiting = {pool.submit(_made, out, job, recipe, data_dir): job for job, recipe in recipes.items()}
        for future in as_completed(waiting):
            yield waiting[future], future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # otherwise the waiting runs would still be made


def _made(out: Path, job: Job, recipe: Recipe, data_dir: Path | None) -> dict[str, Any]:
    """One run in a separate process."""
    folder, path, outcome = _places(out, job)
    make_folder(folder.parent)
    outcome.unlink(missing_ok=True)
    write_atomically(path, recipe.to_toml().encode())
    command = [sys.executable, "-m", "sordino.runs.compare_job", job.method.kind, str(folder)]
    single = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *([str(data_dir)] if data_dir else [])], env=single, stdin=subprocess.DEVNULL, capture_output=True
    )
    if not outcome.exists():
        ended = f"ended with exit code {done.returncode} without an outcome"
        return {"error": f"the process of this run {ended}: start the comparison again to continue it"}
    try:
        return read_json(outcome, "an outcome")
    except SordinoError as error:
        return {"error": str(error)}


def result_of(
    suite: Suite, recipes: Mapping[Job, Recipe], outcomes: Mapping[Job, Mapping[str, Any]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of compare.json: everything that the page needs."""
    runs = [
        {
            "method": job.method.name,
            "target_epsilon": None if job.method.kind == "plain" else job.epsilon,
            "seed": job.seed,
            **{key: value for key, value in outcomes[job].items() if key != "environment"},
        }
        for job in recipes
        if job in outcomes
    ]
    return {
        **about,
        "suite": suite.path.name,
        "title": suite.title,
        "notes": suite.notes,
        **{key: getattr(suite, key) for key in ("delta", "relation", "insecure_seeds")},
        "epsilons": list(suite.epsilons),
        "seeds": list(suite.seeds),
        "complete": len(runs) == len(recipes) and not any("error" in run for run in runs),
        "planned": len(recipes),
        "baseline": suite.reference,
        "methods": [_described(suite, one.name, recipes) for one in suite.methods],
        "table": table(suite, runs),
        "differences": differences(suite, runs),
        "runs": runs,
    }


def _described(suite: Suite, name: str, recipes: Mapping[Job, Recipe]) -> dict[str, Any]:
    """A method with its settings at every ε, from its recipes."""
    (method,) = [one for one in suite.methods if one.name == name]
    settings = {f"{up(job.epsilon)}": recipe for job, recipe in recipes.items() if job.method.name == name}
    return {
        "name": name,
        "kind": method.kind,
        "means": KINDS[method.kind],
        "assumes": method.assumes,
        "recipe": method.recipe or f"sordino/recipes/best/{method.best}.toml",
        "settings": {key: _settings(recipe) for key, recipe in settings.items()},
    }


def _settings(recipe: Recipe) -> dict[str, Any]:
    document = tomllib.loads(recipe.to_toml())
    document["run"].pop("seed")
    document["privacy"].pop("insecure_seed", None)
    return document


def table(suite: Suite, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean, standard deviation and seconds for each method and ε; methods without privacy have one row."""
    rows = []
    for method in suite.methods:
        for epsilon in (None,) if method.kind == "plain" else suite.epsilons:
            some = [r for r in runs if (r["method"], r["target_epsilon"]) == (method.name, epsilon)]
            reached = [r["test_accuracy"] for r in some if "error" not in r]
            seconds = [r["core_seconds"] for r in some if r.get("core_seconds") is not None]
            if not some:
                continue
            rows.append(
                {
                    "method": method.name,
                    "epsilon": epsilon,
                    "mean": statistics.fmean(reached) if reached else None,
                    "spread": statistics.stdev(reached) if len(reached) > 1 else None,
                    "seeds": len(reached),
                    "failed": len(some) - len(reached),
                    "largest_epsilon": max((r["epsilon"] for r in some if r.get("epsilon") is not None), default=None),
                    "core_seconds": statistics.fmean(seconds) if seconds else None,
                }
            )
    return rows


def differences(suite: Suite, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each private method minus the baseline, seed by seed, with the half width of Student's 95 % interval."""
    by_key = {(r["method"], r["target_epsilon"], r["seed"]): r["test_accuracy"] for r in runs if "error" not in r}
    rows = []
    for method in suite.methods:
        if method.name == suite.reference or method.kind == "plain":
            continue
        for epsilon in suite.epsilons:
            pairs = [
                by_key[method.name, epsilon, seed] - by_key[suite.reference, epsilon, seed]
                for seed in suite.seeds
                if (method.name, epsilon, seed) in by_key and (suite.reference, epsilon, seed) in by_key
            ]
            if not pairs:
                continue
            several = len(pairs) > 1
            spread = statistics.stdev(pairs) if several else None
            half = float(student.ppf(0.975, len(pairs) - 1)) * (spread or 0.0) / len(pairs) ** 0.5 if several else None
            rows.append(
                {
                    "method": method.name,
                    "epsilon": epsilon,
                    "mean": statistics.fmean(pairs),
                    "spread": spread,
                    "interval": half,
                    "seeds": len(pairs),
                }
            )
    return rows


def read_result(path: Path) -> dict[str, Any]:
    """The content of a compare.json, for its page; InputError if it is not one."""
    try:
        document: Any = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
    needed = ("title", "table", "differences", "methods", "runs", "baseline", "commit", "environment")
    missing = [key for key in needed if not isinstance(document, dict) or key not in document]
    if missing:
        raise InputError(f"{path} is not a result of a comparison: it has no {missing[0]}")
    try:
        render(document)
    except Exception as error:  # whatever a damaged file leads to
        raise InputError(f"{path} is damaged: no page can be made from it ({type(error).__name__})") from error
    return dict(document)
