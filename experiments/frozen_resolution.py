"""What accuracy do frozen EfficientNet-Lite0 features allow on CIFAR-10, by the resolution of the images? One file.

    python experiments/frozen_resolution.py [--resolutions 128 176 224] [--rows 5000] [--judged 2000]

Without privacy: a ridge regression on one-hot labels, on `rows` training rows, evaluated on `judged` other rows of the
*training* split. Its penalty is the best of several on the same rows, so the accuracy is biased upwards. With all
50,000 rows the accuracy at 128 pixels is 86.6 % (coupling_cifar10.json, NonPriv); the difference shows what more rows
add. The result tells whether 90 % at ε = 1 is possible with these features before half an hour of processor time is
spent on extracting all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from provenance import origin
from sordino import data, features
from sordino.files import write_atomically

PATH = Path(__file__).parent / "results" / "frozen_resolution.json"
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[128, 176, 224])
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--judged", type=int, default=2000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    split = data.load("cifar10").train
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(5))[: given.rows + given.judged]
    targets, found = split.targets[order], []
    for resolution in given.resolutions:
        started = time.process_time()
        seen = features.build({"name": "efficientnet-lite0", "resolution": resolution})(split.inputs[order])
        taken = time.process_time() - started
        row: dict[str, Any] = {
            "resolution": resolution, "milliseconds_per_image": round(1000 * taken / len(order), 1),
            "mean": ridge(
                seen[: given.rows], targets[: given.rows], seen[given.rows :], targets[given.rows :], 10
            ),
        }  # fmt: skip
        found.append(row)
        document = {
            **origin("python experiments/frozen_resolution.py"), "private": False, "rows": given.rows,
            "judged": given.judged, "found": found,
        }  # fmt: skip
        write_atomically(PATH, (json.dumps(document, indent=1) + "\n").encode())
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
