"""Algorithms 1 and 2 of Ye & Shokri 2022 compared on the embedded images; one JSON file, resumable.

    python experiments/hidden_small.py [--seeds 0 1 2]

12,000 images of Fashion-MNIST, the 3 × 3 lowest frequencies of the scattering maps (729 features), ε = 3 at δ = 1e-5,
replace-one, 4,000 steps with batches of 64 and the settings of hidden_state_fashion_mnist.toml; nothing is tuned. The
rows: shuffle and partition (Algorithm 1), sampling without replacement (Algorithm 2), and composition (DP-SGD) as in
hidden_state_composition.toml with 200 steps of 1,024. Each run also states its ε against an adversary who sees every
iterate.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from provenance import add_run, read_runs
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

ROOT = Path(__file__).parents[1]
PATH, RECIPES = ROOT / "experiments" / "results" / "hidden_small.json", ROOT / "experiments" / "recipes"
WORK = ROOT / "runs" / "experiments" / "hidden_small"
SHARED = ("data.name=fashion-mnist-mini", "features.frequencies=3")
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "Algorithm 1, shuffle and partition": ("hidden_state_fashion_mnist.toml", ("train.steps=4000",)),
    "Algorithm 2, without replacement": (
        "hidden_state_fashion_mnist.toml",
        ("train.steps=4000", "sampling.name=without-replacement"),
    ),
    "composition (DP-SGD)": ("hidden_state_composition.toml", ("sampling.expected_batch=1024", "train.steps=200")),
}


def run(row: str, seed: int) -> dict[str, Any]:
    recipe, changes = ROWS[row]
    seeded = (*SHARED, *changes, f"run.seed={seed}", f"privacy.insecure_seed={seed}")
    place = WORK / f"{row.partition(',')[0].replace(' ', '-')}-{seed}"
    found = run_recipe(Recipe.read(RECIPES / recipe, seeded), place, resume=True, progress=False)
    kept = (
        "epsilon",
        "delta",
        "relation",
        "noise_multiplier",
        "steps",
        "epsilon_if_every_iterate_were_seen",
        "seconds",
    )
    return {"column": row, "seed": seed, "accuracy": found["test_accuracy"]} | {k: found[k] for k in kept if k in found}


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds of each row."""
    rows = []
    for name in ROWS:
        reached = [r["accuracy"] for r in runs.values() if r["column"] == name]
        if reached:
            spread = statistics.stdev(reached) if len(reached) > 1 else None
            rows.append({"column": name, "mean": statistics.fmean(reached), "spread": spread, "seeds": len(reached)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    for seed in parser.parse_args().seeds:
        for row in ROWS:
            key = f"{row}, seed {seed}"
            if key not in read_runs(PATH):
                runs = add_run(PATH, "python experiments/hidden_small.py", key, run(row, seed), table)
                print(f"{key}: {runs[key]['accuracy']:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
