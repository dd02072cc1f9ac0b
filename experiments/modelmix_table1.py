"""Table 1 of Xiao, Wan & Devadas 2022 with the settings and steps of its Appendix E; one file for each dataset.

    python experiments/modelmix_table1.py [--seeds 0 1 2] [--epsilons 1 0.2] [--arms dpsgd] [--part 1/2]
    python experiments/modelmix_table1.py --dataset cifar10 --out experiments/results/modelmix_table1_cifar10.json

Scattering features with group normalisation (27 groups, no privacy cost; the paper spends ε = 0.695 on data
normalisation, in its own table), the same small CNNs, batches of 8,192 of all records, 800 steps (CIFAR-10: 700), δ =
1e-5, add-remove, true Poisson sampling, ε = 0.2 to 1. Nothing is tuned: all settings are those of the appendix. The
arms:

    dpsgd       the row "[19]": DP-SGD with c = 0.1, η = 4 (momentum 0.9, as Tramèr and Boneh train)
    modelmix    the row "DP-SGD + MM": c = 1, η = 0.4, τ = 0.05·η for the first half, then 0.025·η
    averaging   its control at the same ε: the same rule and settings, Gaussian noise only

The last iterate is evaluated on the test images.
Runs that are already in the file are not repeated; with `--part i/n` n processes share the file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from provenance import add_run, read_runs
from sordino import data, features, nets
from sordino.methods import modelmix
from sordino.plan import Plan
from sordino.runs.prepared import test_metrics
from sordino.schedule import pieces
from sordino.training import Settings, train
from sordino.training.updates import AveragingSGD

EPSILONS, ARMS = (1.0, 0.2, 0.6, 0.4, 0.8), ("modelmix", "averaging", "dpsgd")
PUBLISHED = {
    "fashion-mnist": {
        "dpsgd": {0.2: 53.4, 0.4: 74.0, 0.6: 81.5, 0.8: 84.5, 1.0: 85.6},
        "modelmix": {0.2: 83.9, 0.4: 85.7, 0.6: 86.1, 0.8: 87.9, 1.0: 88.8},
    },
    "cifar10": {
        "dpsgd": {0.2: 32.8, 0.4: 45.9, 0.6: 56.1, 0.8: 61.2, 1.0: 64.1},
        "modelmix": {0.2: 58.5, 0.4: 63.3, 0.6: 65.0, 0.8: 66.9, 1.0: 68.3},
    },
}
STEPS, NETS = {"fashion-mnist": 800, "cifar10": 700}, {"fashion-mnist": "scatter-cnn", "cifar10": "scatter-cnn-cifar"}
BATCH, DELTA = 8192, 1e-5


@cache
def splits(dataset: str) -> tuple[data.Split, data.Split]:
    """(records to train on, images to evaluate on)."""
    found, folder = data.load(dataset), features.default_folder()
    extract = features.build({"name": "scattering", "normalise": "group", "groups": 27})
    first, second = (
        data.Split(extract.cached(side.inputs, folder), side.targets) for side in (found.train, found.test)
    )
    return first, second


def make_plan(arm: str, epsilon: float, seed: int, records: int, steps: int) -> Plan:
    common: dict[str, Any] = {
        "epsilon": epsilon, "delta": DELTA, "records": records, "insecure_seed": seed, "expected_batch": BATCH,
        "steps": steps,
    }  # fmt: skip
    if arm == "modelmix":
        return modelmix.plan(lr=0.4, tau_over_lr=pieces((0.0, 0.05), (0.5, 0.025)), clip_norm=1.0, **common)
    return Plan.dpsgd(clip_norm=1.0 if arm == "averaging" else 0.1, **common)


def trained(
    arm: str, plan: Plan, model: nn.Module, rows: tuple[Any, Any], rates: dict[str, float], seed: int
) -> dict[str, Any]:
    """The entries of one run. rows: (records to train on, rows to evaluate on). rates: the step size of each arm."""
    optimizers = {"averaging": AveragingSGD, "dpsgd": torch.optim.SGD}
    options: dict[str, Any] = {} if arm == "modelmix" else {"optimizer": optimizers[arm], "lr": rates[arm]}
    momentum = {"momentum": 0.9} if arm == "dpsgd" else {}
    settings = Settings(optimizer_options=momentum, chunk=1024, seed=seed, progress=False)
    found = train(
        model, nn.functional.cross_entropy, rows[0], plan, settings=settings,
        evaluate=lambda m: test_metrics(m, rows[1]), **options,
    )  # fmt: skip
    guarantee = found.guarantee
    if guarantee is None:
        raise SystemExit("the run has no guarantee")
    return {
        "arm": arm,
        "epsilon": guarantee.epsilon,
        "delta": plan.delta,
        "relation": guarantee.relation,
        "beside": dict(guarantee.beside),
        "noise_multiplier": plan.noise.noise_multiplier,
        "steps": plan.steps,
        "seed": seed,
        "accuracy": found.metrics[-1]["test_accuracy"],
        "metrics": [dict(entry) for entry in found.metrics],
        "seconds": round(found.seconds, 1),
    }


def run(dataset: str, arm: str, epsilon: float, seed: int) -> dict[str, Any]:
    records, images = splits(dataset)
    plan = make_plan(arm, epsilon, seed, len(records.targets), STEPS[dataset])
    torch.manual_seed(seed)
    model = nets.build(NETS[dataset], tuple(records.inputs.shape[1:]), 10)
    found = trained(arm, plan, model, (records, images), {"averaging": 0.4, "dpsgd": 4.0}, seed)
    return found | {"dataset": dataset, "target_epsilon": epsilon, "relation": "add/remove"}


def jobs(
    seeds: list[int], epsilons: Sequence[float] = EPSILONS, arms: Sequence[str] = ARMS
) -> Iterator[tuple[str, float, int]]:
    for seed in seeds:
        for epsilon in epsilons:
            for arm in arms:
                yield arm, epsilon, seed


def by_seeds(
    runs: dict[str, Any], arms: Sequence[str], epsilons: Sequence[float], published: dict[str, dict[float, float]]
) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds for each arm and ε, and the published value."""
    rows = []
    for arm in arms:
        for epsilon in epsilons:
            reached = [r["accuracy"] for r in runs.values() if (r["arm"], r["target_epsilon"]) == (arm, epsilon)]
            if reached:
                rows.append(
                    {
                        "arm": arm,
                        "target_epsilon": epsilon,
                        "mean": statistics.fmean(reached),
                        "spread": statistics.stdev(reached) if len(reached) > 1 else None,
                        "seeds": len(reached),
                        "published": published.get(arm, {}).get(epsilon),
                    }
                )
    return rows


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """`by_seeds`, in per cent; runs of the first version name no dataset."""
    percent = {key: run | {"accuracy": 100 * run["accuracy"]} for key, run in runs.items()}
    dataset = next(iter(runs.values())).get("dataset", "fashion-mnist")
    return by_seeds(percent, ARMS, sorted(EPSILONS), PUBLISHED[dataset])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="fashion-mnist", choices=list(STEPS))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "modelmix_table1.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS, choices=EPSILONS)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n processes takes every n-th run")
    arguments = parser.parse_args()
    part, parts = (int(word) for word in arguments.part.split("/"))
    what = "" if arguments.dataset == "fashion-mnist" else f"--dataset {arguments.dataset} "
    command = f"python experiments/modelmix_table1.py {what}--out experiments/results/{arguments.out.name}"
    started = time.monotonic()
    for number, (arm, epsilon, seed) in enumerate(jobs(arguments.seeds, arguments.epsilons, arguments.arms)):
        key = f"{arm} ε={epsilon:g} seed={seed}"
        if number % parts != part - 1 or key in read_runs(arguments.out):
            continue
        found = run(arguments.dataset, arm, epsilon, seed)
        runs = add_run(arguments.out, command, key, found, table)
        print(f"{time.monotonic() - started:7.0f} s  {key}: {runs[key]['accuracy']:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
