"""Fig. 3 of ModelMix (Xiao, Wan & Devadas 2022), recomputed: ε over the steps, with its control; JSON and SVG.

python experiments/modelmix_fig3.py             all panels
python experiments/modelmix_fig3.py --only d-f  only panels (d) to (f), q = 0.04: into the file, without a figure

The paper's text has no values for (d) to (f). The noise is that of plain DP-SGD for ε = 200 at that rate, as in (a) to
(c).
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from scipy.optimize import brentq

from provenance import origin
from sordino.methods.modelmix.accountant import MixStep, account_modelmix, modelmix_epsilon
from sordino.methods.modelmix.sampled import SampledStep, classic
from sordino.report.plots import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, PlotAxis

SIGMA, RATE, CLIP, BATCH, DELTA, STEPS = 0.364, 0.02, 20.0, 1000.0, 1e-5, 5000
TAUS, PS = (0.075, 0.15, 0.3), (1, 25, 100)
PRINTED = {0.075: (57.2, 17.9, 15.3), 0.15: (40.4, 9.0, 7.9), 0.3: (31.7, 5.4, 4.8)}
CURVE = (50, 250, 500, 1000, 2000, 3000, 4000, 5000)
COLOURS = {1: "#b3543c", 25: "#b58a2e", 100: "#2f6f8f", 0: "#3d7a4e"}
ROOT = Path(__file__).parent.parent


def further(rate: float = 0.04) -> dict[str, Any]:
    """Panels (d) to (f): ε after all steps, at twice the sampling rate, with the noise for ε = 200 without mixing."""
    shared: dict[str, Any] = {
        "sampling_rate": rate, "clip_norm": CLIP, "expected_batch": BATCH * rate / RATE, "delta": DELTA,
    }  # fmt: skip

    def plain(sigma: float) -> float:
        return account_modelmix([(MixStep(sigma, 0.0), STEPS)], **shared).epsilon_classic - 200.0

    sigma = round(float(brentq(plain, 0.3, 0.6, xtol=5e-4)), 3)
    lines = []
    for tau in TAUS:
        for p in PS:
            found = account_modelmix([(MixStep(sigma, tau), STEPS)], linf_p=p, **shared)
            lines.append(
                {
                    "tau_over_lr": tau,
                    "p": p,
                    "classic": found.epsilon_classic,
                    "epsilon": found.epsilon,
                    "control": found.equal_variance_epsilon,
                }
            )
    return {"sampling_rate": rate, "noise_multiplier": sigma, "lines": lines}


def main() -> int:
    target = ROOT / "experiments" / "results" / "modelmix_fig3.json"
    if sys.argv[1:] == ["--only", "d-f"]:
        kept = json.loads(target.read_text())
        kept["further"] = further() | origin("python experiments/modelmix_fig3.py --only d-f")
        target.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n")
        return 0
    panels = [panel(tau) for tau in TAUS]
    document = {
        **origin("python experiments/modelmix_fig3.py"),
        "setting": {
            "noise_multiplier": SIGMA, "sampling_rate": RATE, "clip_norm": CLIP, "expected_batch": BATCH,
            "delta": DELTA, "steps": STEPS,
        },
        "note": "printed: Fig. 3(a-c). classic_whole: the paper's conversion at whole orders (Cor. 4.1 as a binomial "
        "sum), classic: at fractional orders too, epsilon: tight conversion. control: DP-SGD of equal variance.",
        "panels": panels,
        "further": further(),
    }  # fmt: skip
    target.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n")
    figure = ROOT / "docs" / "figures" / "modelmix_fig3.svg"
    figure.parent.mkdir(exist_ok=True)
    figure.write_text(svg(panels))
    for entry in panels:
        for line in entry["lines"]:
            print(f"τ/η = {entry['tau_over_lr']:<6} p = {line['p']:<4}" + "".join(
                f" {key} {line[key]:.4g}" for key in ("printed", "classic_whole", "classic", "epsilon", "control")
            ))  # fmt: skip
    return 0


def panel(tau: float) -> dict[str, Any]:
    """The three lines of one panel, and the control's curve."""
    shared: dict[str, Any] = {"sampling_rate": RATE, "clip_norm": CLIP, "expected_batch": BATCH, "delta": DELTA}
    lines = []
    for p, printed in zip(PS, PRINTED[tau], strict=True):
        found = account_modelmix([(MixStep(SIGMA, tau), STEPS)], linf_p=p, **shared)
        totals = STEPS * SampledStep("gaussian", SIGMA, tau * BATCH / CLIP, p, RATE).whole_orders()
        curve = [modelmix_epsilon([(MixStep(SIGMA, tau), t)], linf_p=p, **shared) for t in CURVE]
        lines.append(
            {
                "p": p,
                "printed": printed,
                "classic_whole": min(classic(a, float(total), DELTA) for a, total in enumerate(totals, start=2)),
                "classic": found.epsilon_classic,
                "epsilon": found.epsilon,
                "order": found.order,
                "control": found.equal_variance_epsilon,
                "curve": curve,
            }
        )
    equal = math.sqrt(SIGMA**2 + (tau * BATCH / CLIP) ** 2 / 12)
    control = [modelmix_epsilon([(MixStep(equal, 0.0), t)], **shared) for t in CURVE]
    return {"tau_over_lr": tau, "steps": list(CURVE), "lines": lines, "control_curve": control}


