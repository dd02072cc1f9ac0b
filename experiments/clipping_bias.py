"""Clipping bias (Xiao et al. 2023) on real data: which of its remedies help, at which ε, at equal epochs and records.

    python experiments/clipping_bias.py --part imdb --epsilons 4 --only original enhanced
    python experiments/clipping_bias.py --part cifar10
    python experiments/clipping_bias.py --part fashion_mnist

Writes experiments/results/clipping_bias_{part}.json after every run; runs that are already in the file are not
repeated. The step size of a column is found by the same search (doubled or halved from the same start) on held-out rows
of the *training* split: on images no run trains on these rows; on IMDb the runs of the search do not. Columns with more
than four views or with views and inner momentum, the wide network, and on IMDb columns with inner momentum or word
dropout are not tuned; they take the step size of the column that `lr_of` names. Then each column is trained with all
seeds and evaluated on the test split.
The readings (Figs. 6, 11) are E‖∇f_i − ∇F‖² over public rows of the test split.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from clipping_bias_parts import INNER_DECAY, INNER_LENGTH, OUTER, PARTS, Column, Part, Rows, part_of
from provenance import COMMIT, origin
from sordino import nets
from sordino.diagnostics.instruments import ReadingSteps, Watch
from sordino.files import write_atomically
from sordino.plan import Plan
from sordino.plan.contribution import InnerMomentum
from sordino.plan.public import PublicSet
from sordino.records.companions import companion_model
from sordino.runs.prepared import test_metrics
from sordino.training import Settings, train
from sordino.training.updates import Averaging

RESULTS = Path(__file__).parent / "results"
DELTA, READINGS = 1e-5, 6


@dataclass(frozen=True)
class Job:
    column: str
    epsilon: float
    lr: float
    seed: int
    held_out: bool

    @property
    def key(self) -> str:
        where = "held out" if self.held_out else f"seed {self.seed}"
        return f"{self.column}, ε {self.epsilon:g}, lr {self.lr:g}, {where}"


def make_plan(part: Part, column: Column, rows: Rows, epsilon: float) -> Plan:
    public = None
    if rows.public is not None:
        public = PublicSet.of(rows.public, "rows of the training split that this experiment takes to be public")
    return Plan.dpsgd(
        epsilon=epsilon,
        delta=DELTA,
        records=len(rows.train),
        expected_batch=part.expected_batch,
        **part.length,
        clipping=part.clipping,
        inner=InnerMomentum(INNER_LENGTH, column.inner) if column.inner else None,
        augmentation=column.augmentation,
        public=public,
    )


def make_model(column: Column, rows: Rows, seed: int) -> nn.Module:
    options = dict(column.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        shape = tuple(rows.train.inputs.shape[1:])
        net = nets.build(options.pop("name"), shape, rows.classes, rows.vectors, **options)
    return net if rows.public is None else companion_model(net, rows.public, column.companions)


def run(part: Part, job: Job) -> dict[str, Any]:
    column = part.columns[job.column]
    rows = part.rows(column, job.held_out)
    plan, model = make_plan(part, column, rows, job.epsilon), make_model(column, rows, job.seed)
    watch = Watch(
        ReadingSteps(max(1, -(-plan.steps // READINGS))),
        nn.functional.cross_entropy,
        lambda: part_of(rows.test, 0, part.watched),
        plan.clipping,
        public="rows of the test split of a public benchmark",
        views=column.augmentation,
        seed=job.seed,
    )
    started = time.process_time()
    found = train(
        model,
        nn.functional.cross_entropy,
        rows.train,
        plan,
        optimizer=torch.optim.SGD,
        lr=job.lr,
        settings=Settings(
            optimizer_options={"momentum": column.outer},
            scheduler=partial(LinearLR, start_factor=1.0, end_factor=1e-3, total_iters=plan.steps),
            averaging=Averaging("ema", decay=0.9) if column.average else Averaging(),
            chunk=part.chunk,
            seed=job.seed,
            progress=False,
        ),
        evaluate=partial(test_metrics, split=rows.test),
        watch=None if job.held_out else watch,
    )
    assert found.guarantee is not None
    final = [row for row in found.metrics if "test_accuracy" in row][-1]
    readings = ("step", "sampling_noise", "gradient_norm", "clip_cosine", "norm_quantile_0.25", "norm_quantile_0.75")
    return {
        **asdict(job),
        "epsilon": found.guarantee.epsilon,
        "target_epsilon": job.epsilon,
        "delta": DELTA,
        "relation": found.guarantee.relation,
        "noise_multiplier": plan.noise.noise_multiplier,
        "records": plan.records,
        "expected_batch": part.expected_batch,
        "epochs": plan.steps * part.expected_batch / plan.records,
        "steps": plan.steps,
        "clipping": plan.clipping.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "test_rows": len(rows.test),
        "accuracy": final["test_accuracy"],
        "loss": final["test_loss"],
        "readings": [{k: row[k] for k in readings if k in row} for row in found.metrics if "sampling_noise" in row],
        "core_seconds": round(time.process_time() - started, 1),
    }


# which runs


Runs = dict[str, Any]


def climb(part: Part, runs: Runs, name: str) -> Iterator[Job]:
    """Step sizes to try; each one is yielded after the result of the previous one is in `runs`."""

    def job(lr: float) -> Job:
        return Job(name, part.tuned_at, lr, 0, held_out=True)

    best = part.first_lr
    yield job(best)
    for factor in (2.0, 0.5):
        while True:
            yield job(best * factor)
            if runs[job(best * factor).key]["accuracy"] <= runs[job(best).key]["accuracy"]:
                break
            best *= factor
        if best > part.first_lr:
            return


def chosen_lr(part: Part, runs: Runs, name: str) -> float:
    source = part.columns[name].lr_of or name
    tried = [r for r in runs.values() if r["held_out"] and r["column"] == source]
    return float(max(tried, key=lambda one: float(one["accuracy"]))["lr"])


def jobs(part: Part, runs: Runs, only: tuple[str, ...], epsilons: tuple[float, ...], seeds: int) -> Iterator[Job]:
    """The runs still to be made, in order: first the step sizes, then the seeds, seed 0 of every column first."""
    for name in dict.fromkeys(part.columns[one].lr_of or one for one in only):
        yield from climb(part, runs, name)
    for seed in range(seeds):
        for epsilon in epsilons:
            for name in only:
                yield Job(name, epsilon, chosen_lr(part, runs, name), seed, held_out=False)


def table(part: Part, runs: Runs) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds, for each ε and column."""
    out = []
    for epsilon in part.epsilons:
        for name in part.columns:
            found = [
                r for r in runs.values() if not r["held_out"] and (r["column"], r["target_epsilon"]) == (name, epsilon)
            ]
            if not found:
                continue
            accuracies = [r["accuracy"] for r in found]
            out.append(
                {
                    "column": name,
                    "target_epsilon": epsilon,
                    "mean": statistics.fmean(accuracies),
                    "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                    "seeds": len(found),
                    "core_seconds": statistics.fmean(r["core_seconds"] for r in found),
                    **last_noise(found),
                    **{k: found[0][k] for k in ("epsilon", "delta", "lr", "noise_multiplier", "records", "test_rows")},
                }
            )
    return out


