"""Tests whether the noise has the distribution that the plan states, for an auditor who knows the sums before noise.

An audit's lower bound on ε is imprecise: it compares with an upper *bound* on the privacy loss, which has slack, and
can't detect noise of 0.9 times the scale. But the auditor runs the training and knows every sum before noise, so it can
test the noise itself: with F the distribution that the plan states, the values F(noise) are uniform on [0, 1],
independent over coordinates and steps. With z = Φ⁻¹(F(noise)), standard normal under the claim, each test detects
another kind of fault:

| test        | statistic                                         | detects                                 |
|-------------|---------------------------------------------------|-----------------------------------------|
| fit         | Kolmogorov and Smirnov's                          | any other distribution                  |
| scale       | Σz² against χ²                                    | noise × 0.9, from `enough()` values on  |
| tails       | how many |z| exceed 2 and 3.5 (binomial)          | truncated noise                         |
| mean        | Σz of each release                                | a shift that all coordinates share      |
| steps       | Σ z_s z_t for pairs of releases of one size       | noise that is used twice                |
| coordinates | the autocorrelation of a release, every lag (FFT) | coordinates that share their noise      |
| values      | Σ z·v of each release                             | noise that depends on the values        |

A release that adds noise of earlier steps again (`release`, `earlier`) is tested after that noise is subtracted.

Every p-value is valid for independent normal z (those of the FFT and of the products by a normal approximation in the
far tail, for which `LEVEL` has a margin) and is multiplied by the number of tests. The false alarm probability is at
most `LEVEL`. Noise that passes may still come from a generator that an adversary can predict.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import torch
from scipy import special, stats
from torch import Tensor

LEVEL = 1e-6
"""The p-value below which the noise is reported as different from the plan's."""

MOST = 400_000
"""The largest number of values per release that are tested: tests of the distribution need no more."""

PAIRS = 600
"""If there are more pairs of releases, about this number of them is compared."""


@dataclass
class NoiseCheck:
    """Collects the noise of each step; `scale` is that of the Gaussian or Laplace part."""

    scale: float
    laplace: bool
    places: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, noise: Tensor, widths: Tensor, values: Tensor | None = None, scale: float | None = None) -> None:
        """Adds one step.

        Args:
            noise: The noise on every coordinate.
            widths: The widths of uniform noise that the plan states for the step.
            values: The values before noise, to test that the noise does not depend on them.
            scale: The scale of the step's noise; None: that of the check.
        """
        unit = self.scale if scale is None else scale
        kept = min(len(noise), MOST)
        self.places.append(distribution(noise[:kept] / unit, widths[:kept] / unit, self.laplace))
        self.values.append(torch.zeros(0) if values is None else values[:kept])

    def tests(self) -> dict[str, float]:
        """The p-value of each kind of test, corrected for the number of tests."""
        return noise_tests(self.places, self.values)

    def p_value(self) -> float:
        """Small if the noise has another distribution than stated, or is not independent."""
        found = self.tests()
        return min(1.0, len(found) * min(found.values()))


def enough(factor: float = 0.9, level: float = LEVEL, power: float = 0.999) -> int:
    """How many values the test of the scale needs to detect noise of `factor` times its scale with this probability.

    Σz² is about N(n, 2n) under the claim and factor²·N(n, 2n) otherwise; the two quantiles must not overlap.
    """
    reach = float(-special.ndtri(level / 16) - special.ndtri(1 - power) * factor**2)
    return math.ceil(2.0 * (reach / (1.0 - factor**2)) ** 2)


