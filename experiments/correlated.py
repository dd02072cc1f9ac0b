"""Poisson sampling, random allocation and correlated noise at equal ε, batch and steps: which is best in which case.

    python experiments/correlated.py --data-dir DIR [--out FILE]
    python experiments/correlated.py --again --data-dir DIR   the second design: step sizes chosen over three seeds
    python experiments/correlated.py --page              print the table of FILE as Markdown

The designs are experiments/designs/ways*.toml, fixed before the runs: tasks, budgets, step sizes, seeds, rules. Plain
SGD with a constant step size, clip norm 1, add-remove, the unit of privacy is a record. The step size is the best on
held-out *training* rows, tuned in the same way for each of the three; then all training rows are used, and the accuracy
on the test rows is the mean over the seeds. The planner (`sordino.methods.planner.compare_ways`) uses no data. Tuning
is not charged to the budget, because these datasets are public. Runs that are already in FILE are not repeated; the
table has every row for which all three runs are there.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import sordino
from provenance import add_run, read_runs
from sordino.methods.planner import ALIKE, Budget, compare_ways
from tasks import Rows, accuracy, held_out, model_of, rows_of

HERE = Path(__file__).parent
COMMAND = "python experiments/correlated.py {}--data-dir DIR"
APART = 2.5  # standard errors of a difference
Design = Mapping[str, Any]
Row = dict[str, Any]


def plan_of(way: str, records: int, batches: int, epochs: int, epsilon: float, delta: float) -> sordino.Plan:
    """The plan of one of the three at this budget; all have the same expected batch and number of steps."""
    shared: dict[str, Any] = {
        "records": records, "expected_batch": records / batches, "steps": batches * epochs, "epsilon": epsilon,
        "delta": delta,
    }  # fmt: skip
    return sordino.correlated(**shared) if way == "correlated" else sordino.dpsgd(**shared, sampling=way)


def trained(task: Mapping[str, Any], plan: sordino.Plan, train: Rows, test: Rows, lr: float, seed: int) -> float:
    """The accuracy on the test rows, after a private run."""
    model = model_of(task, train, seed)
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    sordino.train(model, loss, train, plan, lr=lr, settings=sordino.Settings(progress=False, chunk=4096))
    return accuracy(model, test)


def run(design: Design, name: str, way: str, budget: tuple[int, int, float], folder: Path) -> Row:
    """One cell: tuned on held-out training rows, then measured on the test rows."""
    task, (batches, epochs, epsilon) = design["tasks"][name], budget
    train, test = rows_of(task, folder)
    most, rest = held_out(train, design["held_out"])
    tuning = plan_of(way, len(most[1]), batches, epochs, epsilon, design["delta"])
    seeds = range(design.get("tuning_seeds", 1))
    tried = {lr: statistics.mean(trained(task, tuning, most, rest, lr, seed) for seed in seeds) for lr in design["lr"]}
    lr = max(tried, key=lambda one: tried[one])
    plan = plan_of(way, len(train[1]), batches, epochs, epsilon, design["delta"])
    found = [trained(task, plan, train, test, lr, seed) for seed in range(design["seeds"])]
    return {
        "task": name, "way": way, "batches": batches, "epochs": epochs, "steps": plan.steps,
        "records": len(train[1]), "epsilon": plan.guarantee().epsilon, "target_epsilon": epsilon,
        "delta": plan.delta, "relation": plan.relation, "method": plan.method.to_dict(),
        "sampling": plan.sampling.to_dict(), "noise_multiplier": plan.noise.noise_multiplier, "lr": lr,
        "held_out": {str(key): value for key, value in tried.items()}, "accuracies": found,
        "accuracy": statistics.mean(found), "spread": statistics.stdev(found),
    }  # fmt: skip


def key(task: str, way: str, budget: tuple[int, int, float]) -> str:
    batches, epochs, epsilon = budget
    return f"{task}, {batches} batches, {epochs} epochs, ε = {epsilon:g}, {way}"


def budgets(design: Design) -> list[tuple[int, int, float]]:
    return [(*budget, epsilon) for budget in design["budgets"] for epsilon in design["epsilons"]]


def compared(design: Design, task: str, budget: tuple[int, int, float], cells: Mapping[str, Row]) -> Row:
    """One row of the table: the three results, the planner's answer, and the rules of the design."""
    batches, epochs, epsilon = budget
    answer = _planned(Budget(cells["poisson"]["records"], batches, epochs, epsilon, design["delta"]))
    planned = {row["way"]: row for row in answer["rows"]}
    pooled = math.sqrt(statistics.mean(cell["spread"] ** 2 for cell in cells.values()))
    error = max(pooled * math.sqrt(2 / design["seeds"]), 1e-9)
    pairs = [_pair(a, b, cells, planned, error) for a, b in itertools.combinations(design["ways"], 2)]
    chosen = answer["recommended"]
    beaten = [
        way for way, cell in cells.items()
        if cell["accuracy"] - cells[chosen]["accuracy"] > max(APART * error, ALIKE / 100)
    ]  # fmt: skip
    return {
        "task": task, "batches": batches, "epochs": epochs, "epsilon": epsilon,
        **{way: {k: cell[k] for k in ("accuracy", "spread", "noise_multiplier", "lr")} for way, cell in cells.items()},
        "error": error, "planned": chosen, "alike": answer["alike"], "fails": bool(beaten), "beaten_by": beaten,
        "least_noise": min(planned, key=lambda way: planned[way]["noise_in_weights"]),
        "best": max(cells, key=lambda way: cells[way]["accuracy"]), "pairs": pairs,
    }  # fmt: skip


