"""What a guarantee means to an attacker: how often a test for one record can be right, at most.

Formal statement. Let a mechanism be (ε, δ)-DP for each pair of a profile. Any test that decides from the output whether
a given record took part, with probability α of a false alarm, finds it with probability at most

    min over the profile of  e^ε·α + δ  and  1 − e^(−ε)·(1 − α − δ)

(Wasserman & Zhou 2010; Kairouz, Oh & Viswanath 2015). Every pair gives a valid bound, so a few of them are enough; the
more, the closer to the trade-off curve of the mechanism (Dong, Roth & Su 2022).
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
"""From this success on a promise is none that anybody should be told of."""
_DELTAS = (0.5, 0.3, 0.15, 0.05, 0.02, 0.01, 1e-3)


def success_rate(plan: Plan, false_alarms: float = FALSE_ALARMS) -> float:
    """An upper bound on the success of any attack on one record with that rate of false alarms.

    Args:
        plan: what was run, to its end.
        false_alarms: α in (0, 1).

    Returns:
        The bound; 1 where the plan promises nothing at that rate.
    """
    alpha = checks.probability("false_alarms", false_alarms, allow_one=False)
    profile = []
    for delta in {*_DELTAS, plan.delta}:
        other = replace(plan, delta=delta)
        profile.append((other.method.epsilons(other, [plan.steps])[0], delta))
    return bounded_by_profile(profile, alpha)


def in_words(rate: float, unit: str = "record", false_alarms: float = FALSE_ALARMS) -> str:
    """The promise of a guarantee as a sentence for people.

    Args:
        rate: what `success_rate` gave at that rate of false alarms.
        unit: What is protected, "record" or "user".
        false_alarms: α.

    Returns:
        The sentence, rounded up; where nothing is promised it says so.
    """
    meaning = (
        f"at most {up(100 * rate, 3)} of 100 {unit}s that did"
        if rate < NOTHING
        else f"every {unit} that did: nothing is promised"
    )
    return (
        f"Somebody who knows everything but whether one given {unit} took part, sees all that was published, and is "
        f"content to accuse wrongly in {100 * false_alarms:g} of 100 cases, can recognise {meaning}."
    )


def bounded_by_profile(profile: Iterable[tuple[float, float]], alpha: float) -> float:
    """The bound that pairs (ε, δ) of one mechanism give at the rate α of false alarms."""
    bounds = [1.0]
    for epsilon, delta in profile:
        bounds.append(math.exp(min(epsilon, 700.0)) * alpha + delta)
        bounds.append(1 - math.exp(-epsilon) * max(0.0, 1 - alpha - delta))
    return min(bounds)
