"""The weight α of the public gradient in α · public + (1 − α) · private: every rule is a function of plain numbers.

Nothing here uses a record. α multiplies values that were already released, so every rule leaves the guarantee
unchanged (post-processing). Theorems are those of Liu, Bu, Wang, Zha & Karypis 2023, whose Remark 3.2 has the two ends
swapped: α = 0 is private training, α = 1 public training.
"""

from __future__ import annotations

import math

from sordino.errors import InputError


def constant(alpha: float) -> float:
    """α itself, in [0, 1]."""
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 <= alpha <= 1:
        raise InputError(f"alpha = {alpha!r} must lie between 0 (private only) and 1 (public only)")
    return float(alpha)


def only_public() -> float:
    """α = 1."""
    return 1.0


def only_private() -> float:
    """α = 0."""
    return 0.0


def adamix() -> float:
    """α = ½ (Golatkar et al. 2022, for losses that are summed; footnote 3 of Liu et al. 2023)."""
    return 0.5


def sample_mechanism(public_records: int, private_records: int) -> float:
    """α = n_pub / (n_pub + n_priv): every record has the same weight (Table 2 of Liu et al. 2023)."""
    return public_records / (public_records + private_records)


def dpmd(step: int, period: float) -> float:
    """α_t = 1 − cos(π t / 2K) for t ≤ K and 1 from then on (Amid et al. 2022, as in Table 2 of Liu et al. 2023).

    From private only at the first step to public only at step K. Beyond K the printed formula exceeds 1 and then falls
    again; here it stays at 1.
    """
    return 1.0 - math.cos(math.pi * min(step / period, 1.0) / 2)


def equation_5(*, batch: float, noise_multiplier: float, parameters: int, smoothness: float, loss: float) -> float:
    """α = 1 / (1 + B √(2 L 𝓛₀ / (B² + σ² d))): Corollary 4.3.2, for gradients clipped to norm 1.

    It is η_pub / (η_pub + η_priv) with η_pub = 1/(B L √T), which is fixed, and η_priv = √(2 𝓛₀ / (L T (B² + σ² d))),
    which minimises the bound (15) of the private steps only. So it is the ratio of a tuned step size and one that is
    not, and not a joint optimum; it does not depend on the number of public records.
    """
    return 1.0 / (1.0 + batch * math.sqrt(2 * smoothness * loss / (batch**2 + noise_multiplier**2 * parameters)))


def private_step_bound(
    lr: float, *, batch: float, noise_multiplier: float, parameters: int, smoothness: float, loss: float, steps: int
) -> float:
    """The bound (15) of Liu et al. 2023 on the mean of 𝓜_r, for private steps of size `lr` only:

    (2 / (η B T)) · (𝓛₀ + ½ L T η² (B² + σ² d)).
    """
    drift = smoothness * steps * lr**2 * (batch**2 + noise_multiplier**2 * parameters) / 2
    return 2 * (loss + drift) / (lr * batch * steps)


def theorem_3_1(
    *, public_records: int, private_records: int, distance: float, parameters: int, mu: float, spread: float
) -> float:
    """The minimiser over [0, 1] of `theorem_3_1_bound`.

    With a = ‖w₁ − w*‖ √d / (μ n_priv), b = √(Var[l] d_vc) and A = 1/n_priv + 1/n_pub the derivative is zero at

        α = (1/n_priv + a √(1/(n_priv n_pub)) / √(b² A − a²)) / A,

    if b² A > a². Otherwise, or if that exceeds 1, the bound decreases throughout: α = 1. (Liu et al. assume a
    stationary point within [0, 1].)
    """
    share = 1 / private_records + 1 / public_records
    noise = distance * math.sqrt(parameters) / (mu * private_records)
    left = spread**2 * share - noise**2
    if left <= 0:
        return 1.0
    beyond = noise * math.sqrt(1 / (private_records * public_records) / left)
    return min(1.0, (1 / private_records + beyond) / share)


def theorem_3_1_bound(
    alpha: float,
    *,
    public_records: int,
    private_records: int,
    distance: float,
    parameters: int,
    mu: float,
    spread: float,
) -> float:
    """‖w₁ − w*‖ (1 − α) √d / (μ n_priv) + √((1 − α)²/n_priv + α²/n_pub) · √(Var[l] d_vc); `spread` is the last root."""
    optimisation = distance * (1 - alpha) * math.sqrt(parameters) / (mu * private_records)
    return optimisation + spread * math.sqrt((1 - alpha) ** 2 / private_records + alpha**2 / public_records)


def gaussian_mu(*, sampling_rate: float, steps: int, noise_multiplier: float) -> float:
    """μ = q √(T (e^{1/σ²} − 1)), equation (2): the central-limit approximation. For α only, never for ε."""
    return sampling_rate * math.sqrt(steps * math.expm1(min(noise_multiplier**-2, 700.0)))


def least_error(private_error: float, public_error: float) -> float:
    """α* = v_priv / (v_priv + v_pub): the smallest mean squared error of α · public + (1 − α) · private.

    It minimises α² v_pub + (1 − α)² v_priv, where v is a gradient's mean squared distance from the true one. That is
    the error of the combination if the two are independent and the *public* one is unbiased; the private one's bias
    (clipping) is part of v_priv. If both errors are 0, α is ½.
    """
    total = private_error + public_error
    return private_error / total if total > 0 else 0.5


def private_error(
    *,
    moment: float,
    batch: float,
    noise_multiplier: float,
    clip_norm: float,
    parameters: int,
    bias: float = 0.0,
    horizon: float = 1.0,
) -> float:
    """v_priv = (m/B + σ² R² d / B²) / H + ‖bias‖²: sampling, noise, and the bias of clipping.

    `moment` m is tr Σ of the clipped gradients for batches of fixed size, and their mean squared norm for Poisson
    batches with a constant divisor, whose size varies too. `horizon` H is explained in `public_error`; H = 1 without
    bias is the error of a single step.
    """
    return (moment / batch + (noise_multiplier * clip_norm / batch) ** 2 * parameters) / horizon + bias


def public_error(
    *, trace: float, batch: float, records: float = math.inf, horizon: float = 1.0, lasting: float | None = None
) -> float:
    """v_pub = lasting + tr Σ (1/B_pub − 1/n_pub) / H, where lasting is tr Σ / n_pub unless it was measured.

    For H = 1 that is tr Σ / B_pub, the error of a single step. An update has an effect over about H steps (`horizon`),
    over which noise and batches are drawn independently and average out. The public set stays the same: its distance
    from the distribution does not average out, and grows as the model fits these rows.
    """
    fresh = trace * max(0.0, 1 / batch - 1 / records) / horizon
    return (trace / records if lasting is None else lasting) + fresh
