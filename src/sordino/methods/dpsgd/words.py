"""The words of DP-SGD in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys=(
        "inner_length",  # how many past iterates join
        "inner_decay",  # the factor per iterate of age
        "outer_kept",  # the part of the released momentum that a step keeps
        "record_momentum_kept",  # Algorithm 1: the part of each record's own momentum that a step keeps
    )
)
