"""ModelMix with a public embedding: the moments of two blocks multiply, and no other vector of a record is worse."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "experiments"))

import modelmix_gep as script  # noqa: E402
from sordino.methods.modelmix.mixture import Array, Coordinate  # noqa: E402
from sordino.methods.modelmix.sampled import SampledStep  # noqa: E402

SIGMA, RATE = 0.8, 0.1
WIDTHS = (1.5, 4.0)  # of the two blocks, in clip norms


def blocks(p: float = 1.0, widths: tuple[float, float] = WIDTHS) -> script.Blocks:
    return script.Blocks(*(SampledStep("gaussian", SIGMA, width, p, RATE) for width in widths))


def densities(width: float, shift: float, grid: Array) -> tuple[Array, Array]:
    """f and f(· − shift) of noise SIGMA plus a uniform, on a grid."""
    coordinate = Coordinate("gaussian", width / SIGMA)
    return tuple(np.exp(coordinate.log_density((grid - s) / SIGMA)) / SIGMA for s in (0.0, shift))  # type: ignore[return-value]


def by_quadrature(shifts: list[tuple[float, float]], alpha: float) -> float:
    """log E[(1−q+qR)^α] in the plane; shifts: (width, shift) of the two coordinates that a record moves."""
    grid = np.linspace(-12, 16, 1121)
    (f, f_moved), (g, g_moved) = (densities(width, shift, grid) for width, shift in shifts)
    ratio = np.outer(f_moved / f, g_moved / g)
    total = np.sum(np.outer(f, g) * (1 - RATE + RATE * ratio) ** alpha) * (grid[1] - grid[0]) ** 2
    return math.log(total)


def test_two_blocks_without_mixing_are_one_gaussian_of_sensitivity_root_two() -> None:
    both, one = blocks(widths=(0.0, 0.0)), SampledStep("gaussian", SIGMA / math.sqrt(2), 0.0, 1.0, RATE)
    assert both.whole_orders()[:30] == pytest.approx(one.whole_orders()[:30], rel=1e-6)
    assert both.fractional(1.7) == pytest.approx(one.fractional(1.7), rel=1e-6)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 2.6, 4.0])
def test_the_divergence_of_two_blocks_is_that_of_a_quadrature_in_the_plane(alpha: float) -> None:
    both = blocks()
    found = both.fractional(alpha) if alpha % 1 else float(both.whole_orders()[round(alpha) - 2])
    true = by_quadrature([(WIDTHS[0], 1.0), (WIDTHS[1], 1.0)], alpha)
    assert true <= found * (1 + 1e-9)  # an upper bound
    assert found == pytest.approx(true, rel=1e-5)


@pytest.mark.parametrize("block", [0, 1])
@pytest.mark.parametrize("share", [0.5, 0.8])
@pytest.mark.parametrize("alpha", [1.5, 2.6])
def test_a_block_that_is_spread_over_two_coordinates_is_not_worse(block: int, share: float, alpha: float) -> None:
    """The other block is left alone: by the proof it only shifts the logarithm of the likelihood ratio."""
    width = WIDTHS[block]
    spread = by_quadrature([(width, math.sqrt(share)), (width, math.sqrt(1 - share))], alpha)
    single = SampledStep("gaussian", SIGMA, width, 1.0, RATE).fractional(alpha)
    assert spread <= single
    assert blocks().fractional(alpha) > single


def test_the_table_has_the_order_that_the_proof_gives() -> None:
    document = json.loads(script.PATH.read_text(encoding="utf8"))
    for tau in script.WIDTHS:
        for p in (1.0, script.P):
            rows = {r["bound"]: r["epsilon"] for r in document["table"] if (r["tau"], r["p"]) == (tau, p)}
            assert rows["Gaussian"] < rows["mixing of coefficients"] < rows["mixing of weights"]
            assert rows["Gaussian"] == min(rows.values())
            assert rows["the coefficients alone, no mixing"] <= rows["mixing of weights"] < document["without_mixing"]
