"""Writes the results of coupling_*.json into docs/coupling.md.

    python experiments/coupling_page.py

A block is the text between <!-- name --> and <!-- end name -->; the rest of the page is not changed. Parts that were
not run are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pages
from pages import table
from results_page import age

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "experiments" / "results", ROOT / "docs" / "coupling.md"
TITLES = {
    "mnist_redrawn": "MNIST, CNN of appendix A.1, every column with settings of its own, the public rows drawn anew "
    "for every seed",
    "mnist": "MNIST, CNN of appendix A.1, one public split for all seeds",
    "cifar10_redrawn": "CIFAR-10, linear on EfficientNet-Lite0, every column with settings of its own, the public rows "
    "drawn anew for every seed",
    "cifar10_resnet18": "CIFAR-10, ResNet-18 with GroupNorm from random weights, images of 32×32 pixels",
    "imdb": "IMDb, linear on MiniLM",
}
PRINTED = {  # Table 3 of the paper, MNIST CNN
    (None, "FullPriv"): 95.27, (None, "NonPriv"): 98.96, (0.05, "OnlyPub"): 95.58, (0.05, "OnlyPriv"): 84.02,
    (0.05, "AdaMix"): 73.82, (0.05, "DPMD"): 97.56, (0.05, "Coupling"): 97.92, (0.2, "OnlyPub"): 98.00,
    (0.2, "OnlyPriv"): 97.05, (0.2, "AdaMix"): 74.58, (0.2, "DPMD"): 98.36, (0.2, "Coupling"): 98.36,
}  # fmt: skip


def read(part: str) -> dict[str, Any] | None:
    path = RESULTS / f"coupling_{part}.json"
    return json.loads(path.read_text("utf8")) if path.exists() else None


def cell(row: Mapping[str, Any] | None, seeds: int) -> str:
    """Mean ± standard deviation, and the number of seeds if a column has fewer than the others."""
    if row is None:
        return ""
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.2f}"
    return f"{100 * row['mean']:.2f}{spread}" + (f" ({row['seeds']})" if row["seeds"] < seeds else "")


def accuracies() -> str:
    blocks = []
    for part, title in TITLES.items():
        document = read(part)
        if document is None or not document["table"]:
            continue
        setting, found = document["setting"], document["table"]

        def at(column: str, share: float, found: Any = found) -> Mapping[str, Any] | None:
            rows = [row for row in found if row["column"] == column and row["share"] in (share, None)]
            return rows[0] if rows else None

        seeds = max((row["seeds"] for row in found), default=0)
        columns = list(dict.fromkeys(row["column"] for row in found))
        rows = [
            [f"r_pub = {share:g}", *(cell(at(column, share), seeds) for column in columns)]
            for share in sorted({row["share"] for row in found if row["share"] is not None})
        ]
        if part == "mnist":
            rows += [printed(share, columns) for share in (0.05, 0.2)]
        steps = [row for row in found if row["share"] in (0.05, None)]
        blocks.append(
            f"**{title}**: {setting['epochs']:g} epochs, batches of {setting['batch']}, {setting['public_batch']} "
            f"public rows in a step, {seeds} seeds (fewer where a number in brackets says so). Test accuracy in %:\n\n"
            + table(["", *columns], rows)
            + "\n\nChosen on held-out rows: "
            + ", ".join(chosen(row) for row in steps)
            + "."
            + age("coupling", document)
        )
    return "\n\n".join(blocks) or "*Not measured yet.*"


def printed(share: float, columns: list[str]) -> list[str]:
    values = [PRINTED.get((share, column), PRINTED.get((None, column))) for column in columns]
    return [f"*paper, {share:g}, 20 epochs*", *("" if value is None else f"*{value:.2f}*" for value in values)]


def chosen(row: Mapping[str, Any]) -> str:
    what = f"{row['column']} lr {row['lr']:g}"
    if row["column"].startswith("Coupling"):
        return what + (f" α {row['alpha']:.2f} (equation 5)" if row["variant"] < 0 else f" α {row['variant']:g}")
    plain = row["column"].rstrip("+")
    if plain == "DOPE":
        return what + f" C {row['variant']:g}"
    if plain == "DPMD" and row["variant"]:
        return what + f" K {row['variant']:g} T"
    if plain == "AdaMix" and row["variant"]:
        return what + f", {row['variant']:g} directions"
    return what + (f" H {row['variant']:g}" if row["column"].startswith("MSE") else "")


def monotonicity() -> str:
    document = read("monotonicity")
    if document is None:
        return "*Not measured yet.*"
    names = {"epsilon": "ε", "batch": "B", "public": "n_pub", "private": "n_priv", "dimension": "d", "steps": "T"}
    rows = []
    for key, found in document["varied"].items():
        values = ", ".join(f"{row[key]:g}" for row in found)
        best = ", ".join(f"{row['best']:g}" for row in found)
        said = ", ".join(f"{row['equation_5']:.2f}" for row in found)
        rows.append([names[key], values, document["claimed"][key], best, said])
    middle = ", ".join(f"{names[key]} = {value:g}" for key, value in document["middle"].items())
    head = ["varied, at equal privacy", "values", "the paper: α", "best α measured", "equation (5)"]
    return table(head, rows) + f"\n\nAll else: {middle}; {document['seeds']} seeds."


def maps() -> str:
    """The best α and step size of the maps over both, by r_pub and by ε."""
    document = read("maps")
    if document is None:
        return "*Not run yet: `python experiments/coupling_maps.py`.*"
    names = {"public.fraction": "r_pub", "privacy.epsilon": "ε"}
    rows = []
    for found in document["best"].values():
        for row in found:
            (key,) = (key for key in row if key in names)
            rows.append(
                [f"{names[key]} = {row[key]:g}", *(f"{row[x]:g}" for x in ("alpha", "lr")), f"{100 * row['mean']:.1f}"]
            )
    return table(["", "best α", "its step size", "test accuracy in %"], rows)


def filled(page: str) -> str:
    """The page with its blocks made from the result files."""
    return pages.filled(page, {"accuracies": accuracies(), "monotonicity": monotonicity(), "maps": maps()})


def main() -> None:
    PAGE.write_text(filled(PAGE.read_text("utf8")), "utf8")


if __name__ == "__main__":
    main()
