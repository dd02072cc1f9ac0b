"""How much of a true ε an audit can prove, and how often it rejects a true claim: one JSON file.

    python experiments/audit_strength.py [white] [ceiling] [false] [black] [--data-dir DIR] [--anew]

white     DP-SGD at ε = 4, the auditor sees every release: the share of ε that is proven, for full batches and Poisson
          samples, by the verdict, by order statistics at 95 %, and by f-DP in one run, which assumes least
ceiling   what an auditor could prove who knows the exact pair of distributions and has as many independent trials
false     audits of a mechanism whose ε equals its claim: how many of them reject the claim
black     the auditor sees the final model's loss on one record, with initial weights that the adversary chose; MNIST

Rows that are already in results/audit_strength.json are not computed again, so an interrupted run continues; with
--anew the rows of other commits are computed again.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy

import sordino
from provenance import COMMIT, add_run, read_runs
from sordino import data
from sordino.audit import audit_plan
from sordino.audit.black_box import audit_black_box, fitted
from sordino.audit.bounds import Curve
from sordino.audit.claims import largest_rejected
from sordino.audit.guesses import Guesses
from sordino.audit.scores import Scorer, simulate
from sordino.plan import Plan

TARGET = Path(__file__).parent / "results" / "audit_strength.json"
COMMAND = "python experiments/audit_strength.py white ceiling false black --data-dir DIR"
EPSILON, DELTA, RECORDS, CANARIES = 4.0, 1e-5, 64, 7800
SETTINGS = ((1.0, 8), (0.25, 16), (0.05, 100))  # sampling rate, steps
RUNS, SEEDS = (1, 13), range(3)
SHARES = ("share", "share_independent", "share_any")
Row = dict[str, Any]
Job = tuple[str, Callable[[], Row]]


def plan_of(rate: float, steps: int, epsilon: float = EPSILON) -> Plan:
    return sordino.dpsgd(epsilon=epsilon, delta=DELTA, records=RECORDS, expected_batch=RECORDS * rate, steps=steps)


def audited(rate: float, steps: int, runs: int, seed: int, canaries: int = CANARIES) -> Row:
    """One audit of a model with 7,850 weights, over `runs` runs."""
    started = time.process_time()
    torch.manual_seed(seed)
    records = torch.randn(RECORDS, 784), torch.randint(0, 10, (RECORDS,))
    net = nn.Linear(784, 10)
    found = audit_plan(plan_of(rate, steps), net, cross_entropy, records, canaries=canaries, seed=seed, runs=runs)
    return {
        "rate": rate, "steps": steps, "runs": runs, "seed": seed, "canaries": found.canaries,
        "guesses": found.guesses, "correct": found.correct, "epsilon_lower": found.epsilon_lower,
        "epsilon_claimed": found.epsilon_claimed, "holds": found.holds, "relation": found.relation,
        "delta": found.delta, "confidence": found.confidence, "share": found.epsilon_lower / EPSILON,
        "share_any": found.epsilon_lower_any / EPSILON, "bound": found.bound,
        "share_independent": (found.epsilon_lower_independent or 0.0) / EPSILON,
        "processor_seconds": round(time.process_time() - started, 2),
    }  # fmt: skip


def white() -> Iterator[Job]:
    for rate, steps in SETTINGS:
        for runs in RUNS:
            for seed in SEEDS:
                yield f"white q={rate} runs={runs} seed={seed}", partial(audited, rate, steps, runs, seed)


def ceiling_of(rate: float, steps: int, canaries: int) -> Row:
    """The Clopper-Pearson bound for as many independent trials, at the threshold and with the counts that the exact
    pair has in expectation."""
    plan = plan_of(rate, steps)
    coins, scores = simulate(Scorer.of(plan), torch.tensor([[plan.clipping.clip_norm]]).double(), steps, 1_000_000)
    each, inside, outside = canaries / 2, np.sort(scores[coins].numpy()), np.sort(scores[~coins].numpy())
    best = 0.0
    for false in np.geomspace(20 / each, 0.2, 12):
        threshold = outside[int(len(outside) * (1 - false))]
        true = float((inside > threshold).mean())
        least = float(stats.beta.ppf(0.025, each * true, each * (1 - true) + 1))
        most = float(stats.beta.ppf(0.975, each * false + 1, each * (1 - false)))
        best = max(best, largest_rejected(plan, partial(_beyond, least, most)))
    return {"rate": rate, "steps": steps, "canaries": canaries, "epsilon_lower": best, "share": best / EPSILON}


def in_one_run(rate: float, steps: int, guesses: int, canaries: int = 1_000_000) -> Row:
    """The bound from one run with simulated canaries of the exact pair: what the theorem itself loses."""
    plan = plan_of(rate, steps)
    coins, scores = simulate(Scorer.of(plan), torch.tensor([[plan.clipping.clip_norm]]).double(), steps, canaries)
    chosen = Guesses(guesses, 0)
    right = [chosen.correct(scores, coins)]
    lower = largest_rejected(plan, lambda curve: chosen.rejects(curve, right, canaries, 0.05))
    return {
        "rate": rate, "steps": steps, "canaries": canaries, "guesses": guesses, "correct": right[0],
        "epsilon_lower": lower, "share": lower / EPSILON,
    }  # fmt: skip


def _beyond(least: float, most: float, curve: Curve) -> bool:
    """Whether the trade-off curve excludes a true positive rate of at least `least` with a false positive rate of at
    most `most`."""
    return curve.least_false(least) > most


def ceiling() -> Iterator[Job]:
    for rate, steps in SETTINGS:
        for runs in RUNS:
            count = runs * CANARIES
            yield f"ceiling q={rate} canaries={count}", partial(ceiling_of, rate, steps, count)
    for guesses in (700, 50_000):
        yield f"in one run, {guesses} guesses", partial(in_one_run, 0.25, 16, guesses)


def false() -> Iterator[Job]:
    """Full batches, for which the accountant is exact, so that the mechanism's ε equals its claim."""
    for runs, canaries in ((1, 7800), (4, 1950)):
        for first in range(0, 200, 20):
            yield f"false runs={runs} seeds={first}", partial(_false, runs, canaries, first)


