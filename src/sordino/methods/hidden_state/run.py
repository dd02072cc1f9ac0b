"""A run of which only the last iterate is published: everything that its bound depends on, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state.choices import HIDDEN_SAMPLINGS

Array = npt.NDArray[np.float64]

MAX_STEPS = 10_000_000


@dataclass(frozen=True, eq=False)
class HiddenRun:
    """Everything that the bound depends on; `step_sizes` and `noise_stds` have one entry per step.

    sampling         "partition": one secret shuffle, the same ⌊n/b⌋ batches in every epoch, the remainder unused
                     "shuffle": the same, with a new shuffle in each epoch
                     "without-replacement": a fresh uniform subset in every step
                     "full": batch = records
    noise_stds       standard deviation of the noise on the *mean* gradient
    sensitivity      S_g: how far replacing one record moves the *summed* gradient at most
    disparity_slack  how far rounding may move an iterate in one step, in units of the iterate
    """

    records: int
    batch: int
    sampling: str
    step_sizes: Array
    noise_stds: Array
    strong_convexity: float
    smoothness: float
    sensitivity: float
    disparity_slack: float = 0.0

    def __post_init__(self) -> None:
        checks.choice("sampling", self.sampling, HIDDEN_SAMPLINGS)
        n, b = checks.count("records", self.records), checks.count("batch", self.batch)
        if b > n:
            raise InputError(f"batch ({b}) exceeds records ({n})")
        if self.sampling == "full" and b != n:
            raise InputError(f"sampling='full' uses all records in every step: batch must be {n}, got {b}")
        m = checks.real("strong_convexity", self.strong_convexity)
        largest = checks.positive("smoothness", self.smoothness)
        if not 0 <= m <= largest:
            raise InputError(f"strong_convexity must lie in [0, smoothness = {largest:g}], got {m:g}")
        checks.positive("sensitivity", self.sensitivity)
        if checks.real("disparity_slack", self.disparity_slack) < 0:
            raise InputError(f"disparity_slack must not be negative, got {self.disparity_slack}")
        for name in ("step_sizes", "noise_stds"):
            object.__setattr__(self, name, _schedule(name, getattr(self, name)))
        if len(self.step_sizes) != len(self.noise_stds):
            raise InputError(f"{len(self.step_sizes)} step_sizes, but {len(self.noise_stds)} noise_stds")
        if float(self.step_sizes.max()) > 2 / largest * (1 + 1e-12):
            raise Refused(
                f"a step of size {self.step_sizes.max():g} on a loss of smoothness {largest:g} may expand distances: "
                f"the bound needs step sizes of at most 2/M = {2 / largest:.6g}"
            )
        checks.noise_multiplier_value(float(self.noise_multipliers.min()))
        checks.noise_multiplier_value(float(self.noise_multipliers.max()))

    @property
    def steps(self) -> int:
        return len(self.step_sizes)

    @property
    def batches(self) -> int:
        """Batches per epoch."""
        return self.records // self.batch

    @property
    def noise_multipliers(self) -> Array:
        """σ_mul: noise std over half of S_g (over the clip norm), both of the sum."""
        return np.asarray(2 * self.batch * self.noise_stds / self.sensitivity, dtype=np.float64)

    @property
    def shrink(self) -> Array:
        """c_k, rounded up; at most 1, since 0 ≤ m and η ≤ 2/M."""
        ends = (np.abs(1 - self.step_sizes * k) for k in (self.strong_convexity, self.smoothness))
        return np.minimum(np.maximum(*ends) + 2.0**-51, 1.0)

    @property
    def constant(self) -> bool:
        return bool(np.ptp(self.step_sizes) == 0 and np.ptp(self.noise_stds) == 0)

    def until(self, steps: int) -> HiddenRun:
        """The run that stops after `steps` steps."""
        return replace(self, step_sizes=self.step_sizes[:steps], noise_stds=self.noise_stds[:steps])

    def noisier(self, factor: float) -> HiddenRun:
        return replace(self, noise_stds=self.noise_stds * factor)


def _schedule(name: str, values: object) -> Array:
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1 or not 1 <= len(array) <= MAX_STEPS:
        raise InputError(f"{name} must be a list of 1 to {MAX_STEPS} numbers, one per step; got shape {array.shape}")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise InputError(f"{name} must be finite and greater than 0 in every step")
    if float(array.max()) > 1e60 * float(array.min()):
        raise InputError(f"{name} spans more than 60 orders of magnitude")
    array.setflags(write=False)
    return array
