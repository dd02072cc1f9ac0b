"""The cost of the engine's own checks, as a share of a run of 200 steps with Poisson batches.

    python benchmarks/check.py --out benchmarks/results/check.json                  all workloads, about fifteen minutes
    python benchmarks/check.py --only mlp10 logistic --out benchmarks/results/check.json     these again, others kept
    python benchmarks/check.py --table benchmarks/results/check.json --into docs/benchmarks.md

Each workload runs in a separate process with one thread. The size of every batch has a Poisson distribution whose mean
is the workload's batch size, so sizes change from step to step as in training. The processor time spent inside
`Assurance` (before, during and after a chunk) is measured, and that of whole steps. Before the first measured step the
engine makes two steps without checks, so that code loaded once per process is not counted as a cost of the checks.
For large models not all 200 steps are run. After `--seconds`, only those are run in which a check can be due: batches
of a size that did not occur before, and those that the run's own randomness chooses. Of these, too, some may be `left`
after `--most` seconds: each is counted with the mean of those that were run, except for the first step. What is done
before each step is counted for the steps that are not run, too. The share is the checks' time divided by the sum of the
checks' time and 200 median steps without checks. `steps` in the results is the number of steps that were run.
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
from peers.tables import put, three_digits
from sordino.gradients.checks.assurance import Assurance

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


def chosen(batch: int) -> bool:
    """Is this one of the later batches that are tested for interaction?"""
    assurance = Assurance()
    assurance.batches = batch
    return assurance._chosen()


def measure(workload: str, seconds: float, most: float) -> dict[str, Any]:
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
    began_in: list[float] = []  # before a chunk's passes: the same in every step
    whole: list[float] = []
    rarely: list[float] = []  # the checks' time in steps that may have one, after the first
    assurance = Assurance()
    step = stepping(model, work.row_loss, work.records, assurance)
    begun, seen, left = time.perf_counter(), set[int](), 0
    with timed("begin", began_in), timed("prepare", spent), timed("examine", spent):
        for number, size in enumerate(sizes.tolist()):
            assurance.batches = number  # as if every step had been made: it decides which are chosen
            passed = time.perf_counter() - begun
            rare = size not in seen or chosen(number + 1)
            if passed > seconds and len(whole) >= 5:
                left += rare and passed > most
                if not rare or passed > most:
                    seen.add(size)
                    continue
            began, before = time.process_time(), sum(spent) + sum(began_in)
            step(inputs[:size], targets[:size])
            whole.append(time.process_time() - began - (sum(spent) + sum(began_in) - before))
            if rare and number:
                rarely.append(sum(spent) + sum(began_in) - before)
            seen.add(size)
    left_out = (STEPS - len(whole)) * statistics.median(began_in) + left * (statistics.mean(rarely) if rarely else 0.0)
    median, checks = statistics.median(whole), sum(spent) + sum(began_in) + left_out
    return {
        "workload": workload,
        "steps": len(whole),
        "left": left,
        "step_seconds": median,
        "check_seconds": checks,
        "share": checks / (checks + STEPS * median),
        "attributed": assurance.attributed,
        "grouped": assurance.grouped,
        "looked": assurance.looked,
        "sizes": [min(seen), max(seen)],
        "commit": commit(),
    }


def table(results: dict[str, Any]) -> str:
    lines = [
        "| workload | a step, ms | checks, ms | share of 200 steps | programs compared, batches tested, looked at "
        "| steps run |",
        "|---|---|---|---|---|---|",
    ]
    for m in results["measurements"]:
        checks = f"{m['attributed']}, {m['grouped']}, {m['looked']}"
        step, made = (three_digits(1e3 * m[key]) for key in ("step_seconds", "check_seconds"))
        times = f"{step} | {made} | {100 * m['share']:.1f} %"
        lines.append(f"| {WORKLOADS[m['workload']].title} | {times} | {checks} | {m['steps']} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="for all steps of one workload")
    parser.add_argument("--most", type=float, default=60.0, help="the same for steps in which a check may be due")
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
        print(json.dumps(measure(options.child, options.seconds, options.most)))
        return
    results: dict[str, Any] = {"environment": environment(), "goal": GOAL, "measurements": []}
    if options.out.exists():
        known = json.loads(options.out.read_text())["measurements"]
        results["measurements"] = [m for m in known if m["workload"] not in options.only]
    for workload in options.only:
        command = [sys.executable, __file__, "--child", workload, "--seconds", str(options.seconds)]
        command += ["--most", str(options.most)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        one = json.loads(done.stdout.splitlines()[-1])
        results["measurements"].append(one)
        print(f"{workload:9s} {100 * one['share']:.2f} % of {STEPS} steps ({one['steps']} run)", flush=True)
        order = list(WORKLOADS)
        results["measurements"].sort(key=lambda m: order.index(m["workload"]))
        save(results, options.out)


if __name__ == "__main__":
    main()
