"""The keys of hidden-state training in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "loss", "regularisation", "feature_norm", "unit", "bias", "lr", "noise_factors", "radius",
        "cap", "bound", "length", "target_norm", "clip",
    ),
    choices={"loss": ("softmax", "one-vs-rest", "huber", "squared")},
)  # fmt: skip
