"""Table 2 of Ye & Shokri 2022, transfer: a softmax layer on frozen public features of CIFAR-10 at ε = 2; one JSON file.

    python experiments/hidden_transfer.py [--seeds 0 1 2]

The settings of Appendix E for SimCLR's features, nothing tuned:

    DP-SGD        η = 4, batches of 1,024 by Poisson sampling, c = 0.1, momentum 0.9, 40 epochs; add/remove
    … replace-one the same under the relation of the next row: its control
    dynamics      η = 1.92, batches of 1,024 by shuffle and partition, features of norm at most 1, λ = 0.02, our
                  accountant for the last iterate, replace-one. The paper clips softmax's gradient at 1.5, three
                  quarters of its bound, which is not convex: ours is capped at three quarters. 100 epochs, not
                  600: the iterates forget their past in 1/(ηλ) = 26 steps, half an epoch.

The features are those of EfficientNet-Lite0 (experiments/modelmix_transfer.py has the same), because SimCLR's are not
available here; each record's own mean is subtracted and its length is one. The last iterate is evaluated on the test
images. δ = 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelmix_table1 import by_seeds
from modelmix_transfer import dataset
from provenance import add_run, read_runs
from sordino import nets
from sordino.methods import hidden_state
from sordino.plan import Plan
from sordino.runs.prepared import test_metrics
from sordino.training import Settings, train

EPSILON, DELTA, BATCH = 2.0, 1e-5, 1024
RELATIONS = {"DP-SGD": "add-remove", "DP-SGD, replace-one": "replace-one"}
DYNAMICS = "dynamics"
PUBLISHED = {"DP-SGD": {EPSILON: 92.4}, DYNAMICS: {EPSILON: 92.17}}
COMMAND = "python experiments/hidden_transfer.py"


def make_plan(row: str, seed: int, records: int, inputs: int) -> Plan:
    if row == DYNAMICS:
        return hidden_state.plan(
            loss=hidden_state.Softmax(10, cap=0.75), features=inputs, records=records, batch=BATCH, delta=DELTA,
            epsilon=EPSILON, epochs=100, regularisation=0.02, lr=1.92, feature_norm=1.0, bias=1.0, insecure_seed=seed,
        )  # fmt: skip
    return Plan.dpsgd(
        epsilon=EPSILON, delta=DELTA, records=records, expected_batch=BATCH, steps=round(40 * records / BATCH),
        relation=RELATIONS[row], insecure_seed=seed, clip_norm=0.1,
    )  # fmt: skip


def run(row: str, seed: int) -> dict[str, Any]:
    whole = dataset()
    rows, started = whole.train, time.process_time()
    plan = make_plan(row, seed, len(rows), rows.inputs.shape[1])
    if row == DYNAMICS:
        model = hidden_state.train_hidden(plan, (rows.inputs, rows.targets), progress=False).model
    else:
        torch.manual_seed(seed)
        model = nets.build("linear", whole.input_shape, whole.classes)
        settings = Settings(optimizer_options={"momentum": 0.9}, chunk=1024, seed=seed, progress=False)
        train(model, nn.functional.cross_entropy, rows, plan, optimizer=torch.optim.SGD, lr=4.0, settings=settings)
    return {
        "arm": row,
        "target_epsilon": EPSILON,
        "epsilon": plan.guarantee().epsilon,
        "delta": DELTA,
        "relation": plan.relation,
        "noise_multiplier": plan.noise.noise_multiplier,
        "steps": plan.steps,
        "seed": seed,
        "accuracy": test_metrics(model, whole.test)["test_accuracy"],
        "core_seconds": round(time.process_time() - started, 1),
    }


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of each row, its relation, and the published value."""
    relations = RELATIONS | {DYNAMICS: "replace-one"}
    found = by_seeds(runs, tuple(relations), (EPSILON,), PUBLISHED)
    return [one | {"relation": relations[one["arm"]]} for one in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hidden_transfer.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for row, seed in ((r, s) for s in given.seeds for r in (*RELATIONS, DYNAMICS)):
        key = f"{row} seed={seed}"
        if key not in read_runs(given.out):
            runs = add_run(given.out, COMMAND, key, run(row, seed), table)
            print(f"{key}: {runs[key]['accuracy']:.2%}, {runs[key]['core_seconds']} core seconds", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
