"""One table of what was tried against every method: claims, audits, neighbours, mutants, kills, faults, bad inputs.

    python experiments/trust.py             attacks every recipe of zoo.py that results/trust.json does not hold yet
    python experiments/trust.py --again     all of them anew
    python experiments/trust.py NAME…       these anew

Writes results/trust.json and results/trust.md, after each recipe. Mutants come from results/mutants.json (mutants.py),
kills, faults and bad inputs from results/faults.json, black-box bounds from results/audit_strength.json: what one of
these files lacks is shown as a dash, never as a nought. Exit code 1 if anything was found, lost or not caught.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from sordino.audit.attack import attack
from sordino.runs.prepared import work_of
from sordino.shown import down, up
from zoo import ZOO, recipe

RESULTS = Path(__file__).parent / "results"
SLOW = {"companions": ("neighbours", "outputs", "sampling"), "record-momentum": ("neighbours", "outputs", "noise")}
"""Recipes of which some checks take minutes: these are made."""


def attacked(name: str) -> dict[str, Any]:
    """The attack on one recipe, as a row."""
    started = time.process_time()
    work = work_of(recipe(name), None, False)
    found = attack(
        work, name=name, quick=True, only=SLOW.get(name, ()), say=lambda text: print(f"  {text}", flush=True)
    )
    tried = {check.name: check.tried for check in found.checks}
    return {
        "recipe": name,
        "method": found.method,
        "sampler": work.plan.sampling.name,
        "relation": found.relation,
        "epsilon": found.epsilon_claimed,
        "delta": found.delta,
        "audit": None if found.audit is None else found.audit.to_dict(),
        "neighbours": tried.get("neighbours", 0),
        "tried": tried,
        "found": list(found.found),
        "details": {check.name: check.detail for check in found.checks},
        "processor_seconds": round(time.process_time() - started, 1),
    }


def read(name: str) -> Any:
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf8")) if path.exists() else None


def mutants_of(name: str, rows: list[dict[str, Any]]) -> str:
    own = [row for row in rows if row["recipe"] == name and row["mutant"] != "none"]
    return f"{sum(row['caught'] for row in own)} of {len(own)}" if own else "–"


def black_of(name: str) -> str:
    strength = read("audit_strength.json") or {}
    rows = [row for row in strength.get("black", []) if name == "dpsgd"]
    return "; ".join(f"{down(row['epsilon_lower'], 3)} of {up(row['epsilon_claimed'], 3)}" for row in rows) or "–"


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line for each recipe, then what belongs to all of them."""
    mutants = (read("mutants.json") or {}).get("mutants", [])
    lines = [
        "| recipe | method | sampler | claimed ε | white box ε ≥ | black box ε ≥ | neighbours tried | mutants caught "
        "| found |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        audit = row["audit"]
        white = f"{down(audit['epsilon_lower'], 3)} of {up(audit['epsilon_claimed'], 3)}" if audit else "–"
        lines.append(
            f"| {row['recipe']} | {row['method']} | {row['sampler']} | {up(row['epsilon'])} | {white} | "
            f"{black_of(row['recipe'])} | {row['neighbours']} | {mutants_of(row['recipe'], mutants)} | "
            f"{'; '.join(row['found']) or 'nothing'} |"
        )
    real = [row for row in mutants if row["mutant"] != "none"]
    lines += [
        "",
        f"Mutants of our own code: {sum(row['caught'] for row in real)} of {len(real)} caught." if real else "",
    ]
    return "\n".join([*lines, *_faults(), ""])


def _faults() -> list[str]:
    """What results/faults.json counts, key by key."""
    faults = read("faults.json")
    if faults is None:
        return ["", "Kills, faults and bad inputs: not measured here (results/faults.json is missing)."]
    counts = {key: value for key, value in faults.items() if not isinstance(value, list) and key != "command"}
    return [
        "",
        "Kills, faults and bad inputs:",
        *(f"- {key}: {json.dumps(value, ensure_ascii=False)}" for key, value in counts.items()),
    ]


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    target = RESULTS / "trust.json"
    known = {row["recipe"]: row for row in (read("trust.json") or {}).get("rows", [])}
    wanted = [name for name in arguments if name in ZOO]
    if "--again" in arguments:
        known = {}
    for name in wanted or [name for name in ZOO if name not in known]:
        print(f"{name} …", flush=True)
        known[name] = attacked(name)
        rows = [known[each] for each in ZOO if each in known]
        document = {"command": "python experiments/trust.py", "rows": rows}
        target.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf8")
    rows = [known[name] for name in ZOO if name in known]
    text = table(rows)
    (RESULTS / "trust.md").write_text(text, encoding="utf8")
    print(text)
    uncaught = [
        row for row in (read("mutants.json") or {}).get("mutants", []) if row["mutant"] != "none" and not row["caught"]
    ]
    return 1 if uncaught or any(row["found"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
