"""The planner's proposal for a linear classifier on Fashion-MNIST against what trains well.

    python experiments/full_batch.py --data-dir DIR [--out FILE]

The design is experiments/designs/full_batch.toml, fixed before the runs. Runs that are already in FILE are not
repeated.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import sordino
from provenance import add_run, read_runs
from sordino import data
from sordino.methods.hidden_state.comparison import Problem, compare
from tasks import Rows, accuracy, model_of

DESIGN = Path(__file__).parent / "designs" / "full_batch.toml"
COMMAND = "python experiments/full_batch.py --data-dir DIR"
Setting = dict[str, float]


def rows(folder: Path) -> tuple[Rows, Rows]:
    """(training rows, test rows) with pixels in [0, 1], divided by 28."""
    found = data.load("fashion-mnist", folder)
    whole = torch.cat([found.train.inputs, found.test.inputs])
    low, high = float(whole.min()), float(whole.max())  # public constants of the pixels' normalisation
    parts = [((s.inputs.flatten(1).float() - low) / (high - low) / 28, s.targets) for s in (found.train, found.test)]
    return parts[0], parts[1]


def plan_of(design: Mapping[str, Any], setting: Setting, records: int) -> sordino.Plan:
    return sordino.dpsgd(
        records=records, expected_batch=records / setting["batches"], epochs=setting["epochs"],
        epsilon=design["epsilon"], delta=design["delta"], relation=design["relation"], clip_norm=setting["clip_norm"],
    )  # fmt: skip


def trained(plan: sordino.Plan, train: Rows, test: Rows, lr: float, seed: int) -> float:
    """The accuracy on the test rows, after a private run."""
    model = model_of({}, train, seed)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    sordino.train(model, loss, train, plan, lr=lr, settings=sordino.Settings(progress=False, chunk=8192))
    return accuracy(model, test)


def proposal(design: Mapping[str, Any], records: int, features: int) -> Setting:
    """The planner's proposal for an adversary who sees every iterate."""
    problem = Problem(records, features, 10, design["epsilon"], design["delta"])
    found = compare(problem)["composition"]
    return {
        "batches": records // found["batch"], "epochs": found["epochs"], "clip_norm": problem.sensitivity / 2,
        "lr": found["lr"], "planned_noise_multiplier": found["noise_multiplier"],
    }  # fmt: skip


def settings_of(row: Mapping[str, Any]) -> list[Setting]:
    return [
        {"batches": row["batches"], "epochs": row["epochs"], "clip_norm": clip, "lr": scaled / clip}
        for clip, scaled in itertools.product(row["clip_norm"], row["scaled_lr"])
    ]


def tuned(
    design: Mapping[str, Any], settings: list[Setting], rows: tuple[Rows, Rows]
) -> tuple[Setting, list[dict[str, float]]]:
    """The best setting on held-out training rows, and the trials; one setting needs none."""
    if len(settings) == 1:
        return settings[0], []
    most, rest = rows
    found = [trained(plan_of(design, one, len(most[1])), most, rest, one["lr"], 0) for one in settings]
    tried = [{**one, "accuracy": value} for one, value in zip(settings, found, strict=True)]
    return max(zip(found, settings, strict=True), key=lambda pair: pair[0])[1], tried


def run(design: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """One row."""
    train, test = rows(folder)
    described, tried = design["rows"][name], list[dict[str, float]]()
    if described.get("planned"):
        best = proposal(design, len(train[1]), train[0].shape[1])
    else:
        cut = len(train[1]) - design["held_out"]
        most, rest = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
        best, tried = tuned(design, settings_of(described), (most, rest))
    plan = plan_of(design, best, len(train[1]))
    seeds = described.get("seeds", design["seeds"])
    measured = [trained(plan, train, test, best["lr"], seed) for seed in range(seeds)]
    return {
        "row": name, "setting": best, "steps": plan.steps, "epsilon": plan.guarantee().epsilon, "delta": plan.delta,
        "relation": plan.relation, "noise_multiplier": plan.noise.noise_multiplier, "held_out": tried,
        "accuracies": measured, "accuracy": statistics.mean(measured),
        "spread": statistics.stdev(measured) if len(measured) > 1 else None,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "full_batch.json")
    arguments = parser.parse_args()
    design = tomllib.loads(DESIGN.read_text(encoding="utf8"))

    def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
        keys = ("row", "accuracy", "spread", "setting", "steps", "noise_multiplier", "epsilon")
        return [{key: runs[name][key] for key in keys} for name in design["rows"] if name in runs]

    for name in design["rows"]:
        if name not in read_runs(arguments.out):
            row = run(design, name, arguments.data_dir)
            add_run(arguments.out, COMMAND, name, row, table)
            print(f"{name}: {row['accuracy']:.4f} ± {row['spread']:.4f}, {row['setting']}", flush=True)


if __name__ == "__main__":
    main()
