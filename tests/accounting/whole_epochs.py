"""δ(ε) of epochs of random allocation by contour integrals: a reference for every number of epochs.

It shares nothing with the accountant: no convex order, no grid of losses, no composition. With K(z) = log E e^{zL} of
one epoch, δ(ε) is an integral of e^{nK(z) − zε} along a line in the complex plane (see contour.py). L = log M, and

- t = 2 and 3 batches: log M = X + ℓ(Y) with the mean X of all log Lᵢ, a normal variable, and t − 1 others, independent
  of it; ℓ(Y) is the logarithm of the mean of their exponentials, and Y is summed over by a trapezoidal rule;
- any t: by Mellin transforms, E S^{−v} = ∫u^{v−1}·φ(u)^t du / Γ(v) for a sum S of t copies with φ(u) = E e^{−uL}.
  With φ^t derived once that gives E_Q M^{−z} (adding the record), and derived twice E_Q M^{1+z} for Re z < 1 (removing
  it): the orders that matter if there are many epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from contour import TooHard
from scipy.optimize import minimize_scalar
from scipy.special import loggamma

# (θ, imaginary parts) ↦ K(θ) and K(θ + is) − K(θ)
Cumulant = Callable[[float, Any], tuple[float, Any]]


def few_batches(batches: int, sigma: float, *, removing: bool, fine: float = 1.0) -> Cumulant:
    """K of one epoch of two or three batches."""
    s = 1 / sigma

    def found(theta: float, parts: Any) -> tuple[float, Any]:
        step = min(s / 3, 0.12, 1 / max(float(parts[-1]), 1e-9)) / fine
        logs, values = _sums_over_others(batches, s, 1 + theta if removing else -theta, step)
        base = logs + values if removing else logs  # under P, under Q
        losses = values if removing else -values
        start, tilted = _log_sum(base), base + theta * losses
        weights = np.exp(base - start)
        inner = float(weights @ np.expm1(np.minimum(theta * losses, 50.0)))
        inner = math.log1p(inner) if abs(inner) < 0.5 else _log_sum(tilted) - start
        turned = _turned(np.exp(tilted - _log_sum(tilted)), losses, parts)
        # what X contributes is a normal loss with this mean and variance
        variance = s**2 / batches
        mean = variance - s**2 / 2 if removing else s**2 / 2
        outer = mean * theta + variance * theta**2 / 2
        return inner + outer, turned + 1j * parts * (mean + variance * theta) - variance * parts**2 / 2

    return found


def _log_sum(logs: Any) -> float:
    return float(logs.max()) + math.log(float(np.exp(logs - logs.max()).sum()))


def _sums_over_others(batches: int, s: float, order: float, step: float) -> tuple[Any, Any]:
    """(log weight, ℓ) at the points of a grid for Y that matter at the order."""
    reach = 10 * s + abs(order) * s**2
    count = int(2 * reach / step) + 2
    if count ** (batches - 1) > 4_000_000:
        raise TooHard(f"{count} points in each direction")
    line = np.linspace(-reach, reach, count)
    if batches == 2:
        logs = -(line**2) / 2 / s**2
        values = np.logaddexp(line / math.sqrt(2), -line / math.sqrt(2)) - math.log(2)
    else:
        a, b = (part.ravel() for part in np.meshgrid(line, line))
        logs = -(a**2 + b**2) / 2 / s**2
        three = [a / math.sqrt(2) + b / math.sqrt(6), -a / math.sqrt(2) + b / math.sqrt(6), -2 * b / math.sqrt(6)]
        values = np.logaddexp(np.logaddexp(three[0], three[1]), three[2]) - math.log(3)
    weighed = logs + order * values
    kept = (weighed > weighed.max() - 48) | (logs > -48) | (logs + values > (logs + values).max() - 48)
    return logs[kept], values[kept]


def _turned(weights: Any, values: Any, parts: Any) -> Any:
    """log E e^{is·value}."""
    heavy = weights > 1e-20
    weights, values = weights[heavy], values[heavy]
    mean = float(weights @ values)
    if len(parts) * len(values) > 5e7:
        raise TooHard("too many products")
    found = np.zeros(len(parts), dtype=complex)
    rows = max(1, 2_000_000 // len(values))
    for start in range(0, len(parts), rows):
        part = parts[start : start + rows]
        angle = np.outer(part, values - mean)
        found[start : start + rows] = (-2 * np.sin(angle / 2) ** 2 + 1j * np.sin(angle)) @ weights
    return np.log1p(found) + 1j * parts * mean


def many_batches(batches: int, sigma: float, *, removing: bool, fine: float = 1.0) -> Cumulant:
    """K of one epoch of any number of batches, for 0 < θ < 1 by removing and for every θ by adding the record."""
    s = 1 / sigma
    z = np.arange(-14.0, 14.0 + 12 * s, 0.05 / fine * min(1.0, 1 / s))
    normal = np.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    law = np.exp(s * z - s**2 / 2)
    x = np.arange(-70.0, 70.0 + 16 * s, 0.04 / fine)  # u = e^x / t
    transforms = [np.zeros(len(x)) for _ in range(3)]  # φ and its first two derivatives, up to signs
    for start in range(0, len(x), 200):
        part = slice(start, start + 200)
        decay = np.exp(-np.outer(np.exp(x[part]) / batches, law))
        for power, transform in enumerate(transforms):
            transform[part] = decay @ (normal * law**power)
    zeroth, first, second = transforms
    if removing:  # φ^t derived twice; in terms of e^x each derivative has a factor 1/t
        values = zeroth ** (batches - 2) * ((batches - 1) * first**2 + zeroth * second) / batches
    else:
        values = zeroth ** (batches - 1) * first
    with np.errstate(divide="ignore"):
        known = np.log(values)

    def found(theta: float, parts: Any) -> tuple[float, Any]:
        if removing and not theta < 0.7:
            raise TooHard("orders above one")
        v, sign = (1 - theta, -1) if removing else (1 + theta, 1)
        logs = v * x + known
        if max(logs[0], logs[-1]) > logs.max() - 33:
            raise TooHard("the transform decays slowly")
        total = _log_sum(logs)
        gammas = loggamma(v + 1j * sign * parts) - loggamma(v)
        turned = _turned(np.exp(logs - total), sign * x, parts) - gammas
        return total + math.log(float(x[1] - x[0])) - float(loggamma(v).real), turned

    return found


def _spread(cumulant: Cumulant, epochs: int, theta: float) -> float:
    """The standard deviation of the tilted loss, from how fast its transform falls."""
    near = theta
    for _ in range(200):
        fallen = -epochs * float(cumulant(theta, np.array([near]))[1][0].real)
        if 0.05 < fallen < 0.5:
            return math.sqrt(2 * fallen) / near
        near *= 1.3 if fallen <= 0.05 else 0.7
    raise TooHard("no scale of the transform was found")


def log_delta(cumulant: Cumulant, epochs: int, epsilon: float, fine: float = 1.0) -> float:
    """log δ(ε) of that many epochs.

    Raises:
        TooHard: the result would not be precise.
    """
    here = np.zeros(1)

    def bound(log_theta: float) -> float:
        theta = math.exp(log_theta)
        try:
            return epochs * cumulant(theta, here)[0] - theta * epsilon - log_theta - math.log1p(theta)
        except TooHard:
            return 1e300

    found = minimize_scalar(bound, bounds=(-20, 9), method="bounded", options={"xatol": 0.02, "maxiter": 60})
    theta = math.exp(found.x)
    spread = _spread(cumulant, epochs, theta)
    step = 2 * math.pi * min(theta / (max(-found.fun, 1) + 32), 1 / (22 * spread), (1 + theta) / 60) / fine
    most = 8.6 / spread * fine
    for _ in range(9):
        if most / step > 20_000:
            raise TooHard(f"{most / step:.0f} points of the contour")
        s = np.arange(int(most / step) + 2) * step
        scale, change = cumulant(theta, s)
        values = np.exp(epochs * change - 1j * s * epsilon) / ((theta + 1j * s) * (1 + theta + 1j * s))
        total = float((2 * values.real.sum() - values.real[0]) * step / 2 / math.pi)
        if float(np.abs(values[-max(3, len(s) // 50) :]).max()) * most < 1e-9 * abs(total):
            if total <= 1e-8 * float(np.abs(values).sum()) * step:
                raise TooHard("the integral cancels")
            return math.log(total) + epochs * scale - theta * epsilon
        most *= 2
    raise TooHard("the transform decays slowly")
