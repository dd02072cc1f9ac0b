"""How the best α changes with ε, B, n_pub, n_priv, d and T: Corollary 4.3.2 of Liu et al. 2023, by simulation.

    python experiments/coupling.py --part monotonicity

Logistic regression, x ~ N(0, I_d), y = 1 with probability sigmoid(⟨w*, x⟩), ‖w*‖ = 2. The gradient steps are
α · public + (1 − α) · private, starting from w = 0; records are clipped by g/(‖g‖ + 1), batches are Poisson samples,
the noise multiplier meets ε at δ = 1e-5 according to the library's own accountant. For every setting and every α of a
grid the file has the loss of the mean of the last half of the iterates on 5,000 fresh records, averaged over seeds that
are the same for all α, at the best of a few step sizes. `best` is the α with the least mean loss; `equation_5` is the α
of Corollary 4.3.2 with the L of the true model and 𝓛₀ = log 2. Nothing is released, and no record is real: the sums are
simulated in numpy.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from provenance import origin
from sordino.files import write_atomically
from sordino.methods.coupling import rules
from sordino.plan import Plan

Array = npt.NDArray[np.float64]
ALPHAS = tuple(round(0.1 * i, 1) for i in range(11))
RATES, SEEDS, FRESH = (0.5, 1.0, 2.0, 4.0), 8, 5_000


@dataclass(frozen=True)
class Setting:
    epsilon: float = 0.25
    batch: int = 100
    public: int = 200
    private: int = 1000
    dimension: int = 20
    steps: int = 60


MIDDLE = Setting()
VARIED: dict[str, tuple[Any, ...]] = {
    "epsilon": (0.125, 0.25, 0.5, 1.0, 2.0),
    "batch": (25, 50, 100, 200, 400),
    "public": (50, 100, 200, 400),
    "private": (500, 1000, 2000, 4000),
    "dimension": (5, 10, 20, 40, 80),
    "steps": (15, 30, 60, 120),
}
CLAIMED = {"epsilon": "falls", "batch": "falls", "public": "rises", "private": "falls", "dimension": "rises", "steps": "rises"}  # fmt: skip # noqa: E501


def records(rng: np.random.Generator, count: int, truth: Array) -> tuple[Array, Array]:
    x = rng.normal(size=(count, len(truth)))
    return x, (rng.random(count) < 1 / (1 + np.exp(-x @ truth))).astype(float)


def gradients(w: Array, x: Array, y: Array) -> Array:
    found: Array = (1 / (1 + np.exp(-x @ w)) - y)[:, None] * x
    return found


def mean_loss(w: Array, x: Array, y: Array) -> float:
    z = x @ w
    return float(np.mean(np.logaddexp(0, z) - y * z))


def one(at: Setting, sigma: float, alpha: float, lr: float, seed: int) -> float:
    rng = np.random.default_rng([seed, at.dimension])
    truth = rng.normal(size=at.dimension)
    truth *= 2 / np.linalg.norm(truth)
    x, y = records(rng, 400 + 8000, truth)  # the first ones are public; settings of different sizes use the same ones
    public, private = (x[: at.public], y[: at.public]), (x[400 : 400 + at.private], y[400 : 400 + at.private])
    fresh = records(rng, FRESH, truth)
    w, kept = np.zeros(at.dimension), np.zeros(at.dimension)
    for step in range(at.steps):
        drawn = rng.random(at.private) < at.batch / at.private
        g = gradients(w, private[0][drawn], private[1][drawn])
        g /= np.linalg.norm(g, axis=1, keepdims=True) + 1
        theirs = (g.sum(0) + sigma * rng.normal(size=at.dimension)) / at.batch
        w = w - lr * (alpha * gradients(w, *public).mean(0) + (1 - alpha) * theirs)
        if step >= at.steps // 2:
            kept += w / (at.steps - at.steps // 2)
    return mean_loss(kept, *fresh)


def look(at: Setting) -> dict[str, Any]:
    plan = Plan.dpsgd(
        epsilon=at.epsilon, delta=1e-5, records=at.private, expected_batch=at.batch, steps=at.steps, clip_norm=1.0
    )
    sigma = plan.noise.noise_multiplier
    losses = {
        alpha: min(float(np.mean([one(at, sigma, alpha, lr, seed) for seed in range(SEEDS)])) for lr in RATES)
        for alpha in ALPHAS
    }
    smooth = 0.25 * (1 + math.sqrt(at.dimension / (at.public + at.private))) ** 2  # ‖XᵀX‖/4n of standard normal rows
    said = rules.equation_5(
        batch=at.batch, noise_multiplier=sigma, parameters=at.dimension, smoothness=smooth, loss=math.log(2)
    )
    best = min(losses, key=lambda alpha: losses[alpha])
    return {**asdict(at), "noise_multiplier": sigma, "best": best, "equation_5": said, "losses": losses}


def measure(out: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for key, values in VARIED.items():
        found[key] = []
        for value in values:
            found[key].append(look(replace(MIDDLE, **{key: value})))
            print(
                key,
                value,
                "best α",
                found[key][-1]["best"],
                f"equation 5 {found[key][-1]['equation_5']:.3f}",
                flush=True,
            )
    document = {
        "middle": asdict(MIDDLE),
        "claimed": CLAIMED,
        "seeds": SEEDS,
        "varied": found,
        **origin("python experiments/coupling.py --part monotonicity"),
    }
    write_atomically(out, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
