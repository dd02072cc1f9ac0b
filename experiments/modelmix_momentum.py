"""Momentum inside Algorithm 1 of ModelMix as printed: what the audit's canaries show of it; one JSON file.

    python experiments/modelmix_momentum.py

A buffer of G + Δ repeats a record's gradient in every later step, under the same Gaussian noise and under fresh uniform
noise, which averages out. The claim is that of the same run without a buffer; the score of a canary is the linear one
that a Gaussian of the same covariance would ask for. 5,000 canaries, one coordinate each, every record in every batch.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from provenance import origin
from sordino.audit.canaries import make_canaries
from sordino.audit.claims import claim_family
from sordino.audit.guesses import choose_guesses
from sordino.audit.one_run import judge
from sordino.clipping import FlatClip
from sordino.files import write_atomically
from sordino.methods import modelmix
from sordino.methods.modelmix.scores import MixedScorer
from sordino.plan import Plan
from sordino.randomness import RandomSource

SIGMA, WIDTH, STEPS, RECORDS, CANARIES = 4.0, 64.0, 40, 64, 5000  # the first setting of modelmix_audit.py
MOMENTA, SEEDS = (0.0, 0.2, 0.5, 0.9), (0, 1, 2)
TARGET = Path(__file__).parent / "results" / "modelmix_momentum.json"


def printed_with_momentum(momentum: float, coins: Tensor, steps: int, generator: np.random.Generator) -> Any:
    """Algorithm 1 as printed, on one coordinate per canary, with a buffer in the place of G + Δ: what the iterates
    show, (mean of the last two − the new one)/η, which is the buffer and uniform noise. (steps, canaries)"""
    size, lr, tau = len(coins), 0.1, WIDTH * 0.1
    last, before, buffer, seen = np.zeros(size), np.zeros(size), np.zeros(size), []
    for _ in range(steps):
        buffer = momentum * buffer + coins.numpy() + SIGMA * generator.normal(size=size)
        mean, gap = (last + before) / 2, last - before
        side = np.where(gap >= 0, 1.0, -1.0)
        half = np.maximum(np.abs(gap), tau) / 2
        a = generator.random(size)
        mixed = a * (mean + side * half) + (1 - a) * (mean - side * half)
        last, before = mixed - lr * buffer, last
        seen.append((mean - last) / lr)
    return np.stack(seen)


def best_linear_score(seen: Any, momentum: float) -> Any:
    """Σ_k a_k·o_k with the weights that a Gaussian of the same covariance would ask for."""
    steps = len(seen)
    carried = np.array([[momentum ** (i - j) if i >= j else 0.0 for j in range(steps)] for i in range(steps)])
    covariance = SIGMA**2 * carried @ carried.T + WIDTH**2 / 12 * np.eye(steps)
    return np.asarray(np.linalg.solve(covariance, carried.sum(1)) @ seen)


def claimed() -> Plan:
    """The run without a buffer, which is what the theorem covers."""
    return modelmix.plan(
        noise_multiplier=SIGMA, tau_over_lr=WIDTH / RECORDS, lr=0.1, delta=1e-5, records=RECORDS,
        expected_batch=RECORDS, steps=STEPS,
    )  # fmt: skip


@cache
def guesses() -> Any:
    """How many canaries are guessed: chosen before anything is drawn, the same for every momentum and seed."""
    ones = torch.ones(CANARIES, 1, dtype=torch.float64)
    return choose_guesses(MixedScorer.of(claimed()), ones, STEPS, CANARIES, claim_family(claimed()), 0.95)


def audited(momentum: float, seed: int) -> dict[str, Any]:
    """The lower bound on ε for one momentum and seed, beside the claim without a buffer."""
    canaries = make_canaries(
        {"w": torch.Size([CANARIES])}, FlatClip(1.0), CANARIES, "add-remove", RandomSource.seeded(seed)
    )
    seen = printed_with_momentum(momentum, canaries.coins, STEPS, np.random.default_rng(seed))
    scores = torch.from_numpy(best_linear_score(seen, momentum))
    found = judge(claimed(), [(scores, canaries.coins)], guesses(), 0.95)
    return {
        "momentum": momentum,
        "seed": seed,
        "epsilon_claimed": found.epsilon_claimed,
        "epsilon_lower": found.epsilon_lower,
        "holds": found.holds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=TARGET)
    target = parser.parse_args().out
    runs = [audited(momentum, seed) for momentum in MOMENTA for seed in SEEDS]
    setting = {"noise_multiplier": SIGMA, "width": WIDTH, "steps": STEPS, "canaries": CANARIES}
    document = {**origin("python experiments/modelmix_momentum.py"), "setting": setting, "runs": runs}
    write_atomically(target, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
