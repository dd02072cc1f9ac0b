"""The noise, or the mixing threshold, with which a ModelMix run meets a target ε."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Unpack

from sordino import checks
from sordino.errors import InputError
from sordino.methods.modelmix.accountant import (
    MixAccount,
    MixStep,
    Setting,
    Steps,
    account_modelmix,
    best_order,
    checked_run,
    dpsgd_epsilon,
    modelmix_epsilon,
)
from sordino.shown import up


def calibrate_modelmix(
    epsilon: float,
    *,
    solve: str,
    steps: int | Steps,
    noise_multiplier: float | None = None,
    tau_over_lr: float | None = None,
    **setting: Unpack[Setting],
) -> tuple[float, MixAccount]:
    """The smallest value of `solve` with target − 1e-3·min(1, target) ≤ ε ≤ target, and its account.

    Args:
        epsilon: The target.
        solve: "noise_multiplier" (give `tau_over_lr`) or "tau_over_lr" (give `noise_multiplier`).
        steps: The number of steps; or a schedule of steps, whose `solve` values are multiplied by the result.
        noise_multiplier: The noise of every step.
        tau_over_lr: The mixing threshold over the step size, of every step.
        setting: See `Setting`.

    Returns:
        The value, and the account of the run with it.

    Raises:
        InputError: a value is wrong, or the target can't be reached.
    """
    target = checks.positive("epsilon", epsilon)
    checks.choice("solve", solve, ("noise_multiplier", "tau_over_lr"))
    if isinstance(steps, Sequence):
        shape: Steps = steps
    else:
        given = tau_over_lr if solve == "noise_multiplier" else noise_multiplier
        if given is None or (noise_multiplier is not None and tau_over_lr is not None):
            raise InputError("give one of noise_multiplier and tau_over_lr; the other is computed")
        shape = [(MixStep(1.0, given) if solve == "noise_multiplier" else MixStep(given, 1.0), steps)]

    def schedule(value: float) -> Steps:
        return [(replace(step, **{solve: value * getattr(step, solve)}), count) for step, count in shape]

    def quick(value: float) -> float:
        run = checked_run(schedule(value), **setting)
        found = best_order(run, verify=False)  # the criterion is verified once, at the end
        return min(found.tight, dpsgd_epsilon(run, found, coarse=True))

    unit = 1.0
    if solve == "tau_over_lr":
        unit = checks.positive("clip_norm", setting["clip_norm"]) / setting["expected_batch"]
    for function in (quick, lambda value: modelmix_epsilon(schedule(value), **setting)):
        value = _solve(function, target, solve, unit)
        found = account_modelmix(schedule(value), **setting)
        if found.epsilon <= target:
            return value, found
    raise InputError(f"no {solve} was found for ε = {up(target)}; ε may not be monotone here")  # pragma: no cover


def _solve(function: Callable[[float], float], target: float, name: str, unit: float) -> float:
    """The value at which a non-increasing function falls just below the target: secants in logarithms."""
    allowed = 4e-4 * min(1.0, target)
    low: tuple[float, float] | None = None
    high: tuple[float, float] | None = None
    value = unit
    for count in range(120):
        found = function(value)
        if found <= target:
            high = (value, found)
            if target - found <= allowed:
                break
        else:
            low = (value, found)
        if low is None:
            value /= 4
            if value < 1e-4 * unit:
                raise InputError(
                    f"ε = {up(target)} is met even at {name} = {high[0] if high else value:.3g}: it needs "
                    + ("no mixing at all" if name == "tau_over_lr" else "hardly any noise")
                )
        elif high is None:
            value *= 4
            if value > 1e7 * unit:
                raise InputError(
                    f"ε = {up(target)} can't be reached by {name}: even at {low[0]:.3g} ε is {up(low[1], 6)}"
                )
        elif high[0] / low[0] - 1 < 1e-9:
            break
        else:
            share = 0.5
            if count % 3 and high[1] > 0:
                top, aim = math.log(low[1]), math.log(target - allowed / 2)
                share = min(max((top - aim) / max(top - math.log(high[1]), 1e-300), 0.02), 0.98)
            value = low[0] * (high[0] / low[0]) ** share
    assert high is not None
    return high[0]
