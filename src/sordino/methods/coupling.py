"""Coupling: DP-SGD on the private rows, whose released gradients are combined with gradients of declared public rows.

The weight of the combination, the rule it comes from, warm-up and projection work on released values and are no part
of the plan. What is part of it is what a record's vector is before it is clipped:

    centring   clip(g_i − v), v the gradient of public rows (DOPE-SGD, Nasr et al. 2023); v is added back afterwards
    quantile   clip(g_i · C/R), R that quantile of the norms of public gradients; R/C is multiplied back afterwards

In both a record that is not in the batch contributes nothing, and one that is contributes a vector that the plan's own
clipping bounds by C, whatever v and R are. So the accountant is DP-SGD's (docs/guarantees/coupling.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from sordino.accounting import checks
from sordino.errors import InputError, Refused
from sordino.methods.base import Assumption, register
from sordino.methods.dpsgd import DPSGD

if TYPE_CHECKING:
    from sordino.plan import Plan
    from sordino.public import PublicSet


@dataclass(frozen=True)
class Coupling(DPSGD):
    """Paper 004, with the companions that act before the noise."""

    centring: bool = field(default=False, kw_only=True)
    quantile: float | None = field(default=None, kw_only=True)
    name: ClassVar[str] = "coupling"

    def check(self, plan: Plan) -> None:
        if self.inner or self.augmentation or self.record_momentum:
            raise Refused(
                "views and momentum of single records are not combined with public gradients: use the method dpsgd for "
                "them, or leave them out"
            )
        if not isinstance(self.centring, bool):
            raise InputError(f"centring = {self.centring!r} must be true or false")
        if self.quantile is not None:
            checks.probability("quantile", self.quantile, allow_one=True)
            if plan.clipping.norm != "l2":
                raise Refused(
                    f"the quantile is one of l2 norms, and {plan.clipping.name} clipping bounds the "
                    f"{plan.clipping.norm} norm: use l2 clipping, or leave adaptive_clipping out"
                )
        super().check(plan)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        found = []
        if self.centring:
            found.append(
                Assumption(
                    "the public gradient is subtracted from every record's before it is clipped",
                    "it is a function of public rows and released weights; what is clipped is the difference",
                )
            )
        if self.quantile is not None:
            found.append(
                Assumption(
                    f"records are scaled by clip_norm / R and clipped, R the {self.quantile:g} quantile of public ones",
                    "the quantile is a function of public rows and released weights",
                )
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "centring": self.centring, "quantile": self.quantile}


def _read(values: Mapping[str, Any]) -> Coupling:
    if set(values) != {"centring", "quantile"}:
        raise InputError(
            f"the method coupling has the options centring and quantile, got {', '.join(values) or 'none'}"
        )
    return Coupling(**values)


register(Coupling.name, _read)


def plan(*, public: PublicSet | None, centring: bool = False, quantile: float | None = None, **options: Any) -> Plan:
    """A coupling plan: Plan.dpsgd's `options`, the declared public rows, and what a record's vector is.

    `public` may be None for a plan that is made before the rows are read; training refuses it until they are declared.
    """
    from sordino.plan import Plan

    made = Plan.dpsgd(**options, public=public)
    return replace(made, method=Coupling(centring=centring, quantile=quantile))
