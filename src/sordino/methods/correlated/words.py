"""The keys of correlated noise in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys={
        "strategy": "how the noise of different steps is correlated; default: the best for the plan",
        "lambda": "λ of the strategies lambda and banded-lambda",
        "bands": "number of coefficients of C⁻¹ (inverse-root) or of C (banded-root, banded-lambda)",
        "groups": "groups that take turns; with fewer than batches in an epoch, a part of the group is sampled",
        "momentum": "momentum of the update, used only to choose the strategy; default: the optimizer's",
        "decay": "step size times weight decay of the update, used only to choose the strategy",
    },
    choices={"strategy": ("identity", "lambda", "inverse-root", "banded-root", "banded-lambda")},
)
