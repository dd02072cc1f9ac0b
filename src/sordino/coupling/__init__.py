"""Coupling public and private gradients (paper 004): rules for the weight, what public rows say, and their use."""

from sordino.coupling.use import Companion, CoupledGradients, PublicUse, WarmUp
from sordino.coupling.weights import (
    DPMD,
    RULES,
    AdaMix,
    Constant,
    Equation5,
    LeastError,
    OnlyPrivate,
    OnlyPublic,
    Rule,
    SampleMechanism,
    Situation,
    Theorem31,
    Weight,
    rule_from_dict,
)

__all__ = [
    "DPMD",
    "RULES",
    "AdaMix",
    "Companion",
    "Constant",
    "CoupledGradients",
    "Equation5",
    "LeastError",
    "OnlyPrivate",
    "OnlyPublic",
    "PublicUse",
    "Rule",
    "SampleMechanism",
    "Situation",
    "Theorem31",
    "WarmUp",
    "Weight",
    "rule_from_dict",
]
