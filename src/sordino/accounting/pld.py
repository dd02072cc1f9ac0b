"""ε at δ of a composition of releases from discrete privacy loss distributions; always an upper bound.

The composition is one inverse FFT of the product of the components' transforms. Plain FFT composition loses every
probability below 1e-16, so the distributions are first tilted by e^{θ·loss} (the Esscher transform) with the θ of the
Chernoff bound: then the losses near ε are the bulk, and δ = 1e-15 or 1e-100 is as precise as δ = 1e-5.

Every numerical error is turned into a larger ε:
- discretisation: Connect-the-Dots dominates the true pair (see pairs.py);
- truncated tails of one release count as an infinite loss;
- mass outside the FFT's window wraps around into it (only adds), and the mass beyond its right end, bounded by
  Chernoff, counts as an infinite loss;
- rounding of the FFT: a bound on its effect (Parseval, Cauchy–Schwarz) is added to every tail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.fft import irfft, next_fast_len, rfft
from scipy.optimize import minimize_scalar
from scipy.signal import lfilter

from sordino.accounting.pairs import MAX_CELLS, Array, GridTooLarge, Pmf

_LOG_CUT = math.log(1e-18)  # tilted mass that may lie outside the window
_UNIT = 2.0**-52
_CUMULANT_ERROR = 1e-12  # bound on the rounding of a cumulant: its exponents are below 1500
_MEAN_ERROR = 3e-10  # the same for a mean, relative to that of the absolute values: masses of epochs are within 1e-10
_LARGEST = 340.0  # largest exponent of a weight whose square is still a finite double
_STEEPEST = 700.0  # largest θ times the interval: with more all weight is on one loss, and exponents lose their digits


TAIL = 1e-6
"""Fraction of δ that truncated tails may use."""


def shared_interval(interval: float) -> float:
    """The next smaller power of √2: results that were computed for one δ can be reused for others."""
    return float(2.0 ** (math.floor(2 * math.log2(interval)) / 2))


def tail_of(delta: float, total: int) -> float:
    """The probability of one release that may be truncated, a power of 100 for the same reason."""
    return float(max(100.0 ** math.floor(math.log(max(delta * TAIL / total, 1e-300), 100)), 1e-300))


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

    def __init__(self, parts: Sequence[tuple[Pmf, int]], interval: float, cells: int = MAX_CELLS) -> None:
        self.parts = tuple(Repeated(pmf, count, interval) for pmf, count in parts)
        self.interval = interval
        self.cells = cells  # of the composed loss; more raise GridTooLarge
        self.count = sum(part.count for part in self.parts)
        self.drift = sum(part.count * part.pmf.drift for part in self.parts)  # bound on the error by rounding
        self.infinity = -math.expm1(sum(part.count * math.log1p(-part.pmf.infinity) for part in self.parts))

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

    def added_variance(self, tilt: float) -> float:
        """An upper bound on the variance that discretisation added to the composed loss, tilted by θ."""
        total = 0.0
        for part in self.parts:
            cumulant, _ = part.tilted(tilt)
            with np.errstate(over="ignore"):
                total += part.count * float(part.pmf.split @ np.exp(np.minimum(tilt * part.losses - cumulant, 700.0)))
        return total * self.interval**2

    def renyi(self, delta: float) -> tuple[float, float]:
        """(ε, θ) of the best Rényi bound of order θ + 1 (Canonne, Kamath, Steinke 2020, Prop. 12)."""
        _, variance = self.moments(0.0)
        if variance <= 0:
            return 0.0, 1.0
        guess = 0.5 * math.log(2 * max(-math.log(delta), 0.1) / variance)

        def bound(log_tilt: float) -> float:
            tilt = math.exp(log_tilt)
            tightening = tilt * math.log(tilt / (1 + tilt)) - math.log1p(tilt)
            return (self.cumulant(tilt) + tightening - math.log(delta)) / tilt

        found = minimize_scalar(
            bound, bounds=(guess - 7, guess + 5), method="bounded", options={"xatol": 0.05, "maxiter": 24}
        )
        return max(float(found.fun), 0.0), math.exp(float(found.x))

    def renyi_epsilon(self, delta: float) -> float:
        """The best Rényi bound with all errors added. Its effort does not depend on the number of releases.

        Raises:
            GridTooLarge: what was truncated is not small against δ.
        """
        if self.infinity > 2 * TAIL * delta:
            raise GridTooLarge("what was truncated exceeds δ")
        bound, tilt = self.renyi(delta * (1 - 2 * TAIL))
        return bound + self.drift + self.count * _CUMULANT_ERROR / tilt

    def moments_from_below(self, delta: float) -> float:
        """A lower bound on ε by Cantelli's inequality, for PLDs that the releases dominate.

        P[L > m − ks] ≥ k²/(1 + k²) for a loss with mean m and standard deviation s, and P[L > a] ≥ p implies that δ at
        ε < a is at least p·(1 − e^{ε−a}). Mass that is missing in the PLDs counts as a loss of −∞.
        """
        mean, variance = self.moments(0.0)
        size = sum(part.count * float(part.tilted(0.0)[1] @ np.abs(part.losses)) for part in self.parts)
        mean -= self.drift + _MEAN_ERROR * size
        there = min(self.cumulant(0.0), 0.0) - self.count * _CUMULANT_ERROR
        best = 0.0
        for k in np.geomspace(1e-3, 10.0, 41).tolist():
            share = math.exp(there) * k**2 / (1 + k**2) * (1 - 1e-9)
            if share > delta:
                best = max(best, mean - k * math.sqrt(variance) * (1 + 1e-9) + math.log1p(-delta / share))
        return best

    def epsilon(self, delta: float, tilt: float) -> float:
        """The smallest ε with hockey-stick divergence at most δ (∞ if the infinite mass exceeds δ).

        Every θ gives an upper bound. It is precise if the mean of the tilted losses is near ε, so θ is chosen for that.
        """
        if self.infinity >= delta:
            return math.inf
        best = math.inf
        for _ in range(6):
            best = min(best, self._epsilon(delta, tilt))
            aim = max(best, 0.0)
            if math.isinf(best):
                mean, variance = self.moments(tilt)
                aim = mean + 3 * math.sqrt(variance)
            moved = self.tilt_near(aim, tilt)
            if moved == tilt:
                break
            tilt = moved
        return best + self.drift if best > 0 else best

    def tilt_near(self, aim: float, tilt: float) -> float:
        """θ, or another one if the mean of the losses tilted by θ is more than two standard deviations from `aim`."""
        mean, variance = self.moments(tilt)
        return tilt if abs(mean - aim) <= 2 * math.sqrt(variance) else self._tilt_with_mean(aim, tilt)

    def _tilt_with_mean(self, aim: float, tilt: float) -> float:
        """A θ whose tilted mean is within a standard deviation of `aim` (the mean grows with θ).

        If no mean is that large, the steepest θ.
        """
        low, high, steepest = 0.0, math.inf, _STEEPEST / self.interval
        for _ in range(60):
            mean, variance = self.moments(tilt)
            if abs(mean - aim) <= 0.5 * math.sqrt(variance):
                break
            low, high = (tilt, high) if mean < aim else (low, tilt)
            if low >= steepest:
                return steepest
            tilt = min(2 * tilt, steepest) if math.isinf(high) else (low + high) / 2
        return tilt

    def _epsilon(self, delta: float, tilt: float) -> float:
        tail = self._tail(tilt)
        target = _safe_exp(math.log(delta) - tail.log_scale)
        beyond = _safe_exp(_LOG_CUT + tail.log_last) + _safe_exp(_log(self.infinity) - tail.log_scale)
        shape = tail.after + beyond + tail.rounding, tail.discounted
        met = (shape[0] - shape[1] <= target) & tail.known
        if not bool(met[-1]):
            return math.inf
        index = int(np.argmax(met))
        if index and not tail.known[index - 1]:
            return max((tail.first + index) * self.interval, 0.0)
        return self._solve(tail.first, index, shape, target)

    def epsilon_from_below(self, delta: float, tilt: float) -> float:
        """The largest grid point whose δ, with every error subtracted, still exceeds δ (0 if there is none)."""
        tail = self._tail(tilt)
        wrapped = 2 * math.exp(_LOG_CUT) * tail.untilt  # mass that may have wrapped around into the window
        surely = tail.after - tail.discounted - tail.rounding - wrapped
        above = np.flatnonzero((surely > _safe_exp(math.log(delta) - tail.log_scale)) & tail.known)
        return max(0.0, (tail.first + int(above[-1])) * self.interval - self.drift) if len(above) else 0.0

    def span(self, tilt: float) -> float:
        """The length of the range of composed losses outside of which their distribution, tilted by θ, has hardly any
        mass."""
        first, last = self._range(tilt, self.cumulant(tilt))
        return (last - first) * self.interval

    def _solve(self, first: int, index: int, shape: tuple[Array, Array], target: float) -> float:
        """Between grid points δ(ε) = A − e^{ε−l}·G exactly (Doroshenko et al., eq. for discrete PLDs)."""
        above, discounted = shape
        loss = (first + index) * self.interval
        if index == 0 or loss <= 0:
            return max(loss, 0.0)
        start = index - 1
        left = (first + start) * self.interval
        if discounted[start] <= 0:
            return loss
        inside = math.log((above[start] - target) / discounted[start])
        return max(min(left + inside, loss), 0.0)

    def _tail(self, tilt: float) -> _Tail:
        """For each grid point l_k: A_k = P[L > l_k] and G_k = E[e^{l_k−L}; L > l_k], both scaled by e^{θ·mean−K}."""
        cumulant = self.cumulant(tilt)
        mean, _ = self.moments(tilt)
        first, last = self._window(tilt, cumulant)
        probs, error = self._composed(tilt, first, last)
        losses = np.arange(first, last + 1, dtype=np.float64) * self.interval
        exponents = -tilt * (losses - mean)
        untilt: Array = np.exp(np.clip(exponents, -700.0, _LARGEST))
        # rounding errors e change δ(l_k) = Σ_{j>k} (1 − e^{l_k−l_j})·w_j·p_j by at most ‖e‖₂·√Σ (1 − e^{l_k−l_j})²·w_j²
        width = -np.expm1(losses - losses[-1])  # the largest 1 − e^{l_k−l_j}
        rounding = error * np.sqrt(width * np.maximum(_after(untilt**2) - self._discounted(untilt**2), 0.0))
        weights = probs * untilt
        return _Tail(
            first=first,
            after=_after(weights),
            discounted=self._discounted(weights),
            rounding=rounding,
            untilt=untilt,
            known=exponents <= _LARGEST,
            log_scale=cumulant - tilt * mean,
            log_last=-tilt * (float(losses[-1]) - mean),
        )

    def _discounted(self, values: Array) -> Array:
        """For each index k the sum of values_j·e^{l_k−l_j} over the later indices j."""
        decay = math.exp(-self.interval)
        result: Array = decay * lfilter([1.0], [1.0, -decay], np.concatenate([[0.0], values[:0:-1]]))[::-1]
        return result

    def _window(self, tilt: float, cumulant: float) -> tuple[int, int]:
        """The range of composed losses, if its number of cells is allowed."""
        first, last = self._range(tilt, cumulant)
        if last - first > self.cells:
            raise GridTooLarge(f"{last - first} cells for the composed loss")
        return first, last

    def _range(self, tilt: float, cumulant: float) -> tuple[int, int]:
        """Grid points such that at most e^{_LOG_CUT} of the tilted mass lies beyond each (Chernoff)."""
        _, variance = self.moments(tilt)
        step = math.sqrt(-2 * _LOG_CUT / max(variance, self.interval**2 / 4))
        low, high = -math.inf, math.inf
        for power in range(-16, 5):  # heavy tails need small orders
            s = step * 2 ** (power / 2)
            high = min(high, (self.cumulant(tilt + s) - cumulant - _LOG_CUT) / s)
            low = max(low, -(self.cumulant(tilt - s) - cumulant - _LOG_CUT) / s)
        first = max(math.floor(low / self.interval), sum(p.count * p.pmf.lower for p in self.parts))
        last = min(
            math.ceil(high / self.interval), sum(p.count * (p.pmf.lower + len(p.pmf.probs) - 1) for p in self.parts)
        )
        return first, max(last, first + 1)

    def _composed(self, tilt: float, first: int, last: int) -> tuple[Array, float]:
        """Tilted probabilities of the losses first·d … last·d, and a bound on the l2 norm of their rounding errors.

        The transforms are of w − (largest atom), whose l1 norm m is small if most steps do not involve the record. The
        exponent Σ T·log(1 + X) then has an error of about T·m rounding units instead of T.
        """
        size = next_fast_len(last - first + 1, real=True)
        exponent = np.zeros(size // 2 + 1, dtype=np.complex128)
        offset, units = 0, 4.0
        for part in self.parts:
            _, weights = part.tilted(tilt)
            top = int(weights.argmax())
            moved = float(weights[:top].sum() + weights[top + 1 :].sum())
            padded = np.zeros(-(-len(weights) // size) * size)
            padded[: len(weights)] = weights
            folded = np.roll(padded.reshape(-1, size).sum(axis=0), -top)
            folded[0] = math.fsum([folded[0], -weights[top], -moved])  # the total becomes 0
            with np.errstate(divide="ignore", invalid="ignore"):  # a zero of the transform: its power is 0
                exponent += part.count * np.log1p(rfft(folded))
            offset += part.count * (part.pmf.lower + top)
            units += part.count * 2 * moved * (math.log2(size) + 6)
        product = np.exp(exponent)
        probs = np.roll(irfft(product, size), (offset - first) % size)[: last - first + 1]
        norm = math.sqrt(2 * float(np.vdot(product, product).real) / size)  # Parseval: at least ‖probs‖₂
        return np.maximum(probs, 0.0), _UNIT * units * norm


@dataclass(frozen=True)
class _Tail:
    """Tails of the composed loss at the grid points from `first` on, divided by e^{log_scale}.

    known: where no mass beyond the point overflowed a double; elsewhere the tails are underestimated.
    """

    first: int
    after: Array
    discounted: Array
    rounding: Array
    untilt: Array
    known: npt.NDArray[np.bool_]
    log_scale: float
    log_last: float


def _after(values: Array) -> Array:
    """For each index the sum of the values at later indices."""
    return np.concatenate([np.cumsum(values[:0:-1])[::-1], [0.0]])


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _safe_exp(value: float) -> float:
    return math.exp(min(value, 700.0))
