"""A realistic run directory, made by code: what `sordino train` leaves behind, without the training."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

from sordino.plan import Plan, Statistic

RECIPE = """\
[run]
name = "fashion-mnist-linear"
seed = 0
noise_free = true

[data]
name = "fashion-mnist"

[features]
name = "scattering"
normalise = "group"
groups = 27

[model]
name = "linear"

[sampling]
name = "poisson"
expected_batch = 8192

[clipping]
name = "flat"
clip_norm = 0.1

[privacy]
epsilon = 3.0
delta = 1e-5
accountant = "pld"

[train]
steps = 600
optimizer = "sgd"
lr = 8.0
momentum = 0.9
average = "ema"
"""

STEPS = 600
PUBLIC = {"delta": 1e-5, "records": 60_000, "expected_batch": 8192, "clip_norm": 0.1, "noise_multiplier": 4.05}


@cache
def plan(insecure_seed: int | None = None, histogram: bool = False) -> Plan:
    rate = PUBLIC["expected_batch"] / PUBLIC["records"]
    paid = [Statistic("record-norms", noise_multiplier=25.0, sampling_rate=rate)] if histogram else []
    return Plan.dpsgd(**PUBLIC, steps=STEPS, insecure_seed=insecure_seed, statistics=paid)


@cache
def guarantee(insecure_seed: int | None = None, histogram: bool = False) -> dict[str, Any]:
    return plan(insecure_seed, histogram).guarantee().to_dict()


def make_run(
    folder: Path,
    *,
    released: int = STEPS,
    secure: bool = True,
    audit: dict[str, Any] | None = None,
    histogram: dict[str, Any] | None = None,
    noise_free: float | None = 0.9071,
    name: str | None = None,
) -> Path:
    """Writes the files of a run. `released`: how many steps the ledger records."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = RECIPE if name is None else RECIPE.replace('"fashion-mnist-linear"', json.dumps(name))
    (folder / "recipe.toml").write_text(recipe, encoding="utf8")
    seed = None if secure else 7
    _write_ledger(folder, released, seed, histogram is not None)
    claim = guarantee(seed, histogram is not None)
    _write_metrics(folder, claim["epsilon"])
    result = {
        "name": "fashion-mnist-linear",
        "method": "dpsgd",
        **{key: claim[key] for key in ("epsilon", "delta", "relation", "sampler", "accountant", "theorem")},
        "secure": secure,
        "guarantee": claim,
        "test_accuracy": 0.8979,
        "noise_free_accuracy": noise_free,
        "seconds": 143.27,
        "seed": 0,
        "insecure_seed": seed,
        "steps": STEPS,
        "records": PUBLIC["records"],
        "expected_batch": PUBLIC["expected_batch"],
        "noise_multiplier": PUBLIC["noise_multiplier"],
        "parameters": 39_700,
        "environment": {"sordino": "0.1.0", "python": "3.11.7", "torch": "2.13.0+cpu", "threads": 2},
    }
    _write_json(folder / "result.json", result)
    if audit is not None:
        _write_json(folder / "audit.json", audit)
    if histogram is not None:
        _write_json(folder / "histogram.json", histogram)
    return folder


AUDIT = {
    "epsilon_lower": 1.6214,
    "epsilon_claimed": 2.9987,
    "delta": 1e-5,
    "confidence": 0.95,
    "canaries": 5000,
    "guesses": 500,
    "correct": 421,
    "steps": 600,
    "relation": "add-remove",
    "holds": True,
    "bound": "f-DP in one run",
    "sentence": "421 of 500 guesses were right.",
}

HISTOGRAM = {
    "edges": [0.0, 0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8],
    "shares": [0.112, 0.034, 0.061, 0.118, 0.215, 0.287, 0.179, -0.004],
    "noise_std": 0.003,
}


def _write_ledger(folder: Path, released: int, seed: int | None, histogram: bool) -> None:
    """Line by line what the release stage writes."""
    entry = {
        "mechanism": "gaussian",
        "noise_multiplier": PUBLIC["noise_multiplier"],
        "sensitivity": PUBLIC["clip_norm"],
        "norm": "l2",
        "sampling": plan(seed).sampling.to_dict(),
        "relation": "add-remove",
        "secure": seed is None,
        "coordinates": 39_700,
    }
    lines = [{**entry, "purpose": "gradient", "step": step} for step in range(released)]
    if histogram:
        paid = {"purpose": "record-norms", "step": 0, "noise_multiplier": 25.0, "sensitivity": 1.0, "coordinates": 8}
        lines.append({**entry, **paid})
    header = {"kind": "plan", **plan(seed, histogram).to_dict()}
    text = "".join(json.dumps({"kind": "release", **line}) + "\n" for line in lines)
    (folder / "ledger.jsonl").write_text(json.dumps(header) + "\n" + text, encoding="utf8")


def _write_metrics(folder: Path, epsilon: float) -> None:
    rows = [
        {
            "step": step,
            "epsilon": epsilon * math.sqrt(step / STEPS),
            "test_accuracy": 0.898 - 0.25 * math.exp(-step / 60),
            "test_loss": 0.3,
            "lr": 8.0,
            "seconds": 0.24 * step,
        }
        for step in range(25, STEPS + 1, 25)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf8")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf8")
