"""The share of a step that is spent in Python's interpreter, for plain PyTorch and for sordino.

    python benchmarks/interpreter.py --out benchmarks/results/interpreter.json            needs Linux's `perf`

`perf record` samples the processor (cpu-clock) during the steps of one process. Every sample belongs to one library:
Python's, torch's, ours. The profiler itself slows Python down by about a tenth, so these are shares, not times. Samples
are taken only while the process runs, so other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import commit, environment, save
from heldout import WORKLOADS
from peers import ENGINES

LIBRARIES = {"interpreter": ("libpython", "python3"), "torch for Python": ("libtorch_python",), "loops": ("_kernels",)}


def steps(workload: str, engine: str, seconds: float, into: Path) -> None:
    """Runs the steps of one engine while `perf` writes its samples to a file."""
    torch.set_num_threads(1)
    work = WORKLOADS[workload]
    step = ENGINES[engine].prepare(*work.build(), work.row_loss)
    for _ in range(3):
        step()
    command = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "2000", "-o", str(into), "-p", str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as watching:
        time.sleep(1)  # until it has begun
        began = time.process_time()
        while time.process_time() - began < seconds:
            step()
        watching.send_signal(signal.SIGINT)


def shares(samples: Path) -> dict[str, float]:
    """By group of libraries: the share of the samples."""
    command = ["perf", "report", "-q", "-i", str(samples), "--no-children", "-g", "none", "--sort", "dso"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [(float(line.split("%")[0]) / 100, line.split("%")[1].strip()) for line in lines if "%" in line]
    return {
        group: round(sum(share for share, name in found if name.startswith(prefixes)), 4)
        for group, prefixes in LIBRARIES.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=["edgenext", "maxvit", "deberta", "bilstm"])
    parser.add_argument("--seconds", type=float, default=4.0, help="processor time of each engine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/interpreter.json"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        steps(options.child[0], options.child[1], options.seconds, Path(options.child[2]))
        return
    results: dict[str, Any] = {"environment": environment(), "commit": commit(), "measurements": []}
    for workload in options.only:
        for engine in ("plain", "sordino"):
            with tempfile.TemporaryDirectory() as place:
                samples = Path(place) / "samples"
                command = [sys.executable, __file__, "--seconds", str(options.seconds)]
                subprocess.run([*command, "--child", workload, engine, str(samples)], check=True)
                one = {"workload": workload, "engine": engine} | shares(samples)
            results["measurements"].append(one)
            print(json.dumps(one), flush=True)
            save(results, options.out)


if __name__ == "__main__":
    main()
