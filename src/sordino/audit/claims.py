"""A plan's claim as a trade-off curve, and the claims of the same plan with other amounts of noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from sordino.accounting.account import checked_releases, composed_epsilon
from sordino.audit.bounds import Curve, ProfileCurve
from sordino.audit.guesses import Family, least_noise
from sordino.errors import InputError
from sordino.plan import Plan

_DELTAS = tuple(10.0**exponent for exponent in torch.linspace(-5, -0.2, 33).tolist())
"""The δ at which the claim's profile is evaluated: thousands of canaries can't detect rarer events."""
HALVINGS = 8  # steps of the search for the least noise that is rejected: within 1 % of it
_TOLERANCE = 0.005
"""The relative excess of ε from a coarse grid that is tolerated there. It makes the claim weaker, never too strong."""


def claim_curve(plan: Plan) -> ProfileCurve:
    """The plan's privacy profile as a trade-off curve: ε at some values of δ, each from the plan's accountant."""
    if not plan.method.composes:
        found = [plan.method.epsilons(replace(plan, delta=delta), [plan.steps])[0] for delta in _DELTAS]
        return ProfileCurve(tuple(found), _DELTAS)
    releases = checked_releases(plan.releases())
    epsilons = [
        composed_epsilon(releases, delta, plan.relation, plan.accountant, tolerance=_TOLERANCE)[0] for delta in _DELTAS
    ]
    return ProfileCurve(tuple(epsilons), _DELTAS)


def claim_family(claim: Plan, curve: Callable[[Plan], Curve] = claim_curve) -> Family:
    """A function from x to the plan's curve with 2ˣ times its noise; each curve is computed once."""

    @cache
    def scaled(log_scale: float) -> Curve:
        return curve(with_noise(claim, 2.0**log_scale))

    return scaled


def largest_rejected(claim: Plan, rejected: Callable[[Curve], bool], family: Family | None = None) -> float:
    """ε of the plan with the least noise whose curve is rejected (more noise is a stronger claim); 0 if none is."""
    return epsilon_at(claim, least_noise(rejected, family or claim_family(claim), HALVINGS))


def epsilon_at(claim: Plan, log_scale: float) -> float:
    """ε of the claim with 2ˣ times its noise; 0 if x is infinite, which means that no claim is rejected."""
    return 0.0 if math.isinf(log_scale) else with_noise(claim, 2.0**log_scale).guarantee().epsilon


def quick_epsilon_at(claim: Plan, log_scale: float) -> float:
    """`epsilon_at` without the comparison with the Rényi bound, which takes most of the time."""
    if math.isinf(log_scale):
        return 0.0
    scaled = with_noise(claim, 2.0**log_scale)
    return scaled.method.epsilons(scaled, [scaled.steps])[0]


def with_noise(plan: Plan, factor: float) -> Plan:
    """The plan with its noise multiplied by `factor`.

    Raises:
        InputError: the factor is not finite and positive.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise InputError(f"noise_scale = {factor}: give a positive number; 1 is the plan's own noise")
    return replace(plan, noise=replace(plan.noise, noise_multiplier=plan.noise.noise_multiplier * factor))
