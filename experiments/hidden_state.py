"""Hidden state against composition, output and objective perturbation, under the same relation, in one JSON file.

    python experiments/hidden_state.py --out experiments/results/hidden_state.json

Every run is a `sordino train` of a recipe (hidden state, composition) or one of the two baselines for the same convex
problem (`hidden_state_baselines`), with replace-one, δ = 1e-5, and private centring charged to the budget. The file is
written after each run, and finished runs are not repeated, so the script may be killed and started again.
Settings were chosen on the last 10,000 training images (trained on the first 50,000, with the noise for 60,000), never
on the test images; `SEARCH` lists what was tried.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hidden_state_baselines import objective_perturbation, output_perturbation
from provenance import origin
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

RECIPES = Path(__file__).parent / "recipes"
SEEDS = (0, 1, 2)
SEARCH = (
    "on the last 10,000 training images of Fashion-MNIST, one seed each, about 45 runs: cap 0.03 to 1, batch 64 and "
    "128, 20,000 to 80,000 steps, λ 1e-7 to 1e-5, first 1 to 4, rise 0 to 12, 3 to 7 frequencies; composition: "
    "clip from 0.002 to 0.1 of the residual, step 10 to 100, 200 to 800 steps, with and without average and decay. "
    "MNIST takes Fashion-MNIST's settings as they are. The rows with all frequencies, on a random 10,000 of the "
    "training images with 50,000 records: cap 0.03 to 0.9, batch 100 to 5000, 30 to 100 epochs, falling step sizes, "
    "about 20 runs; composition: batch 2048 to 8192, 4 runs."
)


def settings(dataset: str, epsilon: float) -> dict[str, tuple[str, list[str]]]:
    """{row: (recipe, overrides)} of the runs made by `sordino train`."""
    common = [f"data.name={dataset}", f"privacy.epsilon={epsilon}"]
    if epsilon < 2:
        hidden, composed = ["train.steps=20000"], ["train.steps=200", "train.lr=7.0"]
    else:
        hidden, composed = [], []
    rows = {
        "hidden state": ("hidden_state_fashion_mnist.toml", common + hidden),
        "composition (DP-SGD, Poisson, momentum, average)": ("hidden_state_composition.toml", common + composed),
    }
    if (dataset, epsilon) == ("fashion-mnist", 3.0):
        everything = ["features.frequencies=7", "train.steps=600", "train.lr=4.0"]
        rows |= {
            "hidden state, all frequencies": ("hidden_state_fashion_mnist_all.toml", common),
            "composition, all frequencies (the same)": ("hidden_state_composition.toml", common + everything),
        }
    return rows


BASELINES: dict[str, Callable[..., dict[str, Any]]] = {
    "output perturbation": output_perturbation,
    "objective perturbation": objective_perturbation,
}


def run_directory(row: str, dataset: str, epsilon: float, seed: int, work: Path) -> Path:
    return work / f"{dataset}-{epsilon:g}-{row.split(' (')[0].replace(' ', '-')}-{seed}"


def one_run(row: str, dataset: str, epsilon: float, seed: int, work: Path) -> dict[str, Any]:
    """The result of one run; read from its directory if the run is finished."""
    out = run_directory(row, dataset, epsilon, seed, work)
    if row in BASELINES:
        done = out / "result.json"
        if not done.exists():
            out.mkdir(parents=True, exist_ok=True)
            done.write_text(json.dumps(BASELINES[row](dataset, epsilon, seed), indent=2) + "\n")
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    recipe, overrides = settings(dataset, epsilon)[row]
    seeded = [*overrides, f"run.seed={seed}", f"privacy.insecure_seed={seed}"]
    result = run_recipe(Recipe.read(RECIPES / recipe, seeded), out, resume=True, progress=False)
    extra = ("epsilon_of_the_worst_batch", "epsilon_if_every_iterate_were_seen", "certificate")
    return {key: result[key] for key in ("test_accuracy", "epsilon", "noise_multiplier", "seconds", "seed")} | {
        key: result[key] for key in extra if key in result
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    accuracies = [run["test_accuracy"] for run in runs]
    return {
        "mean_test_accuracy": statistics.fmean(accuracies),
        "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "epsilon": max(run["epsilon"] for run in runs),
        "runs": runs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "hidden_state.json")
    parser.add_argument("--work", type=Path, default=Path("runs/experiments/hidden_state"))
    parser.add_argument("--datasets", nargs="+", default=["fashion-mnist", "mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--done", action="store_true", help="run nothing: write the table of the finished runs")
    arguments = parser.parse_args()
    jobs = [
        (dataset, epsilon, row, seed)
        for dataset in arguments.datasets
        for epsilon in (3.0, 1.0)
        for row in (*settings(dataset, epsilon), *BASELINES)
        for seed in arguments.seeds
        if not arguments.done or (run_directory(row, dataset, epsilon, seed, arguments.work) / "result.json").exists()
    ]
    runs: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    for dataset, epsilon, row, seed in jobs:
        found = one_run(row, dataset, epsilon, seed, arguments.work)
        runs.setdefault((dataset, epsilon, row), []).append(found)
        print(f"{dataset}, ε = {epsilon:g}, {row}, seed {seed}: {found['test_accuracy']:.2%}", flush=True)
        rows = [
            {"dataset": d, "target_epsilon": e, "row": r, "relation": "replace-one", "delta": 1e-5, **summary(found)}
            for (d, e, r), found in runs.items()
        ]
        document = {
            **origin("python experiments/hidden_state.py --out experiments/results/hidden_state.json"),
            "search": SEARCH, "rows": rows,
        }  # fmt: skip
        arguments.out.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
