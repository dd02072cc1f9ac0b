"""The keys of DP-SGD in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "inner_length",  # number of past iterates whose gradients are added
        "inner_decay",  # factor per iterate of age
        "outer_kept",  # fraction of the released momentum that a step keeps
        "record_momentum_kept",  # Algorithm 1: fraction of each record's own momentum that a step keeps
    )
)
