"""What a private step of a small model consists of, row by row: each row adds one thing that the guarantee needs.

    python benchmarks/step_parts.py --out benchmarks/results/step_parts.json        about a minute
    python benchmarks/step_parts.py --table benchmarks/results/step_parts.json --into docs/benchmarks.md

The first rows are the step written by hand for one network (`peers/floor.py`): no engine that draws this noise for
every coordinate, and has this entry on disk before the value, can be faster. The last rows are sordino's. All rows
take turns in one process with one thread. The ledger on disk is flushed to the device (fsync) in every step, which
takes wall time and little processor time, so both clocks are shown: medians, and the quartiles in the file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sordino
from engine import environment, save
from heldout import WORKLOADS
from peers import CLIP_NORM, ENGINES, LEARNING_RATE, NOISE_MULTIPLIER
from peers.floor import sums_of
from peers.ours import stepping
from peers.tables import put
from sordino.clipping import FlatClip
from sordino.gradients.checks.assurance import Assurance
from sordino.gradients.sums.memory import keep_freed_memory
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, Ledger, release
from sordino.release.mechanisms import release_grid
from workloads import Workload

Step = Callable[[], object]
POPULATION = 4  # records of the data set, in batches
SMALL = ("mlp10", "words", "logistic")
PLAN = {"kind": "plan"}


def by_hand(work: Workload, *, noise: str = "none", ledger: Ledger | None = None, optimizer: bool = False) -> Step:
    """The step of `peers/floor.py`. noise: "none", "drawn" (added, nothing recorded) or "released" (by `release`)."""
    model, inputs, targets = work.build()
    sums, owners = sums_of(model), dict(model.named_parameters())
    parameters = [p.detach() for p in owners.values()]
    mechanism, source, taken = Gaussian(NOISE_MULTIPLIER), RandomSource.from_os(), 0
    flat = torch.zeros(sum(p.numel() for p in parameters))
    shares = torch.split_with_sizes(flat, [p.numel() for p in parameters])
    reused = [part.view(p.shape) for part, p in zip(shares, parameters, strict=True)]
    grid = release_grid(mechanism, CLIP_NORM, len(flat))
    update = torch.optim.SGD(owners.values(), lr=LEARNING_RATE)
    sampling = {"name": "poisson", "sampling_rate": 0.01}
    keep_freed_memory()

    def released(totals: dict[str, Tensor]) -> dict[str, Tensor]:
        assert ledger is not None
        entry = Entry(purpose="gradient", step=taken, sampling=sampling, relation="add-remove")
        how: Any = {"noise": mechanism, "source": source, "ledger": ledger, "entry": entry, "in_place": True}
        return release(totals, sensitivity=CLIP_NORM, norm="l2", factor=1 / len(targets), dtype=torch.float32, **how)

    def step() -> None:
        nonlocal taken
        # what is released belongs to nobody else, so it can't be the memory that is used again
        totals = [torch.empty(p.shape) for p in parameters] if noise == "released" else reused
        sums(parameters, totals, inputs, targets)
        if noise == "drawn":
            source.stream("floor", taken).rounded_sum(flat, grid.scale, grid.spacing)
        if noise == "released":
            box = dict(zip(owners, totals, strict=True))
            del totals
            totals = list(released(box).values())
        taken += 1
        factor = 1.0 if noise == "released" else 1 / len(targets)
        if optimizer:
            for parameter, total in zip(owners.values(), totals, strict=True):
                parameter.grad = total
            update.step()
            update.zero_grad()
            return
        for value, total in zip(parameters, totals, strict=True):
            value.sub_(total, alpha=LEARNING_RATE * factor)

    return step


def engine(work: Workload, ledger: Ledger, assurance: Assurance | None) -> Step:
    """sordino's step on one batch, without sampling."""
    model, inputs, targets = work.build()
    step = stepping(model, work.row_loss, len(targets), assurance, ledger)
    return lambda: step(inputs, targets)


