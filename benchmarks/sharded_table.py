"""The tables of docs/howto/many_ranks.md about sharded models, from the files that benchmarks/sharded.py wrote.

python benchmarks/sharded_table.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "howto" / "many_ranks.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- sharded:begin -->", "<!-- sharded:end -->"


def table(time: dict[str, Any], sent: dict[str, Any], memory: dict[str, Any]) -> str:
    """Markdown of the three result files."""
    rows = ["| a private step over a plain one | processor time | by the clock |", "|---|---|---|"]
    for kind in time["over_plain"]["processor"]:
        ratios = [time["over_plain"][by][kind] for by in ("processor", "clock")]
        cells = [f"{one['median']:.2f} ({one['least']:.2f} to {one['most']:.2f})" for one in ratios]
        rows.append(f"| {kind} | {' | '.join(cells)} |")
    rows += ["", "| bytes of a step, all ranks | measured | by formula |", "|---|---|---|"]
    for kind, found in sent["a_step"].items():
        formula = "" if found["formula"] is None else f"{found['formula'] / 1e6:.1f} MB"
        rows.append(f"| {kind} | {found['measured'] / 1e6:.1f} MB | {formula} |")
    rows += ["", f"| with {memory['megabytes']} MB for each process | |", "|---|---|"]
    rows += [f"| {kind} | {_ended(found)} |" for kind, found in memory.items() if kind != "megabytes"]
    return "\n".join(rows)


def _ended(found: list[dict[str, Any]]) -> str:
    failed = next((one["failed"] for one in found if "failed" in one), None)
    if failed is None:
        return f"{found[0]['steps']} steps, finite weights"
    return "runs out of memory in the checks before the first step" if "alloc_cpu" in failed else f"fails: {failed}"


def written(page: str) -> str:
    """The page with the tables of the result files."""
    names = ("sharded_time.json", "sharded_bytes.json", "sharded.json")
    time, sent, memory = (json.loads((RESULTS / name).read_text("utf8")) for name in names)
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(time['time'], sent['bytes'], memory['memory'])}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf8")), encoding="utf8")
