"""The keys of coupling in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys={
        "centring": "subtract the public gradient from a record's gradient before clipping",
        "adaptive_clipping": "scale records so that this quantile of public norms is at the clip norm",
        "warm_up": "steps of SGD on the public rows before the first private step",
        "warm_up_lr": "step size of the warm-up",
        "warm_up_momentum": "momentum of the warm-up",
        "projection": "project the last linear layer's released gradient onto this many public directions",
        "rule": "how α, the weight of the public gradient, is chosen",
        "alpha": "rule constant: α itself",
        "period": "rule dpmd: the step from which α is 1; default: the number of steps",
        "smoothness": "rule equation-5: L of the loss; default: measured on public rows",
        "initial_loss": "rule equation-5: the loss before the first step; default: measured on public rows",
        "rows": "rules that measure: the number of public rows to measure on",
        "distance": "rule theorem-3.1: ‖w₁ − w*‖, required",
        "vc_dimension": "rule theorem-3.1: default the number of weights",
        "every": "rule mse: steps between two estimates",
        "horizon": "rule mse: steps over which errors average out; default 1",
        "held_back": "rule mse: share of the public rows that is used for estimates only",
    },
    choices={
        "rule": (
            "constant", "only-public", "only-private", "adamix", "sample-mechanism", "dpmd", "equation-5",
            "theorem-3.1", "mse",
        )
    },
)  # fmt: skip
