"""Theorem 4.1 of Xiao, Xiang, Wang & Devadas 2023: Algorithm 1, every record's own momentum normalised, full batch.

Its proof bounds the error of the momenta by (28) and the gradient by (30). Both are held here with the constants that
they print, on least squares, where smoothness, sampling noise and gradients are known.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

Array = npt.NDArray[np.float64]
N, D = 24, 3


def problem(seed: int) -> tuple[Array, Array]:
    """f_i(w) = ½‖A_i w − b_i‖² with A_i near the identity: records disagree by a bounded amount."""
    generator = np.random.default_rng(seed)
    matrices = np.eye(D) + 0.2 * generator.normal(size=(N, D, D))
    return matrices, 0.5 * generator.normal(size=(N, D))


def gradients(w: Array, matrices: Array, shifts: Array) -> Array:
    return np.einsum("nij,ni->nj", matrices, np.einsum("nij,j->ni", matrices, w) - shifts)


def trained(steps: int, seed: int, deviation: float) -> dict[str, float]:
    """Algorithm 1 with η′ = T^{-3/4}/4, γ = T^{-1/2}: what it did, and both sides of (28) summed and of (30)."""
    matrices, shifts = problem(seed)
    generator = np.random.default_rng(100 + seed)
    smooth = float(np.linalg.norm(matrices, 2, axis=(1, 2)).max() ** 2)
    rate, gamma = steps**-0.75 / 4, steps**-0.5
    w = np.full(D, 1.0)
    start = 0.5 * float((np.einsum("nij,j->ni", matrices, w) - shifts).__pow__(2).sum(1).mean())
    momenta = gradients(w, matrices, shifts)
    averaged = np.zeros((N, D))
    errors, ea, best, tau = 0.0, 0.0, math.inf, 0.0
    for _ in range(steps):
        directions = momenta / np.linalg.norm(momenta, axis=1, keepdims=True)
        w = w - rate * (directions.mean(0) + deviation * generator.normal(size=D))
        now = gradients(w, matrices, shifts)
        noise = now - now.mean(0)
        momenta = gamma * now + (1 - gamma) * momenta
        averaged = (1 - gamma) * averaged + noise
        errors += float(np.linalg.norm(momenta - now.mean(0), axis=1).mean()) / steps
        ea += float(np.linalg.norm(averaged, axis=1).mean()) / steps
        tau = max(tau, float(np.linalg.norm(noise, axis=1).mean()))
        best = min(best, float(np.linalg.norm(now.mean(0))))
    size = deviation * math.sqrt(D)
    drift = 2 * smooth * rate * (1 + size) / gamma
    right = tau / (gamma * steps) + gamma * ea + drift
    gap = 4 * start / (rate * steps) + 2 * smooth * rate * (2 + size**2) + 15 * right
    return {"errors": errors, "bound_29": right, "best": best, "bound_30": gap}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("deviation", [0.0, 0.5])
@pytest.mark.parametrize("steps", [100, 1600])
def test_the_errors_of_the_momenta_and_the_smallest_gradient_stay_below_29_and_30(
    seed: int, deviation: float, steps: int
) -> None:
    found = trained(steps, seed, deviation)
    assert found["errors"] <= found["bound_29"]
    assert found["best"] <= found["bound_30"]


def accumulated(steps: int, *, identical: bool) -> float:
    """Σ_k EA_k of one record whose sampling noise is independent from step to step, or always the same."""
    gamma = steps**-0.5
    noise = np.random.default_rng(3).normal(size=(64, steps))
    if identical:
        noise[:] = np.sign(noise[:, :1])
    total, averaged = 0.0, np.zeros(64)
    for k in range(steps):
        averaged = (1 - gamma) * averaged + noise[:, k]
        total += float(np.abs(averaged).mean())
    return total


def test_independent_noise_adds_up_as_t_to_the_five_quarters_and_identical_noise_as_t_to_the_three_halves() -> None:
    """So the last term of (12) vanishes as T^{-1/4} where noise is independent, and stays where it is identical."""
    for identical, exponent in ((False, 1.25), (True, 1.5)):
        growth = accumulated(6400, identical=identical) / accumulated(400, identical=identical)
        assert math.log(growth) / math.log(16) == pytest.approx(exponent, abs=0.05)
