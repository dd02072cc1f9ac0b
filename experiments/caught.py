"""Audits of random allocation, correlated noise and users: which claims hold, and which broken runs are detected.

    python experiments/caught.py [--seeds 3] [--out FILE]
    python experiments/caught.py --page                 print the table of FILE as Markdown

A linear layer with 7,850 weights, 64 synthetic records, one short run for each audit. "As claimed" runs the plan; all
other rows run something that does not satisfy the plan's claim. Runs that are already in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import sordino
from provenance import add_run, read_runs
from sordino.audit import audit_plan
from sordino.methods.correlated.scores import CorrelatedScorer
from sordino.methods.correlated.sensitivity import column_norm, sensitivity
from sordino.plan import Plan
from sordino.sampling import Allocation, Cyclic, Poisson

COMMAND = "python experiments/caught.py"
RECORDS = 64
Options = dict[str, Any]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(784, 10)


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(RECORDS, 784, generator=generator)
    return inputs, torch.randint(0, 10, (RECORDS,), generator=generator)


def in_a_fixed_order(run: Plan) -> Plan:
    """Uses the batches of the first epoch in every epoch."""
    assert isinstance(run.sampling, Allocation)
    return replace(run, sampling=Cyclic(run.sampling.batches))


def suspects_a_fixed_order(plan: Plan) -> CorrelatedScorer:
    """The likelihood ratio for independent noise and groups in a fixed order; it does not use a canary's group."""
    assert isinstance(plan.sampling, Allocation)
    identity = torch.zeros(plan.steps, dtype=torch.float64)
    identity[0] = 1.0
    scale = plan.noise.noise_multiplier * plan.sensitivity
    return CorrelatedScorer(scale, plan.relation == "replace-one", plan.sampling.batches, 1.0, identity)


def once(plan: Plan) -> float:
    """The noise for a sensitivity that counts only one participation, relative to the correct noise."""
    strategy, groups = plan.method.strategy, plan.sampling.batches  # type: ignore[attr-defined,union-attr]
    return column_norm(strategy, steps=plan.steps) / sensitivity(strategy, steps=plan.steps, separation=groups)


def cases() -> dict[str, Callable[[], tuple[Plan, Options]]]:
    """Functions that make (plan, options of the audit), by name."""
    half: Options = {"noise_scale": 0.5}

    def of(make: Callable[[], Plan], options: Options | Callable[[Plan], Options]) -> Callable[..., Any]:
        def made() -> tuple[Plan, Options]:
            plan = make()
            return plan, options if isinstance(options, dict) else options(plan)

        return made

    shared: Options = {"records": RECORDS, "delta": 1e-5}
    user: Options = {**shared, "expected_batch": 32, "steps": 8, "unit": "user"}
    correlated: Options = {**shared, "expected_batch": 16, "steps": 16, "epsilon": 3.0}

    def allocation() -> Plan:
        return sordino.dpsgd(**shared, expected_batch=4, steps=64, epsilon=4.0, sampling="allocation")

    def fixed() -> Plan:
        return sordino.correlated(**correlated, strategy="inverse-root", bands=4, groups=4)

    def sampled() -> Plan:
        return sordino.correlated(**correlated, strategy="banded-lambda", value=0.5, bands=2, groups=2)

    def users() -> Plan:
        return sordino.dpsgd(**user, epsilon=4.0)

    def examples() -> Plan:
        return sordino.dpsgd(**user, epsilon=3.0, examples_per_user=4)

    def counted_as_rows() -> Plan:
        return sordino.dpsgd(**(user | {"unit": "record"}), noise_multiplier=2.0)

    many, few = {"canaries": 7000}, {"canaries": 1900}
    return {
        "allocation, as claimed": of(allocation, many),
        "allocation, half the noise": of(allocation, many | half),
        "allocation, a fixed order": of(
            allocation, lambda plan: many | {"tamper": in_a_fixed_order, "scorer": suspects_a_fixed_order(plan)}
        ),
        "allocation, everybody in every batch": of(
            allocation, many | {"tamper": lambda run: replace(run, sampling=Poisson(1.0))}
        ),
        "correlated, fixed order, as claimed": of(fixed, many),
        "correlated, fixed order, half the noise": of(fixed, many | half),
        "correlated, fixed order, sensitivity of one participation": of(
            fixed, lambda plan: many | {"noise_scale": once(plan)}
        ),
        "correlated, sampled groups, as claimed": of(sampled, many),
        "correlated, sampled groups, half the noise": of(sampled, many | half),
        "users, as claimed": of(users, many),
        "users, half the noise": of(users, many | half),
        "rows of users, as claimed": of(examples, few),
        "rows of users, half the noise": of(examples, few | half),
        "rows of users, users counted as rows": of(counted_as_rows, few | {"rows_per_canary": 4}),
    }


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each case."""
    found = []
    for name in cases():
        own = [run for run in runs.values() if run["case"] == name]
        if own:
            lower = [run["epsilon_lower"] for run in own]
            found.append({
                "case": name, "audits": len(own), "broken": sum(not run["holds"] for run in own),
                "epsilon_claimed": own[0]["epsilon_claimed"], "lower_least": min(lower),
                "lower_median": statistics.median(lower), "lower_greatest": max(lower),
                "canaries": own[0]["canaries"], "seconds": statistics.median(run["seconds"] for run in own),
            })  # fmt: skip
    return found


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The table as lines of Markdown."""
    lines = [
        "| run | claim | canaries | called broken | ε at least: least, median, greatest |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        bounds = ", ".join(f"{row[key]:.2f}" for key in ("lower_least", "lower_median", "lower_greatest"))
        broken = f"{row['broken']} of {row['audits']}"
        lines.append(f"| {row['case']} | {row['epsilon_claimed']:.2f} | {row['canaries']} | {broken} | {bounds} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--page", action="store_true", help="print the table of FILE as Markdown")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "caught.json")
    arguments = parser.parse_args()
    if arguments.page:
        print("\n".join(markdown(json.loads(arguments.out.read_text(encoding="utf8"))["table"])))
        return
    for seed in range(arguments.seeds):
        for name, make in cases().items():
            label = f"{name}, seed {seed}"
            if label in read_runs(arguments.out):
                continue
            plan, options = make()
            start = time.process_time()
            found = audit_plan(plan, model(), loss, rows(), seed=seed, **options)
            run = {"case": name, "seed": seed, "seconds": time.process_time() - start, **found.to_dict()}
            add_run(arguments.out, COMMAND, label, run, table)
            print(f"{label}: ε ≥ {found.epsilon_lower:.3f} of {found.epsilon_claimed:.3f}, holds: {found.holds}")


if __name__ == "__main__":
    main()
