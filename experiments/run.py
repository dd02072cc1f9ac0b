"""Runs a recipe over several seeds and writes one JSON file: every run, its settings, mean and spread.

    python experiments/run.py experiments/recipes/NAME.toml --seeds 0 1 2

Each seed is a separate `sordino train` with `run.seed` and `privacy.insecure_seed` set to it, so that it can be
repeated; the data are public, so the insecure seed does no harm. Finished seeds are not run again; killed ones are
resumed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from provenance import origin

KEYS = (
    "test_accuracy",
    "noise_free_accuracy",
    "epsilon",
    "delta",
    "relation",
    "sampler",
    "accountant",
    "seconds",
    "seed",
)


def run_seed(recipe: Path, seed: int, work: Path, overrides: list[str]) -> dict[str, Any]:
    """Makes one training run in a separate process; returns its result.json."""
    out = work / f"{recipe.stem}-seed{seed}"
    settings = [*overrides, f"run.seed={seed}", f"privacy.insecure_seed={seed}"]
    command = [sys.executable, "-m", "sordino", "train", str(recipe), "--out", str(out), "--resume", "--json"]
    command += [word for setting in settings for word in ("--set", setting)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if finished.returncode:
        raise SystemExit(f"seed {seed} failed with exit code {finished.returncode}; run again to resume")
    result: dict[str, Any] = json.loads(finished.stdout)
    result.pop("run")
    return result


def summary(recipe: Path, results: list[dict[str, Any]], overrides: list[str]) -> dict[str, Any]:
    accuracies = [result["test_accuracy"] for result in results]
    return {
        "recipe": recipe.name,
        "overrides": overrides,
        **origin(f"python experiments/run.py {recipe.as_posix()} --seeds {' '.join(str(r['seed']) for r in results)}"),
        "mean_test_accuracy": statistics.fmean(accuracies),
        "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        "runs": [{key: result[key] for key in KEYS} for result in results],
        "guarantee": results[0]["guarantee"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--name", help="name of the result file (default: the recipe's)")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--work", type=Path, default=Path("runs/experiments"), help="the folder of the run directories")
    arguments = parser.parse_args()
    name = arguments.name or arguments.recipe.stem
    target = Path(__file__).parent / "results" / f"{name}.json"
    target.parent.mkdir(exist_ok=True)
    work = arguments.work / name
    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = [pool.submit(run_seed, arguments.recipe, seed, work, arguments.set) for seed in arguments.seeds]
        results = []
        for future in waiting:
            results.append(future.result())
            target.write_text(json.dumps(summary(arguments.recipe, results, arguments.set), indent=2) + "\n")
            print(f"{name}: seed {results[-1]['seed']}: {results[-1]['test_accuracy']:.2%}", flush=True)
    print(f"{target}: mean {statistics.fmean(r['test_accuracy'] for r in results):.2%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
