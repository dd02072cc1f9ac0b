"""Theorems 3.1 and 3.2 of Xiao et al. 2023 with better constants, and the step size that they prescribe.

Setting: F is β-smooth, `gap` = F(w₀) − inf F, E‖∇f_i − ∇F‖² ≤ τ² everywhere (Assumption 3.1), T steps of
w ← w − η(Ḡ + Δ), where Ḡ is the mean of the clipped gradients of a Poisson batch over its expected size (at least 1)
and E‖Δ‖² = c²·noise². (η of Xiao et al. 2023 is this one divided by the expected batch.)

Where the constants come from. For g = ∇F + ξ, ⟨∇F, g⟩ = ‖g‖² − ⟨ξ, g⟩ ≥ ‖g‖(‖g‖ − ‖ξ‖) ≥ ‖g‖(‖∇F‖ − 2‖ξ‖), so

    normalised:  ⟨∇F, g/‖g‖⟩    ≥ ‖∇F‖ − 2‖ξ‖                            (printed, eq. (20): ‖∇F‖/4 − 15‖ξ‖/4)
    clipped:     ⟨∇F, clip(g)⟩  ≥ min(‖∇F‖/2, c)·‖∇F‖ − 2c‖ξ‖             (replaces (23), (24))

The second: clip(g) = g·min(‖g‖, c)/‖g‖, so the left side is at least min(‖g‖, c)(‖∇F‖ − 2‖ξ‖). If the bracket is
positive, ‖g‖ ≥ ‖∇F‖ − ‖ξ‖ ≥ ‖∇F‖/2; if it is not, min(‖g‖, c) ≤ c. Inserted into the descent inequality (17), (22)
these give the bounds below, with 2τ instead of 15τ. The printed (11) has a negative left side (and so says nothing) if
c·√Pr(clipped) < 4τ; the clipped bound here is meaningful for every c.
"""

from __future__ import annotations

import math

PRINTED_FLOOR = 15.0
FLOOR = 2.0
"""The factor of τ below which no theorem brings ‖∇F‖. It is at least 1, by the two-sample example of section 3.1."""


def step_size(*, smoothness: float, gap: float, noise: float, steps: int, clip_norm: float = 1.0) -> float:
    """η for which the bounds below hold: it balances gap/(ηT) and βc²η(2 + noise²)/2."""
    return math.sqrt(2 * gap / (smoothness * steps * clip_norm**2 * (2 + noise**2)))


def normalised_bound(*, smoothness: float, gap: float, tau: float, noise: float, steps: int) -> float:
    """Thm 3.1, sharpened: E min_k ‖∇F(w_k)‖ is at most this, at η = step_size(clip_norm=1)."""
    return math.sqrt(2 * smoothness * gap * (2 + noise**2) / steps) + FLOOR * tau


def clipped_bound(*, smoothness: float, gap: float, tau: float, noise: float, steps: int, clip_norm: float) -> float:
    """Thm 3.2, sharpened: the largest x with min(x/2, c)·x ≤ c·√(2β·gap(2 + noise²)/T) + 2cτ.

    With m(x) = min(x/2, c)·x, E min_k m(‖∇F(w_k)‖) is at most that right side. So this bounds min_k ‖∇F(w_k)‖ itself
    where the run is deterministic (full batch, no noise); in a random run it bounds m⁻¹ of the mean of m.
    """
    right = clip_norm * normalised_bound(smoothness=smoothness, gap=gap, tau=tau, noise=noise, steps=steps)
    return math.sqrt(2 * right) if right <= 2 * clip_norm**2 else right / clip_norm


def printed_left_side(gradient_norm: float, unclipped: float, clip_norm: float, tau: float) -> float:
    """The left side of (11) as printed, for Pr(‖g‖ < c) = `unclipped`. Negative: the theorem says nothing."""
    clipped = 1 - unclipped
    factor = clip_norm * clipped / 4 - math.sqrt(clipped) * tau
    return unclipped * gradient_norm**2 + factor * gradient_norm
