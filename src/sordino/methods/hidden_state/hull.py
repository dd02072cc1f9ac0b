"""The convex-hull bound: the smallest energy Σ a_k²/s_k² of shifts that cancel all disparities by the last step.

z_{k+1} = c_k·z_k + d_k − a_k with z₀ = z_T = 0 and a, z ≥ 0. With w_k = Π_{j>k} c_j, I_k = Σ_{i≤k} w_i·d_i and
u_k = Σ_{i≤k} (w_i·s_i)² the smallest energy is Σ (ΔI)²/Δu over the edges of the greatest convex minorant of (0, 0),
(u_k, I_k) (docs/guarantees/hidden_state.md, section 3). The minorant is found by pooling adjacent blocks.

Scale. The weights w underflow in long runs, so they are never stored. A *block* of consecutive steps has
    shrink  Π c_k of its steps
    moved   ΔI in units of its own last weight
    spread  Δu in units of its own last weight, squared: at least the last step's own variance, so never 0
Blocks compose without w, their energies do not depend on the scale, and their slopes are compared using `shrink` only.
What a product loses by underflow is below 10⁻³⁰⁰; 10⁻¹⁵⁰ is added to the energy for it.

Rounding. Two blocks are pooled only if their slopes are in the wrong order by more than the accumulated rounding; each
such pooling keeps the shifts feasible, and feasible shifts give a valid bound even if they are not the best.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_UNIT = 2.0**-53
_UNDERFLOW = 1e-150  # a block of smaller energy may have underflowed; the noise is within 10⁻⁶⁰ … 1 (HiddenRun)


def minorant_energy(shrink: Array, moved: Array, spread: Array, steps: int | None = None) -> float:
    """An upper bound on Σ (ΔI)²/Δu over the edges of the minorant of consecutive blocks of `steps` steps in total.

    In the worst case a `shrink` has one rounding per step, a `moved` 3 and a `spread` 5; a comparison multiplies them
    to fewer than 20 per step, an energy to 11.
    """
    margin = 20 * ((len(moved) if steps is None else steps) + 16) * _UNIT
    pooled: list[tuple[float, float, float]] = []
    for r, i, v in zip(shrink.tolist(), moved.tolist(), spread.tolist(), strict=True):
        # slopes I/(u·w): the earlier block's w is r times the later one's
        while pooled and pooled[-1][1] * v > r * i * pooled[-1][2] * (1 + margin):
            before = pooled.pop()
            r, i, v = before[0] * r, before[1] * r + i, before[2] * r * r + v
        pooled.append((r, i, v))
    energy = math.fsum(i * i / v for _, i, v in pooled) * (1 + margin)
    return energy + _UNDERFLOW if moved.any() else 0.0


def windows(shrink: Array, variances: Array, length: int) -> tuple[Array, Array]:
    """(shrink, spread) of the blocks of `length` steps from each step on, truncated at the end. O(T·log length)."""
    total_shrink, total_spread = np.ones_like(shrink), np.zeros_like(shrink)
    power_shrink, power_spread = shrink, variances
    done, size = 0, 1
    while length:
        if length & 1:
            later = _shift(power_shrink, done, 1.0)
            total_spread = total_spread * later**2 + _shift(power_spread, done, 0.0)
            total_shrink = total_shrink * later
            done += size
        later = _shift(power_shrink, size, 1.0)
        power_spread = power_spread * later**2 + _shift(power_spread, size, 0.0)
        power_shrink = power_shrink * later
        size, length = 2 * size, length >> 1
    return total_shrink, total_spread


def position_energies(shrink: Array, disparities: Array, variances: Array, period: int) -> Array:
    """The smallest energy for a record that is used in steps j, j + period, …, for each j < period.

    Between two uses there is no disparity, so the slope is 0 and those steps always pool with the use before them: one
    block per use. The steps before the first use have no cost.
    """
    rest_shrink, rest_spread = windows(shrink, variances, period - 1)
    rest_shrink, rest_spread = _shift(rest_shrink, 1, 1.0), _shift(rest_spread, 1, 0.0)
    moved = disparities * rest_shrink
    spread = variances * rest_shrink**2 + rest_spread
    block_shrink = shrink * rest_shrink
    used = min(period, len(shrink))
    energies = [
        minorant_energy(block_shrink[j::period], moved[j::period], spread[j::period], len(shrink)) for j in range(used)
    ]
    return np.array(energies + [0.0] * (period - used))


def _shift(values: Array, by: int, fill: float) -> Array:
    """values[k + by] at k, `fill` beyond the end."""
    by = min(by, len(values))
    return np.concatenate([values[by:], np.full(by, fill)])
