"""How long the papers' larger experiments would take on one core, from the time of a clipped gradient; one JSON file.

    python experiments/step_costs.py

Measures the processor time of `clipped_sum` (norms and weighted sum, without noise and data loading) on random rows, in
one thread, as the best of three passes after a warm-up. The core hours of an item are this time multiplied by its
number of gradients, for one run with one seed and without tuning.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from provenance import origin
from sordino import nets
from sordino.clipping import FlatClip
from sordino.files import write_atomically
from sordino.gradients import Rows, clipped_sum

PATH = Path(__file__).parent / "results" / "step_costs.json"
PICTURE = (3, 32, 32)
NETWORKS: dict[str, tuple[str, tuple[int, ...], int, dict[str, Any]]] = {
    "CNN on scattering, 28×28": ("scatter-cnn", (81, 7, 7), 512, {}),
    "CNN on scattering, CIFAR-10": ("scatter-cnn", (243, 8, 8), 512, {}),
    "softmax on scattering, CIFAR-10": ("linear", (243, 8, 8), 512, {}),
    "ResNet-8, enhanced": ("resnet", PICTURE, 64, {"depth": 8, "form": "enhanced"}),
    "ResNet-20": ("resnet", PICTURE, 64, {"depth": 20}),
    "ResNet-20, enhanced": ("resnet", PICTURE, 64, {"depth": 20, "form": "enhanced"}),
    "ResNet-32": ("resnet", PICTURE, 64, {"depth": 32}),
    "WRN-16-4": ("wide-resnet", PICTURE, 16, {}),
}
ITEMS: tuple[tuple[str, str, int], ...] = (
    ("ModelMix, Table 1, CIFAR-10 (700 steps of 8,192)", "CNN on scattering, CIFAR-10", 700 * 8192),
    ("ModelMix, Table 2, CIFAR-10, and Fig. 2 (3,500 steps of 1,500)", "ResNet-20", 3500 * 1500),
    ("ModelMix, Table 2, SVHN (4,000 steps of 1,830)", "ResNet-20", 4000 * 1830),
    ("ModelMix, section 5.3, GEP (5,000 steps of 2,000)", "ResNet-20", 5000 * 2000),
    ("Hidden state, Fig. 3 (300 epochs of 50,000)", "softmax on scattering, CIFAR-10", 300 * 50_000),
    ("Clipping bias, Table 2, CIFAR-10 (60 epochs)", "ResNet-20", 60 * 50_000),
    ("Clipping bias, Table 1, CIFAR-10 (60 epochs, 3 iterates)", "ResNet-20, enhanced", 180 * 50_000),
    ("Clipping bias, Fig. 2 (250 epochs of CIFAR-100)", "ResNet-32", 250 * 50_000),
    ("De et al.'s WRN-16-4 (60 epochs, 16 views)", "WRN-16-4", 60 * 16 * 50_000),
)  # fmt: skip


def seconds_per_record(name: str, shape: tuple[int, ...], rows: int, options: dict[str, Any]) -> float:
    torch.manual_seed(0)
    model = nets.build(name, shape, 10, **options)
    given = Rows(torch.randn(rows, *shape), torch.randint(0, 10, (rows,)))
    taken = []
    for _ in range(4):
        began = time.process_time()
        clipped_sum(model, nn.functional.cross_entropy, given, FlatClip(1.0))
        taken.append(time.process_time() - began)
    return min(taken[1:]) / rows


def main() -> int:
    torch.set_num_threads(1)
    found = {what: seconds_per_record(*network) for what, network in NETWORKS.items()}
    document = {
        **origin("python experiments/step_costs.py"),
        "networks": [{"what": what, "seconds_per_record": seconds} for what, seconds in found.items()],
        "items": [
            {"item": item, "network": what, "gradients": count, "core_hours": count * found[what] / 3600}
            for item, what, count in ITEMS
        ],
    }
    write_atomically(PATH, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    for row in (*document["networks"], *document["items"]):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
