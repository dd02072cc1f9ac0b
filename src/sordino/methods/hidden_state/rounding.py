"""How far double precision may move one step of gradient descent: bounds that do not depend on the records.

A step computes v = Σ_i r_i ⊗ x̃_i − (b/η)(1 − ηλ)·w with r_i the residuals at scores W·x̃_i, and w' = −(η/b)·(v +
noise). With unit roundoff u = 2⁻⁵³, weights in a ball of radius B, ‖x̃‖ ≤ R, and d features, the usual bounds (Higham
2002, section 3.1: a sum of k products is off by at most k·u/(1 − k·u) of the sum of their sizes) give, in l2:

    scores      (d + 1)·u·R·B, and as much again for what the loss computes from their differences
    residuals   H·(that) + 2⁻⁴⁵·G          (a residual is an H-Lipschitz function of its scores; exp, log: some ulps)
    their sum   b·R·(that) + (b + 2)·u·b·G·R
    the rest    4·u·(b/η)·B                (decay, the sum of both, the last product; a rounded projection)

Each is multiplied by two, which covers 1/(1 − k·u) and features whose norm is a few ulps above the bound.
"""

from __future__ import annotations

from sordino.methods.hidden_state.certificate import Geometry
from sordino.methods.hidden_state.losses import Loss

_UNIT = 2.0**-53
_NOISES, _PULLS = 2.0**20, 2.0**10  # the default radius, in units of the noise and of the gradient of one step


def iterate_radius(asked: float | None, noise: float, pull: float) -> float:
    """The radius of the ball for iterates.

    Args:
        asked: The radius that the user asks for; None: one that iterates do not reach in any sensible run.
        noise: The largest standard deviation of a step's noise in one coordinate. After T steps in d dimensions noise
            alone has moved an iterate by about √(T·d) times that.
        pull: The length of the largest step that the gradient of one record alone would make.
    """
    return asked if asked is not None else _NOISES * noise + _PULLS * pull


def step_error(loss: Loss, geometry: Geometry, features: int, batch: int, scale: float, ball: float) -> float:
    """A bound on ‖computed − exact‖ of one step before the noise, in units of the iterate. `scale`: η/b."""
    R = geometry.record_norm
    slope = loss.slope(min(geometry.score_norm, ball * R))
    scores = 2 * (features + 1) * _UNIT * R * ball
    residuals = loss.curvature * scores + 2.0**-45 * slope
    total = batch * R * residuals + (batch + 2) * _UNIT * batch * slope * R
    return 2 * (scale * total + 4 * _UNIT * ball)
