"""Steps of one run by 1, 2 and 4 processes: seconds and bytes per step, and whether the released bits are the same.

    python benchmarks/ranks.py --json benchmarks/results/ranks.json

Each process has one thread. Four ranks on two cores test correctness only. Model, batches and insecure seed are the
same for every number of ranks; the first step, in which the engine checks its programs, is not timed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from sordino import nets
from sordino.plan import Plan
from sordino.runs.results import environment
from sordino.training import Settings, train

STEPS, RECORDS, BATCH, CHUNK = 8, 4096, 512, 64


def _run(number: int, size: int, place: str, queue: Any) -> None:
    torch.set_num_threads(1)
    if size > 1:
        dist.init_process_group("gloo", f"file://{place}", rank=number, world_size=size)
    torch.manual_seed(0)
    net = nets.build("mnist-cnn", (1, 28, 28), 10)
    x, y = torch.randn(RECORDS, 1, 28, 28), torch.randint(10, (RECORDS,))
    plan = Plan.dpsgd(
        noise_multiplier=1.0,
        delta=1e-5,
        records=RECORDS,
        expected_batch=BATCH,
        steps=STEPS,
        clip_norm=1.0,
        insecure_seed=1,
    )
    times: list[float] = []

    def evaluate(_: nn.Module) -> dict[str, float]:
        times.append(time.perf_counter())
        return {}

    settings = Settings(chunk=CHUNK, eval_every=1, checkpoint_every=0, progress=False)
    result = train(net, cross_entropy, (x, y), plan, lr=0.1, settings=settings, evaluate=evaluate)
    if number == 0:
        digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in result.model.parameters())).hexdigest()
        steps = [b - a for a, b in itertools.pairwise(times)]
        queue.put({"seconds": statistics.median(steps), "digest": digest, "parameters": _count(net)})
    queue.close()
    queue.join_thread()
    os._exit(0)


def _count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def measure(size: int) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_run, args=(number, size, f"{folder}/group", queue)) for number in range(size)]
        for process in ranks:
            process.start()
        found: dict[str, Any] = queue.get(timeout=600)
        for process in ranks:
            process.join()
    sent = bytes_of_a_step(found["parameters"], size)
    return {"ranks": size, **found, "bytes_of_a_step": sent}


def bytes_of_a_step(parameters: int, ranks: int) -> int:
    """Weights in single precision and 8 bytes per record to every follower; sums in double precision (gloo's ring)."""
    sums = 16 * parameters if ranks == 2 else 8 * parameters * (ranks - 1) * (ranks + 1) // ranks
    return (ranks - 1) * (4 * parameters + 8 * BATCH) + sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "ranks.json")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for size in (1, 2, 4):
        found = [measure(size) for _ in range(arguments.rounds)]
        row = {**found[0], "seconds": statistics.median(one["seconds"] for one in found)}
        row["range"] = [min(one["seconds"] for one in found), max(one["seconds"] for one in found)]
        row["over_one_rank"] = row["seconds"] / rows[0]["seconds"] if rows else 1.0
        rows.append(row)
        print(f"{size} ranks: {row['seconds'] * 1e3:.1f} ms a step, {row['over_one_rank']:.2f} of one rank's")
    document = {
        "command": "python benchmarks/ranks.py --json benchmarks/results/ranks.json",
        "batch": BATCH,
        "chunk": CHUNK,
        "steps": STEPS,
        "same_bits": len({row["digest"] for row in rows}) == 1,
        "rows": rows,
        "environment": environment(),
    }
    arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf8")
    return 0 if document["same_bits"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
