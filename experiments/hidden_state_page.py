"""Writes the tables of hidden_state.json, hidden_table1.json and hidden_transfer.json into docs/hidden_state.md.

python experiments/hidden_state_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pages
from results_page import age

ROOT = Path(__file__).parent.parent
PAGE, RESULTS = ROOT / "docs" / "hidden_state.md", ROOT / "experiments" / "results" / "hidden_state.json"
BEGIN, END = "<!-- table: experiments/hidden_state_page.py -->", "<!-- end of table -->"
TABLE1 = ROOT / "experiments" / "results" / "hidden_table1.json"
TABLE2 = ROOT / "experiments" / "results" / "hidden_transfer.json"
NAMES = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST", "cifar10": "CIFAR-10"}


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
    made = "\n\n".join(filter(None, (table(document), age("hidden_state", document).strip())))
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{after}"


def table1() -> dict[str, str]:
    """The block of the paper's Table 1: every row with its relation, the published value and the noise."""
    document = json.loads(TABLE1.read_text(encoding="utf8"))
    lines = []
    for row in document["table"]:
        runs = [r for r in document["runs"].values() if all(r[key] == row[key] for key in ("dataset", "column"))]
        spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
        lines.append(
            [
                NAMES[row["dataset"]], row["column"].removesuffix(", replace-one"), row["relation"],
                f"{100 * row['mean']:.2f}{spread} ({row['seeds']})",
                "" if row["published"] is None else f"*{row['published']:.2f}*",
                f"{runs[0]['steps']:,}", f"{runs[0]['noise_multiplier']:.2f}",
            ]
        )  # fmt: skip
    head = ["data", "method", "relation", "test accuracy, % (seeds)", "*paper*", "steps", "noise multiplier"]
    return {"table 1": pages.table(head, lines)}


def table2() -> dict[str, str]:
    """The block of the paper's Table 2: every row with its relation, the published value and the noise."""
    document = json.loads(TABLE2.read_text(encoding="utf8"))
    lines = []
    for row in document["table"]:
        run = next(r for r in document["runs"].values() if r["arm"] == row["arm"])
        spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
        lines.append(
            [
                row["arm"].removesuffix(", replace-one"), row["relation"],
                f"{100 * row['mean']:.2f}{spread} ({row['seeds']})",
                "" if row["published"] is None else f"*{row['published']:.2f}*",
                f"{run['steps']:,}", f"{run['noise_multiplier']:.2f}",
            ]
        )  # fmt: skip
    head = ["method", "relation", "test accuracy, % (seeds)", "*paper, SimCLR*", "steps", "noise multiplier"]
    return {"table 2": pages.table(head, lines)}


def main() -> int:
    page = filled(PAGE.read_text(encoding="utf8"), json.loads(RESULTS.read_text()))
    PAGE.write_text(pages.filled(page, table1() | table2()), encoding="utf8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
