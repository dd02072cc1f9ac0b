"""Fresh, hidden batches: the distribution of the energy μ² of a record that is used in random steps.

Given the steps that use the record the pair is μ-GDP, and the distribution of these steps does not depend on the
record's value, so δ(ε) ≤ E δ_μ(ε). Instead of the smallest energy of each pattern (there are too many) we use feasible
shifts whose energy V is a Markov chain (docs/guarantees/hidden_state.md, section 5) with two moves:

    open    a use of the record in step i costs e(i, a) when it is spread over that step and the a after it
    scale   in a step without it, all earlier shifts shrink together:  V ← V·r_k,  r_k = c_k²·u_{k−1}/u_k
            (u_k: the variance of all noise so far)

All moves are affine in V, so a mean-preserving split between grid points can only increase E f(V) for convex f: see
`GaussianMixture.spread`. Masses are sums of products of non-negative numbers; their rounding is added at the end.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sordino.methods.hidden_state.gaussian_mixture import GaussianMixture
from sordino.methods.hidden_state.hull import position_energies, windows

Array = npt.NDArray[np.float64]

CELLS = 1024
BLOCKS = (0, 1, 2, 3, 4, 6, 9, 14, 24, 48)
WORK = 200_000  # limit on the steps of a chain times its block: long chains use short blocks only
LONGEST_CHAIN = 40_000  # steps that are followed; the record counts as used in every earlier step
_FORGOTTEN = 1e-9


def without_replacement_law(shrink: Array, disparities: Array, variances: Array, rate: float) -> list[GaussianMixture]:
    """Mixtures that each bound δ for a record that every step uses with probability `rate`, independently."""
    if rate >= 1:
        return [GaussianMixture(np.ones(1), position_energies(shrink, disparities, variances, 1))]
    decay = _decays(shrink, variances)
    begin, start = _begin(shrink, disparities, variances, decay, rate)
    costs = _block_costs(shrink[begin:], disparities[begin:], variances[begin:], max(BLOCKS))
    top = _likely_peak(start, costs[:, 0], decay[begin:], rate)
    longest = min(max(1.0, 0.6 / rate), WORK / len(costs))
    blocks = [block for block in BLOCKS if block <= max(1.0, longest)]
    return [_coins(costs[:, : block + 1], decay[begin:], rate, start, top) for block in blocks]


def _coins(costs: Array, decay: Array, rate: float, start: float, top: float) -> GaussianMixture:
    """The chain in which a use stays open for costs.shape[1] − 1 steps; then everything is scaled until the next use.

    With 0 steps it is the chain behind Thm 5.3 of Ye & Shokri; every number is valid, and the caller uses the best.
    """
    block = costs.shape[1] - 1
    grid = _Grid(top)
    fresh = np.zeros((block + 1, CELLS))  # [a]: mass over V_old if the record was used a steps ago
    scaled = grid.at(start)  # mass over V if everything is scaled down
    for k in range(len(costs)):
        closed = grid.shifted(fresh[block], costs[k - 1 - block, block]) if k > block else fresh[block]
        used = scaled + closed
        for a in range(min(block, k)):
            used = used + grid.shifted(fresh[a], costs[k - 1 - a, a])
        scaled = (1 - rate) * grid.multiplied(scaled + closed, float(decay[k]))
        fresh[1:] = (1 - rate) * fresh[:-1]
        fresh[0] = rate * used
    ages = range(min(block + 1, len(costs)))
    parts = [(scaled, 0.0), *((fresh[a], float(costs[-1 - a, a])) for a in ages)]
    return grid.mixture(parts, moves=len(costs) * (block + 4))


def fresh_shuffle_law(
    shrink: Array, disparities: Array, variances: Array, period: int
) -> tuple[GaussianMixture, float]:
    """(distribution, worst V) for a record that is used once every `period` steps, in a step drawn in each epoch.

    In each epoch V is scaled in the steps before the use. The use then either stays open to the end of the epoch, or is
    counted at once and scaled with the rest; both are valid, and for each step the one with the smaller mean of V is
    used. A partial last epoch may not reach the record.
    """
    pad = -len(shrink) % period
    decay = np.append(_decays(shrink, variances), np.ones(pad)).reshape(-1, period)
    before = np.cumprod(np.hstack([np.ones((len(decay), 1)), decay[:, :-1]]), axis=1)
    after = np.cumprod(np.hstack([np.ones((len(decay), 1)), decay[:, :0:-1]]), axis=1)[:, ::-1]
    opened = np.append(_costs_to_epoch_end(shrink, disparities, variances, period), np.zeros(pad)).reshape(-1, period)
    at_once = np.append(disparities**2 / variances, np.zeros(pad)).reshape(-1, period) * after
    followed = min(len(decay), max(2, LONGEST_CHAIN // period))
    mean = worst = top = start = 0.0
    moves = []
    for e in range(len(decay)):
        if e == len(decay) - followed:
            start = top = mean = worst
        better = before[e] * mean + opened[e] <= before[e] * after[e] * mean + at_once[e]
        factor, offset = before[e] * np.where(better, 1.0, after[e]), np.where(better, opened[e], at_once[e])
        mean = float(np.mean(factor * mean + offset))
        top = max(top, float(np.max(factor * top + offset)))
        worst = float(np.max(np.minimum(before[e] * worst + opened[e], before[e] * after[e] * worst + at_once[e])))
        moves.append((factor, offset))
    grid = _Grid(top)
    mass = grid.at(start)
    for factor, offset in moves[-followed:]:
        moved = [
            grid.shifted(grid.multiplied(mass, r), v) for r, v in zip(factor.tolist(), offset.tolist(), strict=True)
        ]
        mass = np.sum(moved, axis=0) / period
    return grid.mixture([(mass, 0.0)], moves=followed * (period + 4)), worst * (1 + 1e-9)


def _costs_to_epoch_end(shrink: Array, disparities: Array, variances: Array, period: int) -> Array:
    """e of a use in each step, spread over the rest of its epoch."""
    costs = np.empty_like(shrink)
    later_shrink, later_spread = 1.0, 0.0
    for k in range(len(shrink) - 1, -1, -1):
        if (k + 1) % period == 0:
            later_shrink, later_spread = 1.0, 0.0
        later_spread += variances[k] * later_shrink**2
        costs[k] = (disparities[k] * later_shrink) ** 2 / later_spread
        later_shrink *= shrink[k]
    return costs * (1 + 8 * (period + 8) * 2.0**-53)


def _decays(shrink: Array, variances: Array) -> Array:
    """r_k = c_k²·u_{k−1}/u_k with u_k = c_k²·u_{k−1} + s_k², rounded up."""
    decays = np.empty_like(shrink)
    total = 0.0
    for k, (c, v) in enumerate(zip(shrink.tolist(), variances.tolist(), strict=True)):
        kept = c * c * total
        total = kept + v
        decays[k] = kept / total
    # u has a relative error below 4 roundings for each step that contributes to it, at most all steps of the run
    return np.minimum(decays * (1 + 8 * len(shrink) * 2.0**-53), 1.0)


def _begin(shrink: Array, disparities: Array, variances: Array, decay: Array, rate: float) -> tuple[int, float]:
    """(first step to follow, V before it). For earlier steps V has decayed, or counts as the worst case."""
    steps = len(shrink)
    lasting = np.cumsum(np.log(rate + (1 - rate) * np.maximum(decay, 1e-300))[::-1])  # log of the remaining mean of V
    horizon = int(np.searchsorted(-lasting, -math.log(_FORGOTTEN))) + 1
    begin = steps - min(steps, horizon, LONGEST_CHAIN)
    if begin == 0:
        return 0, 0.0
    return begin, float(position_energies(shrink[:begin], disparities[:begin], variances[:begin], 1)[0])


def _block_costs(shrink: Array, disparities: Array, variances: Array, block: int) -> Array:
    """e(i, a): the energy of a use in step i, spread over it and the a steps after it. (T, block + 1)"""
    costs = np.empty((len(shrink), block + 1))
    for a in range(block + 1):
        later_shrink, later_spread = windows(shrink, variances, a)
        later_shrink = np.append(later_shrink[1:], 1.0)
        later_spread = np.append(later_spread[1:], 0.0)
        costs[:, a] = (disparities * later_shrink) ** 2 / (variances * later_shrink**2 + later_spread)
    return costs * (1 + 1e-13)  # windows of at most 2⁶ steps: below 2⁶ roundings


def _likely_peak(start: float, costs: Array, decay: Array, rate: float) -> float:
    """The end of the grid: ten deviations above the mean of V with block = 0. What lies beyond is added to `excess`."""
    mean, variance, peak = start, 0.0, start
    for cost, r in zip(costs.tolist(), decay.tolist(), strict=True):
        second = rate * ((mean + cost) ** 2 + variance) + (1 - rate) * r * r * (mean**2 + variance)
        mean = rate * (mean + cost) + (1 - rate) * r * mean
        variance = max(0.0, second - mean**2)
        peak = max(peak, mean + 10 * math.sqrt(variance))
    return peak + 4 * float(costs.max())


class _Grid:
    """Masses over V on an even grid from 0 to `top`; every move splits between neighbours and preserves the mean.

    What would exceed the top stays there, and the mean that this loses is added to `excess`.
    """

    def __init__(self, top: float) -> None:
        self.step = top / (CELLS - 1)
        self.excess = 0.0
        self._points = np.arange(CELLS, dtype=np.float64)
        self._split: dict[float, tuple[npt.NDArray[np.intp], Array]] = {}

    def at(self, value: float) -> Array:
        mass = np.zeros(CELLS)
        mass[0] = 1.0
        return self.shifted(mass, value)

    def shifted(self, mass: Array, by: float) -> Array:
        whole, part = divmod(by / self.step, 1.0)
        i = min(int(whole), CELLS - 1)
        moved = np.zeros(CELLS)
        moved[i:] = (1 - part) * mass[: CELLS - i]
        moved[i + 1 :] += part * mass[: CELLS - i - 1]
        over = mass[CELLS - i - 1 :]
        lost = float(over.sum())
        if lost > 0:  # the last cell stays within the grid only if it was not moved at all
            target = self._points[CELLS - i - 1 :] + by / self.step - (CELLS - 1)
            self.excess += float(over @ np.maximum(target, 0.0)) * self.step
            moved[-1] = float(mass.sum()) - float(moved[:-1].sum())
        return moved

    def multiplied(self, mass: Array, by: float) -> Array:
        if by not in self._split:
            if len(self._split) > 64:
                self._split.clear()
            target = self._points * min(by, 1.0)
            low = np.minimum(target.astype(np.intp), CELLS - 2)
            self._split[by] = low, target - low
        low, part = self._split[by]
        kept = np.bincount(low, mass * (1 - part), CELLS)
        return np.asarray(kept + np.bincount(low + 1, mass * part, CELLS), dtype=np.float64)

    def mixture(self, parts: list[tuple[Array, float]], *, moves: int) -> GaussianMixture:
        """The distribution of V: masses, each with an amount to add to V. `moves` counts the roundings of a mass."""
        values = self._points * self.step
        weight = np.concatenate([mass for mass, _ in parts])
        square = np.concatenate([values + raised for _, raised in parts])
        kept = weight > 0
        grown = 1 + 16 * (moves + 16) * 2.0**-53
        return GaussianMixture(weight[kept] * grown, square[kept] * grown, True, self.excess * grown)
