"""How much of a true ε an audit shows, and how often it calls a true claim broken: one JSON file.

python experiments/audit_strength.py white     the mechanism at its claim, seen whole: share of ε that is shown
python experiments/audit_strength.py false     200 audits of mechanisms exactly at their claim
python experiments/audit_strength.py black     the final model's loss on one record, worst-case initial weights
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sordino
from sordino import data
from sordino.audit import audit_plan
from sordino.audit.black_box import audit_black_box, fitted

SEEDS = range(3)
TARGET = Path(__file__).parent / "results" / "audit_strength.json"


def white() -> list[dict[str, Any]]:
    """DP-SGD at ε = 4 on 7,850 weights: one run, and as many as make 100,000 canaries."""
    rows = []
    records = torch.randn(64, 784), torch.randint(0, 10, (64,))
    for batch, steps in ((64, 8), (16, 16)):
        plan = sordino.dpsgd(epsilon=4.0, delta=1e-5, records=64, expected_batch=batch, steps=steps)
        for runs in (1, 13):
            started = time.process_time()
            found = [
                audit_plan(plan, nn.Linear(784, 10), cross_entropy, records, canaries=7800, seed=seed, runs=runs)
                for seed in SEEDS
            ]
            lower = sorted(result.epsilon_lower for result in found)
            rows.append({
                "epsilon": 4.0, "delta": 1e-5, "rate": batch / 64, "steps": steps, "canaries": found[0].canaries,
                "guesses": found[0].guesses, "epsilon_lower": lower, "median_share": statistics.median(lower) / 4.0,
                "processor_seconds_each": round((time.process_time() - started) / len(SEEDS), 2),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def false() -> dict[str, Any]:
    """200 seeds at full batches, where the accountant is exact and the mechanism lies on its claim."""
    records = torch.randn(64, 784), torch.randint(0, 10, (64,))
    plan = sordino.dpsgd(epsilon=4.0, delta=1e-5, records=64, expected_batch=64, steps=2)
    found = [
        audit_plan(plan, nn.Linear(784, 10), cross_entropy, records, canaries=7800, seed=seed) for seed in range(200)
    ]
    shares = [result.epsilon_lower / result.epsilon_claimed for result in found]
    return {
        "audits": len(found),
        "called_broken": sum(not result.holds for result in found),
        "median_share": statistics.median(shares),
        "largest_share": max(shares),
    }


def black() -> list[dict[str, Any]]:
    """500 of the embedded pictures, which the initial weights fit; the record is noise, of a wrong class."""
    train = data.load("fashion-mnist-mini", None).train
    inputs, targets = train.inputs[:500], train.targets[:500]
    noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    rows = []
    for hidden, epsilon, runs in ((None, 10.0, 600), (None, 4.0, 600), (32, 10.0, 400)):
        torch.manual_seed(0)
        layers = [nn.Linear(784, 10)] if hidden is None else [nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
        net = fitted(nn.Sequential(nn.Flatten(), *layers), cross_entropy, (inputs, targets), lr=0.01)
        wrong = net(noise[None]).argmin().detach()
        plan = sordino.dpsgd(epsilon=epsilon, delta=1e-5, records=501, expected_batch=501, steps=10)
        started = time.process_time()
        found = audit_black_box(plan, net, cross_entropy, (inputs, targets), (noise, wrong), runs=runs, lr=0.05, seed=0)
        rows.append(found.to_dict() | {
            "network": "linear" if hidden is None else f"mlp of {hidden}", "records": 501,
            "share": found.epsilon_lower / epsilon,
            "processor_seconds": round(time.process_time() - started, 1),
        })  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main(parts: list[str]) -> int:
    document: dict[str, Any] = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    document["command"] = "python experiments/audit_strength.py white false black"
    for part in parts or ["white", "false", "black"]:
        document[part] = {"white": white, "false": false, "black": black}[part]()
        TARGET.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    print(TARGET.name, "written")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
