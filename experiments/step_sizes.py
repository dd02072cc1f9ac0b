"""The step size that the planner proposes for linear classifiers, and fractions of it, on held-out training rows.

    python experiments/step_sizes.py --data-dir DIR [--out FILE]
    python experiments/step_sizes.py --page              print the table of FILE as Markdown

The design is experiments/designs/step_sizes.toml. Tasks that are already in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from linear_rule import rows, tried
from pages import table as markdown
from provenance import add_run, read_runs
from sordino.methods.hidden_state.comparison import Problem
from sordino.methods.hidden_state.linear_rule import proposal
from tasks import held_out

HERE = Path(__file__).parent
DESIGN = HERE / "designs" / "step_sizes.toml"
COMMAND = "python experiments/step_sizes.py --data-dir DIR"


def run(design: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """One task: the accuracy for every budget and every fraction of the proposed step size."""
    task, found = design["tasks"][name], []
    inputs, targets = rows(task, folder)[0]
    targets = targets % task["modulo"] if "modulo" in task else targets
    most, rest = held_out((inputs, targets), design["held_out"])
    count, features, classes = len(most[1]), most[0].shape[1], int(most[1].max()) + 1
    for epochs, epsilon in itertools.product(design["max_epochs"], design["epsilons"]):
        problem = Problem(
            count, features, classes, epsilon, design["delta"], feature_norm=task["longest"], max_epochs=epochs
        )
        planned = proposal(problem)
        setting = {"rate": planned.batch / count, "steps": planned.steps, "clip_norm": planned.clip_norm}
        for factor in design["factors"]:
            own = setting | {"lr": factor * planned.lr}
            trials = [tried(planned.noise_multiplier, own, most, rest, seed) for seed in range(design["seeds"])]
            found.append({
                "max_epochs": epochs, "epsilon": epsilon, "factor": factor, "lr": own["lr"], "batch": planned.batch,
                "steps": planned.steps, "score_noise": factor * planned.score_noise, "accuracies": trials,
                "accuracy": statistics.mean(trials),
            })  # fmt: skip
        print(name, epochs, epsilon, *(f"{100 * one['accuracy']:.2f}" for one in found[-4:]), flush=True)
    return {"task": name, "found": found}


def gains(runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """For every task and fraction: the points gained over the proposal, the least, the median and the greatest."""
    result = []
    for name, one in runs.items():
        base = {(r["max_epochs"], r["epsilon"]): r["accuracy"] for r in one["found"] if r["factor"] == 1}
        for factor in sorted({r["factor"] for r in one["found"]} - {1.0}):
            gained = [
                100 * (r["accuracy"] - base[r["max_epochs"], r["epsilon"]])
                for r in one["found"]
                if r["factor"] == factor
            ]
            result.append({
                "task": name, "factor": factor, "budgets": len(gained), "least": min(gained),
                "median": statistics.median(gained), "greatest": max(gained),
            })  # fmt: skip
    return result


def page(found: list[dict[str, Any]]) -> str:
    """The gains as a Markdown table: one row for each task, one column for each fraction."""
    factors = sorted({row["factor"] for row in found})
    cells = {(r["task"], r["factor"]): f"{r['least']:+.1f} to {r['greatest']:+.1f}" for r in found}
    names = list(dict.fromkeys(row["task"] for row in found))
    lines = [[name, *(cells[name, factor] for factor in factors)] for name in names]
    return markdown(["points gained by", *(f"{factor:g} of the step size" for factor in factors)], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--page", action="store_true", help="print the table of FILE as Markdown")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step_sizes.json")
    arguments = parser.parse_args()
    if arguments.page:
        print(page(json.loads(arguments.out.read_text(encoding="utf8"))["table"]))
        return
    if arguments.data_dir is None:
        parser.error("--data-dir is needed")
    design = tomllib.loads(DESIGN.read_text(encoding="utf8"))
    for name in design["tasks"]:
        if name not in read_runs(arguments.out):
            add_run(arguments.out, COMMAND, name, run(design, name, arguments.data_dir), gains)


if __name__ == "__main__":
    main()
