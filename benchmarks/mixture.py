"""The cost of correlated noise compared with DP-SGD's: memory and processor time of a release, by number of Gaussians.

    python benchmarks/mixture.py --json benchmarks/results/mixture.json

Each row is measured in a separate process that releases sums in double precision for some steps, as training does, with
one Gaussian for each coordinate (DP-SGD) or with p Gaussians (`inverse-root` with p coefficients: the step's own, and
p − 1 of earlier steps, regenerated from their addresses). `peak` is the largest resident size minus that before the
first release, in megabytes; `seconds` is the least processor time among the last releases. The machine may be shared.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

COMMAND = "python benchmarks/mixture.py"
STEPS = 3


def measured(coordinates: int, bands: int) -> dict[str, Any]:
    """One process: releases of `coordinates` sums with `bands` Gaussians each, after that many earlier steps."""
    import torch

    import sordino
    from sordino.release import Entry, release
    from sordino.release.ledger import Ledger

    steps = bands - 1 + STEPS
    if bands == 1:
        plan = sordino.dpsgd(records=1000, expected_batch=100, steps=steps, noise_multiplier=2.0, delta=1e-4)
    else:
        plan = sordino.correlated(
            records=1000, expected_batch=100, steps=steps, noise_multiplier=2.0, delta=1e-4, strategy="inverse-root",
            bands=bands,
        )  # fmt: skip
    source = plan.source()
    sums, times, small = torch.randn(coordinates, dtype=torch.float64), [], 0
    with Ledger.open(None, plan.to_dict()) as ledger:
        for step in range(steps):
            earlier = plan.method.earlier_noise(plan, step, 0) if bands > 1 else None
            entry = Entry("gradient", step, plan.sampled(step), plan.relation)
            given = {f"layer {k}": part.clone() for k, part in enumerate(sums.chunk(4))}
            if step == 0:
                small = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            begin = time.process_time()
            release(
                given, sensitivity=plan.sensitivity, norm=plan.clipping.norm, noise=plan.noise, source=source,
                ledger=ledger, entry=entry, in_place=True, dtype=torch.float32, earlier=earlier,
            )  # fmt: skip
            times.append(time.process_time() - begin)
            del given
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"coordinates": coordinates, "gaussians": bands, "seconds": min(times[bands - 1 :]),
            "peak": (peak - small) / 1024}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--one", type=int, nargs=2, metavar=("COORDINATES", "GAUSSIANS"), help="one row, in this process"
    )
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(*arguments.one)))
        return
    rows = []
    for coordinates in (100_000, 4_000_000):
        for bands in (1, 2, 4, 16, 52):
            line = [sys.executable, __file__, "--one", str(coordinates), str(bands)]
            rows.append(json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout))
            print(rows[-1], flush=True)
    if arguments.json:
        from sordino.files import json_bytes, write_atomically
        from sordino.runs.results import environment

        write_atomically(arguments.json, json_bytes({"command": COMMAND, "environment": environment(), "rows": rows}))


if __name__ == "__main__":
    main()
