"""Coupling public and private gradients (Liu, Bu, Wang, Zha & Karypis 2023): rules for the weight, and their use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.methods.coupling.method import Coupling, plan
    from sordino.methods.coupling.recipe import public_use
    from sordino.methods.coupling.use import CoupledGradients, CoupledUpdate, PublicUse, WarmUp
    from sordino.methods.coupling.weights import (
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
else:
    __getattr__, _ = lazy_names(
        __name__,
        {
            "method": ["Coupling", "plan"],
            "recipe": ["public_use"],
            "use": ["CoupledGradients", "CoupledUpdate", "PublicUse", "WarmUp"],
            "weights": [
                "DPMD", "RULES", "AdaMix", "Constant", "Equation5", "LeastError", "OnlyPrivate", "OnlyPublic", "Rule",
                "SampleMechanism", "Situation", "Theorem31", "Weight", "rule_from_dict",
            ],
        },
    )  # fmt: skip

__all__ = [
    "DPMD",
    "RULES",
    "AdaMix",
    "Constant",
    "CoupledGradients",
    "CoupledUpdate",
    "Coupling",
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
    "plan",
    "public_use",
    "rule_from_dict",
]
