"""The time of ε and its certified lower bound for random allocation, and their distance, over a grid of plans.

    python benchmarks/epochs.py [--out FILE]

Processor time of one call of `account` with empty caches, on one core of a shared machine: what others do there can
double it, so a plan that takes more than a second is measured three times, and the least counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from sordino.accounting import allocation, geometric
from sordino.accounting.account import account
from sordino.accounting.events import allocated, compose_events
from sordino.errors import SordinoError
from sordino.files import write_atomically

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

BATCHES = (2, 30, 100, 1000, 10_000)
NOISE = (0.3, 0.6, 1.0, 3.0, 30.0)
EPOCHS = (1, 10, 1000, 50_000, 10**6, 10**9, 10**12)
DELTAS = (1e-5, 1e-12)
LONG, TIMES = 1.0, 3


def measured(batches: int, sigma: float, epochs: int, delta: float) -> dict[str, Any]:
    """One plan, again if it took long."""
    rows = [_once(batches, sigma, epochs, delta)]
    while rows[-1]["seconds"] > LONG and len(rows) < TIMES:
        rows.append(_once(batches, sigma, epochs, delta))
    return min(rows, key=lambda row: float(row["seconds"]))


def _once(batches: int, sigma: float, epochs: int, delta: float) -> dict[str, Any]:
    for cache in (allocation.epoch_pmfs, allocation._powers, geometric._places):
        cache.cache_clear()
    begin = time.process_time()
    row: dict[str, Any] = {"batches": batches, "noise_multiplier": sigma, "epochs": epochs, "delta": delta}
    try:
        found = account(compose_events([(allocated(sigma, batches, batches), epochs)]), delta)
        row |= {"epsilon": found.epsilon, "epsilon_lower": found.epsilon_lower, "accountant": found.accountant}
    except SordinoError as error:
        row |= {"refused": str(error)}
    return row | {"seconds": time.process_time() - begin}


def main() -> None:
    from provenance import origin

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "epochs.json")
    arguments = parser.parse_args()
    measured(10, 1.0, 1, 1e-5)  # imports
    rows = [measured(*plan) for plan in itertools.product(BATCHES, NOISE, EPOCHS, DELTAS)]
    answered = [row for row in rows if "epsilon" in row]
    ratios = [row["epsilon_lower"] / row["epsilon"] for row in answered if row.get("epsilon_lower")]
    document = {
        **origin("python benchmarks/epochs.py"),
        "plans": len(rows), "refused": len(rows) - len(answered),
        "slowest_seconds": max(row["seconds"] for row in rows),
        "without_lower_bound": sum(not row["epsilon_lower"] for row in answered),
        "least_ratio_of_bounds": min(ratios), "bounds_crossed": sum(ratio > 1 for ratio in ratios),
        "rows": rows,
    }  # fmt: skip
    write_atomically(arguments.out, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    print(json.dumps({key: value for key, value in document.items() if key != "rows"}, indent=1))


if __name__ == "__main__":
    main()