@functools.cache  # the table is made again after every run
def _planned(budget: Budget) -> Row:
    return compare_ways(budget)


def _pair(a: str, b: str, cells: Mapping[str, Row], planned: Mapping[str, Row], error: float) -> Row:
    """How much better b is than a, in points, expected and measured; and by how much the mechanism's noise is lower."""
    measured = 100 * (cells[b]["accuracy"] - cells[a]["accuracy"])
    return {
        "ways": [a, b], "expected": planned[a]["expected_loss"] - planned[b]["expected_loss"], "measured": measured,
        "standard_errors": measured / 100 / error,
        "less_noise": math.log(planned[a]["noise_in_weights"] / planned[b]["noise_in_weights"]),
    }  # fmt: skip


def summary(rows: list[Row]) -> dict[str, Any]:
    """The answers to the design's questions over all rows."""
    pairs = [pair for row in rows for pair in row["pairs"]]
    called = [pair for pair in pairs if abs(pair["expected"]) > ALIKE]
    alike = [pair for pair in pairs if abs(pair["expected"]) <= ALIKE]

    def signs(chosen: list[Row], what: str) -> dict[str, int]:
        agrees = [pair[what] * pair["measured"] > 0 for pair in chosen]
        apart = [abs(pair["standard_errors"]) > APART for pair in chosen]
        both = list(zip(agrees, apart, strict=True))
        return {
            "pairs": len(chosen), "expected_sign": sum(agrees), "told_apart_as_expected": sum(a and t for a, t in both),
            "told_apart_against": sum(not a and t for a, t in both),
        }  # fmt: skip

    return {
        "rows": len(rows),
        "planner_fails": sum(row["fails"] for row in rows),
        "planner_is_best": sum(row["planned"] == row["best"] for row in rows),
        "least_noise_is_best": sum(row["least_noise"] == row["best"] for row in rows),
        "called_different": signs(called, "expected"),
        "called_alike": {
            "pairs": len(alike),
            "told_apart": sum(abs(pair["standard_errors"]) > APART for pair in alike),
            "told_apart_by_a_point": sum(
                abs(pair["standard_errors"]) > APART and abs(pair["measured"]) > 1 for pair in alike
            ),
        },
        "all_pairs_by_the_model": signs(pairs, "expected"),
        "all_pairs_by_the_mechanisms_noise": signs(pairs, "less_noise"),
        "correlation_with_the_model": _correlation(pairs, "expected"),
        "correlation_with_the_mechanisms_noise": _correlation(pairs, "less_noise"),
    }


def _correlation(pairs: list[Row], what: str) -> float | None:
    if len(pairs) < 3:
        return None
    return statistics.correlation([pair[what] for pair in pairs], [pair["measured"] for pair in pairs])


def table(design: Design, runs: Mapping[str, Row]) -> dict[str, Any]:
    """Every row that has all three cells."""
    rows = []
    for task in design["tasks"]:
        for budget in budgets(design):
            cells = {way: runs[key(task, way, budget)] for way in design["ways"] if key(task, way, budget) in runs}
            if len(cells) == len(design["ways"]):
                rows.append(compared(design, task, budget, cells))
    return {"rows": rows, "summary": summary(rows), "design": dict(design)}


def markdown(found: Mapping[str, Any]) -> list[str]:
    """The table as lines of Markdown: test accuracy in % (± over the seeds) and the noise multiplier of each."""
    ways = found["design"]["ways"]
    lines = [
        "| task, batches × epochs, ε | " + " | ".join(ways) + " | planner | told apart |",
        "|---|" + "---|" * (len(ways) + 2),
    ]
    for row in found["rows"]:
        cells = [
            f"{100 * row[way]['accuracy']:.2f} ± {100 * row[way]['spread']:.2f} (σ {row[way]['noise_multiplier']:.2f})"
            for way in ways
        ]
        where = f"{row['task']}, {row['batches']} × {row['epochs']}, {row['epsilon']:g}"
        said = row["planned"] + (f" (alike: {', '.join(row['alike'])})" if len(row["alike"]) > 1 else "")
        apart = [
            f"{pair['ways'][pair['measured'] > 0]} > {pair['ways'][pair['measured'] <= 0]}"
            for pair in row["pairs"]
            if abs(pair["standard_errors"]) > APART
        ]
        lines.append(f"| {where} | {' | '.join(cells)} | {said} | {'; '.join(apart) or '–'} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--page", action="store_true", help="print the table of FILE as Markdown")
    parser.add_argument("--again", action="store_true", help="the second design")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    suffix = "_again" if arguments.again else ""
    arguments.out = arguments.out or HERE / "results" / f"correlated{suffix}.json"
    if arguments.page:
        found = json.loads(arguments.out.read_text(encoding="utf8"))["table"]
        print("\n".join(markdown(found)), json.dumps(found["summary"], indent=1), sep="\n\n")
        return
    if arguments.data_dir is None:
        parser.error("--data-dir is needed")
    design = tomllib.loads((HERE / "designs" / f"ways{suffix}.toml").read_text(encoding="utf8"))
    cells = list(itertools.product(design["tasks"], budgets(design), design["ways"]))

    def finished(runs: dict[str, Any]) -> dict[str, Any]:
        return table(design, runs)

    for name, budget, way in cells:
        label = key(name, way, budget)
        if label in read_runs(arguments.out):
            continue
        cell = run(design, name, way, budget, arguments.data_dir)
        add_run(arguments.out, COMMAND.format("--again " if arguments.again else ""), label, cell, finished)
        print(f"{label}: {cell['accuracy']:.4f} ± {cell['spread']:.4f}, σ = {cell['noise_multiplier']:.4g}, "
              f"lr = {cell['lr']}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
