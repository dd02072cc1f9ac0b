"""The plan (one frozen value with everything that a guarantee depends on), the guarantee, and the base of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.plan.contribution import Augmentation, Companions, Contribution, InnerMomentum, RecordMomentum
    from sordino.plan.core import ROUNDING_MARGIN, Plan, Statistic
    from sordino.plan.guarantee import Guarantee
    from sordino.plan.make import make_plan, make_sampling
    from sordino.plan.method import Accounted, Assumption, Method, Request
    from sordino.plan.public import PublicSet
    from sordino.plan.spent import epsilon_curve, from_ledger
else:  # imported on first use: a recipe's keys are checked before torch and scipy are loaded
    __getattr__, _ = lazy_names(
        __name__,
        {
            "contribution": ["Augmentation", "Companions", "Contribution", "InnerMomentum", "RecordMomentum"],
            "core": ["ROUNDING_MARGIN", "Plan", "Statistic"],
            "guarantee": ["Guarantee"],
            "make": ["make_plan", "make_sampling"],
            "method": ["Accounted", "Assumption", "Method", "Request"],
            "public": ["PublicSet"],
            "spent": ["epsilon_curve", "from_ledger"],
        },
    )

__all__ = [
    "ROUNDING_MARGIN",
    "Accounted",
    "Assumption",
    "Augmentation",
    "Companions",
    "Contribution",
    "Guarantee",
    "InnerMomentum",
    "Method",
    "Plan",
    "PublicSet",
    "RecordMomentum",
    "Request",
    "Statistic",
    "epsilon_curve",
    "from_ledger",
    "make_plan",
    "make_sampling",
]