def training(work: Workload, path: Path) -> Step:
    """A step of `private_steps`: batches drawn at random from a data set, rows gathered, the ledger on disk."""
    model, inputs, targets = work.build(POPULATION * work.records)
    plan = sordino.Plan.dpsgd(
        noise_multiplier=NOISE_MULTIPLIER, delta=1e-6, records=len(targets), expected_batch=work.records, steps=100_000,
        clip_norm=CLIP_NORM,
    )  # fmt: skip
    sums = sordino.record_gradients(model, work.row_loss, (inputs, targets), FlatClip(CLIP_NORM))
    source, update = plan.source(), torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    ledger = Ledger.open(path, plan.to_dict())
    steps = sordino.private_steps(plan, sums, records=len(targets), source=source, ledger=ledger, chunk=4096)

    def step() -> None:
        next(steps).assign(model)
        update.step()
        update.zero_grad()

    return step


def rows_of(work: Workload, place: Path) -> dict[str, Step]:
    """The rows of the table, in order; each contains what the one before it does."""
    memory, disk, third, fourth, fifth = (
        Ledger.open(None if path is None else place / path, PLAN) for path in (None, "a", "b", "c", "d")
    )
    return {
        "plain PyTorch": ENGINES["plain"].prepare(*work.build(), work.row_loss),
        "by hand: both passes, norms, clipped sums, update": by_hand(work),
        "+ exact noise of the cryptographic generator on every coordinate": by_hand(work, noise="drawn"),
        "+ `release`: finite values, range, a hashed entry in memory": by_hand(work, noise="released", ledger=memory),
        "+ the entry on disk before the value": by_hand(work, noise="released", ledger=disk),
        "+ `torch.optim.SGD`, as plain has it": by_hand(work, noise="released", ledger=third, optimizer=True),
        "sordino without checks: any model instead of this one": engine(work, fourth, None),
        "+ checks, after the first step": engine(work, fifth, Assurance()),
        "+ Poisson sampling from a data set, rows gathered": training(work, place / "e"),
    }


def measure(workload: str, seconds: float, disk: Path) -> dict[str, Any]:
    """Wall and processor time of every row, in turns. disk: where the ledgers are."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=disk) as place:
        steps = rows_of(WORKLOADS[workload], Path(place))
        for step in steps.values():
            for _ in range(3):
                step()
        spent: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            for name, step in steps.items():
                for _ in range(4):
                    before = time.perf_counter(), time.process_time()
                    step()
                    spent[name].append((time.perf_counter() - before[0], time.process_time() - before[1]))
    rows = [{"row": name} | dict(_quartiles(found)) for name, found in spent.items()]
    return {"workload": workload, "records": WORKLOADS[workload].records, "rows": rows}


def _quartiles(found: Sequence[tuple[float, float]]) -> Iterator[tuple[str, Any]]:
    for name, values in zip(("wall", "cpu"), zip(*found, strict=True), strict=True):
        low, middle, high = statistics.quantiles(values, n=4)
        yield f"{name}_seconds", middle
        yield f"{name}_quartiles", [low, high]
    yield "steps", len(found)


def table(results: dict[str, Any]) -> str:
    measured = results["measurements"]
    titles = [f"{WORKLOADS[m['workload']].title}, batch {m['records']}" for m in measured]
    heading = "step: processor ms, over plain's; wall ms"
    lines = [f"| {heading} | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for number, row in enumerate(measured[0]["rows"]):
        cells = []
        for m in measured:
            one, plain = m["rows"][number], m["rows"][0]
            ratio = one["cpu_seconds"] / plain["cpu_seconds"]
            cells.append(f"{1e3 * one['cpu_seconds']:.3g}, × {ratio:.2f}; {1e3 * one['wall_seconds']:.3g}")
        lines.append(f"| {row['row']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SMALL, default=list(SMALL))
    parser.add_argument("--seconds", type=float, default=15.0, help="for each workload")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/step_parts.json"))
    parser.add_argument("--table", type=Path, metavar="JSON", help="print the table of a results file and stop")
    parser.add_argument("--into", type=Path, metavar="MD", help="with --table: fill it into this document")
    options = parser.parse_args(argv)
    if options.table:
        found = table(json.loads(options.table.read_text()))
        if options.into:
            put(options.into, "<!-- parts:begin -->", "<!-- parts:end -->", found)
        else:
            print(found)
        return
    results: dict[str, Any] = {"environment": environment(), "settings": {"seconds": options.seconds, "threads": 1}}
    results["measurements"] = []
    for workload in options.only:
        results["measurements"].append(measure(workload, options.seconds, options.out.parent))
        save(results, options.out)
    print(table(results))


if __name__ == "__main__":
    main()
