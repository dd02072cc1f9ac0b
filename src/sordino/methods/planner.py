"""Which way for a budget: Poisson sampling, random allocation or correlated noise, by the noise that reaches the model.

At equal ε, batch and number of steps the three differ in their noise alone. Plain SGD adds up what is released, so the
noise in the weights after step t is a prefix sum of the noise of the steps; `noise_in_weights` is its root mean square
over the steps, per coordinate, in clip norms and for a step size of 1 on sums (for independent noise σ·√((T+1)/2)). The
way with the least of it is recommended. Looks at no data: it is an estimate of what trains best, and no part of a
guarantee.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sordino import checks
from sordino.errors import InputError
from sordino.methods.correlated.choose import best_setting
from sordino.methods.correlated.strategies import Strategy
from sordino.methods.correlated.workloads import Workload, noise_in_weights
from sordino.plan.samplers import SAMPLERS, default_batches, sampler_noise

_LEAST_GAIN = 0.01
"""Correlated noise costs more time a step, so it has to gain this much."""


def compare_ways(
    *,
    records: int,
    batches: int,
    epochs: float,
    epsilon: float,
    delta: float,
    momentum: float = 0.0,
    decay: float = 0.0,
) -> dict[str, Any]:
    """The three ways at one batch.

    Args:
        records: public number of records.
        batches: steps in an epoch.
        epochs: expected passes over the records.
        epsilon: the target, under add-remove.
        delta: δ in (0, 1).
        momentum: of the update that will be used.
        decay: its step size times its weight decay.

    Returns:
        JSON-able: `rows`, `recommended`, `why`.
    """
    workload = Workload(momentum, decay)
    steps = max(1, math.ceil(epochs * batches - 1e-9))
    rows: list[dict[str, Any]] = []
    for sampler in SAMPLERS:
        one = sampler_noise(
            sampler, records=records, batches=batches, epochs=epochs, epsilon=epsilon, delta=delta
        )  # fmt: skip
        weights = one.noise_multiplier * noise_in_weights(Strategy("identity"), workload, steps)
        rows.append(_row(sampler, records / batches, steps, one.noise_multiplier, weights))
    found = best_setting(
        records=records, batch=records / batches, steps=steps, epsilon=epsilon, delta=delta, workload=workload
    )
    how = {
        "strategy": found.strategy.to_dict(), "groups": found.pattern.groups, "sampling_rate": found.pattern.rate,
        "noises_per_step": len(found.strategy.noise(steps)),
    }  # fmt: skip
    rows.append(_row("correlated", records / batches, steps, found.noise_multiplier, found.noise_in_weights) | how)
    return {"rows": rows} | _recommended(rows)


def _row(way: str, batch: float, steps: int, sigma: float, weights: float) -> dict[str, Any]:
    return {
        "way": way, "batch": batch, "steps": steps, "noise_multiplier": sigma, "noise_per_step": sigma / batch,
        "noise_in_weights": weights, "noise_of_run": weights / (batch * steps),
    }  # fmt: skip


def _recommended(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    by_way = {row["way"]: row for row in rows}
    plain = min(SAMPLERS, key=lambda way: by_way[way]["noise_in_weights"])
    gain = by_way[plain]["noise_in_weights"] / by_way["correlated"]["noise_in_weights"] - 1
    if gain > _LEAST_GAIN:
        found = by_way["correlated"]
        return {
            "recommended": "correlated",
            "why": f"{plain} puts {100 * gain:.0f} % more noise into the weights than correlated noise (strategy "
            f"{found['strategy']['name']}, {found['groups']} groups), which later steps partly take back; a step adds "
            f"{found['noises_per_step']} Gaussians for each coordinate",
        }
    other = "poisson" if plain == "allocation" else "allocation"
    return {
        "recommended": plain,
        "why": f"at equal ε, batch and steps {other} needs "
        f"{100 * (by_way[other]['noise_multiplier'] / by_way[plain]['noise_multiplier'] - 1):.1f} % more noise, and "
        f"correlated noise leaves {-100 * gain:.0f} % more in the weights"
        if gain < 0
        else f"correlated noise would leave only {100 * gain:.1f} % less noise in the weights, for more time a step",
    }


def compare_all(
    *, records: int, epochs: float, epsilon: float, delta: float, batches: Sequence[int] | None = None, **update: float
) -> dict[str, Any]:
    """`compare_ways` at several batches.

    Args:
        records: public number of records.
        epochs: expected passes over them.
        epsilon: the target, under add-remove.
        delta: δ in (0, 1).
        batches: steps in an epoch (default: those of batches near 4096, 1024 and 256, as far as there are records).
        **update: momentum and decay.

    Returns:
        JSON-able: `recommended` and `why` for the largest batch, `rows` of all, `relation`.

    Raises:
        InputError: a value is wrong.
    """
    records = checks.count("records", records)
    chosen = default_batches(records) if batches is None else [checks.count("batches", b) for b in batches]
    if max(chosen) > records:
        raise InputError(f"{max(chosen)} batches per epoch are more than the {records} records")
    checks.positive("epochs", epochs)
    made = [
        compare_ways(records=records, batches=count, epochs=epochs, epsilon=epsilon, delta=delta, **update)
        for count in chosen
    ]
    ways = [one["recommended"] for one in made]
    rows = [row | {"recommended": one["recommended"]} for one in made for row in one["rows"]]
    return {
        "recommended": ways[0],
        "why": f"at batch {records / chosen[0]:.5g}: {made[0]['why']}",
        "by_batch": [
            {"batch": records / count, "recommended": one["recommended"], "why": one["why"]}
            for count, one in zip(chosen, made, strict=True)
        ],
        "relation": "add-remove",
        "rows": rows,
    }
