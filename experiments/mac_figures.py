"""Figs. 1, 3 and 4 of Harder et al. 2018, drawn from result files.

    python experiments/mac_figures.py            docs/figures/mac_*.svg, and results/mac_fig4.json
    python experiments/mac_figures.py --check    exit 1 if a figure differs from the files

Figs. 1 and 3: the curves of experiments/results/mac.json (test error over the steps, mean over the seeds). Fig. 4: one
weight, a softplus layer with true weight −0.7 and a sigmoid layer with 0.7, 1,000 random inputs. It shows the objective
and its second-order expansion at 0, and one standard deviation of the expansion's value if slope and curvature are
released with noise multiplier 1 and each is clipped to 1.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from provenance import origin
from sordino.files import write_atomically
from sordino.methods.dp_mac.network import ACTIVATIONS, Layer
from sordino.methods.dp_mac.taylor import expand
from sordino.report.curves import curves_svg
from sordino.report.plots import Series

ROOT = Path(__file__).parents[1]
RESULTS, FIGURES = ROOT / "experiments" / "results", ROOT / "docs" / "figures"
RECORDS, POINTS = 1000, [round(-2 + 0.1 * k, 1) for k in range(41)]
PARTS = {"mnist": ("0.5", "2", "8"), "usps": ("1", "8")}


def layers() -> dict[str, tuple[Layer, torch.Tensor, torch.Tensor]]:
    """(layer at weight 0, inputs, targets) of the two objectives."""
    z = torch.randn(RECORDS, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero, one = torch.zeros(1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    hidden = Layer(zero, None, ACTIVATIONS["softplus"])
    last = Layer(zero, None, ACTIVATIONS["linear"], "sigmoid")
    targets = torch.sigmoid(0.7 * one * z)
    return {"input layer": (hidden, z, hidden.activation.value(-0.7 * z)), "output layer": (last, z, targets)}


def fourth() -> dict[str, Any]:
    """The objective, its expansion and the noise of the expansion, per record, as functions of the weight."""
    found = {}
    for name, (layer, z, targets) in layers().items():
        terms = expand(layer, z, targets)
        value, slope = float(terms.value.mean()), float((terms.slope * terms.inputs).mean())
        curvature = float((terms.curvature * terms.inputs.square()).mean())
        exact = [
            float(expand(Layer(torch.full_like(layer.weight, w), None, layer.activation, layer.output), z, targets)
                  .value.mean())
            for w in POINTS
        ]  # fmt: skip
        expanded = [value + slope * w + curvature * w * w / 2 for w in POINTS]
        noise = [(w**2 + (w * w / 2) ** 2) ** 0.5 / RECORDS for w in POINTS]
        found[name] = {"weight": POINTS, "objective": exact, "second order": expanded, "standard deviation": noise}
    return found


def curves(document: Mapping[str, Any], part: str, epsilon: str) -> str:
    """Figs. 1 (USPS) and 3 (MNIST): the mean over the seeds, at the evaluated steps."""
    lines: dict[str, list[float]] = {}
    for method in ("dp-mac", "dp-sgd"):
        runs = [
            dict(map(tuple, run["curve"]))
            for name, run in document[part].items()
            if name.startswith(f"eps={epsilon},") and name.endswith(method)
        ]
        steps = sorted(runs[0])
        measured = [statistics.fmean(run[step] for run in runs) for step in steps]
        lines[method.upper()] = [1 - value for value in measured] if part == "mnist" else measured
    last = ", ".join(f"{name} {values[-1]:.4f}" for name, values in lines.items())
    what = {"mnist": "MNIST: test error", "usps": "USPS autoencoder: squared error per pixel"}[part]
    series = Series(f"{what}, ε = {epsilon}", f"After the last step: {last}.", "step", "error")
    return curves_svg([float(s) for s in steps], lines, series)


def figures(document: Mapping[str, Any], drawn: Mapping[str, Any]) -> dict[str, str]:
    out = {
        f"mac_{part}_eps{epsilon.replace('.', '')}.svg": curves(document, part, epsilon)
        for part, epsilons in PARTS.items()
        for epsilon in epsilons
    }
    for name, found in drawn.items():
        lines = {key: found[key] for key in ("objective", "second order")}
        at = found["weight"].index(1.0)
        apart = abs(found["objective"][at] - found["second order"][at])
        said = f"At a distance of 1 the two differ by {apart:.3f}."
        shifted = [w - POINTS[0] for w in found["weight"]]
        series = Series(f"{name}: objective and its expansion at 0", said, "weight + 2", "objective per record")
        out[f"mac_fig4_{name.split()[0]}.svg"] = curves_svg(shifted, lines, series, from_zero=False)
    return out


def main() -> int:
    document = json.loads((RESULTS / "mac.json").read_text(encoding="utf8"))
    path = RESULTS / "mac_fig4.json"
    if "--check" in sys.argv[1:]:
        drawn = json.loads(path.read_text(encoding="utf8"))["figure_4"]
        same = [(FIGURES / n).read_text(encoding="utf8") == text for n, text in figures(document, drawn).items()]
        return 0 if all(same) else 1
    found = {**origin("python experiments/mac_figures.py"), "records": RECORDS, "figure_4": fourth()}
    write_atomically(path, (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode())
    for name, text in figures(document, found["figure_4"]).items():
        (FIGURES / name).write_text(text, encoding="utf8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
