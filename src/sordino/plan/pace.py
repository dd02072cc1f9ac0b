"""The time that a run may take: how many steps fit it, for each size of the batch.

A step of B records takes s + B/r + g·(k − 1) seconds: s for what does not depend on the batch (drawing it, one Gaussian
for each parameter, the update), r records per second, and g for each further Gaussian if a method adds k of them to a
parameter. `sordino doctor` measures the three for a recipe. Evaluations and the reading of data are not included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sordino import checks
from sordino.errors import InputError

MOST = 10**12
"""More steps than any comparison makes."""


@dataclass(frozen=True)
class Pace:
    """Seconds that a run may take, and the three numbers of the module; 0: takes no time.

    Raises:
        InputError: a value is not a positive finite number, or a step takes no time.
    """

    seconds: float
    per_step: float = 0.0
    per_record: float = 0.0
    per_noise: float = 0.0

    @classmethod
    def of(
        cls,
        *,
        minutes: float,
        seconds_per_step: float | None = None,
        records_per_second: float | None = None,
        seconds_per_noise: float | None = None,
    ) -> Pace:
        """The pace of what a user states, of which at least one of the first two speeds must be given."""
        given = {
            "minutes": minutes, "seconds_per_step": seconds_per_step, "records_per_second": records_per_second,
            "seconds_per_noise": seconds_per_noise,
        }  # fmt: skip
        values = {name: checks.positive(name, value) for name, value in given.items() if value is not None}
        if seconds_per_step is None and records_per_second is None:
            raise InputError(
                "minutes needs the time of a step: give seconds_per_step, records_per_second or both (`sordino doctor "
                "RECIPE.toml` measures them)"
            )
        return cls(
            checks.positive("minutes in seconds", 60 * values["minutes"]),
            values.get("seconds_per_step", 0.0),
            0.0 if records_per_second is None else checks.real("seconds for a record", 1 / records_per_second),
            values.get("seconds_per_noise", 0.0),
        )

    def step(self, batch: float, noises: int = 1) -> float:
        """The seconds of a step of this expected batch, with so many Gaussians for each parameter."""
        return self.per_step + batch * self.per_record + (noises - 1) * self.per_noise

    def steps(self, batch: float, noises: int = 1) -> int:
        """The steps that fit the time; InputError if not even one does."""
        found = self.fitting(batch, noises)
        if not found:
            raise InputError(
                f"the time is too short: a step of {batch:g} records takes {self.step(batch, noises):.3g} seconds, and "
                f"the run may take {self.seconds:.3g}; give more minutes, or smaller batches (more of them)"
            )
        return found

    def fitting(self, batch: float, noises: int = 1) -> int:
        """The steps that fit the time, `MOST` at most; 0 if not even one does."""
        step = self.step(batch, noises)
        if step * MOST <= self.seconds:
            return MOST
        return math.floor(self.seconds / step * (1 + 1e-12))  # 60 s at 0.1 s are 600 steps

    def to_dict(self) -> dict[str, Any]:
        """The pace as JSON-serialisable values."""
        return {
            "minutes": self.seconds / 60,
            "seconds_per_step": self.per_step,
            "records_per_second": 1 / self.per_record if self.per_record else None,
            "seconds_per_noise": self.per_noise,
        }
