"""Rényi divergence of one Poisson-sampled step of ModelMix, at integer and fractional orders, from moments.

With R = P_v/P₀ the likelihood ratio of the worst vector v that clipping allows, (α−1)·ρ(α) is
log E_{P₀}[(1−q+qR)^α] (the other direction is not larger: Mironov, Talwar & Zhang 2019, Thm 5). R is a product over
coordinates, so its moments are products; an integer order needs finitely many of them, a fractional one an integral
over complex ones, which converges so fast that the distribution of R itself is never needed.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from scipy.special import gammaln, loggamma, rgamma

from sordino.methods.modelmix.mixture import SHIFTS, Array, Coordinate, excess, margin, nodes, size

MOST_ORDERS = 256  # integer orders
_SAFE = 1 + 1e-8  # bound on the relative error of moments by rounding and quadrature; `quadrature_error` verifies it
_WIDEST, _NARROWEST = 1e6, 1e-3  # range of widths of the uniform, in noise scales, that doubles resolve


class SampledStep:
    """One kind of step: the moments of the likelihood ratio R of the worst vector that clipping allows."""

    def __init__(self, noise: Literal["gaussian", "laplace"], sigma: float, width: float, p: float, rate: float):
        self.rate = rate
        # the l∞ bound may be relaxed, so that shifts are large enough for doubles
        p = min(p, max(1.0, (1e3 / sigma) ** 2))
        self.shift = 1 / (sigma * math.sqrt(p))
        self.noise, self.p = noise, p
        relative = width / sigma
        self.coordinate = Coordinate(noise, min(relative, _WIDEST)) if relative >= _NARROWEST else None
        # e^{αλ}·f must stay in the range of doubles, at tilts α·shift up to about 20
        if self.coordinate is None and noise == "gaussian":
            self.top = MOST_ORDERS
        else:
            self.top = int(min(MOST_ORDERS, 18 / self.shift)) if 1e-4 < self.shift <= 9 else 0

    def verified_levels(self, wanted: int) -> tuple[int, float]:
        """(the number n of criteria S_0 … S_{n−1} that hold, n ≤ wanted; the smallest margin among them).

        Fractional orders below n + 1 may be used. Without a uniform the divergence depends on the length of the vector
        only.
        """
        if self.coordinate is None and self.noise == "gaussian":
            return wanted, math.inf
        smallest = math.inf
        coordinate = self.coordinate or Coordinate(self.noise, _NARROWEST)
        for level in range(wanted):
            found = margin(coordinate, self.shift, level) if (level + 2) * self.shift <= 18 else -1.0
            if found <= 0:
                return level, smallest
            smallest = min(smallest, found)
        return wanted, smallest

    def quadrature_error(self, order: float) -> float:
        """Relative change of the moments up to `order` when every panel is halved."""
        if self.coordinate is None:
            return 0.0
        orders = np.array([1.2, 2.0, max(2.0, order)])
        once, twice = (excess(nodes(self.coordinate, self.shift, max(2.0, order), f), orders) for f in (1, 2))
        return float(np.max(np.abs(once / twice - 1)))

    def log_moment(self, u: Any) -> Any:
        """log E_{P₀}[R^u] if ⌊p⌋ coordinates are shifted by c/√p and one by the remainder; u real or complex."""
        whole = math.floor(self.p * (1 + 1e-12))
        total = whole * self._log_moment(self.shift, u)
        rest = math.sqrt(max(self.p - whole, 0.0)) * self.shift
        return total + self._log_moment(rest, u) if rest > 1e-6 * self.shift else total

    def _log_moment(self, shift: float, u: Any) -> Any:
        """log M_v(u) of one coordinate; in closed form if there is no uniform."""
        if self.coordinate is not None:
            return np.log1p(excess(nodes(self.coordinate, shift, math.ceil(float(np.max(np.real(u))))), u))
        if self.noise == "gaussian":
            return u * (u - 1) * shift**2 / 2
        return np.log1p((u * np.expm1((u - 1) * shift) + (u - 1) * np.expm1(-u * shift)) / (2 * u - 1))

    def worst(self, orders: Array) -> Array:
        """The largest log E_{P₀}[R^k] over all vectors, for real orders; ∞ if it exceeds the doubles.

        Σ_j g(x_j) ≤ budget · sup g(x)/x with x = size(v), v up to the largest shift: g need not be convex, and p may be
        any real number. If g(x)/x is largest at the largest shift (it always was; Appendix C of Xiao et al. 2022
        asserts more, that g is convex) this is Cor. 4.1; otherwise the supremum is used.
        """
        kept = np.minimum(orders, self.top)
        shifts = [float(v) for v in self.shift * np.array(SHIFTS)]
        slopes = [self._log_moment(v, kept) / size(self.noise, v) for v in shifts]
        budget = self.p * size(self.noise, self.shift)
        return np.where(orders <= self.top, np.max(slopes, axis=0) * (budget * _SAFE), np.inf)

    def whole_orders(self) -> Array:
        """(α−1)·ρ(α) at α = 2 … top: log Σ_k C(α,k)(1−q)^{α−k}q^k·A_k, as log1p of the sum of A_k − 1 (Cor. 4.1)."""
        alphas = np.arange(2.0, self.top + 1)
        moments = self.worst(alphas)
        if self.rate == 1:
            return moments
        logs = moments + np.log(-np.expm1(-moments))  # log(A_k − 1), k = 2 … top
        k = alphas[None, :]
        binomial = gammaln(alphas + 1)[:, None] - gammaln(k + 1) - gammaln(np.maximum(alphas[:, None] - k, 0) + 1)
        log_q, log_rest = math.log(self.rate), math.log1p(-self.rate)
        terms = np.where(k <= alphas[:, None], binomial + k * log_q + (alphas[:, None] - k) * log_rest + logs, -np.inf)
        return np.asarray(np.logaddexp(0.0, np.logaddexp.reduce(terms, axis=1)) * _SAFE)

    def fractional(self, alpha: float) -> float:
        """(α−1)·ρ(α) = log E_{P₀}[(1−q+qR)^α] for 1 < α < top, by Mellin inversion; the error bound is added.

        (1+z)^α is Σ_{k≤n} C(α,k)z^k plus (1/2πi)∫ Γ(−u)Γ(u−α)/Γ(−α)·z^u du along Re u = c, n < c < n+1, where
        n = ⌊α⌋, and plus z^α when c < α. With z = Rq/(1−q) and R = 1 subtracted everything becomes a moment excess.
        """
        if self.rate == 1:
            return float(self.worst(np.array([alpha]))[0])
        n = math.floor(alpha)
        if not float(np.real(self.log_moment(np.array([n + 1.0]))[0])) < 600:
            return math.inf  # exceeds the range of doubles
        log_z = math.log(self.rate) - math.log1p(-self.rate)
        powers = [float(k) for k in range(2, n + 1)] + ([alpha] if alpha - n >= 0.5 else [])
        signs = [math.exp(gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)) for k in powers]
        moments = self.log_moment(np.array(powers)) if powers else np.zeros(0)
        total = float(np.sum(np.array(signs) * np.exp(log_z * np.array(powers)) * np.expm1(moments)))
        low, high = (n, alpha) if alpha - n >= 0.5 else (alpha, n + 1)
        value, error = self._contour(alpha, log_z, (low + high) / 2, (high - low) / 2)
        return math.log1p(max(total + value + error, 0.0) * _SAFE * math.exp(alpha * math.log1p(-self.rate)))

    def _contour(self, alpha: float, log_z: float, centre: float, half: float) -> tuple[float, float]:
        """The integral by the trapezoidal rule, and a bound on its error.

        The integrand is analytic for |Re u − c| < half, so the error of the rule with step h is at most the integral of
        its modulus over the two lines at distance a, divided by e^{2πa/h} − 1 (Trefethen & Weideman 2014, Thm 5.1).
        There |E R^u − 1| ≤ |u(u−1)|/(x(x−1))·(E R^x − 1) with x = Re u > 1 (Taylor's remainder).
        """
        inside = 0.8 * half
        step = 2 * math.pi * inside / 25
        height = np.arange(0.0, 10.0, step)

        def kernel(u: Any) -> Any:
            return np.exp(loggamma(-u) + loggamma(u - alpha)) * float(rgamma(-alpha))

        u = centre + 1j * height
        terms = kernel(u) * np.exp(log_z * u) * np.expm1(self.log_moment(u))
        terms[0] /= 2
        value = step / math.pi * float(terms.real.sum())
        error = 0.0
        for x, weight in ((centre - inside, math.exp(-25)), (centre + inside, math.exp(-25)), (centre, 1e-14)):
            line = x + 1j * height
            size = np.abs(kernel(line) * line * (line - 1)) / (x * (x - 1))
            mass = step / math.pi * float(size.sum()) * weight
            tail = float(size[-1]) / 2 if x == centre else 0.0  # e^{−π·Im u}: the truncated part
            error += (mass + tail) * math.exp(log_z * x) * float(np.expm1(self.log_moment(np.array([x]))[0].real))
        return value, error


def tight(alpha: float, total: float, delta: float) -> float:
    """ε from total = (α−1)·ρ(α): Canonne, Kamath & Steinke 2020, Prop. 12."""
    return float((total - math.log(delta) - math.log(alpha)) / (alpha - 1) + math.log1p(-1 / alpha))


def classic(alpha: float, total: float, delta: float) -> float:
    """ε = ρ + log(1/δ)/(α−1): Mironov 2017, Prop. 3, as used by Xiao et al. 2022 (their Thm 2.2)."""
    return float((total - math.log(delta)) / (alpha - 1))
