"""Audits of inner momentum, momentum of single records and self-augmentation, each also with a deliberate fault.

python experiments/bias_audit.py

The canaries are records, so that clipping is audited too: 1,200 canaries in one run. The faulty versions clip every
iterate, or every view, separately and add the results. Writes one JSON file.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from provenance import origin
from sordino.audit.faults import iterates_clipped_apart, views_clipped_apart
from sordino.audit.record_canaries import Gradients, audit_record_vectors
from sordino.plan import Plan
from sordino.plan.contribution import Augmentation, InnerMomentum, RecordMomentum
from sordino.records.gradients import plan_gradients

HEIGHT, WIDTH = 30, 40
SEEDS = range(3)
BEGIN, END = "<!-- bias_audit:begin -->", "<!-- bias_audit:end -->"
INNER, VIEWS = InnerMomentum(2, 0.5), Augmentation(views=4, erase=0.5, mixup=0.3)
FULL: dict[str, Any] = {"expected_batch": HEIGHT * WIDTH, "steps": 6}
SAMPLED: dict[str, Any] = {"expected_batch": HEIGHT * WIDTH // 4, "steps": 16}

CASES: dict[str, tuple[dict[str, Any], Gradients]] = {
    "plain": (FULL, plan_gradients),
    "inner momentum": ({**FULL, "inner": INNER}, plan_gradients),
    "self-augmentation": ({**FULL, "augmentation": VIEWS}, plan_gradients),
    "inner momentum and self-augmentation, sampled": (
        {**SAMPLED, "inner": INNER, "augmentation": VIEWS},
        plan_gradients,
    ),
    "momentum of single records": ({**FULL, "record_momentum": RecordMomentum(0.9)}, plan_gradients),
    "fault: every iterate clipped": ({**FULL, "inner": INNER}, iterates_clipped_apart),
    "fault: every view clipped": ({**FULL, "augmentation": VIEWS}, views_clipped_apart),
}


def main() -> int:
    torch.set_num_threads(1)
    start, runs = time.monotonic(), []
    for name, (options, gradients) in CASES.items():
        plan = Plan.dpsgd(epsilon=3.0, delta=1e-5, records=HEIGHT * WIDTH, **options)
        for seed in SEEDS:
            found = audit_record_vectors(plan, height=HEIGHT, width=WIDTH, seed=seed, gradients=gradients)
            runs.append({"case": name, "seed": seed, **found.to_dict()})
    summary = {name: said([run for run in runs if run["case"] == name]) for name in CASES}
    document = {
        **origin("python experiments/bias_audit.py"),
        "seconds": round(time.monotonic() - start),
        "summary": summary,
    }
    target = Path(__file__).parent / "results" / "bias_audit.json"
    target.write_text(json.dumps({**document, "runs": runs}, indent=2, ensure_ascii=False) + "\n")
    fill(summary)
    return 0


def fill(summary: dict[str, dict[str, Any]]) -> None:
    """Writes the table into the page, between its markers."""
    page = Path(__file__).parents[1] / "docs" / "guarantees" / "clipping_bias.md"
    before, rest = page.read_text(encoding="utf8").split(BEGIN)
    lines = ["| | claimed ε | ε at least | broken |", "| --- | --- | --- | --- |"]
    for name, found in summary.items():
        lower = ", ".join(f"{value:.2f}" for value in found["epsilon_lower"])
        lines.append(f"| {name} | {found['epsilon_claimed']:.2f} | {lower} | {found['broken']} of {found['seeds']} |")
    table = "\n".join(lines)
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf8")
    print(table)


def said(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "seeds": len(runs),
        "epsilon_claimed": round(runs[0]["epsilon_claimed"], 3),
        "epsilon_lower": [round(run["epsilon_lower"], 3) for run in runs],
        "broken": sum(not run["holds"] for run in runs),
    }


if __name__ == "__main__":
    raise SystemExit(main())
