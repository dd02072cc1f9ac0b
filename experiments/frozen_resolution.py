"""What accuracy do frozen EfficientNet-Lite0 features allow on CIFAR-10, by the resolution of the images? One file.

    python experiments/frozen_resolution.py [--resolutions 96 128 160 192 224] [--rows 6000] [--judged 3000] [--mirror]

Trained on `rows` training rows and evaluated on `judged` other rows of the *training* split; test rows are not read.

- Without privacy: a ridge regression on one-hot labels.
- At ε = 1: a softmax layer by clipped, noisy SGD (experiments/heads.py). The noise in the mean gradient has the
  standard deviation of the plan with all records, so only the better fit from more records is missing.

Both take the best of a few settings on the rows that judge, so both are biased upwards by a little. With --mirror the
features are the mean of those of an image and of its mirror image, which doubles the time. The file shows the
accuracy against processor time, before all images are embedded; a killed run continues.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feature_search import judge
from provenance import COMMIT, origin
from sordino import data, features
from sordino.files import write_atomically

PATH = Path(__file__).parent / "results" / "frozen_resolution.json"
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)
EPSILON, STEPS, RATES = 1.0, (40, 100), (3000.0, 6000.0, 12000.0)


def ridge(rows: Tensor, targets: Tensor, judged: Tensor, wanted: Tensor, classes: int) -> float:
    """The best held-out accuracy over the penalties, relative to the mean eigenvalue."""
    mean, std = rows.mean(0), rows.std(0).clamp(min=1e-6)
    x, y = (((part - mean) / std).double() for part in (rows, judged))
    labels = torch.nn.functional.one_hot(targets, classes).double() - 1 / classes
    gram, moment = x.T @ x, x.T @ labels
    scale = float(gram.diagonal().mean())
    eye = torch.eye(len(gram), dtype=torch.float64)
    found = []
    for penalty in PENALTIES:
        weights = torch.linalg.solve(gram + penalty * scale * eye, moment)
        found.append(float(((y @ weights).argmax(1) == wanted).double().mean()))
    return max(found)


def private(seen: Tensor, targets: Tensor, rows: int, records: int, classes: int) -> dict[str, Any]:
    """The best held-out accuracy at ε over a few step sizes and numbers of steps, with the setting that has it."""
    tried = []
    for steps, lr in product(STEPS, RATES):
        average = 0.9 if steps < 60 else 0.97
        setting = {"epsilon": EPSILON, "batch": 8192, "steps": steps, "clip": 0.01, "lr": lr, "average": average}
        tried.append((judge(seen, targets, rows, records, classes, setting | {"seed": 0}), setting))
    accuracy, setting = max(tried, key=lambda one: one[0])
    return {"at_epsilon": accuracy, "setting": setting}


def measured(resolution: int, mirror: bool, inputs: Tensor, targets: Tensor, rows: int, records: int) -> dict[str, Any]:
    """One resolution: the time of an image, and the accuracies with and without privacy."""
    started = time.process_time()
    seen = features.build({"name": "efficientnet-lite0", "resolution": resolution, "mirror": mirror})(inputs)
    taken = time.process_time() - started
    normalised = seen - seen.mean(1, keepdim=True)
    normalised /= normalised.norm(dim=1, keepdim=True)
    return {
        "resolution": resolution, "mirror": mirror, "milliseconds_per_image": round(1000 * taken / len(inputs), 1),
        "mean": ridge(seen[:rows], targets[:rows], seen[rows:], targets[rows:], 10),
        **private(normalised, targets, rows, records, 10),
        "core_seconds": round(time.process_time() - started, 1), "commit": COMMIT,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[96, 128, 160, 192, 224])
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--judged", type=int, default=3000)
    parser.add_argument("--mirror", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    split = data.load("cifar10").train
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(5))[: given.rows + given.judged]
    inputs, targets, records = split.inputs[order], split.targets[order], len(split) - given.judged
    about = {"rows": given.rows, "judged": given.judged}
    before = json.loads(PATH.read_text(encoding="utf8")) if PATH.exists() else {}
    found = before["found"] if all(before.get(key) == value for key, value in about.items()) else []
    command = f"python experiments/frozen_resolution.py --resolutions {' '.join(map(str, given.resolutions))}"
    for resolution in given.resolutions:
        if any((row["resolution"], row["mirror"]) == (resolution, given.mirror) for row in found):
            continue
        found.append(measured(resolution, given.mirror, inputs, targets, given.rows, records))
        found.sort(key=lambda row: (row["mirror"], row["resolution"]))
        document = {
            **origin(command + (" --mirror" if given.mirror else "")), "epsilon": EPSILON, "delta": 1e-5,
            "relation": "add-remove", **about, "found": found,
        }  # fmt: skip
        write_atomically(PATH, (json.dumps(document, indent=1) + "\n").encode())
        print(found, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
