"""Step time and memory of records with past iterates or views, as ratios to plain DP-SGD.

    python benchmarks/records.py                                   measure and write the JSON file: about five minutes
    python benchmarks/records.py --into docs/benchmarks.md         write the tables of the JSON file into the document

A step is that of a training run: draw the views, compute gradients at every iterate and one clipped vector per record,
add noise by `release` with a ledger in memory, update by SGD. Each round is a fresh process in which all settings take
turns step by step; a ratio is that of two steps of the same turn, and the table shows the median over all of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine import environment, save

RESULTS = Path(__file__).parent / "results" / "records.json"
LENGTHS, VIEWS = (1, 2, 3), (2, 4, 8)
SETTINGS = ["plain", *(f"iterates {1 + k}" for k in LENGTHS), *(f"views {k}" for k in VIEWS)]
TITLES = {"W3": ("MNIST CNN", 512), "W4-64": ("ResNet-20 GroupNorm", 32)}
BEGIN, END = "<!-- records:begin -->", "<!-- records:end -->"


def goal(setting: str) -> float:
    """The goal for the ratio: 1.1 for each iterate (3.3 at K₀ = 2), and 1.1 for each view."""
    kind, _, count = setting.partition(" ")
    return 1.0 if kind == "plain" else 1.1 * int(count)


def stepper(workload: str, setting: str) -> tuple[Callable[[], None], int]:
    """One private step of the workload with this setting, and the number of steps until all past iterates exist."""
    import torch

    from sordino.plan import Plan
    from sordino.plan.contribution import Augmentation, InnerMomentum
    from sordino.records.gradients import plan_gradients
    from sordino.records.momentum import PastIterates
    from sordino.release.ledger import Ledger
    from sordino.training.steps import private_steps
    from workloads import SIX

    model, inputs, targets = SIX[workload].build(TITLES[workload][1])
    kind, _, count = setting.partition(" ")
    inner = InnerMomentum(int(count) - 1, 0.3) if kind == "iterates" else None
    augmentation = Augmentation(views=int(count), crop=4, flip=True) if kind == "views" else None
    plan = Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-5, records=len(inputs), expected_batch=len(inputs), steps=1_000,
        inner=inner, augmentation=augmentation,
    )  # fmt: skip
    past = PastIterates()
    sums = plan_gradients(plan, model, torch.nn.functional.cross_entropy, (inputs, targets), past=lambda: past)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger.open(None, plan.to_dict())
    steps = private_steps(plan, sums, records=len(inputs), source=plan.source(), ledger=ledger)

    def step() -> None:
        nonlocal past
        private = next(steps)
        if inner is not None:
            past = past.followed_by(model, inner.length)
        private.assign(model)
        optimizer.step()

    return step, 1 + (inner.length if inner else 0)


def times(workload: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of processor time of each step, all settings taking turns."""
    steps = {}
    for setting in SETTINGS:
        steps[setting], early = stepper(workload, setting)
        for _ in range(early):
            steps[setting]()
    found: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    for _ in range(repeats):
        for setting, step in steps.items():
            start = time.process_time()
            step()
            found[setting].append(time.process_time() - start)
    return found


def memory(workload: str, setting: str) -> int:
    """The peak memory during steps minus the resident size after model and batch were made, in bytes."""
    from peers.measure import peak, reset_peak, resident

    step, early = stepper(workload, setting)
    gc.collect()
    before = resident()
    reset_peak()
    for _ in range(early + 1):
        step()
    return peak() - before


def child(job: dict[str, Any]) -> Any:
    """Runs a job in a fresh process with one thread; the last line of its output is the result."""
    variables = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(rounds: int, repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {
        "command": "python benchmarks/records.py",
        "environment": environment(),
        "settings": {"rounds": rounds, "repeats": repeats, "threads": 1, "clock": "cpu", "views": "crop 4, flip"},
        "workloads": {name: {"title": title, "records": n} for name, (title, n) in TITLES.items()},
    }
    for name, entry in results["workloads"].items():
        seconds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
        for turn in range(rounds):
            for setting, values in child({"times": [name, repeats]}).items():
                seconds[setting] += values
            print(f"{name} round {turn}: plain {statistics.median(seconds['plain']) * 1e3:.0f} ms", flush=True)
        ratios = {s: [a / b for a, b in zip(v, seconds["plain"], strict=True)] for s, v in seconds.items()}
        entry["cpu_ms"] = {s: round(statistics.median(v) * 1e3, 2) for s, v in seconds.items()}
        entry["ratio"] = {s: round(statistics.median(v), 3) for s, v in ratios.items()}
        entry["quartiles"] = {s: [round(q, 3) for q in statistics.quantiles(v, n=4)[::2]] for s, v in ratios.items()}
        entry["extra_mb"] = {s: round(child({"memory": [name, s]}) / 1e6, 1) for s in SETTINGS}
    return results


def table(results: dict[str, Any]) -> str:
    machine, how = results["environment"], results["settings"]
    lines = [
        f"{machine['cpu']}, one thread, torch {machine['versions']['torch']}; {how['rounds']} rounds of "
        f"{how['repeats']} steps each, processor time; {machine['date']}, commit {machine['commit']}.",
        "",
        "| | "
        + " | ".join(f"{e['title']}, {e['records']} records" for e in results["workloads"].values())
        + " | goal |",
        "| --- |" + " --- |" * (len(results["workloads"]) + 1),
    ]
    for setting in SETTINGS:
        cells = []
        for entry in results["workloads"].values():
            low, high = entry["quartiles"][setting]
            ratio = f"{entry['ratio'][setting]:.2f} ({low:.2f}–{high:.2f})"
            first = f"{entry['cpu_ms'][setting]:.0f} ms" if setting == "plain" else ratio
            cells.append(f"{first}, {entry['extra_mb'][setting]:.0f} MB")
        lines.append(f"| {said(setting)} | " + " | ".join(cells) + f" | {goal(setting):.1f} |")
    return "\n".join(lines)


def said(setting: str) -> str:
    kind, _, count = setting.partition(" ")
    return {"plain": "plain DP-SGD", "iterates": f"K₀ = {int(count or 1) - 1}", "views": f"{count} views"}[kind]


def fill(document: Path, results: dict[str, Any]) -> None:
    """Writes the table between the markers."""
    text = document.read_text(encoding="utf8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    document.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{after}", encoding="utf8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--into", type=Path, metavar="MD", help="write the tables of --out into this document and stop")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        job = json.loads(options.child)
        print(json.dumps(times(*job["times"]) if "times" in job else memory(*job["memory"])))
    elif options.into:
        fill(options.into, json.loads(options.out.read_text()))
    else:
        results = measure(options.rounds, options.repeats)
        save(results, options.out)
        print(table(results))


if __name__ == "__main__":
    main()
