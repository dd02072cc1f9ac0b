"""Coupling: should public rows share the private rows' forward and backward pass, or have a separate one?

    python benchmarks/public_pass.py

Core milliseconds of a step's gradients (median over interleaved rounds, one thread): private rows only; with a separate
plain pass over the public rows; and with public and private rows in one pass of the engine. The last one is a lower
bound: it computes one weighted sum, although two would be needed to separate public and private rows.
Writes benchmarks/results/public_pass.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from sordino.clipping import AutomaticClip
from sordino.gradients import Rows, clipped_sum
from sordino.methods.coupling.estimates import mean_gradient
from sordino.runs.results import environment
from workloads import MnistCnn

PRIVATE, ROUNDS = 1000, 15
CLIPPING, LOSS = AutomaticClip(1.0, gamma=1.0), nn.functional.cross_entropy
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "MNIST CNN, 200 public": (MnistCnn, (1, 28, 28), 200),
    "MNIST CNN, 1000 public": (MnistCnn, (1, 28, 28), 1000),
    "linear 1280 → 10, 200 public": (lambda: nn.Linear(1280, 10), (1280,), 200),
    "linear 1280 → 10, 1000 public": (lambda: nn.Linear(1280, 10), (1280,), 1000),
}


def measure(model: nn.Module, shape: tuple[int, ...], count: int) -> dict[str, float]:
    """The milliseconds of each of the three."""
    private = torch.randn(PRIVATE, *shape), torch.randint(10, (PRIVATE,))
    public = torch.randn(count, *shape), torch.randint(10, (count,))

    def alone() -> None:
        clipped_sum(model, LOSS, Rows(*private), CLIPPING)

    def own_pass() -> None:
        alone()
        mean_gradient(model, LOSS, Rows(*public))

    def same_pass() -> None:
        inputs, targets = (torch.cat(pair) for pair in zip(private, public, strict=True))
        clipped_sum(model, LOSS, Rows(inputs, targets), CLIPPING)

    ways: dict[str, Callable[[], None]] = {"private_alone": alone, "own_pass": own_pass, "same_pass": same_pass}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS + 1):  # the first one warms up
        for name, way in ways.items():
            started = time.process_time()
            way()
            taken[name].append(1e3 * (time.process_time() - started))
    return {name: round(statistics.median(values[1:]), 2) for name, values in taken.items()}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {title: measure(model(), shape, count) for title, (model, shape, count) in CASES.items()}
    document = {"private_rows": PRIVATE, "rounds": ROUNDS, "core_milliseconds": rows, "environment": environment()}
    path = Path(__file__).parent / "results" / "public_pass.json"
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf8")
    for title, row in rows.items():
        print(title, row)


if __name__ == "__main__":
    main()
