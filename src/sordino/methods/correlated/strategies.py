"""Strategies: lower triangular Toeplitz matrices C; a run adds the noise C⁻¹z instead of z.

A strategy is given by the coefficients of C⁻¹, as the doubles that the release multiplies by. Two kinds:

- C⁻¹ has few coefficients ("lambda": 1, −λ; "inverse-root": the first p of (1−x)^{1/2}, Kalinin, McKenna, Upadhyay &
  Lampert 2025, arXiv 2505.12128). C is then *defined* as the inverse of the matrix of these doubles, and nothing is
  approximated: c_t = Σ_j |c′_j|·c_{t−j} is a sum of positive numbers, so every c_t has a small relative error.
- C has few coefficients ("banded-root": the first h of (1−x)^{−1/2}; "banded-lambda": 1, λ, …, λ^{h−1}), as cyclic
  Poisson sampling requires (Choquette-Choo et al. 2023, arXiv 2306.08153). Its inverse is infinite and is truncated
  where its coefficients no longer matter. `residue` bounds the effect: C is the banded matrix plus a Toeplitz matrix
  whose coefficients have absolute sum at most `residue`. The accountant includes it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.signal import lfilter

from sordino import checks
from sordino.errors import InputError, Refused

Array = npt.NDArray[np.float64]

KINDS = ("identity", "lambda", "inverse-root", "banded-root", "banded-lambda")
BANDED = ("identity", "banded-root", "banded-lambda")
MOST_STEPS = 10**7
"""The largest number of steps and of bands of C; vectors of this length are computed."""
MOST_TERMS = 4096
"""Largest number of Gaussians in one coordinate of one step."""
_NEGLIGIBLE = 1e-13  # absolute sum of the coefficients of C⁻¹ that are truncated
_VANISHED = 1e-200  # smaller coefficients of C count as 0: the bound on a norm is rounded up by far more
_UNIT = 2.0**-53


@dataclass(frozen=True)
class Strategy:
    """One matrix C.

    Args:
        name: identity, lambda, inverse-root, banded-root or banded-lambda.
        value: λ in (0, 1) of lambda and banded-lambda.
        bands: The number of coefficients of C⁻¹ (inverse-root) or of C (banded-root, banded-lambda).

    Raises:
        InputError: the name is unknown, or a value is missing, wrong or not one of this strategy.
    """

    name: str
    value: float | None = None
    bands: int | None = None

    def __post_init__(self) -> None:
        checks.choice("strategy", self.name, KINDS)
        has_value, has_bands = self.name.endswith("lambda"), self.name not in ("identity", "lambda")
        if (self.value is not None) != has_value or (self.bands is not None) != has_bands:
            wanted = [name for name, has in (("lambda", has_value), ("bands", has_bands)) if has]
            raise InputError(f"the strategy {self.name} takes {' and '.join(wanted) or 'no options'}, and nothing else")
        if self.value is not None:
            checks.within("lambda", self.value, 0, 1, open_low=True, open_high=True)
        if self.bands is not None and checks.whole("bands", self.bands, minimum=2) > MOST_STEPS:
            raise InputError(f"bands = {self.bands}: at most {MOST_STEPS}")

    @property
    def width(self) -> int | None:
        """The number of bands of C; None if C is not banded."""
        return (self.bands or 1) if self.name in BANDED else None

    def noise(self, steps: int) -> Mapping[int, float]:
        """The non-zero coefficients of C⁻¹, by lag; that of lag 0 is 1."""
        return _noise(self, steps)

    def matrix(self, steps: int) -> Array:
        """The first column of C: its coefficients c_0 = 1, c_1, …, one for each step."""
        return _matrix(self, steps).copy()

    def residue(self, steps: int) -> float:
        """A bound on the absolute sum of the coefficients of C − `matrix`; 0 if nothing is truncated."""
        return _residue(self, steps)

    def to_dict(self) -> dict[str, Any]:
        """The strategy as JSON-serialisable values; `strategy_from` is the inverse."""
        return {
            "name": self.name,
            **({} if self.value is None else {"lambda": self.value}),
            **({} if self.bands is None else {"bands": self.bands}),
        }

    def __str__(self) -> str:
        parts = [f"λ = {self.value:.6g}"] if self.value is not None else []
        parts += [f"{self.bands} bands"] if self.bands is not None else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name


def strategy_from(values: Mapping[str, Any]) -> Strategy:
    """The inverse of `Strategy.to_dict`.

    Raises:
        InputError: a key is missing or unknown, or a value is wrong.
    """
    if not isinstance(values, Mapping) or "name" not in values:
        raise InputError(f"a strategy must be {{name, lambda, bands}}, got {values!r}")
    checks.known_keys({k: v for k, v in values.items() if k != "name"}, ("lambda", "bands"), "a strategy")
    return Strategy(values["name"], values.get("lambda"), values.get("bands"))


def root(power: float, count: int) -> Array:
    """The first coefficients of (1 − x)^power."""
    ratios = (np.arange(1, count) - 1 - power) / np.arange(1, count)
    return np.concatenate([[1.0], np.cumprod(ratios)])


def inverse(coefficients: Array, steps: int) -> Array:
    """The first coefficients of 1/c(x), for c_0 = 1."""
    impulse = np.zeros(steps)
    impulse[0] = 1.0
    found: Array = lfilter([1.0], coefficients, impulse)
    return found


@functools.lru_cache(64)
def _noise(strategy: Strategy, steps: int) -> Mapping[int, float]:
    if strategy.name == "identity":
        return {0: 1.0}
    if strategy.name == "lambda":
        assert strategy.value is not None
        return {0: 1.0, 1: -strategy.value}
    if strategy.name == "inverse-root":
        assert strategy.bands is not None
        return dict(enumerate(root(0.5, min(strategy.bands, steps)).tolist()))
    found = inverse(_band(strategy)[:steps], steps)
    rest = np.append(np.cumsum(np.abs(found)[::-1])[::-1], 0.0)  # absolute sums of the remaining coefficients
    kept = max(int(np.argmax(rest <= _NEGLIGIBLE)), 1)
    terms = {lag: float(found[lag]) for lag in range(min(kept, steps)) if abs(found[lag]) > _NEGLIGIBLE / steps}
    if len(terms) > MOST_TERMS:
        raise Refused(f"{strategy}: a step would add the noise of {len(terms)} steps; use fewer bands")
    return terms


def _band(strategy: Strategy) -> Array:
    """The coefficients of a banded C."""
    if strategy.name == "identity":
        return np.ones(1)
    assert strategy.bands is not None
    if strategy.name == "banded-root":
        return root(-0.5, strategy.bands)
    assert strategy.value is not None
    return np.cumprod(np.concatenate([[1.0], np.full(strategy.bands - 1, strategy.value)]))


@functools.lru_cache(64)
def _matrix(strategy: Strategy, steps: int) -> Array:
    if strategy.name in BANDED:
        band = _band(strategy)[:steps]
        return np.concatenate([band, np.zeros(steps - len(band))])
    found = inverse(_polynomial(_noise(strategy, steps)), steps)
    return np.where(found < _VANISHED, 0.0, found)


def _polynomial(terms: Mapping[int, float]) -> Array:
    given = np.zeros(max(terms) + 1)
    given[list(terms)] = list(terms.values())
    return given


@functools.lru_cache(64)
def _residue(strategy: Strategy, steps: int) -> float:
    """With r = 1 − c·c′ (as polynomials, up to the number of steps), 1/c′ − c = r/c′, and |1/c′| ≤ |c| + |r/c′|."""
    if strategy.name not in BANDED or strategy.name == "identity":
        return 0.0
    band, given = _band(strategy)[:steps], _polynomial(_noise(strategy, steps))
    left = -np.convolve(band, given)[:steps]
    left[0] += 1.0
    rounding = (len(band) + 2) * _UNIT * np.convolve(np.abs(band), np.abs(given))[:steps]
    rest = float((np.abs(left) + rounding).sum()) * (1 + 1e-9)
    if rest >= 0.5:
        raise Refused(f"{strategy} can't be inverted in double precision")
    return rest * float(np.abs(band).sum()) / (1 - rest) * (1 + 1e-9)


def relative_error(strategy: Strategy, steps: int) -> float:
    """A bound on the relative error of each number of `matrix` and of sums of their products."""
    if strategy.name in BANDED:
        return 4 * steps * _UNIT
    return 2.0 * steps * (len(_noise(strategy, steps)) + 2) * _UNIT + math.ldexp(1.0, -50)