def svg(panels: list[dict[str, Any]]) -> str:
    """Three panels with the tight ε on a logarithmic scale; circles show the paper's values. The colours are visible on
    white and on black."""
    body = []
    for index, entry in enumerate(panels):
        x = PlotAxis(0.0, 7000.0, LEFT, WIDTH - RIGHT, 2500.0)
        y = PlotAxis(-1.0, 2.0, HEIGHT - BOTTOM, TOP, 1.0)
        parts = [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(t):.1f}" y2="{y(t):.1f}" stroke="#8884"/>'
            f'<text x="{LEFT - 8}" y="{y(t) + 4:.1f}" text-anchor="end">{10**t:g}</text>'
            for t in y.ticks()
        ]
        parts += [f'<text x="{x(t):.1f}" y="{HEIGHT - 22}" text-anchor="middle">{t:g}</text>' for t in (0, 2500, 5000)]
        curves = [(line["p"], line["curve"]) for line in entry["lines"]] + [(0, entry["control_curve"])]
        for p, values in curves:
            points = [(x(s), y(math.log10(v))) for s, v in zip(entry["steps"], values, strict=True)]
            path = "M" + " L".join(f"{a:.1f} {b:.1f}" for a, b in points)
            dash = ' stroke-dasharray="6 4"' if p == 0 else ""
            parts.append(f'<path d="{path}" fill="none" stroke="{COLOURS[p]}" stroke-width="2.2"{dash}/>')
            name = "control" if p == 0 else f"p = {p}"
            lift = {25: -2, 100: 12}.get(p, 4)
            parts.append(
                f'<text x="{points[-1][0] + 10:.1f}" y="{points[-1][1] + lift:.1f}" style="fill:{COLOURS[p]}">'
                f"{name}: {values[-1]:.3g}</text>"
            )
        for line in entry["lines"]:
            at = f'cx="{x(STEPS):.1f}" cy="{y(math.log10(line["printed"])):.1f}"'
            parts.append(f'<circle {at} r="4" fill="none" stroke="{COLOURS[line["p"]]}"/>')
        title = f"τ = {entry['tau_over_lr']:g}η: ε over the steps"
        parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{title}</text>')
        body.append(f'<g transform="translate({index * WIDTH} 0)">{"".join(parts)}</g>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {len(panels) * WIDTH} {HEIGHT}" role="img" '
        'aria-label="ε of ModelMix over the steps for three gaps and three truncations, and of the control">'
        "<style>text{font:13px system-ui,sans-serif;fill:#777}</style>" + "".join(body) + "</svg>\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
