"""The planner's proposal for linear classifiers against tuned settings, on test rows.

    python experiments/linear_rule.py --data-dir DIR [--out FILE]

The design is experiments/designs/linear_rule.toml. Tasks that are already in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import tomllib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sordino
from provenance import add_run, read_runs
from sordino import data
from sordino.methods.hidden_state.comparison import Problem
from sordino.methods.hidden_state.linear_rule import NORM, proposal
from sordino.training.updates import Averaging
from tasks import Rows, accuracy, held_out, model_of

DESIGN = Path(__file__).parent / "designs" / "linear_rule.toml"
COMMAND = "python experiments/linear_rule.py --data-dir DIR"
Setting = dict[str, float]


def rows(task: Mapping[str, Any], folder: Path) -> tuple[Rows, Rows]:
    """(training rows, test rows), scaled as the proposal says: the longest possible record has norm 16."""
    found = data.load(task["dataset"], folder)
    parts = []
    for split in (found.train, found.test):
        x = split.inputs
        if "words" in task:
            x = torch.zeros(len(x), task["words"]).scatter_(1, x % task["words"], 1.0)
        x = x.flatten(1).float()
        if task.get("unit"):
            x = x / x.norm(dim=1, keepdim=True)
        elif "words" not in task:
            low, high = float(x.min()), float(x.max())  # black and white after a public normalisation: both occur
            x = (x - low) / (high - low)
        parts.append((x * (NORM / task["longest"]), split.targets))
    return parts[0], parts[1]


def plan_of(design: Mapping[str, Any], epsilon: float, setting: Setting, records: int) -> sordino.Plan:
    return sordino.dpsgd(
        records=records, expected_batch=setting["rate"] * records, steps=int(setting["steps"]), epsilon=epsilon,
        delta=design["delta"], relation=design["relation"], clip_norm=setting["clip_norm"],
    )  # fmt: skip


def trained(plan: sordino.Plan, lr: float, train: Rows, test: Rows, seed: int) -> float:
    """The accuracy on the test rows, after a private run."""
    model = model_of({}, train, seed)
    settings = sordino.Settings(progress=False, chunk=8192, averaging=Averaging("tail", tail=0.5))
    sordino.train(model, torch.nn.CrossEntropyLoss(reduction="none"), train, plan, lr=lr, settings=settings)
    return accuracy(model, test)


def tried(noise_multiplier: float, setting: Setting, most: Rows, rest: Rows, seed: int = 0) -> float:
    """The same in closed form, for trials: batches are slices, the noise is torch's, and nothing is released."""
    (x, y), clip, steps = most, setting["clip_norm"], int(setting["steps"])
    wanted = torch.nn.functional.one_hot(y).float()
    lengths, generator = x.square().sum(1) + 1, torch.Generator().manual_seed(seed)
    batch = round(setting["rate"] * len(y))
    weights = torch.zeros(x.shape[1] + 1, wanted.shape[1])
    average = torch.zeros_like(weights)
    for step in range(steps):
        at = int(torch.randint(0, len(y) - batch + 1, (1,), generator=generator))
        part = slice(at, at + batch)
        error = torch.softmax(x[part] @ weights[:-1] + weights[-1], 1) - wanted[part]
        error *= (clip / (error.square().sum(1) * lengths[part]).sqrt().clamp(min=clip))[:, None]
        total = torch.cat([(error.T @ x[part]).T, error.sum(0, keepdim=True)])
        total += noise_multiplier * clip * torch.randn(total.shape, generator=generator)
        weights -= setting["lr"] / batch * total
        average += weights if step >= steps / 2 else 0.0
    return _right(average, rest)


def _right(weights: Tensor, rows: Rows) -> float:
    return float(((rows[0] @ weights[:-1] + weights[-1]).argmax(1) == rows[1]).double().mean())


def tuned(design: Mapping[str, Any], epsilon: float, first: Setting, train: Rows) -> tuple[Setting, list[Any]]:
    """The best setting on held-out training rows, and all trials."""
    most, rest = held_out(train, 1 / 6)
    longest = math.hypot(NORM, 1)
    settings = [first, first | {"steps": first["steps"] // 4}] + [
        first | {"clip_norm": clip * longest, "lr": move / (NORM * clip * longest)}
        for clip, move in itertools.product(design["clip"], design["move"])
    ]
    plans = [plan_of(design, epsilon, one, len(most[1])) for one in settings]
    found = [
        (tried(plan.noise.noise_multiplier, one, most, rest), one) for plan, one in zip(plans, settings, strict=True)
    ]
    return max(found, key=lambda pair: pair[0])[1], [{**one, "accuracy": value} for value, one in found]


def run(design: Mapping[str, Any], name: str, folder: Path) -> dict[str, Any]:
    """One task: the proposal and the tuned setting."""
    task = design["tasks"][name]
    train, test = rows(task, folder)
    count, features, classes = len(train[1]), train[0].shape[1], int(train[1].max()) + 1
    problem = Problem(count, features, classes, task["epsilon"], design["delta"], feature_norm=task["longest"])
    planned = proposal(problem)
    first = {
        "rate": planned.batch / count, "steps": planned.steps, "clip_norm": planned.clip_norm, "lr": planned.lr,
    }  # fmt: skip
    best, trials = tuned(design, task["epsilon"], first, train)
    rows_of: dict[str, Any] = {}
    for row, setting in (("proposal", first), ("tuned", best)):
        if row == "tuned" and best == first:
            rows_of[row] = rows_of["proposal"]
            continue
        plan = plan_of(design, task["epsilon"], setting, count)
        found = [trained(plan, setting["lr"], train, test, seed) for seed in range(design["seeds"])]
        rows_of[row] = {
            "setting": setting, "accuracies": found, "accuracy": statistics.mean(found),
            "spread": statistics.stdev(found), "noise_multiplier": plan.noise.noise_multiplier,
            "epsilon": plan.guarantee().epsilon, "delta": plan.delta, "relation": plan.relation,
        }  # fmt: skip
        print(f"{name} {row}: {rows_of[row]['accuracy']:.4f} ± {rows_of[row]['spread']:.4f}, {setting}", flush=True)
    return {"task": name, "proposed": asdict(planned), "trials": trials, **rows_of}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "linear_rule.json")
    arguments = parser.parse_args()
    design = tomllib.loads(DESIGN.read_text(encoding="utf8"))

    def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
        keys = ("accuracy", "spread", "setting", "noise_multiplier", "epsilon")
        return [
            {"row": f"{name}, {row}", **{key: runs[name][row][key] for key in keys}}
            for name in design["tasks"]
            if name in runs
            for row in ("proposal", "tuned")
        ]

    for name in design["tasks"]:
        if name not in read_runs(arguments.out):
            add_run(arguments.out, COMMAND, name, run(design, name, arguments.data_dir), table)


if __name__ == "__main__":
    main()
