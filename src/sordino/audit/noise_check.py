"""Is the noise what the plan says it is? A test of its distribution, for whoever may look at the sums before noise.

An audit's lower bound on ε is blunt: it compares with a *bound* on the mechanism's privacy, which has slack, and can't
see uniform noise of half the width. But the audit makes the run itself and knows every sum before noise, so it can
look at the noise: with F the distribution that the plan states, the values F(noise) are uniform on [0, 1], independent
over coordinates and steps. Two tests, at half the level each: Kolmogorov and Smirnov's for the distribution, and the
correlation of a coordinate's successive values (a buffer that carries noise from one step to the next shows there).

False alarms have probability at most `LEVEL`. Noise that passes may still be of a generator that someone can predict.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from scipy import special, stats
from torch import Tensor

LEVEL = 1e-6
"""The p-value from which on the noise is said not to be what the plan states."""


@dataclass
class NoiseCheck:
    """Collects the noise of each step; `scale` is that of the Gaussian or Laplace part."""

    scale: float
    laplace: bool
    places: list[Tensor] = field(default_factory=list)

    def add(self, noise: Tensor, widths: Tensor) -> None:
        """The noise of one step on every coordinate, and the widths that the plan states for it."""
        self.places.append(distribution(noise / self.scale, widths / self.scale, self.laplace))

    def p_value(self) -> float:
        """Small where the noise is not what was stated, in its distribution or in being independent."""
        pooled = torch.cat(self.places).numpy()
        fits = float(stats.kstest(pooled, "uniform").pvalue)
        if len(self.places) < 2:
            return fits
        normal = [torch.special.ndtri(place.clamp(1e-12, 1 - 1e-12)) for place in self.places]
        pairs = sum(len(place) for place in normal[1:])
        together = sum(float(a @ b) for a, b in pairwise(normal)) / math.sqrt(pairs)
        independent = float(2 * special.ndtr(-abs(together)))
        return min(1.0, 2 * min(fits, independent))


def distribution(x: Tensor, widths: Tensor, laplace: bool) -> Tensor:
    """P[X + U ≤ x] for standard Gaussian (Laplace) X and U uniform on [−w/2, w/2]; w → 0 is X itself."""
    narrow = widths < 1e-4
    w = torch.where(narrow, torch.full_like(widths, 1e-4), widths)
    return ((_integral(x + w / 2, laplace) - _integral(x - w / 2, laplace)) / w).clamp(0.0, 1.0)


def _integral(z: Tensor, laplace: bool) -> Tensor:
    """∫_{−∞}^z of the distribution function."""
    if laplace:
        return torch.relu(z) + torch.exp(-z.abs()) / 2
    below: Tensor = torch.special.ndtr(z)
    return z * below + torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
