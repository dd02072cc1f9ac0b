"""How the weights depend on released sums: prefix sums, or momentum with weight decay. Only picks the strategy.

Plain SGD adds up what is released: the weights after step t are a prefix sum. With momentum β and weight decay
(m ← β·m + g, w ← α·w − lr·m with α = 1 − lr·weight_decay) the weights after step t are Σ_i a_{t−i} g_i with the
coefficients of 1/((1 − αx)(1 − βx)). The noise in them is A·C⁻¹z, and its root mean square over coordinates and steps,
per unit of z, is ‖A·C⁻¹‖_F/√T. A guarantee never depends on A.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.signal import lfilter, oaconvolve

from sordino import checks
from sordino.errors import InputError
from sordino.methods.correlated.strategies import Array, Strategy


@dataclass(frozen=True)
class Workload:
    """The update: `momentum` as in torch.optim.SGD, `decay` = lr · weight_decay. Both 0: prefix sums."""

    momentum: float = 0.0
    decay: float = 0.0

    def __post_init__(self) -> None:
        checks.within("momentum", self.momentum, 0, 1, open_high=True)
        checks.within("decay", self.decay, 0, 1, open_high=True)

    def coefficients(self, steps: int) -> Array:
        """a_0, a_1, …: the coefficient of a sum in the weights, by the number of steps since."""
        return _coefficients(self, steps).copy()

    def to_dict(self) -> dict[str, float]:
        """The workload as JSON-serialisable values; `workload_from` is the inverse."""
        return asdict(self)


def workload_from(values: Mapping[str, Any]) -> Workload:
    """The inverse of `Workload.to_dict`."""
    if not isinstance(values, Mapping):
        raise InputError(f"a workload must be {{momentum, decay}}, got {values!r}")
    checks.known_keys(values, ("momentum", "decay"), "a workload")
    return Workload(**values)


@functools.lru_cache(16)
def _coefficients(workload: Workload, steps: int) -> Array:
    alpha, beta = 1.0 - workload.decay, workload.momentum
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    found: Array = lfilter([1.0], [1.0, -alpha - beta, alpha * beta], impulse)
    return found


def noise_in_weights(strategy: Strategy, workload: Workload, steps: int) -> float:
    """‖A·C⁻¹‖_F/√T: the root mean square, over steps, of the noise in the weights, for z of variance 1."""
    terms = strategy.noise(steps)
    given = np.zeros(max(terms) + 1)
    given[list(terms)] = list(terms.values())
    product = oaconvolve(given, _coefficients(workload, steps))[:steps]
    return float(np.sqrt((product**2 * np.arange(steps, 0, -1)).sum() / steps))
