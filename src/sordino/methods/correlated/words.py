"""The words of correlated noise in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "strategy",  # how the noise of the steps hangs together
        "lambda",  # of lambda and banded-lambda
        "bands",  # coefficients of C⁻¹ (inverse-root) or of C (banded-root, banded-lambda)
        "groups",  # that take turns; fewer than there are batches: a part of the group is drawn
        "momentum",  # of the update, for the choice of the strategy; default: the optimizer's
        "decay",  # step size times weight decay of the update; likewise
    ),
    choices={"strategy": ("identity", "lambda", "inverse-root", "banded-root", "banded-lambda")},
)
