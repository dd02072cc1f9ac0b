"""Peak memory of the first steps in fresh processes, and how much of it is code.

    python benchmarks/resident.py --out benchmarks/results/resident.json
    python benchmarks/resident.py --only resnet18 deberta --processes 1 --out benchmarks/results/resident.json

A process that takes its first step loads pages of libraries from their files: torch's operators, NumPy, OpenSSL. They
count as resident memory, for plain PyTorch too. `file` is the growth of RssFile (Linux) during the steps, `peak` that
of the whole resident size, `each` the peak of every step, all in MB above the size before the first step. "unchecked"
is sordino's step without its checks: what ordinary steps need.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from heldout import WORKLOADS
from peers import ENGINES, Step
from peers.measure import _status, peak, reset_peak, resident
from peers.ours import stepping

STEPS = 5


def steps(workload: str, engine: str) -> dict[str, Any]:
    """The growth of the peak and of the pages of files during STEPS steps, in MB."""
    torch.set_num_threads(1)
    model, inputs, targets = WORKLOADS[workload].build(None)
    row_loss = WORKLOADS[workload].row_loss
    if engine == "unchecked":
        bare = stepping(model, row_loss, len(targets), None)
        step: Step = lambda: bare(inputs, targets)  # noqa: E731
    else:
        step = ENGINES[engine].prepare(model, inputs, targets, row_loss)
    gc.collect()
    before, files, each = resident(), _status("RssFile"), []
    for _ in range(STEPS):
        reset_peak()
        step()
        each.append(round((peak() - before) / 1e6, 1))
    return {"peak": max(each), "file": round((_status("RssFile") - files) / 1e6, 1), "each": each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["W1", "mlp10", "logistic"], choices=list(WORKLOADS))
    parser.add_argument("--processes", type=int, default=10, help="fresh processes of each engine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(steps(*given.child)))
        return
    known = json.loads(given.out.read_text())["MB"] if given.out and given.out.exists() else {}
    for workload in given.only:
        for engine in ("plain", "sordino", "unchecked"):
            run = [sys.executable, __file__, "--child", workload, engine]
            env = {**os.environ, "OMP_NUM_THREADS": "1"}
            each = [json.loads(subprocess.check_output(run, env=env)) for _ in range(given.processes)]
            known.setdefault(workload, {})[engine] = each
            print(workload, engine, {key: sorted(one[key] for one in each) for key in each[0]}, flush=True)
            if given.out:  # after each, so that it can be stopped; workloads that are not measured again are kept
                text = json.dumps({"steps": STEPS, "torch": torch.__version__, "MB": known}, indent=1)
                given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