def last_noise(found: list[dict[str, Any]]) -> dict[str, float | None]:
    """τ² after the last step, and τ² divided by the squared gradient norm, because networks differ in scale."""
    last = [r["readings"][-1] for r in found if r["readings"]]
    return {
        "sampling_noise": statistics.fmean(r["sampling_noise"] for r in last) if last else None,
        "relative_noise": statistics.fmean(r["sampling_noise"] / r["gradient_norm"] ** 2 for r in last)
        if last
        else None,
    }


def complete(part: Part, runs: Runs) -> bool:
    return all(job.key in runs for job in jobs(part, runs, tuple(part.columns), part.epsilons, 3))


def document(name: str, part: Part, runs: Runs) -> dict[str, Any]:
    return {
        **origin(f"python experiments/clipping_bias.py --part {name}"),
        "title": part.title,
        "notes": part.notes,
        "expected_batch": part.expected_batch,
        "length": dict(part.length),
        "outer_kept": OUTER,
        "scheduler": "linear to zero",
        "inner": InnerMomentum(INNER_LENGTH, INNER_DECAY).to_dict(),
        "step_sizes": "climb by factors of 2 from the same start, on held-out rows of the training split, seed 0; "
        "columns with lr_of take that column's",
        "columns": {key: asdict(column) for key, column in part.columns.items()},
        "complete": complete(part, runs),
        "table": table(part, runs),
        "runs": runs,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", required=True, choices=PARTS)
    parser.add_argument("--only", nargs="+", help="columns; default: all")
    parser.add_argument("--epsilons", nargs="+", type=float)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    part, path = PARTS[given.part], given.out or RESULTS / f"clipping_bias_{given.part}.json"
    only = tuple(given.only or part.columns)
    if unknown := [name for name in only if name not in part.columns]:
        parser.error(f"unknown column {unknown[0]!r}; there are {', '.join(part.columns)}")
    runs: Runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    started = time.monotonic()
    for job in jobs(part, runs, only, tuple(given.epsilons or part.epsilons), given.seeds):
        if job.key in runs:
            continue
        runs[job.key] = run(part, job) | {"commit": COMMIT}
        write_atomically(
            path, (json.dumps(document(given.part, part, runs), indent=1, ensure_ascii=False) + "\n").encode()
        )
        print(f"{time.monotonic() - started:7.0f} s  {job.key}: {runs[job.key]['accuracy']:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
