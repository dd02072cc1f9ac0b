"""Writes clipping_bias_*.json and imdb_kept.json into docs/clipping_bias.md, and draws plots.

    python experiments/clipping_bias_page.py

A block is the text between <!-- name --> and <!-- end name -->; the rest of the page is not changed. A block of an
experiment that has not been run says so.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pages
from results_page import age
from sordino.report.curves import curves_svg
from sordino.report.plots import Series

ROOT = Path(__file__).parents[1]
PAGE, FIGURES = ROOT / "docs" / "clipping_bias.md", ROOT / "docs" / "figures"
PARTS = ("imdb", "cifar10", "cifar10_8000", "fashion_mnist")
NOT_RUN = "*Not run yet: `python experiments/clipping_bias.py --part {}`.*"


def read(part: str) -> dict[str, Any] | None:
    path = ROOT / "experiments" / "results" / f"clipping_bias_{part}.json"
    return json.loads(path.read_text()) if path.exists() else None


def accuracy(row: Mapping[str, Any]) -> str:
    spread = "" if row["spread"] is None else f" ± {100 * row['spread']:.1f}"
    return f"{100 * row['mean']:.1f}{spread} ({row['seeds']})"


def table(document: Mapping[str, Any]) -> str:
    """Accuracy at each ε with the number of seeds in brackets, sampling noise, step size and time."""
    rows = document["table"]
    epsilons = sorted({row["target_epsilon"] for row in rows})
    lines = []
    for name in dict.fromkeys(row["column"] for row in rows):
        found = {row["target_epsilon"]: row for row in rows if row["column"] == name}
        first = next(iter(found.values()))
        noise = ["" if first.get(k) is None else f"{first[k]:.3g}" for k in ("sampling_noise", "relative_noise")]
        cells = [accuracy(found[e]) if e in found else "" for e in epsilons]
        lines.append([name, *cells, *noise, f"{first['lr']:g}", f"{first['core_seconds']:.0f}"])
    head = ["test accuracy in %", *(f"ε = {e:g}" for e in epsilons), "τ² at the end", "τ²/‖∇F‖²", "lr", "seconds a run"]
    return pages.table(head, lines)


def sizes(document: Mapping[str, Any]) -> str:
    runs = list(document["runs"].values())
    tested = [run for run in runs if not run["held_out"]]
    if not tested:
        return f"{document['title']}. No run on the test split yet."
    first = tested[0]
    multipliers = sorted({(r["target_epsilon"], f"{r['noise_multiplier']:.3f}") for r in tested})
    sigma = ", ".join(f"{multiplier} at ε = {epsilon:g}" for epsilon, multiplier in multipliers)
    return (
        f"{document['title']}; {first['records']:,} records, {first['epochs']:.3g} epochs, {first['steps']} steps, "
        f"expected batch {document['expected_batch']}, δ = {first['delta']:g}, {first['relation']}, Poisson "
        f"sampling, noise multiplier {sigma}. {document['notes']}. {len(runs)} runs, "
        f"{sum(run['held_out'] for run in runs)} of them to choose step sizes; "
        f"{sum(run['core_seconds'] for run in runs) / 60:.0f} minutes of one core in all."
        f"{age('clipping_bias', document)}"
    )


def noise_curves(document: Mapping[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """The steps, and for each column the mean of τ² over the seeds, at the first ε."""
    epsilon = document["table"][0]["target_epsilon"] if document["table"] else None
    steps: list[float] = []
    curves: dict[str, list[float]] = {}
    for name in document["columns"]:
        found = [
            run["readings"]
            for run in document["runs"].values()
            if not run["held_out"] and (run["column"], run["target_epsilon"]) == (name, epsilon) and run["readings"]
        ]
        places = [reading["step"] for reading in found[0]] if found else []
        steps = steps or places
        if found and places == steps and all(len(one) == len(steps) for one in found):
            curves[name] = [statistics.fmean(one[k]["sampling_noise"] for one in found) for k in range(len(steps))]
    return steps, curves


def figure(part: str, document: Mapping[str, Any]) -> str | None:
    steps, curves = noise_curves(document)
    if not curves:
        return None
    last = ", ".join(f"{name} {values[-1]:.3g}" for name, values in curves.items())
    series = Series(f"{part}: sampling noise τ² over steps", f"At the end: {last}.", "step", "τ²")
    return curves_svg(steps, curves, series, from_zero=True)


def kept(document: Mapping[str, Any]) -> str:
    """A linear classifier on the mean vector of the words that are kept, on held-out training reviews."""
    rows = [
        [
            f"{row['words']} words of its {row['keep']}",
            f"without the {row['without_most_frequent']} most frequent" if row["without_most_frequent"] else "all",
            f"{100 * row['accuracy']:.1f}",
        ]
        for row in document["rows"]
    ]
    return pages.table(["kept of a review", "words", "held-out accuracy in %"], rows)


def blocks() -> dict[str, str]:
    found = {"imdb kept": kept(json.loads((ROOT / "experiments" / "results" / "imdb_kept.json").read_text("utf8")))}
    for part in PARTS:
        document = read(part)
        found[f"{part} table"] = table(document) if document else NOT_RUN.format(part)
        found[f"{part} sizes"] = sizes(document) if document else NOT_RUN.format(part)
    return found


def main() -> int:
    PAGE.write_text(pages.filled(PAGE.read_text("utf8"), blocks()), "utf8")
    for part in PARTS:
        drawing = figure(part, document) if (document := read(part)) else None
        if drawing is not None:
            (FIGURES / f"clipping_bias_{part}.svg").write_text(drawing, "utf8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
