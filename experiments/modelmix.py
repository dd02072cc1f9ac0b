"""Table 1 of Xiao, Wan & Devadas 2022, Fashion-MNIST: ModelMix against DP-SGD and its own controls; one JSON file.

    python experiments/modelmix.py --out experiments/results/modelmix.json

Scattering features with group normalisation (27 groups, no privacy cost), the small CNN, ε = 0.2, 0.6 and 1.0 at
δ = 1e-5, add-remove, true Poisson sampling, 5 seeds (arms with the paper's settings: 3). Every arm uses the same number
of records and publishes the same running average of its iterates. The arms:

    dpsgd             DP-SGD with momentum 0.9
    averaging         DP-SGD at the same ε, descending from the mean of the last two iterates
    modelmix          ModelMix at the same ε, uniform noise of `ratio` times the Gaussian's standard deviation
    same-variance     `averaging` with the noise multiplier of equal per-coordinate variance; its ε is lower
    modelmix-paper    ModelMix with the paper's own c, η and τ_k, and its control at the same ε, averaging-paper

The step sizes of `dpsgd` and `averaging` are chosen on 10,000 held-out training images while the other 50,000 are
trained on (noise of seed 0), at ε = 1 and at ε = 0.2: doubled while that helps, otherwise halved while that helps; at
ε = 0.6 the geometric mean of the two is used. `modelmix` and `same-variance` use the step sizes of `averaging`, so that
they are compared at equal steps. No setting is chosen on test images. All runs are in the file and are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from provenance import origin
from sordino import data, features, nets
from sordino.files import write_atomically
from sordino.plan import Plan
from sordino.runs.prepared import test_metrics
from sordino.schedule import Schedule, pieces
from sordino.training import Settings, train
from sordino.training.updates import Averaging, AveragingSGD

EPSILONS, SEEDS, DELTA = (0.2, 0.6, 1.0), (0, 1, 2, 3, 4), 1e-5
BATCH, STEPS, CLIP = 4096, 60, 0.1
TUNED_AT, FIRST_RATE = (1.0, 0.2), {"dpsgd": 16.0, "averaging": 256.0}
RATIO = 1.0  # the uniform noise's standard deviation over the Gaussian's: half of the variance is uniform
PAPER: Mapping[str, Any] = {"batch": 8192, "steps": 30, "clip": 1.0, "lr": 0.4, "tau": ((0.0, 0.05), (0.5, 0.025))}
ARMS = ("dpsgd", "averaging", "modelmix", "same-variance", "modelmix-paper", "averaging-paper")
SHOWN = ("epsilon", "beside", "noise_multiplier", "lr", "tau_over_lr", "steps", "expected_batch", "clip_norm")


@dataclass(frozen=True)
class Job:
    """One training run. `held_out` runs choose settings; the others are the result."""

    arm: str
    epsilon: float
    lr: float
    seed: int
    held_out: bool

    @property
    def key(self) -> str:
        return (
            f"{'held-out' if self.held_out else 'test'} {self.arm} ε={self.epsilon:g} lr={self.lr:g} seed={self.seed}"
        )


@lru_cache(maxsize=1)
def dataset() -> data.Dataset:
    loaded, folder = data.load("fashion-mnist"), features.default_folder()
    extract = features.build({"name": "scattering", "normalise": "group", "groups": 27})
    return replace(
        loaded,
        train=data.Split(extract.cached(loaded.train.inputs, folder), loaded.train.targets),
        test=data.Split(extract.cached(loaded.test.inputs, folder), loaded.test.targets),
    )


@lru_cache(maxsize=2)
def splits(held_out: bool) -> tuple[data.Split, data.Split]:
    """(records to train on, images to evaluate on)."""
    whole = dataset()
    if not held_out:
        return whole.train, whole.test
    order = torch.randperm(len(whole.train.targets), generator=torch.Generator().manual_seed(0))
    part = [data.Split(whole.train.inputs[i], whole.train.targets[i]) for i in (order[:50_000], order[50_000:])]
    return part[0], part[1]


def make_plan(job: Job, records: int) -> Plan:
    common: dict[str, Any] = {"delta": DELTA, "records": records, "insecure_seed": job.seed}
    ours = common | {"expected_batch": BATCH, "steps": STEPS, "clip_norm": CLIP}
    theirs = common | {"expected_batch": PAPER["batch"], "steps": PAPER["steps"], "clip_norm": PAPER["clip"]}
    if job.arm in ("dpsgd", "averaging"):
        return Plan.dpsgd(epsilon=job.epsilon, **ours)
    if job.arm == "averaging-paper":
        return Plan.dpsgd(epsilon=job.epsilon, **theirs)
    from sordino.methods import modelmix

    if job.arm == "modelmix-paper":
        return modelmix.plan(epsilon=job.epsilon, lr=job.lr, tau_over_lr=pieces(*PAPER["tau"]), **theirs)
    mixed = balanced(job, ours)
    return mixed if job.arm == "modelmix" else modelmix.averaging_control(mixed)


def balanced(job: Job, options: Mapping[str, Any]) -> Plan:
    """The ModelMix plan at ε whose uniform noise has RATIO times the standard deviation of its Gaussian noise."""
    from sordino.methods import modelmix

    def at(sigma: float) -> Plan:
        tau = RATIO * sigma * 12**0.5 * CLIP / BATCH
        return modelmix.plan(noise_multiplier=sigma, tau_over_lr=tau, lr=job.lr, **options)

    high = Plan.dpsgd(epsilon=job.epsilon, **options).noise.noise_multiplier  # enough without any uniform noise
    low = high / 4
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle).guarantee().epsilon <= job.epsilon else (middle, high)
    return at(high)


def run(job: Job) -> dict[str, Any]:
    records, images = splits(job.held_out)
    plan = make_plan(job, len(records.targets))
    torch.manual_seed(job.seed)
    model = nets.build("scatter-cnn", tuple(records.inputs.shape[1:]), 10)
    options: dict[str, Any] = {}
    if job.arm == "dpsgd":
        options = {"optimizer": torch.optim.SGD, "lr": job.lr}
    elif not job.arm.startswith("modelmix"):
        options = {"optimizer": AveragingSGD, "lr": job.lr}
    settings = Settings(
        optimizer_options={"momentum": 0.9} if job.arm == "dpsgd" else {},
        averaging=Averaging("ema", decay=0.9),
        chunk=2048,
        seed=job.seed,
        progress=False,
    )
    found = train(
        model, nn.functional.cross_entropy, records, plan, settings=settings,
        evaluate=lambda m: test_metrics(m, images), **options,
    )  # fmt: skip
    assert found.guarantee is not None
    measured = found.metrics[-1]["test_accuracy"]
    return {
        "arm": job.arm,
        "target_epsilon": job.epsilon,
        "epsilon": found.guarantee.epsilon,
        "beside": dict(found.guarantee.beside),
        "noise_multiplier": plan.noise.noise_multiplier,
        "tau_over_lr": _schedule(plan, "tau_over_lr"),
        "lr": job.lr,
        "steps": plan.steps,
        "expected_batch": plan.divisor,
        "clip_norm": plan.clipping.clip_norm,
        "seed": job.seed,
        "held_out": job.held_out,
        "accuracy": measured,
        "seconds": round(found.seconds, 1),
    }


def _schedule(plan: Plan, name: str) -> dict[str, Any] | None:
    value = getattr(plan.method, name, None)
    return value.to_dict() if isinstance(value, Schedule) else None


def chosen_rate(runs: Mapping[str, Mapping[str, Any]], arm: str, epsilon: float) -> float:
    """The step size that was best on the held-out images; the paper's for the arms with the paper's settings."""
    if arm.endswith("-paper"):
        return float(PAPER["lr"])
    tuned = "dpsgd" if arm == "dpsgd" else "averaging"
    if epsilon not in TUNED_AT:
        low, high = (chosen_rate(runs, tuned, at) for at in TUNED_AT)
        return math.sqrt(low * high)
    tried = [r for r in runs.values() if r["held_out"] and (r["arm"], r["target_epsilon"]) == (tuned, epsilon)]
    return float(max(tried, key=lambda run: float(run["accuracy"]))["lr"])


def climb(runs: Mapping[str, Mapping[str, Any]], arm: str, epsilon: float, first: float) -> Iterator[Job]:
    """Step sizes to try; each one is yielded after the result of the previous one is in `runs`."""

    def job(lr: float) -> Job:
        return Job(arm, epsilon, lr, 0, held_out=True)

    best = first
    yield job(best)
    for factor in (2.0, 0.5):
        while True:
            yield job(best * factor)
            if runs[job(best * factor).key]["accuracy"] <= runs[job(best).key]["accuracy"]:
                break
            best *= factor
        if best > first:
            return


def jobs(runs: Mapping[str, Mapping[str, Any]], arms: tuple[str, ...]) -> Iterator[Job]:
    """The runs still to be made, in order: first those that choose the settings, then the seeds."""
    for arm, first in FIRST_RATE.items():
        for epsilon in TUNED_AT:
            yield from climb(runs, arm, epsilon, first)
            first = chosen_rate(runs, arm, epsilon) / 2
    for seed in SEEDS:
        for epsilon in EPSILONS:
            for arm in [arm for arm in arms if seed < 3 or not arm.endswith("-paper")]:
                yield Job(arm, epsilon, chosen_rate(runs, arm, epsilon), seed, held_out=False)


def table(runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds, for each arm and ε."""
    tested = [run for run in runs.values() if not run["held_out"]]
    rows = []
    for arm in ARMS:
        for epsilon in EPSILONS:
            found = [run for run in tested if (run["arm"], run["target_epsilon"]) == (arm, epsilon)]
            if not found:
                continue
            accuracies = [run["accuracy"] for run in found]
            row = {
                "arm": arm,
                "target_epsilon": epsilon,
                "mean": statistics.fmean(accuracies),
                "spread": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
                "seeds": len(accuracies),
                "over_averaging": paired(tested, arm, epsilon),
            }
            rows.append(row | {key: found[0][key] for key in SHOWN})
    return rows


