"""Which sampler for a budget: Poisson or random allocation, compared by the noise that reaches the model.

At equal ε, batch and number of steps the update is the same but for the noise multiplier σ, so the sampler with the
smaller σ is better whatever the model. Between batches it is not as simple: a step adds noise σ/B to the mean
gradient, and T steps of a step size that shrinks as 1/T add σ/(B·√T) in all; larger batches have less of both, and
fewer steps for the same epochs. `noise_per_step` and `noise_of_run` are these numbers in clip norms, per coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sordino import checks
from sordino.accounting.calibration import calibrate, noise_guess
from sordino.accounting.events import compose_events
from sordino.accounting.schemes import releases_of
from sordino.errors import InputError

SAMPLERS = ("poisson", "allocation")


@dataclass(frozen=True)
class SamplerNoise:
    """A sampler at a batch: the smallest noise that meets the budget, and what of it reaches the model."""

    sampler: str
    batch: float
    steps: int
    epsilon: float
    noise_multiplier: float
    noise_per_step: float
    noise_of_run: float


def sampler_noise(
    sampler: str, *, records: int, batches: int, epochs: float, epsilon: float, delta: float
) -> SamplerNoise:
    """The noise of one sampler with `batches` steps in each of `epochs` epochs, under add-remove."""
    steps = max(1, math.ceil(epochs * batches - 1e-9))
    name = "poisson" if batches == 1 else sampler
    sampling: dict[str, Any] = {"name": name} | (
        {"sampling_rate": 1 / batches} if name == "poisson" else {"batches": batches}
    )
    guess = noise_guess(sampling, steps, records, epsilon, delta)
    sigma, found = calibrate(
        lambda s: compose_events(releases_of(sampling, "gaussian", s, records, steps)), epsilon, delta, guess=guess
    )
    batch = records / batches
    return SamplerNoise(sampler, batch, steps, found, sigma, sigma / batch, sigma / (batch * math.sqrt(steps)))


def compare_samplers(
    *, records: int, epochs: float, epsilon: float, delta: float, batches: Sequence[int] | None = None
) -> dict[str, Any]:
    """Poisson sampling against random allocation for a budget, at several batches per epoch.

    Args:
        records: public number of records.
        epochs: expected passes over them.
        epsilon: the target, under add-remove.
        delta: δ in (0, 1).
        batches: per epoch (default: those of batches near 256, 1024 and 4096, as far as there are records).

    Returns:
        JSON-able: `rows` (SamplerNoise as mappings), `recommended`, `why`, `relation`.

    Raises:
        InputError: a value is wrong.
    """
    records = checks.count("records", records)
    chosen = default_batches(records) if batches is None else [checks.count("batches", b) for b in batches]
    if max(chosen) > records:
        raise InputError(f"{max(chosen)} batches per epoch are more than the {records} records")
    checks.positive("epochs", epochs)
    rows = [
        sampler_noise(sampler, records=records, batches=count, epochs=epochs, epsilon=epsilon, delta=delta)
        for count in chosen
        for sampler in SAMPLERS
    ]
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    gains = [poisson.noise_multiplier / allocated.noise_multiplier - 1 for poisson, allocated in pairs]
    best = max(gains)
    better = "allocation" if best > 1e-3 else "poisson"
    why = (
        f"at equal ε, batch and steps Poisson sampling needs {100 * min(gains):.1f} to {100 * best:.1f} % more noise "
        "than random allocation, which uses every record once per epoch"
        if better == "allocation"
        else "both need the same noise; Poisson sampling can be resumed at any step"
    )
    return {"recommended": better, "why": why, "relation": "add-remove", "rows": [asdict(row) for row in rows]}


def default_batches(records: int) -> list[int]:
    """Steps in an epoch of batches near 4096, 1024 and 256, as far as there are records."""
    sizes = [size for size in (4096, 1024, 256) if size <= records / 2] or [max(1, records // 4)]
    return [math.ceil(records / size) for size in sizes]
