"""The cost of the engine's own checks, as a share of a run of 200 steps with Poisson batches.

    python benchmarks/check.py --out benchmarks/results/check.json                  all workloads, about ten minutes
    python benchmarks/check.py --only mlp10 logistic --out benchmarks/results/check.json     these again, others kept
    python benchmarks/check.py --table benchmarks/results/check.json --into docs/benchmarks.md

Each workload runs in a separate process with one thread. The size of every batch has a Poisson distribution whose mean
is the workload's batch size, so sizes change from step to step as in training. The processor time spent inside
`Assurance` (before, during and after a chunk) is measured, and that of whole steps. Before the first measured step the
engine makes two steps without checks, so that code loaded once per process is not counted as a cost of the checks.
For large models fewer than 200 steps are run, until `--seconds` have passed. The share is the checks' time divided by
the sum of the checks' time and 200 median steps without checks. Checks that only a later, rarer program or draw causes
are then missing; `steps` in the results is the number of steps that were run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine import commit, environment, save
from heldout import WORKLOADS
from peers import ENGINES
from peers.tables import put
from sordino.gradients.assurance import Assurance

STEPS = 200
GOAL = 0.03


def timed(name: str, spent: list[float]) -> Any:
    """The method of Assurance, wrapped so that its processor time is appended to `spent`."""
    method: Callable[..., None] = getattr(Assurance, name)

    def run(self: Assurance, *args: Any) -> None:
        began = time.process_time()
        method(self, *args)
        spent.append(time.process_time() - began)

    return mock.patch.object(Assurance, name, run)


def measure(workload: str, seconds: float) -> dict[str, Any]:
    """One run: the processor time of the checks and of the median step, and the number of checks."""
    from peers.ours import stepping

    torch.set_num_threads(1)
    work = WORKLOADS[workload]
    sizes = torch.poisson(torch.full((STEPS,), float(work.records)), generator=torch.Generator().manual_seed(0)).long()
    model, inputs, targets = work.build(int(sizes.max()))
    warm = ENGINES["sordino"].prepare(*work.build(4), work.row_loss)
    warm()
    warm()
    spent: list[float] = []
    whole: list[float] = []
    assurance = Assurance()
    step = stepping(model, work.row_loss, work.records, assurance)
    end = time.perf_counter() + seconds
    with timed("begin", spent), timed("examine", spent):
        for size in sizes.tolist():
            began, before = time.process_time(), sum(spent)
            step(inputs[:size], targets[:size])
            whole.append(time.process_time() - began - (sum(spent) - before))
            if time.perf_counter() > end and len(whole) >= 5:
                break
    median, checks = statistics.median(whole), sum(spent)
    return {
        "workload": workload,
        "steps": len(whole),
        "step_seconds": median,
        "check_seconds": checks,
        "share": checks / (checks + STEPS * median),
        "attributed": assurance.attributed,
        "grouped": assurance.grouped,
        "sizes": [int(sizes[: len(whole)].min()), int(sizes[: len(whole)].max())],
        "commit": commit(),
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | a step, ms | checks, ms | share of 200 steps | programs compared, batches tested | steps run |",
        "|---|---|---|---|---|---|",
    ]
    for m in results["measurements"]:
        checks = f"{m['attributed']}, {m['grouped']}"
        times = f"{1e3 * m['step_seconds']:.3g} | {1e3 * m['check_seconds']:.3g} | {100 * m['share']:.1f} %"
        lines.append(f"| {WORKLOADS[m['workload']].title} | {times} | {checks} | {m['steps']} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="for one workload; no step begins afterwards")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/check.json"))
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of a results file and stop")
    parser.add_argument("--into", type=Path, metavar="MD", help="with --table: fill it into this document")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.table:
        found = table(json.loads(options.table.read_text()))
        if options.into:
            put(options.into, "<!-- check:begin -->", "<!-- check:end -->", found)
        else:
            print(found)
        return
    if options.child:
        print(json.dumps(measure(options.child, options.seconds)))
        return
    results: dict[str, Any] = {"environment": environment(), "goal": GOAL, "measurements": []}
    if options.out.exists():
        known = json.loads(options.out.read_text())["measurements"]
        results["measurements"] = [m for m in known if m["workload"] not in options.only]
    for workload in options.only:
        command = [sys.executable, __file__, "--child", workload, "--seconds", str(options.seconds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        one = json.loads(done.stdout.splitlines()[-1])
        results["measurements"].append(one)
        print(f"{workload:9s} {100 * one['share']:.2f} % of {STEPS} steps ({one['steps']} run)", flush=True)
        order = list(WORKLOADS)
        results["measurements"].sort(key=lambda m: order.index(m["workload"]))
        save(results, options.out)


if __name__ == "__main__":
    main()
