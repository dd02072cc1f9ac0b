"""The certificate: the constants of a loss that a guarantee for the last iterate needs, with the proof of each.

    φ(w) = w − η·(1/b)·Σ ∇ℓ_i(w) − η·λ·w      with ℓ_i(w) = f_{t_i}(W·x̃_i),  x̃ = (x, bias),  ‖x‖ ≤ feature_norm

- m = λ: every ℓ_i is convex (shown for the loss), and the regulariser is not affected by whatever bounds the gradients.
- M = λ + H·R², R² = feature_norm² + bias²: ∇²ℓ_i = ∇²f ⊗ x̃x̃ᵀ ⪯ H·‖x̃‖² (Kronecker products multiply eigenvalues).
- S = 2·G·R: ‖∇ℓ_i‖ = ‖∇f‖·‖x̃‖ ≤ G·R, and replacing a record removes one such vector and adds another.

With these, φ is max(|1 − ηm|, |1 − ηM|)-Lipschitz for η ≤ 2/M (a mean of m-strongly convex and M-smooth functions is
one too; Nesterov 2018, Thm 2.1.12), and two neighbouring maps differ by at most η·S/b everywhere. That is all that
docs/guarantees/hidden_state.md assumes. Features are scaled down to their norm record by record during training, so the
norm bound is not an assumption about the data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.methods.hidden_state.losses import Loss


@dataclass(frozen=True)
class Certificate:
    """Constants of the regularised objective of every batch, each with its justification (`how_…`).

    `strong_convexity` is m, `smoothness` M, and `sensitivity` S: the largest distance by which replacing one record
    moves a sum of gradients.
    """

    strong_convexity: float
    smoothness: float
    sensitivity: float
    how_strong_convexity: str
    how_smoothness: str
    how_sensitivity: str

    @property
    def largest_lr(self) -> float:
        """The largest step size that does not expand distances."""
        return 2.0 / self.smoothness

    @property
    def best_lr(self) -> float:
        """The step size that contracts most: |1 − ηm| = |1 − ηM|."""
        return 2.0 / (self.strong_convexity + self.smoothness)

    def contraction(self, lr: float) -> float:
        """The Lipschitz constant of a step of size `lr` ≤ 2/M."""
        return max(abs(1 - lr * self.strong_convexity), abs(1 - lr * self.smoothness))

    def to_dict(self) -> dict[str, Any]:
        return {
            "strong_convexity": {"value": self.strong_convexity, "how": self.how_strong_convexity},
            "smoothness": {"value": self.smoothness, "how": self.how_smoothness},
            "sensitivity": {"value": self.sensitivity, "how": self.how_sensitivity},
        }


@dataclass(frozen=True)
class Geometry:
    """The domain of features and weights.

    Args:
        feature_norm: The largest norm of a record's features.
        bias: The constant feature that is appended; 0: none.
        radius: Weights are projected into a ball of this radius after each step (a non-expansive map, so it has no
            privacy cost); None: they are not.

    Raises:
        InputError: a value is out of range.
    """

    feature_norm: float = 1.0
    bias: float = 1.0
    radius: float | None = None

    def __post_init__(self) -> None:
        checks.within("feature_norm", self.feature_norm, 1e-30, 1e30)
        if not 0 <= checks.real("bias", self.bias) <= 1e30:
            raise InputError(f"bias = {self.bias}: the constant feature must be positive, or 0 for none")
        if self.radius is not None:
            checks.within("radius", self.radius, 1e-30, 1e30)

    @property
    def record_norm(self) -> float:
        """R: the largest norm of a record's features and its constant together."""
        return math.hypot(self.feature_norm, self.bias)

    @property
    def score_norm(self) -> float:
        """The largest ‖z‖ over all weights at which gradients are computed."""
        return math.inf if self.radius is None else self.radius * self.record_norm


def certify(loss: Loss, geometry: Geometry, regularisation: float) -> Certificate:
    """The certificate of a loss on clipped features with an l2 regulariser.

    Args:
        loss: The loss.
        geometry: The bounds on features and weights.
        regularisation: λ of the regulariser, positive.

    Returns:
        The constants of the regularised objective, each with its justification.

    Raises:
        InputError: a value is not a finite number.
        Refused: there is no regulariser, or the gradient of the loss is not bounded on this geometry.
    """
    if not checks.real("regularisation", regularisation) > 0:
        raise Refused(
            f"regularisation = {regularisation}: without regularisation the objective is not strongly convex, steps do "
            "not contract, and hiding the iterates has no proven effect; give a positive one, or use dpsgd"
        )
    checks.positive("regularisation", regularisation)
    reasons, R = loss.reasons(), geometry.record_norm
    slope = loss.slope(geometry.score_norm)
    norm = f"features scaled down to norm {geometry.feature_norm:g} record by record" + (
        f", a constant feature {geometry.bias:g}" if geometry.bias else ", no bias"
    )
    return Certificate(
        strong_convexity=regularisation,
        smoothness=regularisation + loss.curvature * R**2,
        sensitivity=2 * slope * R,
        how_strong_convexity=f"λ of the regulariser, which no bound affects; the loss is convex: "
        f"{reasons['convexity']}",
        how_smoothness=f"λ + {loss.curvature:.6g}·{R**2:.6g}; curvature of the loss: {reasons['curvature']}; {norm}",
        how_sensitivity=f"2·{slope:.6g}·{R:.6g} for replacing one record; slope: {reasons['slope']}; {norm}",
    )
