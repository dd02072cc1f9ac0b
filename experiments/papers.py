"""Writes experiments/PAPERS.md: where each item of the five papers is implemented, tested and measured.

    python experiments/papers.py            write the page
    python experiments/papers.py --check    exit 1 if the page differs from the result files

Items are algorithms, theorems, figures and tables: the rows are in experiments/paper_rows. Paths are relative to the
repository and must exist; our values are read from the result files.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paper_rows import clipping_bias, coupling, dp_mac, hidden_state, modelmix

PAGE = Path(__file__).parent / "PAPERS.md"
PAPERS = {
    "ModelMix (Xiao, Wan, Devadas)": modelmix.ROWS,
    "Hidden state (Ye, Shokri)": hidden_state.ROWS,
    "Clipping bias (Xiao, Xiang, Wang, Devadas)": clipping_bias.ROWS,
    "DP-MAC (Harder, Köhler, Welling, Park)": dp_mac.ROWS,
    "Coupling (Liu, Bu, Wang, Zha, Karypis)": coupling.ROWS,
}
HEAD = (
    "item",
    "implemented",
    "tested",
    "measured",
    "published, %",
    "ours, %",
    "how ours differs, or why there is no result",
)


def page() -> str:
    """The whole page."""
    lines = [
        "# The five papers, item by item",
        "",
        "`python experiments/papers.py` writes this page; our values are read from the result files.",
        "",
    ]
    for title, rows in PAPERS.items():
        lines += [f"## {title}", "", f"| {' | '.join(HEAD)} |", "|" + "---|" * len(HEAD)]
        lines += [f"| {' | '.join(row.cells())} |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit 1 if the page differs from what would be written")
    if parser.parse_args().check:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf8") != page())
    PAGE.write_text(page(), encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
