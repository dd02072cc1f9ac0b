"""The keys of correlated noise in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "strategy",  # how the noise of different steps is correlated
        "lambda",  # λ of lambda and banded-lambda
        "bands",  # number of coefficients of C⁻¹ (inverse-root) or of C (banded-root, banded-lambda)
        "groups",  # groups that take turns; with fewer than there are batches, a part of the group is sampled
        "momentum",  # momentum of the update, to choose the strategy; default: the optimizer's
        "decay",  # step size times weight decay of the update, to choose the strategy
    ),
    choices={"strategy": ("identity", "lambda", "inverse-root", "banded-root", "banded-lambda")},
)