def noise_tests(places: Sequence[Tensor], values: Sequence[Tensor] = ()) -> dict[str, float]:
    """p-values by the kind of test, from the values F(noise) of each release."""
    normal = [torch.special.ndtri(place.double().clamp(1e-15, 1 - 1e-15)) for place in places if len(place)]
    pooled = torch.cat(normal)
    count = len(pooled)
    square = float(pooled.square().sum())
    found = {
        "fit": float(stats.kstest(special.ndtr(pooled.numpy()), "uniform").pvalue),
        "scale": 2 * min(float(stats.chi2.cdf(square, count)), float(stats.chi2.sf(square, count))),
        "tails": 2 * min(_tail(pooled, 2.0), _tail(pooled, 3.5)),
        "mean": _smallest([float(z.sum()) / math.sqrt(len(z)) for z in normal]),
        "coordinates": min(1.0, len(normal) * min(_autocorrelation(z) for z in normal)),
    }
    pairs = [(a, b) for a, b in combinations(normal, 2) if len(a) == len(b) > 8]
    if pairs:
        step = max(1, len(pairs) // PAIRS)
        found["steps"] = _smallest(
            [float(a @ b) / float(a.norm() * b.norm()) * math.sqrt(len(a)) for a, b in pairs[::step]]
        )
    below = [(z, v.double()) for z, v in zip(normal, values, strict=False) if len(v) == len(z) and float(v.norm()) > 0]
    if below:
        found["values"] = _smallest([float(z @ v) / float(v.norm()) for z, v in below])
    return {name: min(1.0, p) for name, p in found.items()}


def _tail(normal: Tensor, beyond: float) -> float:
    """The two-sided p-value of the number of |z| above `beyond`: neither too many nor too few."""
    outside, share = int((normal.abs() > beyond).sum()), float(2 * special.ndtr(-beyond))
    return min(1.0, 2 * float(stats.binomtest(outside, len(normal), share).pvalue))


def _smallest(scores: Sequence[float]) -> float:
    """The p-value of the most extreme of many standard normal scores, by the union bound."""
    return min(1.0, 2 * len(scores) * float(special.ndtr(-max(map(abs, scores)))))


def _autocorrelation(z: Tensor) -> float:
    """The p-value of the most extreme Σ_i z_i z_{i+lag} over all lags with enough terms, by the union bound."""
    count = len(z)
    if count < 64:
        return 1.0
    spectrum = torch.fft.rfft(z, n=2 * count)
    products = torch.fft.irfft(spectrum.abs().square(), n=2 * count)[1:count]
    terms = torch.arange(count - 1, 0, -1, dtype=torch.float64)
    kept = terms >= 32
    scores = products[kept] / terms[kept].sqrt()
    # products of normals have heavier tails than a normal: with few terms a score counts less
    weighed = scores.abs() / (1.0 + scores.abs() / terms[kept].sqrt())
    return min(1.0, 2 * int(kept.sum()) * float(special.ndtr(-float(weighed.max()))))


def distribution(x: Tensor, widths: Tensor, laplace: bool) -> Tensor:
    """P[X + U ≤ x] for standard Gaussian (Laplace) X and U uniform on [−w/2, w/2]; w → 0 is X itself."""
    plain = _cumulative(x, laplace)
    narrow = widths < 1e-4
    if bool(narrow.all()):
        return plain
    w = torch.where(narrow, torch.full_like(widths, 1e-4), widths)
    mixed = ((_integral(x + w / 2, laplace) - _integral(x - w / 2, laplace)) / w).clamp(0.0, 1.0)
    return torch.where(narrow, plain, mixed)


def _cumulative(x: Tensor, laplace: bool) -> Tensor:
    if laplace:
        return torch.where(x < 0, torch.exp(-x.abs()) / 2, 1 - torch.exp(-x.abs()) / 2)
    below: Tensor = torch.special.ndtr(x)
    return below


def _integral(z: Tensor, laplace: bool) -> Tensor:
    """∫_{−∞}^z of the distribution function."""
    if laplace:
        return torch.relu(z) + torch.exp(-z.abs()) / 2
    below: Tensor = torch.special.ndtr(z)
    return z * below + torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)


def worst(tests: Mapping[str, float]) -> tuple[str, float]:
    """The test with the smallest p-value, corrected for the number of tests."""
    name = min(tests, key=lambda key: tests[key])
    return name, min(1.0, len(tests) * tests[name])