def _false(runs: int, canaries: int, first: int) -> Row:
    found = [audited(1.0, 2, runs, seed, canaries) for seed in range(first, first + 20)]
    return {
        "runs": runs, "first": first, "audits": len(found), "called_broken": sum(not one["holds"] for one in found),
        "shares": [round(one["share"], 3) for one in found],
        "above_at_95": sum(one["share_independent"] * EPSILON > one["epsilon_claimed"] for one in found),
    }  # fmt: skip


def black(data_dir: Path | None) -> Iterator[Job]:
    """500 images of MNIST, which the initial weights fit; the audited record is noise, labelled with the class that
    fits it least."""
    for hidden, epsilon, runs in ((None, 10.0, 800), (None, 4.0, 400)):
        yield f"black {hidden or 'linear'} ε={epsilon}", partial(_black, hidden, epsilon, runs, data_dir)


def _black(hidden: int | None, epsilon: float, runs: int, data_dir: Path | None) -> Row:
    train = data.load("mnist", data_dir).train
    inputs, targets = train.inputs[:500], train.targets[:500]
    noise = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    layers = [nn.Linear(784, 10)] if hidden is None else [nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10)]
    net = fitted(nn.Sequential(nn.Flatten(), *layers), cross_entropy, (inputs, targets), lr=0.01)
    wrong = net(noise[None]).argmin().detach()
    plan = sordino.dpsgd(epsilon=epsilon, delta=DELTA, records=501, expected_batch=501, steps=10)
    started = time.process_time()
    found = audit_black_box(plan, net, cross_entropy, (inputs, targets), (noise, wrong), runs=runs, lr=0.05, seed=0)
    return found.to_dict() | {
        "network": "linear" if hidden is None else f"mlp of {hidden}", "data": "mnist", "records": 501,
        "relation": plan.relation, "share": found.epsilon_lower / epsilon,
        "processor_seconds": round(time.process_time() - started, 1),
    }  # fmt: skip


def table(runs: dict[str, Any]) -> dict[str, Any]:
    """The table that the pages show."""
    kept = {kind: [row for key, row in runs.items() if key.startswith(kind)] for kind in ("white", "ceiling", "black")}
    rows = []
    for rate, steps in SETTINGS:
        for number in RUNS:
            mine = [row for row in kept["white"] if (row["rate"], row["runs"]) == (rate, number)]
            most = [r["share"] for r in kept["ceiling"] if (r["rate"], r["canaries"]) == (rate, number * CANARIES)]
            if mine:
                shares = {name: sorted(row[name] for row in mine) for name in SHARES}
                rows.append({
                    "rate": rate, "steps": steps, "runs": number, "canaries": mine[0]["canaries"], "seeds": len(mine),
                    "shares": shares, "ceiling": most[0] if most else None,
                    "median": {name: statistics.median(values) for name, values in shares.items()},
                })  # fmt: skip
    alarms = {}
    for number in (1, 4):
        mine = [row for key, row in runs.items() if key.startswith(f"false runs={number} ")]
        alarms[str(number)] = {
            "audits": sum(row["audits"] for row in mine), "called_broken": sum(row["called_broken"] for row in mine),
            "above_at_95": sum(row["above_at_95"] for row in mine),
            "largest_share": max((share for row in mine for share in row["shares"]), default=None),
        }  # fmt: skip
    one_run = [row for key, row in runs.items() if key.startswith("in one run")]
    return {"white": rows, "one_run": one_run, "false": alarms, "black": kept["black"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=["white", "ceiling", "false", "black", []])
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--json", type=Path, default=TARGET)
    parser.add_argument("--anew", action="store_true", help="also rows that another commit made")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made: Mapping[str, Callable[[], Iterator[Job]]] = {
        "white": white, "ceiling": ceiling, "false": false, "black": partial(black, arguments.data_dir)
    }  # fmt: skip
    for part in arguments.parts or made:
        for key, job in made[part]():
            known = read_runs(arguments.json).get(key)
            if known is None or (arguments.anew and known["commit"] != COMMIT):
                runs = add_run(arguments.json, COMMAND, key, job(), table)
                print(key, {k: runs[key].get(k) for k in ("share", "called_broken", "processor_seconds")}, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
