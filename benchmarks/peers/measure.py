"""One measuring process: builds the model, checks it or warms up, times the steps, reads the peak memory."""

from __future__ import annotations

import copy
import gc
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heldout import WORKLOADS
from peers import CLIP_NORM, ENGINES

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
TOLERANCE = 1e-8
SINGLE_TOLERANCE = 2.0**-8  # the largest relative increase of a norm for its rounding (`contributions.RAISED`)


def _status(field: str) -> int:
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{STATUS} has no {field}")


def resident() -> int:
    """The resident bytes of this process; the peak so far if the system does not report them."""
    return _status("VmRSS") if STATUS.exists() else _peak_since_start()


def reset_peak() -> None:
    """Resets the peak (Linux); on other systems the peak counts from the start of the process."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text("5")


def peak() -> int:
    """The highest resident size since `reset_peak`, in bytes."""
    return _status("VmHWM") if STATUS.exists() else _peak_since_start()


def _peak_since_start() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(workload: str, engine: str, *, turn: float, records: int | None) -> Iterator[dict[str, Any]]:
    """Makes two warm-up steps, and then on each request a turn: the steps that fit into `turn` seconds, at least one.

    The first step is timed too: its additional time is what an engine does once, including its checks.

    Memory is the peak over all steps so far, including the warm-up, minus the resident size after model, batch and
    engine were built: it contains activations, gradients and what the engine keeps, but not the model or the imports.
    """
    model, inputs, targets = WORKLOADS[workload].build(records)
    step = ENGINES[engine].prepare(model, inputs, targets, WORKLOADS[workload].row_loss)
    gc.collect()
    before = resident()
    reset_peak()
    began = time.perf_counter()
    step()
    first = time.perf_counter() - began
    step()
    yield {"first_seconds": first}
    while True:
        walls: list[float] = []
        cpus: list[float] = []
        phases: dict[str, list[float]] = defaultdict(list)
        deadline = time.perf_counter() + turn
        while not walls or time.perf_counter() < deadline:
            wall, cpu = time.perf_counter(), time.process_time()
            for name, seconds in step().items():
                phases[name].append(seconds)
            walls.append(time.perf_counter() - wall)
            cpus.append(time.process_time() - cpu)
        medians = {name: statistics.median(values) for name, values in phases.items()}
        yield {"seconds": walls, "cpu_seconds": cpus, "phases": medians, "extra_bytes": peak() - before}


def check(workload: str, *, records: int = 4) -> dict[str, Any]:
    """Compares sordino's clipped sum and norms with a plain loop over records, in double precision.

    In single precision the two may be on different sides of a ReLU's kink for one record (a difference of 4e-3 that is
    not a fault of the engine); it is used only if torch has no float64 kernel (grouped products). The clip norm is the
    median of the records' norms, so that some records are clipped and some are not.
    """
    from sordino.clipping import FlatClip
    from sordino.gradients import Rows, brute_force, clipped_sum

    built, loss = WORKLOADS[workload].build(records), WORKLOADS[workload].row_loss
    try:
        model = copy.deepcopy(built[0]).double()
        wide = [t.double() if t.is_floating_point() else t for t in built[1:]]
        rows = Rows(wide[0], wide[1])
        norms, tolerance = brute_force(model, loss, rows, FlatClip(CLIP_NORM)).norms, TOLERANCE
    except RuntimeError:
        model, rows = built[0], Rows(built[1], built[2])
        norms, tolerance = brute_force(model, loss, rows, FlatClip(CLIP_NORM)).norms, SINGLE_TOLERANCE
    clipping = FlatClip(float(norms.median()))
    ours, oracle = clipped_sum(model, loss, rows, clipping), brute_force(model, loss, rows, clipping)
    scale = max(float(v.abs().max()) for v in oracle.sums.values())
    sums = max(float((ours.sums[n] - v).abs().max()) for n, v in oracle.sums.items()) / scale
    spread = float(((ours.norms - oracle.norms).abs() / oracle.norms).max())
    if not (sums <= tolerance and spread <= tolerance):
        raise AssertionError(f"{workload}: sordino is off the plain loop by {sums:.2e} (sums), {spread:.2e} (norms)")
    return {"records": records, "sums_error": sums, "norms_error": spread, "tolerance": tolerance}
