"""The keys of ModelMix in recipes."""

from __future__ import annotations

from sordino.registry import Words

WORDS = Words(
    keys={
        "lr": "step size, a number or a schedule: the guarantee depends on it",
        "tau_over_lr": "mixing threshold τ divided by the step size, a number or a schedule",
        "noise_factors": "factors on the noise multiplier over the steps, a number or a schedule; default 1",
    }
)
