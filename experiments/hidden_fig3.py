"""Fig. 3 of Ye & Shokri 2022: does DP-SGD on CIFAR-10's scattering features still improve after 60 epochs?

    python experiments/hidden_fig3.py            results/hidden_fig3.json and docs/figures/hidden_state_fig3.svg
    python experiments/hidden_fig3.py --figure   only the figure, from the file

The rows of experiments/hidden_table1.py with the paper's settings (Appendix D.4; 2,187 features), without and with its
regulariser, for 180 epochs with the noise that has ε = 3 after 60 of them. Accuracy is measured every ten epochs on the
test images and on 10,000 of the training images, both of which are public here. One seed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hidden_table1 import CLIP, DELTA, PAPER, RIDGE, dpsgd_plan, splits
from provenance import add_run, read_runs
from sordino import data, nets
from sordino.clipping import FlatClip
from sordino.plan import Plan
from sordino.report.curves import curves_svg
from sordino.report.plots import Series
from sordino.runs.prepared import test_metrics
from sordino.training import Settings, train

ROOT = Path(__file__).parents[1]
PATH = ROOT / "experiments" / "results" / "hidden_fig3.json"
FIGURE = ROOT / "docs" / "figures" / "hidden_state_fig3.svg"
COMMAND, DATASET, ROW = "python experiments/hidden_fig3.py", "cifar10", "DP-SGD, clipped gradients"
LONGER, POINTS = 3, 18
ARMS = {"λ = 0": 0.0, f"λ = {RIDGE}": RIDGE}


def longer_plan(records: int) -> Plan:
    """The paper's plan for three times as many steps, with the same noise."""
    paper, plan = PAPER[DATASET], dpsgd_plan(DATASET, ROW, 0, records)
    return Plan.dpsgd(
        noise_multiplier=plan.noise.noise_multiplier, delta=DELTA, records=records, expected_batch=paper.batch,
        steps=LONGER * plan.steps, clipping=FlatClip(CLIP), insecure_seed=0,
    )  # fmt: skip


def run(ridge: float) -> dict[str, Any]:
    rows, test = splits(DATASET)
    plan, some = longer_plan(len(rows)), data.Split(rows.inputs[:10_000], rows.targets[:10_000])
    torch.manual_seed(0)
    model, began = nets.build("linear", tuple(rows.inputs.shape[1:]), 10), time.process_time()

    def measured(net: nn.Module) -> dict[str, float]:
        on = {name: test_metrics(net, split)["test_accuracy"] for name, split in (("test", test), ("train", some))}
        return {f"{name}_accuracy": value for name, value in on.items()}

    settings = Settings(
        optimizer_options={"momentum": 0.9, "weight_decay": ridge}, chunk=4096, seed=0, progress=False,
        eval_every=plan.steps // POINTS,
    )  # fmt: skip
    found = train(
        model, nn.functional.cross_entropy, rows, plan, optimizer=torch.optim.SGD, lr=PAPER[DATASET].lr,
        settings=settings, evaluate=measured,
    )  # fmt: skip
    first = dpsgd_plan(DATASET, ROW, 0, len(rows))
    return {
        "ridge": ridge, "delta": DELTA, "relation": plan.relation, "noise_multiplier": plan.noise.noise_multiplier,
        "steps": plan.steps, "epsilon": plan.guarantee().epsilon, "steps_of_the_paper": first.steps,
        "epsilon_of_the_paper": first.guarantee().epsilon, "seed": 0,
        "curve": [
            {"epoch": m["step"] * plan.divisor / plan.records} | {k: m[f"{k}_accuracy"] for k in ("test", "train")}
            for m in found.metrics if "test_accuracy" in m
        ],
        "core_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """The accuracies nearest to 60 epochs, and the last ones."""
    rows = []
    for name, one in runs.items():
        at = min(one["curve"], key=lambda point: abs(float(point["epoch"]) - PAPER[DATASET].epochs))
        for point, epsilon in ((at, one["epsilon_of_the_paper"]), (one["curve"][-1], one["epsilon"])):
            rows.append({"arm": name, "epochs": round(point["epoch"]), "epsilon": epsilon} | {
                key: point[key] for key in ("test", "train")
            })  # fmt: skip
    return rows


def draw(runs: dict[str, Any]) -> str:
    """Accuracies over the epochs."""
    first = next(iter(runs.values()))["curve"]
    lines = {
        f"{what}, {name}": [p[what] for p in one["curve"]] for name, one in runs.items() for what in ("test", "train")
    }
    last = ", ".join(f"{name} {values[-1]:.3f}" for name, values in lines.items())
    series = Series("CIFAR-10, scattering: accuracy over epochs", f"At the end: {last}.", "epoch", "accuracy")
    return curves_svg([float(p["epoch"]) for p in first], lines, series, from_zero=False)


def main() -> int:
    torch.set_num_threads(1)
    for name, ridge in ARMS.items():
        if "--figure" not in sys.argv[1:] and name not in read_runs(PATH):
            found = add_run(PATH, COMMAND, name, run(ridge), table)[name]
            print(f"{name}: {found['curve'][-1]}", flush=True)
    FIGURE.write_text(draw(json.loads(PATH.read_text("utf8"))["runs"]), "utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
