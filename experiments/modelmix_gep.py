"""Section 5.3 of Xiao, Wan & Devadas 2022, GEP: the ε of ModelMix with a public embedding of gradients.

    python experiments/modelmix_gep.py

Gradient embedding perturbation (Yu et al. 2021) projects each record's gradient on k directions that public rows give,
clips the k coefficients at c₀ and the residual at c₁, and adds noise of σ·c₀ and σ·c₁. Appendix E of the paper has
q = 2000/50000, T = 5000, c₀ = 5, c₁ = 2, η = 0.2, p = 25, τ = 0.05 and 0.75 of the noise that GEP needs for ε = 8 at
q = 1000/50000 and T = 10000, and states ε = 2.9; here 0.75 is taken of the noise multiplier. Nothing is trained. The
bounds are proved in docs/guarantees/modelmix.md:

    mixing of weights       the paper's: weight by weight; hides the residual, of the coefficients nothing is claimed
    ... in one block        the same, p = 1: hides the whole update; the noise of the coefficients is not counted
    mixing of coefficients  in the basis of the embedding and its complement: hides both
    Gaussian                the control: noise of the same variance in both blocks, without mixing

Whether τ = 0.05 is a length or, as everywhere else in the appendix, in units of η is not said: both are computed.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from provenance import origin
from sordino.accounting.account import composed_epsilon
from sordino.accounting.events import Release
from sordino.files import write_atomically
from sordino.methods.modelmix.mixture import Array
from sordino.methods.modelmix.sampled import SampledStep, classic, tight
from sordino.plan import Plan

PATH = Path(__file__).parent / "results" / "modelmix_gep.json"
RATE, BATCH, STEPS, DELTA, CLIPS, SCALED, P = 2000 / 50_000, 2000.0, 5000, 1e-5, (5.0, 2.0), 0.75, 25.0
WIDTHS = {"τ = 0.05": 0.05 / 0.2, "τ = 0.05·η": 0.05}  # τ/η
PUBLISHED = 2.9


class Blocks(SampledStep):
    """A step whose records move two blocks of coordinates, each in its own clip norm: R = R₁·R₂, moments multiply."""

    def __init__(self, first: SampledStep, second: SampledStep):
        self.blocks, self.rate = (first, second), first.rate
        self.top = min(first.top, second.top)

    def verified_levels(self, wanted: int) -> tuple[int, float]:
        found = [block.verified_levels(wanted) for block in self.blocks]
        return min(levels for levels, _ in found), min(margin for _, margin in found)

    def log_moment(self, u: Any) -> Any:
        return sum(block.log_moment(u) for block in self.blocks)

    def worst(self, orders: Array) -> Array:
        first, second = self.blocks
        return first.worst(orders) + second.worst(orders)


def epsilon(step: SampledStep, count: int = STEPS, delta: float = DELTA) -> dict[str, float]:
    """The smallest ε over whole orders, and over fractional ones below those whose criterion S is verified."""
    totals = count * step.whole_orders()
    points = [(float(alpha), float(total)) for alpha, total in enumerate(totals, start=2)]
    levels, margin = step.verified_levels(3)
    for alpha in np.linspace(1.02, min(levels + 1, step.top) - 0.02, 60):
        if abs(alpha - round(alpha)) > 1e-3:
            points.append((float(alpha), count * step.fractional(float(alpha))))
    best = min(points, key=lambda point: tight(point[0], point[1], delta))
    ordinary = min(classic(alpha, total, delta) for alpha, total in points)
    least = tight(best[0], best[1], delta)
    return {"epsilon": least, "epsilon_classic": ordinary, "order": best[0], "margin": margin}


def of_noise(sigma: float, tau_over_lr: float, p: float) -> list[dict[str, Any]]:
    """The bounds of one setting; σ is the noise of each block in its clip norm."""
    widths = [tau_over_lr * BATCH / clip for clip in CLIPS]
    plain, embedded, residual = (SampledStep("gaussian", sigma, w, p, RATE) for w in (0.0, *widths))
    length = math.hypot(*CLIPS)
    whole = SampledStep("gaussian", sigma * CLIPS[1] / length, tau_over_lr * BATCH / length, 1.0, RATE)
    equal = 1 / math.sqrt(sum(1 / (sigma**2 + w**2 / 12) for w in widths))
    control = composed_epsilon([(Release("gaussian", equal, RATE), STEPS)], DELTA, "add-remove", "pld")[0]
    alone = composed_epsilon([(Release("gaussian", sigma, RATE), STEPS)], DELTA, "add-remove", "pld")[0]
    one_block = [{"bound": "mixing of weights, in one block", **epsilon(whole)}] if p == 1 else []
    return [
        {"bound": "mixing of weights", **epsilon(Blocks(plain, residual))},
        *one_block,
        {"bound": "mixing of coefficients", **epsilon(Blocks(embedded, residual))},
        {"bound": "Gaussian", "epsilon": control},
        {"bound": "the coefficients alone, no mixing", "epsilon": alone},
    ]


def main() -> int:
    before = Plan.dpsgd(epsilon=8.0, delta=DELTA, records=50_000, expected_batch=1000, steps=10_000, clip_norm=1.0)
    sigma = SCALED * math.sqrt(2) * before.noise.noise_multiplier  # two blocks: sensitivity √2 in their clip norms
    unmixed = composed_epsilon([(Release("gaussian", sigma / math.sqrt(2), RATE), STEPS)], DELTA, "add-remove", "pld")
    rows = [
        {"tau": name, "p": p, **found}
        for name, width in WIDTHS.items()
        for p in (1.0, P)
        for found in of_noise(sigma, width, p)
    ]
    document = {
        **origin("python experiments/modelmix_gep.py"),
        "setting": {
            "sampling_rate": RATE, "steps": STEPS, "delta": DELTA, "relation": "add-remove", "clip_norms": CLIPS,
            "noise_multiplier": sigma, "expected_batch": BATCH, "published": PUBLISHED,
        },
        "without_mixing": unmixed[0],
        "table": rows,
    }  # fmt: skip
    write_atomically(PATH, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    for row in rows:
        print(row["tau"], f"p = {row['p']:g}", row["bound"], f"{row['epsilon']:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
