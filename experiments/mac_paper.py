"""DP-MAC with the settings of Table 2 of Harder et al. 2018, nothing tuned, five seeds; one JSON file, resumable.

    python experiments/mac_paper.py [--parts mnist usps] [--seeds 0 1 2 3 4]

Z-steps: 30 joint Adam steps from a forward start. W-steps: Adam, one a step; its step size falls by the printed factor
after every epoch. Bounds, noise and the noise of DP-PCA are the printed ones, so ε is not the printed one: ours is for
add/remove and δ = 1e-5, by PLD, and includes DP-PCA. What the paper leaves open: the scale of the inputs (here that of
our recipe, a public one), and USPS's split (4,649 images of the resampled half instead of 5,000). The DP-SGD column of
Table 2 is not run: its step size "decays" by 100, and DP-SGD with settings of its own is in mac.json.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import StepLR

from mac import USPS, recipe, sets_of
from provenance import add_run, read_runs
from sordino.methods import dp_mac
from sordino.methods.dp_mac.optimise import WSteps
from sordino.methods.dp_mac.recipe import MacRecipe
from sordino.methods.dp_mac.run import test_metrics
from sordino.methods.dp_mac.training import Mac, train_mac
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.plan import Plan

PATH = Path(__file__).parent / "results" / "mac_paper.json"
COMMAND = "python experiments/mac_paper.py"
BOUND, Z_LR, DELTA = {"mnist": 0.3, "usps": 0.001}, {"mnist": 0.003, "usps": 0.001}, 1e-5


@dataclass(frozen=True)
class Printed:
    """One column of Table 2 at one printed ε."""

    sigma: float
    batch: int
    epochs: int
    lr: float
    decay: float  # of the step size, after every epoch
    pca: float | None = None  # the noise multiplier of DP-PCA
    accuracy: float | None = None  # Table 1a


PRINTED = {
    "mnist": {
        0.5: Printed(8.0, 1000, 10, 0.03, 0.7, 16.0, 0.90),
        2.0: Printed(2.8, 1000, 30, 0.01, 0.95, 8.0, 0.95),
        8.0: Printed(1.0, 1000, 30, 0.01, 0.95, 4.0, 0.97),
    },
    "usps": {
        1.0: Printed(7.8, 250, 50, 0.003, 0.97),
        2.0: Printed(4.1, 250, 50, 0.003, 0.97),
        4.0: Printed(3.1, 500, 50, 0.003, 0.97),
        8.0: Printed(1.8, 500, 50, 0.003, 0.97),
    },
}


def made(part: str, epsilon: float, seed: int) -> tuple[MacRecipe, Mac, Plan]:
    """(our recipe with the printed noise of DP-PCA, the printed DP-MAC, its plan)."""
    row = PRINTED[part][epsilon]
    name, changes = (USPS, ()) if row.pca is None else ("mac_mnist_eps8", (f"features.noise_multiplier={row.pca}",))
    ours = recipe(name, seed, *changes)
    mac = Mac(ZSteps(30, Z_LR[part]), w=WSteps("adam", row.lr), bounds={"gradient": BOUND[part]})
    plan = dp_mac.plan(
        parts=mac.parts(len(ours.widths) - 1), noise_multiplier=row.sigma, delta=DELTA, records=ours.plan.records,
        steps=math.ceil(row.epochs * ours.plan.records / row.batch), expected_batch=row.batch, insecure_seed=seed,
        statistics=[] if ours.pca is None else [ours.pca.statistic()],
    )  # fmt: skip
    return ours, mac, plan


def run(part: str, epsilon: float, seed: int) -> dict[str, Any]:
    row, (ours, mac, plan) = PRINTED[part][epsilon], made(part, epsilon, seed)
    sets, epoch = sets_of(ours), round(plan.records / row.batch)
    settings = replace(
        ours.settings, scheduler=partial(StepLR, step_size=epoch, gamma=row.decay), eval_every=0, progress=False
    )
    evaluate, began = partial(test_metrics, sets=sets, autoencoder=ours.autoencoder), time.process_time()
    found = train_mac(ours.network(), sets.train, plan, mac, settings=settings, evaluate=evaluate)
    guarantee, key = plan.guarantee(), "test_error" if ours.autoencoder else "test_accuracy"
    return {
        "part": part, "printed_epsilon": epsilon, "seed": seed, key: found.metrics[-1][key],
        "epsilon": guarantee.epsilon, "delta": DELTA, "relation": guarantee.relation, "noise_multiplier": row.sigma,
        "steps": plan.steps, "expected_batch": row.batch, "records": plan.records,
        "core_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds: of test accuracies (MNIST) or squared errors (USPS)."""
    rows = []
    for part, columns in PRINTED.items():
        for epsilon, row in columns.items():
            found = [r for r in runs.values() if (r["part"], r["printed_epsilon"]) == (part, epsilon)]
            values = [r["test_accuracy" if part == "mnist" else "test_error"] for r in found]
            if values:
                rows.append({
                    "part": part, "printed_epsilon": epsilon, "epsilon": found[0]["epsilon"], "sigma": row.sigma,
                    "result": statistics.fmean(values), "spread": statistics.stdev(values) if len(values) > 1 else None,
                    "seeds": len(values), "published": row.accuracy,
                })  # fmt: skip
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PATH)
    parser.add_argument("--parts", nargs="+", default=list(PRINTED), choices=list(PRINTED))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(5)))
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seeds:
        for part in given.parts:
            for epsilon in PRINTED[part]:
                key = f"{part}, printed ε {epsilon:g}, seed {seed}"
                if key not in read_runs(given.out):
                    found = add_run(given.out, COMMAND, key, run(part, epsilon, seed), table)[key]
                    result = found.get("test_accuracy", found.get("test_error"))
                    print(f"{key}: {result:.4f}, ε {found['epsilon']:.3f}, {found['core_seconds']} core s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
