"""Figs. 1 and 2 of Ye & Shokri 2022 from our accountants: writes results/hidden_state_figures.json and SVG files.

    python experiments/hidden_state_figures.py

λ = 1, β = 4, S_g = 4, n = 50, η = 0.02, σ² = 4, orders 10, 20, 30; b = 2 in Fig. 1, b = 4 in Fig. 2 (12 batches).
The curve "hull" is sordino's bound. The curves are Rényi divergences, as in the paper, all under replace-one.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation
from dp_accounting.rdp import rdp_privacy_accountant as google_rdp
from scipy.special import logsumexp

from provenance import origin
from sordino.accounting.events import Release
from sordino.methods.hidden_state import ye_shokri as ys
from sordino.methods.hidden_state.hull import position_energies
from sordino.methods.hidden_state.participation import without_replacement_law
from sordino.report.curves import curves_svg
from sordino.report.plots import Series

ROOT = Path(__file__).resolve().parent.parent
ORDERS = np.array([10.0, 20.0, 30.0])
EPOCHS = list(range(1, 61))
FIG_1 = ys.Setting(
    records=50, batch=2, epochs=1, step_size=0.02, strong_convexity=1.0, smoothness=4.0, sensitivity=4.0, sigma=2.0
)
FIG_2 = replace(FIG_1, batch=4)

Array = npt.NDArray[np.float64]


def steps_of(setting: ys.Setting) -> tuple[Array, Array, Array]:
    """(c, d, s²) of each step."""
    steps = setting.epochs * setting.batches
    shrink = 1 - setting.step_size * setting.strong_convexity
    moved = setting.step_size * setting.sensitivity / setting.batch
    return np.full(steps, shrink), np.full(steps, moved), np.full(steps, 2 * setting.step_size * setting.sigma**2)


def hull(setting: ys.Setting, position: int) -> Array:
    return ORDERS * float(position_energies(*steps_of(setting), setting.batches)[position]) / 2


def averaged(weights: Array, squares: Array) -> Array:
    """The Rényi divergence of a mixture of Gaussian pairs."""
    return np.array([float(logsumexp((a - 1) * a * squares / 2, b=weights)) / (a - 1) for a in ORDERS])


def hull_partition(setting: ys.Setting) -> Array:
    squares = position_energies(*steps_of(setting), setting.batches)
    return averaged(np.full(len(squares), 1 / len(squares)), squares)


def hull_without_replacement(setting: ys.Setting) -> Array:
    """The best of the chains; the probability mass outside their grids, below 1e-12, is left out of the figure."""
    laws = without_replacement_law(*steps_of(setting), setting.batch / setting.records)
    best: Array = np.array([averaged(law.weights, law.squares) for law in laws]).min(axis=0)
    return best


def mixing_and_diffusion(setting: ys.Setting, position: int) -> Array:
    """Balle, Barthe, Gaboardi & Geumlek 2019, Thm 5, for one epoch, and composition over the epochs (the dashed line).

    A record of the last batch has the cost of its step. For a record with k batches after it, this cost is divided by k
    and multiplied by (1 − 2ηβλ/(β + λ))^((k + 1)/2).
    """
    after = setting.batches - 1 - position
    product = setting.smoothness * setting.strong_convexity / (setting.smoothness + setting.strong_convexity)
    shrink = (1 - 2 * setting.step_size * product) ** ((after + 1) / 2) / after if after else 1.0
    return ORDERS * setting.step_cost * setting.epochs * shrink


def composition(setting: ys.Setting, rate: float) -> Array:
    """The adversary sees every iterate: one Gaussian mechanism per epoch (rate 1), or a sample of records per step."""
    if rate == 1:
        return ORDERS * setting.step_cost * setting.epochs
    sigma = math.sqrt(2 / setting.step_size) * setting.sigma * setting.batch * 2 / setting.sensitivity
    accountant = google_rdp.RdpAccountant(ORDERS.tolist(), NeighboringRelation.REPLACE_ONE)
    release = Release("gaussian", sigma, rate, records=setting.records, batch=setting.batch)
    accountant.compose(release.rdp_event("replace-one"), setting.epochs * setting.batches)
    return np.asarray(accountant._rdp, dtype=np.float64)


def curves() -> dict[str, dict[str, list[list[float]]]]:
    """figure → curve → [epoch][order]."""
    panels: dict[str, dict[str, Any]] = {
        "fig1_first_batch": {
            "hull": lambda s: hull(s, 0),
            "Thm 4.4": lambda s: ys.strongly_convex(s, ORDERS, 0),
            "Thm 4.5": lambda s: ys.naive_dynamics(s, ORDERS),
            "Balle et al., composed": lambda s: mixing_and_diffusion(s, 0),
            "composition": lambda s: composition(s, 1),
        },
        "fig1_last_batch": {
            "hull": lambda s: hull(s, s.batches - 1),
            "Thm 4.4": lambda s: ys.strongly_convex(s, ORDERS, s.batches - 1),
            "Thm 4.5": lambda s: ys.naive_dynamics(s, ORDERS),
            "Balle et al., composed": lambda s: mixing_and_diffusion(s, s.batches - 1),
            "composition": lambda s: composition(s, 1),
        },
        "fig2_partition": {
            "hull, averaged": hull_partition,
            "Thm 5.2": lambda s: ys.shuffle_and_partition(s, ORDERS),
            "Thm 4.4, last batch": lambda s: ys.strongly_convex(s, ORDERS, s.batches - 1),
            "composition": lambda s: composition(s, s.batch / s.records),
        },
        "fig2_without_replacement": {
            "hull, averaged": hull_without_replacement,
            "Thm 5.3": lambda s: ys.without_replacement(s, ORDERS),
            "composition": lambda s: composition(s, s.batch / s.records),
        },
    }
    found: dict[str, dict[str, list[list[float]]]] = {}
    for panel, lines in panels.items():
        setting = FIG_1 if panel.startswith("fig1") else FIG_2
        found[panel] = {name: [rdp(replace(setting, epochs=k)).tolist() for k in EPOCHS] for name, rdp in lines.items()}
    return found


def main() -> None:
    found = curves()
    about = origin("python experiments/hidden_state_figures.py")
    document = {**about, "orders": ORDERS.tolist(), "epochs": EPOCHS, "relation": "replace-one", "curves": found}
    (ROOT / "experiments/results/hidden_state_figures.json").write_text(json.dumps(document) + "\n")
    figures = ROOT / "docs/figures"
    figures.mkdir(exist_ok=True)
    for name, panel, title in (
        (
            "hidden_state_fig1_first",
            "fig1_first_batch",
            "Rényi divergence of order 10, a record of the first batch (Fig. 1)",
        ),
        ("hidden_state_fig1", "fig1_last_batch", "Rényi divergence of order 10, a record of the last batch (Fig. 1)"),
        ("hidden_state_fig2", "fig2_partition", "Rényi divergence of order 10, shuffle and partition (Fig. 2)"),
    ):
        lines = {label: [row[0] for row in rows] for label, rows in found[panel].items()}
        series = Series(
            title, "from the accountants; λ = 1, β = 4, S_g = 4, n = 50, η = 0.02, σ² = 4", "epochs", "privacy"
        )
        highest = (4 if panel.startswith("fig1") else 1.5) * max(
            max(values) for label, values in lines.items() if not label.startswith(("comp", "Thm 4.5", "Balle"))
        )
        (figures / f"{name}.svg").write_text(curves_svg(EPOCHS, lines, series, highest=highest), encoding="utf-8")


if __name__ == "__main__":
    main()
