"""The keys of DP-MAC in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys={
        "z_steps": "steps of Adam on the auxiliary coordinates of a batch",
        "z_lr": "step size of the Z-steps",
        "z_start": "where the auxiliary coordinates start: forward or backward",
        "z_order": "joint (all layers at once) or sweep (from the last layer to the first)",
        "z_rate": "step size of a backward start",
        "mu": "μ, the weight of a hidden layer's objective",
        "radius": "bound on the norm of inputs and auxiliary coordinates",
        "order": "order of the expansion, 1 or 2",
        "curvature": "order 2: full matrices per unit, or their diagonal",
        "value": "also release the constant of the expansion",
        "bounding": "how a record's coefficients are bounded: clip, normalise or analytic",
        "split": "how the joint norm is divided among the parts: equal or sqrt-dim",
        "bound": "bound on the gradient of a layer, one number or one per layer",
        "curvature_bound": "bound on the curvature",
        "value_bound": "bound on the constant",
        "thresholds_noise": "noise multiplier of private thresholds",
        "thresholds_every": "steps between two measurements of the thresholds",
        "thresholds_quantile": "quantile of the record norms at which thresholds are set",
        "w_steps": "steps on the noisy polynomial of a batch",
        "floor": "smallest curvature, in noise levels",
    },
    models={"classifier": ("hidden", "activation"), "autoencoder": ("hidden", "activation")},
    features={"none": ("multiply",), "dp-pca": ("components", "noise_multiplier", "scale", "whiten", "multiply")},
    optimizers=("sgd", "adam", "cg"),
)
