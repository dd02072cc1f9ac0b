"""What a guarantee means for an attacker: an upper bound on the success of any test for one record.

Formal statement. Let a mechanism be (ε, δ)-DP for each pair of a profile. Any test that decides from the output whether
a given record took part, with false positive rate α, detects it with probability at most

    min over the profile of  e^ε·α + δ  and  1 − e^(−ε)·(1 − α − δ)

(Wasserman & Zhou 2010; Kairouz, Oh & Viswanath 2015). Every pair gives a valid bound, so a few of them suffice; with
more of them the bound is closer to the trade-off curve of the mechanism (Dong, Roth & Su 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from sordino import checks
from sordino.plan.core import Plan
from sordino.shown import up

FALSE_ALARMS = 0.01
NOTHING = 0.995
"""From this success rate on, the guarantee is described as no protection."""
_DELTAS = (0.5, 0.3, 0.15, 0.05, 0.02, 0.01, 1e-3)


def success_rate(plan: Plan, false_alarms: float = FALSE_ALARMS) -> float:
    """An upper bound on the success of any attack on one record at a given false positive rate.

    Args:
        plan: The complete plan that was run.
        false_alarms: The false positive rate α in (0, 1).

    Returns:
        The bound; 1 if the plan guarantees nothing at that rate.
    """
    alpha = checks.probability("false_alarms", false_alarms, allow_one=False)
    profile = []
    for delta in {*_DELTAS, plan.delta}:
        other = replace(plan, delta=delta)
        profile.append((other.method.epsilons(other, [plan.steps])[0], delta))
    return bounded_by_profile(profile, alpha)


def in_words(rate: float, unit: str = "record", false_alarms: float = FALSE_ALARMS) -> str:
    """A guarantee as a sentence for readers who do not know differential privacy.

    Args:
        rate: What `success_rate` returned for that false positive rate.
        unit: The unit of privacy, "record" or "user".
        false_alarms: The false positive rate α.

    Returns:
        The sentence, rounded up; it says so if nothing is guaranteed.
    """
    meaning = (
        f"at most {up(100 * rate, 3)} of 100 {unit}s that did"
        if rate < NOTHING
        else f"every {unit} that did: there is no guarantee"
    )
    return (
        f"An attacker who knows everything except whether one given {unit} took part, sees all that was published, and "
        f"accepts {100 * false_alarms:g} % false accusations, can recognise {meaning}."
    )


def bounded_by_profile(profile: Iterable[tuple[float, float]], alpha: float) -> float:
    """The bound from pairs (ε, δ) of one mechanism at the false positive rate α."""
    bounds = [1.0]
    for epsilon, delta in profile:
        bounds.append(math.exp(min(epsilon, 700.0)) * alpha + delta)
        bounds.append(1 - math.exp(-epsilon) * max(0.0, 1 - alpha - delta))
    return min(bounds)
