"""The keys of ModelMix in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(keys=("lr", "tau_over_lr", "noise_factors"))
