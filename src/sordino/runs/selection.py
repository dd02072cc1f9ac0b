"""A sweep with private selection: a random number of runs, of which the best is released, at one (ε, δ) for all.

    runs/NAME-sweep/run/         the run directory of the selected run, and of no other
    runs/NAME-sweep/sweep.json   the grid, the distribution of the number of runs, and the guarantee of the selection

The theorem (accounting/selection.py) covers the selected run *only*. So there is no table and no heat map; other runs
are deleted as soon as a better one is known; their results and their number, which would void the guarantee, are never
written. The settings of each run are drawn uniformly from the grid; noise is calibrated so that the selection meets ε.

A run that fails counts as the worst. If no run was drawn (Poisson), or all failed, nothing is released. A killed sweep
has published nothing and is started again: what it left behind is deleted without being read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sordino import report
from sordino.accounting.grids import Releases
from sordino.accounting.selection import Repetition, calibrate_selection, selection_epsilon
from sordino.checks import SHAPES
from sordino.errors import InputError, Refused, SordinoError
from sordino.files import json_bytes, make_folder, read_json, usable_folder, write_atomically
from sordino.plan import Plan
from sordino.randomness import RandomSource
from sordino.registry import names_with
from sordino.runs.closing import write_closed
from sordino.runs.recipe import Recipe
from sordino.runs.sweep import Checked, Sweep, check, described, run_one, toml_value
from sordino.shown import up
from sordino.training.metrics import read_metrics
from sordino.training.progress import working
from sordino.training.sealed import read_sealed

HIDDEN = ".unpublished"  # below `out`, for runs that must not be seen
THREAT = (
    "the adversary sees the selected run only, every noisy sum that it released, and the distribution of the number of "
    "runs; neither the other runs nor how many there were"
)
_THEOREM = "private selection with a random number of runs (Papernot, Steinke 2022, Thm "
THEOREMS = {name: f"{_THEOREM}{6 if name == 'poisson' else 2})" for name in SHAPES}
ASSUMPTIONS = (
    ("the number of runs is secret", "drawn from a cryptographic generator and never written"),
    ("no other run's result is seen", "their directories are deleted; there is no table of results"),
    ("the test data by which the run was selected are public", "assumed; the guarantee does not protect them"),
)
NOTHING = "This time no run was drawn, or none succeeded: nothing is released. The budget is spent all the same."


@dataclass(frozen=True)
class Price:
    """(ε, δ) of the whole sweep, and the distribution of the number of runs."""

    epsilon: float
    delta: float
    repetition: Repetition


@dataclass(frozen=True)
class Outcome:
    """The selected run: its point, its metric, and its directory."""

    chosen: Checked
    value: float
    folder: Path


Run = Callable[[Recipe, Path], Mapping[str, Any]]


def candidates(sweep: Sweep, price: Price, data_dir: Path | None = None) -> list[Checked]:
    """All points, with noise for which the selection meets the price; Refused if the theorem does not cover it."""
    for axis in sweep.axes:
        if axis.key.startswith(("data.", "public.")):
            raise Refused(
                f"--over {axis.key}: with --pay all runs must protect the same records, but this key changes which "
                "rows are private; sweep other keys"
            )
        if axis.key.startswith("privacy."):
            raise Refused(
                f"--over {axis.key}: with --pay the privacy of all runs follows from --epsilon and --delta; sweep "
                "other keys"
            )
    checked = check(sweep, data_dir, partial(_with_noise, noise_multiplier=1.0, delta=price.delta))
    for one in checked:
        _refuse(one.recipe, one.plan)
    if len({one.plan.relation for one in checked}) > 1:
        raise Refused("the runs of a paid sweep must have the same relation: the whole has one guarantee")
    kinds = {repr(one.plan.releases()): one.plan for one in checked}
    functions: list[Callable[[float], Releases]] = [partial(_releases, plan) for plan in kinds.values()]
    found = calibrate_selection(functions, price.epsilon, price.repetition, price.delta, checked[0].plan.relation)
    noise = dict(zip(kinds, found, strict=True))
    return [_calibrated(one, noise[repr(one.plan.releases())], price.delta) for one in checked]


def _calibrated(one: Checked, noise_multiplier: float, delta: float) -> Checked:
    recipe = _with_noise(one.recipe, noise_multiplier, delta)
    return Checked(one.point, recipe, one.plan.with_noise(noise_multiplier))


def _with_noise(recipe: Recipe, noise_multiplier: float, delta: float) -> Recipe:
    """The recipe with this noise instead of its own budget."""
    privacy = replace(recipe.privacy, epsilon=None, noise_multiplier=noise_multiplier, delta=delta)
    return replace(recipe, privacy=privacy)


def _releases(plan: Plan, noise_multiplier: float) -> Releases:
    return plan.with_noise(noise_multiplier).releases()


def _refuse(recipe: Recipe, plan: Plan) -> None:
    if plan.insecure_seed is not None:
        raise Refused(
            "with --pay the runs need independent, secret noise: leave privacy.insecure_seed out of the recipe"
        )
    if recipe.run.noise_free:
        raise Refused(
            "with --pay only the selected run may be published: add --set run.noise_free=false, because training "
            "without noise is not private"
        )
    if not plan.method.composes:
        raise Refused(
            f"--pay needs the Rényi divergence of a run at all orders, which {plan.method.name} does not give: use one "
            f"of {', '.join(names_with(lambda method: method.composes))}"
        )


def run_paid(
    sweep: Sweep, price: Price, out: Path, *, data_dir: Path | None = None, progress: bool | None = None
) -> dict[str, Any]:
    """Makes the runs, keeps the best one, and returns the content of sweep.json; the other runs are deleted."""
    usable_folder(out)
    if out.exists() and any(path.name != HIDDEN for path in out.iterdir()):
        raise InputError(f"{out} is not empty: a paid sweep is made once, in its own directory; give another --out")
    found = candidates(sweep, price, data_dir)
    relation = found[0].plan.relation
    epsilon = selection_epsilon([one.plan.releases() for one in found], price.repetition, price.delta, relation)
    if not epsilon <= price.epsilon:
        raise SordinoError(f"calibration failed: the sweep would cost ε = {up(epsilon)}, more than {up(price.epsilon)}")
    hidden = out / HIDDEN
    shutil.rmtree(hidden, ignore_errors=True)
    make_folder(hidden, private=True)
    try:
        with working("a paid sweep; the number of runs is secret", progress):
            drawn = draw_runs(found, price.repetition, RandomSource.from_os())
            best = best_of(drawn, sweep, hidden, partial(run_one, data_dir=data_dir))
        document = _document(sweep, price, epsilon, relation, best)
        if best is not None:
            restate(best.folder, document)
            _same_times(best.folder)
            best.folder.replace(out / "run")
    finally:
        shutil.rmtree(hidden, ignore_errors=True)
    write_atomically(out / "sweep.json", json_bytes(document))
    return document


def _same_times(folder: Path) -> None:
    """Gives all files the same time: the time of the selected run would reveal how many runs followed."""
    now = time.time()
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (now, now))


def draw_runs(found: Sequence[Checked], repetition: Repetition, source: RandomSource) -> list[Checked]:
    """K runs, each with settings drawn uniformly and independently. Both draws are independent of the records."""
    count = repetition.draw(source.stream("sweep/runs", 0))
    return [found[index] for index in source.stream("sweep/settings", 0).below(len(found), count)] if count else []


def best_of(drawn: Sequence[Checked], sweep: Sweep, hidden: Path, run: Run) -> Outcome | None:
    """The run with the best metric, the first among equals; the directories of all others are deleted.

    A run that fails, or whose metric is not a number, is worse than any other. None: there is nothing to release.
    """
    best: Outcome | None = None
    for index, one in enumerate(drawn):
        folder = hidden / str(index)
        found = run(one.recipe, folder).get(sweep.metric)
        value = float(found) if isinstance(found, int | float) else math.nan
        if math.isnan(value) or (best is not None and not sweep.better(value, best.value)):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        if best is not None:
            shutil.rmtree(best.folder, ignore_errors=True)
        best = Outcome(one, value, folder)
    return best


def _document(sweep: Sweep, price: Price, epsilon: float, relation: str, best: Outcome | None) -> dict[str, Any]:
    """What may be published: a function of the selected run and of public values only."""
    law = price.repetition
    sentence = (
        f"The selection as a whole is (ε = {up(epsilon)}, δ = {up(price.delta)})-differentially "
        f"private under {relation}: the best, by {sweep.metric} on public test data, of a secret {law.distribution} "
        f"number of runs (mean {law.mean_runs:g}), each with settings drawn uniformly from {len(sweep.points())}. "
        "Only the selected run may be published, not the number of runs or the results of the others."
    )
    return {
        **described(sweep),
        "paid": True,
        "secure": True,
        "epsilon": epsilon,
        "delta": price.delta,
        "relation": relation,
        "accountant": "rdp",
        "theorem": THEOREMS[law.distribution],
        "distribution": law.distribution,
        "mean_runs": law.mean_runs,
        "sentence": sentence if best else f"{sentence} {NOTHING}",
        "selected": None
        if best is None
        else {
            "settings": {key: toml_value(text) for key, text in best.chosen.point.settings},
            "seed": best.chosen.recipe.run.seed,
            "folder": "run",
            "value": best.value,
            "noise_multiplier": best.chosen.plan.noise.noise_multiplier,
        },
    }


def restate(folder: Path, document: Mapping[str, Any]) -> None:
    """Changes the selected run's files: the guarantee of the whole selection replaces that of the single run."""
    result = read_json(folder / "result.json", "the result of the selected run")
    stated = {key: document[key] for key in ("epsilon", "delta", "relation", "accountant", "theorem")}
    guarantee = result["guarantee"]
    assumptions = [*guarantee["assumptions"], *({"text": text, "check": how} for text, how in ASSUMPTIONS)]
    guarantee |= stated | {
        "sentence": document["sentence"],
        "threat_model": THREAT,
        "assumptions": assumptions,
        "epsilon_rdp": document["epsilon"],
        "epsilon_lower": None,
        "beside": {"epsilon_of_a_single_run": result["epsilon"], **guarantee["beside"]},
    }
    result |= stated | {"guarantee": guarantee, "epsilon_of_a_single_run": result["epsilon"]}
    if isinstance(result.get("environment"), dict):
        result["environment"].pop("finished", None)  # with the end of the sweep it would show how many runs followed
    metrics = folder / "metrics.jsonl"
    rows = read_metrics(metrics)
    # the ε of a single run over its steps is smaller than the selection's cost, so it is not shown
    kept = [json.dumps({key: value for key, value in row.items() if key != "epsilon"}) + "\n" for row in rows]
    write_atomically(metrics, "".join(kept).encode())
    tensors, about = read_sealed(folder / "model.safetensors")  # the model file states an ε too
    metadata = {key: value for key, value in about.items() if key not in ("format", "ledger", "result")}
    metadata |= {key: stated[key] for key in ("epsilon", "delta", "relation")} | {"guarantee": document["sentence"]}
    write_closed(
        folder, {key: value for key, value in result.items() if key not in ("ledger", "files")}, tensors, metadata
    )
    report.write(folder)
