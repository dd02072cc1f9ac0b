"""Writes the results of mac.json, mac_steady.json and mac_paper.json into docs/dp_mac.md and docs/guarantees/dp_mac.md.

    python experiments/mac_page.py

A block is the text between <!-- name --> and <!-- end name -->; the rest of the page is not changed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pages import filled, table
from results_page import age

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "docs" / "dp_mac.md", ROOT / "docs" / "guarantees" / "dp_mac.md")
Document = dict[str, Any]


def spread(cell: Document | None, percent: bool) -> str:
    """Mean ± standard deviation (number of seeds)."""
    if cell is None:
        return "not run"
    factor, digits = (100, 2) if percent else (1, 4)
    text = f"{factor * cell['mean']:.{digits}f}"
    if cell["spread"] is not None:
        text += f" ± {factor * cell['spread']:.{digits}f}"
    return f"{text} ({cell['seeds']})"


def by_epsilon(document: Document, section: str, epsilons: tuple[str, ...], percent: bool) -> str:
    summary = document["summary"][section]
    rows = []
    for epsilon in epsilons:
        runs = [r for name, r in document.get(section, {}).items() if name.startswith(f"eps={epsilon},")]
        found = max((r["epsilon"] for r in runs), default=float("nan"))
        sigma = runs[0]["noise_multiplier"] if runs else float("nan")
        steps, batch = (runs[0]["steps"], round(runs[0]["expected_batch"])) if runs else ("–", "–")
        cells = [spread(summary.get(f"eps={epsilon}, {how}"), percent) for how in ("dp-mac", "dp-sgd")]
        rows.append([f"{found:.4f}", *cells, f"{sigma:.3f}", str(steps), str(batch)])
    return table(["ε", "DP-MAC (seeds)", "DP-SGD (seeds)", "noise multiplier", "steps", "expected batch"], rows)


def pairs(document: Document) -> str:
    """How often DP-MAC has the smaller error among pairs of runs with equal seeds."""
    runs = document.get("usps", {})
    both = [(r, runs.get(name.replace("dp-mac", "dp-sgd"))) for name, r in runs.items() if name.endswith("dp-mac")]
    known = [(ours["test_error"], theirs["test_error"]) for ours, theirs in both if theirs is not None]
    better = sum(ours < theirs for ours, theirs in known)
    return f"DP-MAC has the smaller error in {better} of {len(known)} pairs of runs with the same ε and seed."


def variants(document: Document, section: str) -> str:
    rows = []
    for name, row in document.get(section, {}).items():
        accuracy = row.get("test_accuracy")
        result = f"{100 * accuracy:.2f} %" if accuracy is not None else f"{row['test_error']:.4f}"
        rows.append([name, result, f"{row['epsilon']:.3f}", str(row["steps"])])
    return table(["variant", "result", "ε", "steps"], rows)


def not_private(document: Document) -> str:
    rows = [[name, spread(cell, name.startswith("mnist"))] for name, cell in document["summary"]["not_private"].items()]
    return table(["what", "accuracy in %, or error (seeds)"], rows)


def scales(document: Document) -> str:
    rows = []
    for start, found in document.get("scales", {}).items():
        for way, norms in found["ways"].items():
            cells = [f"{n:.1e}" for n in norms["median_norms"]]
            rows.append([f"{way}; {start}", *cells, f"{norms['largest_over_smallest']:.0f}"])
    return table(["Z; initial weights", *(f"layer {k}" for k in range(1, 7)), "largest/smallest"], rows)


def sensitivities(document: Document) -> str:
    rows = [
        [
            row["coefficient"],
            f"{row['radius']:g}",
            *(f"{row[key]:.4g}" for key in ("attained", "ours", "printed")),
            "**yes**" if row["printed_is_exceeded"] else "no",
        ]
        for row in document["sensitivities"]["table"]["rows"]
    ]
    head = ["coefficient", "T_z", "attained by ascent", "our bound", "printed", "printed exceeded"]
    return "For T = 2t, softplus 60-300 and sigmoid 300-10 with random weights, no biases:\n\n" + table(head, rows)


def paper_noise(document: Document) -> str:
    rows = [
        [*(f"{r[key]:g}" for key in ("claimed", "sigma", "batch", "epochs", "sigma_pca")), f"{r['epsilon']:.3f}"]
        for r in document["paper_noise"]["table"]["rows"]
    ]
    head = ["ε claimed", "σ", "batch", "epochs", "σ of DP-PCA", "ε (PLD, δ = 10⁻⁵, DP-PCA included)"]
    return table(head, rows)


def audit(document: Document) -> str:
    rows = []
    for scale, cell in document["summary"]["audit"].items():
        runs = [r for r in document.get("audit", {}).values() if r["noise_scale"] == float(scale)]
        low = [r["epsilon_lower"] for r in runs]
        claimed = runs[0]["epsilon_claimed"] if runs else float("nan")
        bounds = f"{min(low):.2f} to {max(low):.2f}" if low else "–"
        rows.append([scale, bounds, f"{claimed:.3f}", f"{cell['claims_broken']} of {cell['of']}"])
    return table(["noise ×", "lower bounds on ε (95 %)", "claimed", "claims broken"], rows)


def steadier() -> str:
    """The three settings on held-out training images, then the chosen one on the test images."""
    path = ROOT / "experiments" / "results" / "mac_steady.json"
    if not path.exists():
        return "*Not run yet: `python experiments/mac_steady.py`.*"
    rows = [
        [r["images"], r["setting"], r["z"], spread(r | {"mean": r["error"]}, percent=False)]
        for r in json.loads(path.read_text())["table"]
    ]
    return table(["measured on", "setting", "Z", "squared error (seeds)"], rows)


def printed() -> str:
    """The rows with the paper's own settings."""
    path = ROOT / "experiments" / "results" / "mac_paper.json"
    if not path.exists():
        return "*Not run yet: `python experiments/mac_paper.py`.*"
    names = {"mnist": ("MNIST, accuracy in %", True), "usps": ("USPS, squared error", False)}
    rows = []
    for r in json.loads(path.read_text())["table"]:
        what, percent = names[r["part"]]
        published = "–" if r["published"] is None else f"{100 * r['published']:.0f}"
        result = spread(r | {"mean": r["result"]}, percent)
        rows.append([what, f"{r['printed_epsilon']:g}", f"{r['epsilon']:.2f}", f"{r['sigma']:g}", result, published])
    return table(["measured", "printed ε", "its ε here", "σ", "DP-MAC (seeds)", "paper"], rows)


def blocks(document: Document) -> dict[str, str]:
    return {
        "steadier": steadier(),
        "paper settings": printed(),
        "mnist": by_epsilon(document, "mnist", ("0.5", "2", "8"), True),
        "usps": by_epsilon(document, "usps", ("1", "2", "4", "8"), False) + "\n\n" + pairs(document),
        "not_private": not_private(document),
        "mnist_variants": variants(document, "mnist_variants"),
        "usps_variants": variants(document, "usps_variants"),
        "scales": scales(document),
        "sensitivities": sensitivities(document),
        "paper_noise": paper_noise(document),
        "audit": audit(document),
        "engine": f"mac.json:{said}" if (said := age("mac", document)) else "",
    }


def main() -> int:
    document = json.loads((ROOT / "experiments" / "results" / "mac.json").read_text())
    for page in PAGES:
        page.write_text(filled(page.read_text("utf8"), blocks(document)), "utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
