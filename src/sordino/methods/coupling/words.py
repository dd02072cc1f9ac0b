"""The keys of coupling in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "centring", "adaptive_clipping", "warm_up", "warm_up_lr", "warm_up_momentum", "projection", "rule",
        "alpha", "period", "smoothness", "initial_loss", "rows", "distance", "vc_dimension", "every", "horizon",
        "held_back",
    ),
    choices={
        "rule": (
            "constant", "only-public", "only-private", "adamix", "sample-mechanism", "dpmd", "equation-5",
            "theorem-3.1", "mse",
        )
    },
)  # fmt: skip