def paired(tested: list[Mapping[str, Any]], arm: str, epsilon: float) -> dict[str, float] | None:
    """The mean difference from `averaging` at the same ε and seed, and its standard error."""
    other = "averaging-paper" if arm.endswith("-paper") else "averaging"
    accuracy = {(run["arm"], run["seed"]): run["accuracy"] for run in tested if run["target_epsilon"] == epsilon}
    seeds = [seed for seed in SEEDS if (arm, seed) in accuracy and (other, seed) in accuracy]
    if arm == other or len(seeds) < 2:
        return None
    found = [accuracy[arm, seed] - accuracy[other, seed] for seed in seeds]
    return {"mean": statistics.fmean(found), "standard_error": statistics.stdev(found) / math.sqrt(len(found))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "modelmix.json")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--only-settings", action="store_true", help="stop once the step sizes are chosen")
    arguments = parser.parse_args()
    runs: dict[str, Any] = json.loads(arguments.out.read_text())["runs"] if arguments.out.exists() else {}
    started = time.monotonic()
    for job in jobs(runs, tuple(arguments.arms)):
        if arguments.only_settings and not job.held_out:
            break
        if job.key in runs:
            continue
        runs[job.key] = run(job)
        document = {
            **origin("python experiments/modelmix.py --out experiments/results/modelmix.json"),
            "table": table(runs),
            "runs": runs,
        }
        write_atomically(arguments.out, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"{time.monotonic() - started:7.0f} s  {job.key}: {runs[job.key]['accuracy']:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
