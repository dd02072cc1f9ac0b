"""The keys of hidden-state training in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys={
        "loss": "a certified loss; default softmax",
        "regularisation": "λ of the l2 regulariser, required: it makes the objective strongly convex",
        "feature_norm": "features are scaled down to this norm, record by record; default 1",
        "unit": "also scale features up to feature_norm",
        "bias": "the constant feature that is appended; 0: none",
        "lr": "step size, a number or a schedule; default 2/(m + M) of the certificate",
        "noise_factors": 'factors on the noise: a number, a schedule, or {kind = "closing", first, rise}',
        "radius": "weights are projected into a ball of this radius; default: one that is never reached",
        "cap": "softmax, one-vs-rest: largest derivative of the loss",
        "bound": "huber: distance from which the loss is linear",
        "length": "huber, squared: length of the vectors that encode classes",
        "target_norm": "squared: targets are scaled down to this norm",
        "clip": "softmax: bound on the gradient; refused unless it is the same as a cap",
    },
    choices={"loss": ("softmax", "one-vs-rest", "huber", "squared")},
)
