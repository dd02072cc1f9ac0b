"""Writes the table of experiments/results/hidden_state.json into docs/hidden_state.md, between its two markers.

python experiments/hidden_state_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "hidden_state.md", ROOT / "experiments" / "results" / "hidden_state.json"
BEGIN, END = "<!-- table: experiments/hidden_state_page.py -->", "<!-- end of table -->"
NAMES = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}


def table(document: dict[str, Any]) -> str:
    """One line for each row of the results, with the seeds that were run."""
    lines = [
        "| data | ε (replace-one) | method | test accuracy, mean ± spread | runs | ε if every iterate were seen |",
        "|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
        seen = row["runs"][0].get("epsilon_if_every_iterate_were_seen")
        everything = "the same" if "composition" in row["row"] else "–" if seen is None else f"{seen:.0f}"
        lines.append(
            f"| {NAMES[row['dataset']]} | {row['target_epsilon']:g} | {row['row']} | "
            f"{100 * row['mean_test_accuracy']:.2f}{spread} % | {len(row['runs'])} | {everything} |"
        )
    return "\n".join(lines)


def filled(page: str, document: dict[str, Any]) -> str:
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(document)}\n\n{END}{after}"


def main() -> int:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf8"), json.loads(RESULTS.read_text())), encoding="utf8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
