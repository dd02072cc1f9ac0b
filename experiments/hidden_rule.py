"""Hidden state and composition at equal ε, each as the planner proposes to train it, on test rows.

    python experiments/hidden_rule.py --data-dir DIR [--out FILE] [--tasks NAME …]

The design is experiments/designs/hidden_rule.toml. Tasks that are already in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linear_rule import plan_of, rows, trained
from provenance import add_run, read_runs
from sordino.methods.hidden_state import train_hidden
from sordino.methods.hidden_state.comparison import Problem
from sordino.methods.hidden_state.hidden_rule import HiddenProposal, hidden_plan, hidden_proposal, losses_of
from sordino.methods.hidden_state.linear_rule import Proposal, proposal
from tasks import Rows

DESIGN = Path(__file__).parent / "designs" / "hidden_rule.toml"
COMMAND = "python experiments/hidden_rule.py --data-dir DIR"
WAYS = ("composition", "hidden_state")


def last_iterate(plan: Any, train: Rows, test: Rows) -> float:
    """The accuracy on the test rows of the published last iterate."""
    model = train_hidden(plan, train, progress=False).model
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def run(design: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """One task: both proposals, trained with every seed."""
    task = design["tasks"][name]
    train, test = rows(task, folder)
    count, features, classes = len(train[1]), train[0].shape[1], int(train[1].max()) + 1
    problem = Problem(
        count, features, classes, task["epsilon"], design["delta"], feature_norm=task["longest"],
        max_epochs=task["max_epochs"],
    )  # fmt: skip
    composed, hidden = proposal(problem), hidden_proposal(problem, features, classes)
    setting = {
        "rate": composed.batch / count, "steps": composed.steps, "clip_norm": composed.clip_norm, "lr": composed.lr,
    }  # fmt: skip
    plans = (
        plan_of({"delta": design["delta"], "relation": "replace-one"}, task["epsilon"], setting, count),
        hidden_plan(problem, features, classes, hidden),
    )
    found: dict[str, Any] = {"task": name}
    proposals: tuple[Proposal | HiddenProposal, ...] = (composed, hidden)
    for way, plan, proposed in zip(WAYS, plans, proposals, strict=True):
        begin, accuracies = time.perf_counter(), list[float]()
        for seed in range(design["seeds"]):
            if way == "composition":
                accuracies.append(trained(plan, composed.lr, train, test, seed))
            else:
                accuracies.append(last_iterate(plan, train, test))
        found[way] = {
            "proposal": asdict(proposed), "expected_losses": losses_of(proposed), "accuracies": accuracies,
            "accuracy": statistics.mean(accuracies), "spread": statistics.stdev(accuracies),
            "noise_multiplier": plan.noise.noise_multiplier, "epsilon": plan.guarantee().epsilon, "delta": plan.delta,
            "relation": plan.relation, "seconds": time.perf_counter() - begin,
        }  # fmt: skip
        print(f"{name} {way}: {found[way]['accuracy']:.4f} ± {found[way]['spread']:.4f}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hidden_rule.json")
    parser.add_argument("--tasks", nargs="+")
    arguments = parser.parse_args()
    design = tomllib.loads(DESIGN.read_text(encoding="utf8"))

    def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
        keys = ("accuracy", "spread", "noise_multiplier", "epsilon", "expected_losses")
        return [
            {"row": f"{name}, {way}", **{key: runs[name][way][key] for key in keys}}
            for name in design["tasks"]
            if name in runs
            for way in WAYS
        ]

    for name in arguments.tasks or design["tasks"]:
        if name not in read_runs(arguments.out):
            add_run(arguments.out, COMMAND, name, run(design, name, arguments.data_dir), table)


if __name__ == "__main__":
    main()
