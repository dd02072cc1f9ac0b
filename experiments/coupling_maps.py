"""Figs. 2 and 3 of Liu et al. 2023 at a small size: accuracy over α and the step size, by r_pub and by ε; one file.

    python experiments/coupling_maps.py

Runs `sordino sweep` on experiments/recipes/coupling_mini.toml: a softmax layer on the 12,000 embedded images of
Fashion-MNIST, of which the share r_pub is public; one seed, true Poisson sampling, add-remove, δ = 1e-5. The paper uses
ViT-small on CIFAR-10. As in the paper's maps, accuracies are on test images: they show how the best α changes, and no
setting is chosen by them. Resumable; the run directories are under runs/experiments. The maps in docs/figures are drawn
from the result file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from provenance import origin
from sordino.files import write_atomically
from sordino.report.heatmap import heat_map_file
from sordino.report.sweep import grids
from sordino.runs.sweep import Sweep, SweptKey, run_sweep

ROOT = Path(__file__).parents[1]
PATH, FIGURES = ROOT / "experiments" / "results" / "coupling_maps.json", ROOT / "docs" / "figures"
RECIPE = ROOT / "experiments" / "recipes" / "coupling_mini.toml"
ALPHAS, RATES = "method.alpha=0.05,0.2,0.5,0.8", "train.lr=0.03,0.1,0.3"
PARTS = {"r_pub": "public.fraction=0.01,0.05,0.2,0.5", "epsilon": "privacy.epsilon=0.5,2,8"}


def best(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """The best point of the map of each value of the key."""
    found: dict[float, dict[str, Any]] = {}
    for row in document["table"]:
        value = row["settings"][key]
        if row["mean"] is not None and (value not in found or row["mean"] > found[value]["mean"]):
            found[value] = row
    return [
        {key: value, "alpha": row["settings"]["method.alpha"], "lr": row["settings"]["train.lr"], "mean": row["mean"]}
        for value, row in found.items()
    ]


def draw(maps: dict[str, Any]) -> dict[str, str]:
    """{file name: SVG}, a map for each value of r_pub and of ε."""
    out = {}
    for part, document in maps.items():
        for number, grid in enumerate(grids(document)):
            out[f"coupling_{part}_{number}.svg"] = heat_map_file(grid)
    return out


def main() -> int:
    if "--check" in sys.argv[1:]:
        maps = json.loads(PATH.read_text(encoding="utf8"))["maps"]
        return int(any((FIGURES / name).read_text("utf8") != text for name, text in draw(maps).items()))
    maps, summary = {}, {}
    for part, axis in PARTS.items():
        axes = tuple(map(SweptKey.parse, (axis, ALPHAS, RATES)))
        folder = ROOT / "runs" / "experiments" / f"coupling_maps_{part}"
        document = run_sweep(Sweep(RECIPE, axes), folder, progress=False)
        for run in document["runs"]:
            del run["folder"]
        maps[part], summary[part] = document, best(document, axes[0].key)
        found = {**origin("python experiments/coupling_maps.py"), "best": summary, "maps": maps}
        write_atomically(PATH, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
        print(part, summary[part], flush=True)
    for name, text in draw(maps).items():
        (FIGURES / name).write_text(text, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
