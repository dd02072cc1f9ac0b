"""ε at δ of a composition of releases, from discrete privacy loss distributions, always from above.

The composition is one inverse FFT of the product of the components' transforms. Plain FFT composition loses every
probability below 1e-16, so the distributions are first tilted by e^{θ·loss} (the Esscher transform) with the θ of the
Chernoff bound: then the losses near ε are the bulk, and δ = 1e-15 or 1e-100 is as precise as δ = 1e-5.

Every numerical error is put on the side of a larger ε:
- discretisation: Connect-the-Dots dominates the true pair (see pairs.py);
- tails of one release that are cut off count as an infinite loss;
- mass outside of the FFT's window wraps around into it (only adds), and the mass beyond its right end, bounded by
  Chernoff, counts as an infinite loss;
- rounding of the FFT: a bound on the error of each cell is added to each cell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter

from sordino.accounting.pairs import MAX_CELLS, Array, GridTooLarge, Pmf

_LOG_CUT = math.log(1e-18)  # tilted mass that may lie outside of the window
_ROUNDING = 1e-15


class Repeated:
    """`count` releases with the same privacy loss distribution."""

    def __init__(self, pmf: Pmf, count: int, interval: float) -> None:
        self.pmf = pmf
        self.count = count
        self.losses: Array = np.arange(pmf.lower, pmf.lower + len(pmf.probs), dtype=np.float64) * interval
        with np.errstate(divide="ignore"):
            self.logs: Array = np.log(pmf.probs)

    def tilted(self, tilt: float) -> tuple[float, Array]:
        """log E[e^{θL}; L finite] of one release, and the distribution tilted by θ."""
        logs = self.logs + tilt * self.losses
        top = float(logs.max())
        weights = np.exp(logs - top)
        total = float(weights.sum())
        return top + math.log(total), weights / total


class Composition:
    """Releases on a common grid of losses."""

    def __init__(self, parts: Sequence[Repeated], interval: float) -> None:
        self.parts = tuple(parts)
        self.interval = interval
        self.count = sum(part.count for part in parts)
        self.infinity = -math.expm1(sum(part.count * math.log1p(-part.pmf.infinity) for part in parts))

    def cumulant(self, tilt: float) -> float:
        """K(θ) = log E[e^{θL}] of the composed loss L."""
        return sum(part.count * part.tilted(tilt)[0] for part in self.parts)

    def moments(self, tilt: float) -> tuple[float, float]:
        """Mean and variance of the composed loss, tilted by θ."""
        mean = variance = 0.0
        for part in self.parts:
            _, weights = part.tilted(tilt)
            centre = float(weights @ part.losses)
            mean += part.count * centre
            variance += part.count * float(weights @ (part.losses - centre) ** 2)
        return mean, variance

    def chernoff(self, delta: float) -> tuple[float, float]:
        """(ε, θ) of the best bound P[L ≥ ε] ≤ e^{K(θ)−θε} = δ."""
        log_delta = -math.log(delta)
        _, variance = self.moments(0.0)
        if variance <= 0:
            return 0.0, 1.0
        guess = math.log(math.sqrt(2 * log_delta / variance))

        def bound(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            return (self.cumulant(tilt) + log_delta) / tilt

        found = minimize_scalar(
            bound, bounds=(guess - 6, guess + 4), method="bounded", options={"xatol": 0.02, "maxiter": 40}
        )
        return max(float(found.fun), 0.0), math.exp(float(found.x))

    def epsilon(self, delta: float, tilt: float) -> float:
        """The smallest ε with hockey-stick divergence at most δ (∞ when the infinite mass exceeds δ)."""
        if self.infinity >= delta:
            return math.inf
        for _ in range(12):
            first, tail, shape = self._tilted_tail(tilt, delta)
            index = int(np.argmax(shape[0] - shape[1] <= tail.target))
            reached = bool(shape[0][index] - shape[1][index] <= tail.target)
            if not reached:
                return math.inf
            if index == 0 and first > 0:
                tilt /= 2  # the answer lies left of the window
                continue
            return self._solve(first, index, shape, tail.target)
        return math.inf

    def _solve(self, first: int, index: int, shape: tuple[Array, Array], target: float) -> float:
        """Between grid points δ(ε) = A − e^{ε−l}·G exactly (Doroshenko et al., eq. for discrete PLDs)."""
        above, discounted = shape
        loss = (first + index) * self.interval
        if index == 0 or loss <= 0:
            return max(loss, 0.0)
        start = index - 1
        left = (first + start) * self.interval
        inside = math.log((above[start] - target) / discounted[start])
        return max(min(left + inside, loss), 0.0)

    def _tilted_tail(self, tilt: float, delta: float) -> tuple[int, _Tail, tuple[Array, Array]]:
        """For each grid point l_k: A_k = P[L > l_k] and G_k = E[e^{l_k−L}; L > l_k], both scaled by e^{θl−K}."""
        cumulant = self.cumulant(tilt)
        mean, _ = self.moments(tilt)
        first, last = self._window(tilt, cumulant)
        probs = self._composed(tilt, first, last)
        losses = (first + np.arange(len(probs))) * self.interval
        log_scale = cumulant - tilt * mean  # the scale of the untilted probabilities
        weights = probs * np.exp(np.clip(-tilt * (losses - mean), -745.0, 700.0))
        beyond = math.exp(_LOG_CUT - tilt * (losses[-1] - mean)) + _safe_exp(_log(self.infinity) - log_scale)
        decay = math.exp(-self.interval)
        reversed_weights = weights[::-1]
        tail = np.concatenate([[0.0], np.cumsum(reversed_weights)[:-1]])[::-1] + beyond
        discounted = decay * lfilter([1.0], [1.0, -decay], np.concatenate([[0.0], reversed_weights[:-1]]))[::-1]
        return first, _Tail(_safe_exp(math.log(delta) - log_scale)), (tail, discounted)

    def _window(self, tilt: float, cumulant: float) -> tuple[int, int]:
        """Grid points between which all but e^{_LOG_CUT} of the tilted mass lies on either side (Chernoff)."""
        _, variance = self.moments(tilt)
        step = math.sqrt(-2 * _LOG_CUT / max(variance, self.interval**2 / 4))
        low, high = -math.inf, math.inf
        for factor in (0.125, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0):
            s = step * factor
            high = min(high, (self.cumulant(tilt + s) - cumulant - _LOG_CUT) / s)
            low = max(low, -(self.cumulant(tilt - s) - cumulant - _LOG_CUT) / s)
        first = max(math.floor(low / self.interval), sum(p.count * p.pmf.lower for p in self.parts))
        last = min(
            math.ceil(high / self.interval), sum(p.count * (p.pmf.lower + len(p.pmf.probs) - 1) for p in self.parts)
        )
        if last - first > MAX_CELLS:
            raise GridTooLarge(f"{last - first} cells for the composed loss")
        return first, max(last, first + 1)

    def _composed(self, tilt: float, first: int, last: int) -> Array:
        """Tilted probabilities of the losses first·d … last·d, each with the FFT's rounding bound added."""
        size = next_fast_len(last - first + 1, real=True)
        product = np.ones(size // 2 + 1, dtype=np.complex128)
        offset = 0
        for part in self.parts:
            _, weights = part.tilted(tilt)
            padded = np.zeros(-(-len(weights) // size) * size)
            padded[: len(weights)] = weights
            spectrum = rfft(padded.reshape(-1, size).sum(axis=0))
            product *= spectrum**part.count
            offset += part.count * part.pmf.lower
        probs = np.roll(irfft(product, size), (offset - first) % size)[: last - first + 1]
        error = _ROUNDING * math.log2(size + 2) * (1 + self.count) * 2 * float(np.abs(product).mean())
        result: Array = np.maximum(probs, 0.0) + error
        return result


@dataclass(frozen=True)
class _Tail:
    target: float


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _safe_exp(value: float) -> float:
    return math.exp(min(value, 700.0))
