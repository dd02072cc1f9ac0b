"""Poisson sampling, random allocation and correlated noise at equal ε, batch and steps: who wins where.

    python experiments/correlated.py --data-dir DIR [--out FILE] [--seeds 3]

A linear classifier, plain SGD with a constant step size, clip norm 1, δ = 10⁻⁵ (add-remove, a record). For each
dataset, ε and number of epochs each way trains with the noise that meets ε. The step size is the best of `RATES` on a
tenth of the *training* rows that is held out, tuned alike for each way (one seed); then all training rows are used,
and the accuracy on the test rows is the mean over the seeds, with their standard deviation. The planner's choice
(`sordino.methods.planner.compare_ways`) is made without looking at data and is compared with the best mean. Tuning is
not paid for: these are public datasets. Runs that are in FILE already are not made again.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch

import sordino
from provenance import add_run, read_runs
from sordino import data
from sordino.methods.planner import Budget, compare_ways

DATASETS = {"adult": 32561, "fashion-mnist": 60000, "fashion-mnist/10": 6000, "mnist/10": 6000}
"""Names with their training rows; /10: every tenth training row, where the noise weighs ten times as much."""
EPSILONS = (1.0, 8.0)
EPOCHS = (1, 5)
WAYS = ("poisson", "allocation", "correlated")
RATES = (0.1, 0.3, 1.0, 3.0)
BATCHES = 50  # steps of an epoch
DELTA = 1e-5
COMMAND = "python experiments/correlated.py --data-dir DIR"
Rows = tuple[torch.Tensor, torch.Tensor]


def rows_of(name: str, folder: Path) -> tuple[Rows, Rows]:
    """(training rows, test rows), flat."""
    whole, _, every = name.partition("/")
    found = data.load(whole, folder)
    train, test = ((part.inputs.flatten(1).float(), part.targets) for part in (found.train, found.test))
    kept = slice(None, None, int(every or 1))
    return (train[0][kept], train[1][kept]), test


def plan_of(way: str, records: int, epochs: int, epsilon: float) -> sordino.Plan:
    """The plan of a way at this budget; all have the same expected batch and number of steps."""
    shared: dict[str, Any] = {
        "records": records, "expected_batch": records / BATCHES, "steps": BATCHES * epochs, "epsilon": epsilon,
        "delta": DELTA,
    }  # fmt: skip
    return sordino.correlated(**shared) if way == "correlated" else sordino.dpsgd(**shared, sampling=way)


def accuracy(plan: sordino.Plan, train: Rows, test: Rows, rate: float, seed: int) -> float:
    """Of a linear classifier on the test rows, after a private run."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(train[0].shape[1], int(train[1].max()) + 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    sordino.train(model, loss, train, plan, lr=rate, settings=sordino.Settings(progress=False, chunk=4096))
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def held_out(rows: Rows) -> tuple[Rows, Rows]:
    """Nine tenths and one tenth of the rows, at random from a fixed seed."""
    order = torch.randperm(len(rows[1]), generator=torch.Generator().manual_seed(0))
    cut = len(order) * 9 // 10
    return tuple(tuple(part[chosen] for part in rows) for chosen in (order[:cut], order[cut:]))  # type: ignore[return-value]


def run(name: str, way: str, epochs: int, epsilon: float, folder: Path, seeds: int) -> dict[str, Any]:
    """One row: tuned on held-out training rows, then measured on the test rows."""
    train, test = rows_of(name, folder)
    most, rest = held_out(train)
    tuning = plan_of(way, len(most[1]), epochs, epsilon)
    tried = {rate: accuracy(tuning, most, rest, rate, 0) for rate in RATES}
    rate = max(tried, key=lambda one: tried[one])
    plan = plan_of(way, len(train[1]), epochs, epsilon)
    found = [accuracy(plan, train, test, rate, seed) for seed in range(seeds)]
    return {
        "dataset": name, "way": way, "epochs": epochs, "steps": plan.steps, "epsilon": plan.guarantee().epsilon,
        "target_epsilon": epsilon, "delta": DELTA, "relation": plan.relation, "method": plan.method.to_dict(),
        "sampling": plan.sampling.to_dict(), "noise_multiplier": plan.noise.noise_multiplier, "lr": rate,
        "held_out": {str(key): value for key, value in tried.items()}, "accuracies": found,
        "accuracy": statistics.mean(found), "spread": statistics.stdev(found) if len(found) > 1 else 0.0,
    }  # fmt: skip


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """For each dataset and budget: the ways with their accuracies, the best of them, and the planner's choice."""
    found = []
    for name in DATASETS:
        for epsilon in EPSILONS:
            for epochs in EPOCHS:
                rows = {way: runs.get(key(name, way, epochs, epsilon)) for way in WAYS}
                if any(row is None for row in rows.values()):
                    continue
                shown = {
                    way: {k: row[k] for k in ("accuracy", "spread", "noise_multiplier", "lr")}
                    for way, row in rows.items()
                    if row is not None
                }
                planned = compare_ways(Budget(DATASETS[name], BATCHES, epochs, epsilon, DELTA))
                best = max(shown, key=lambda way: shown[way]["accuracy"])
                lost = shown[best]["accuracy"] - shown[planned["recommended"]]["accuracy"]
                row = {"dataset": name, "epsilon": epsilon, "epochs": epochs, **shown, "best": best}
                found.append(row | {"planned": planned["recommended"], "lost_by_the_plan": lost})
    return found


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The table as lines of a page: test accuracy in % (± over the seeds) and the noise multiplier of each way."""
    found = ["| dataset, ε, epochs | " + " | ".join(WAYS) + " | planned |", "|---|" + "---|" * (len(WAYS) + 1)]
    for row in rows:
        ways = [row[way] for way in WAYS]
        cells = [
            f"{100 * one['accuracy']:.2f} ± {100 * one['spread']:.2f} (σ = {one['noise_multiplier']:.3g})"
            for one in ways
        ]
        where = f"{row['dataset']}, {row['epsilon']:g}, {row['epochs']}"
        found.append(f"| {where} | {' | '.join(cells)} | {row['planned']} |")
    return found


def key(name: str, way: str, epochs: int, epsilon: float) -> str:
    return f"{name}, ε = {epsilon:g}, {epochs} epochs, {way}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--page", action="store_true", help="print the table of what is in FILE as a page has it")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "correlated.json")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=list(DATASETS))
    arguments = parser.parse_args()
    if arguments.page:
        print("\n".join(markdown(json.loads(arguments.out.read_text(encoding="utf8"))["table"])))
        return
    for name in arguments.datasets:
        for epochs in EPOCHS:
            for epsilon in EPSILONS:
                for way in WAYS:
                    label = key(name, way, epochs, epsilon)
                    if label in read_runs(arguments.out):
                        continue
                    row = run(name, way, epochs, epsilon, arguments.data_dir, arguments.seeds)
                    add_run(arguments.out, COMMAND, label, row, table)
                    print(f"{label}: {row['accuracy']:.4f} ± {row['spread']:.4f}, σ = {row['noise_multiplier']:.4g}, "
                          f"lr = {row['lr']}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
