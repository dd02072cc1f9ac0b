"""The keys of DP-SGD in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys={
        "inner_length": "number of past iterates whose gradients are added to a record's vector",
        "inner_decay": "factor per iterate of age",
        "outer_kept": "fraction of the released momentum that a step keeps: the momentum of the optimizer sgd",
        "record_momentum_kept": "fraction of each record's own momentum that a step keeps (full batches only)",
    }
)
