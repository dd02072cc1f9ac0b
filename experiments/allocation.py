"""Random allocation against Monte Carlo: 30 random plans, both directions, with confidence intervals.

    python experiments/allocation.py [--plans 30] [--samples 100000] [--seed 0] [--out FILE]

A plan consists of t, σ, a number of epochs and an ε, drawn at random. δ(ε) is estimated from samples of the composed
privacy loss: E_P (1 − e^{ε−L})₊ for removing a record, and the same with the pair exchanged for adding one. The
confidence interval is that of Maurer & Pontil 2009 (empirical Bernstein, values in [0, 1]) at 1 − 10⁻⁶ on either side.
The accountant's ε must not be below the interval, and its certified lower bound must not be above it; `wrong` counts
the plans that violate this. δ = 10⁻⁶ is too small for sampling: there the file has both bounds and their processor
time.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from provenance import origin
from sordino.accounting.account import account
from sordino.accounting.allocation import Epoch, epoch_pmfs
from sordino.accounting.events import allocated, compose_events
from sordino.accounting.pld import Composition
from sordino.files import json_bytes, write_atomically

_LOG = math.log(2 / 1e-6)
SMALL = 1e-6
Array = npt.NDArray[np.float64]


def sampled_losses(epoch: Epoch, epochs: int, samples: int, generator: np.random.Generator, *, removing: bool) -> Array:
    """The composed loss log dP/dQ under P (removing), or log dQ/dP under Q."""
    sigma, t, seen = epoch.noise_multiplier, epoch.batches, epoch.seen
    total = np.zeros(samples)
    for _ in range(epochs):
        logs = generator.standard_normal((samples, seen)) / sigma - 0.5 / sigma**2
        if removing:
            place = generator.integers(t, size=samples)
            there = np.flatnonzero(place < seen)
            logs[there, place[there]] += 1 / sigma**2
        total += np.log((np.exp(logs).sum(axis=1) + t - seen) / t)
    return total if removing else -total


def interval(losses: Array, epsilon: float) -> tuple[float, float, float]:
    """(estimate, lower, upper) of δ(ε)."""
    values = np.maximum(-np.expm1(np.minimum(epsilon - losses, 0.0)), 0.0)
    count, mean = len(values), float(values.mean())
    width = math.sqrt(2 * float(values.var(ddof=1)) * _LOG / count) + 7 * _LOG / (3 * (count - 1))
    return mean, max(mean - width, 0.0), mean + width


def direction_epsilon(epoch: Epoch, epochs: int, delta: float, *, removing: bool, grid: float = 2e-3) -> float:
    """An upper bound on ε at δ for one direction."""
    pmf = epoch_pmfs(epoch, grid, delta * 1e-6 / epochs)[0 if removing else 1]
    composition = Composition([(pmf, epochs)], grid)
    return composition.epsilon(delta, composition.renyi(delta)[1])


def compared(plan: dict[str, Any], samples: int, generator: np.random.Generator) -> dict[str, Any]:
    """One plan: Monte Carlo estimates of both directions, and the accountant at the ends of the intervals."""
    epoch = Epoch(plan["noise_multiplier"], plan["batches"], plan["seen"])
    found: dict[str, Any] = dict(plan)
    wrong = False
    for removing in (True, False):
        losses = sampled_losses(epoch, plan["epochs"], samples, generator, removing=removing)
        estimate, low, high = interval(losses, plan["epsilon"])
        # δ(ε) ≥ low, so the upper bound on ε at δ = low must be at least ε
        upper = direction_epsilon(epoch, plan["epochs"], low, removing=removing) if low > 0 else None
        found["removing" if removing else "adding"] = {
            "delta": estimate, "delta_low": low, "delta_high": high, "epsilon_at_delta_low": upper,
        }  # fmt: skip
        wrong |= upper is not None and upper < plan["epsilon"] * (1 - 1e-9)
        if removing:
            event = compose_events([(allocated(*_key(epoch)), plan["epochs"])])
            both = account(event, min(high, 0.999))
            found["epsilon_lower_at_delta_high"] = both.epsilon_lower
            found["at_small_delta"] = _bracket(event)
            wrong |= both.epsilon_lower is not None and both.epsilon_lower > plan["epsilon"] * (1 + 1e-9)
    return found | {"wrong": bool(wrong)}


def _bracket(event: Any) -> dict[str, Any]:
    """Both bounds at a δ that is too small for sampling, and the processor time of both together."""
    begin = time.process_time()
    found = account(event, SMALL)
    return {"delta": SMALL, "epsilon": found.epsilon, "epsilon_lower": found.epsilon_lower,
            "seconds": time.process_time() - begin}  # fmt: skip


def _key(epoch: Epoch) -> tuple[float, int, int]:
    return epoch.noise_multiplier, epoch.batches, epoch.seen


def random_plan(generator: np.random.Generator) -> dict[str, Any]:
    batches = int(np.exp(generator.uniform(math.log(2), math.log(600))))
    sigma = float(np.exp(generator.uniform(math.log(0.4), math.log(6.0))))
    epochs = int(generator.integers(1, 9))
    seen = batches if generator.random() < 0.7 else int(generator.integers(1, batches + 1))
    # the scale of an ε for which δ is neither close to 0 nor to 1
    scale = math.sqrt(epochs * math.expm1(min(1 / sigma**2, 3.0)) / batches)
    return {"batches": batches, "seen": seen, "noise_multiplier": sigma, "epochs": epochs,
            "epsilon": float(generator.uniform(0.3, 1.8) * scale)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("experiments/results/allocation.json"))
    arguments = parser.parse_args()
    generator = np.random.default_rng(arguments.seed)
    begin, results = time.perf_counter(), []
    for number in range(arguments.plans):
        plan = random_plan(generator)
        samples = max(20_000, min(arguments.samples, 4_000_000 // plan["seen"]))
        parts = compared(plan, samples, generator)
        results.append(parts | {"samples": samples})
        print(f"{number + 1}/{arguments.plans} {'WRONG' if parts['wrong'] else 'ok'} {plan}", flush=True)
    document = {
        **origin("python experiments/allocation.py"),
        "plans": results,
        "wrong": sum(r["wrong"] for r in results),
        "seed": arguments.seed,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(arguments.out, json_bytes(document))
    print(f"{document['wrong']} of {arguments.plans} wrong, {time.perf_counter() - begin:.0f} s, {arguments.out}")


if __name__ == "__main__":
    main()
