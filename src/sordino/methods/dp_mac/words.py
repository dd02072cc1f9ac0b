"""The keys of DP-MAC in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "z_steps", "z_lr", "z_start", "z_order", "z_rate", "mu", "radius", "order", "curvature", "value", "bounding",
        "split", "bound", "curvature_bound", "value_bound", "thresholds_noise", "thresholds_every",
        "thresholds_quantile", "w_steps", "floor",
    ),
    models={"classifier": ("hidden", "activation"), "autoencoder": ("hidden", "activation")},
    features={"none": ("multiply",), "dp-pca": ("components", "noise_multiplier", "scale", "whiten", "multiply")},
    optimizers=("sgd", "adam", "cg"),
)  # fmt: skip
