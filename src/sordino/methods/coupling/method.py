"""Coupling: DP-SGD on the private rows, whose released gradients are combined with gradients of declared public rows.

The weight of the combination, its rule, warm-up and projection use released values and are not part of the plan. What
is part of it is a record's vector before clipping:

    centring   clip(g_i − v), v the gradient of public rows (DOPE-SGD, Nasr et al. 2023); v is added back afterwards
    quantile   clip(g_i · C/R), R that quantile of the norms of public gradients; R/C is multiplied back afterwards

In both cases a record that is not in the batch contributes nothing, and one that is contributes a vector that the
plan's clipping bounds by C, for all v and R. So the accountant is DP-SGD's (docs/guarantees/coupling.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from torch import Tensor, nn

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.methods.coupling.recipe import public_use
from sordino.methods.coupling.use import CoupledUpdate, PublicUse
from sordino.plan.core import Plan
from sordino.plan.make import make_plan
from sordino.plan.method import Assumption, Method, Request
from sordino.plan.options import SharedOptions, with_options
from sordino.plan.public import PublicSet

if TYPE_CHECKING:
    from sordino.records.gradients import GradientSum
    from sordino.records.momentum import PastIterates
    from sordino.runs.recipe import Recipe
    from sordino.split import Split


@dataclass(frozen=True)
class Coupling(Method):
    """Liu, Bu, Wang, Zha & Karypis 2023, with the uses of public rows that act before the noise."""

    centring: bool = field(default=False, kw_only=True)
    quantile: float | None = field(default=None, kw_only=True)
    name: ClassVar[str] = "coupling"
    takes_public_rows: ClassVar[bool] = True
    combines_public: ClassVar[bool] = True

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    def check(self, plan: Plan) -> None:
        if not isinstance(self.centring, bool):
            raise InputError(f"centring = {self.centring!r} must be true or false")
        if self.quantile is not None:
            checks.probability("quantile", self.quantile, allow_one=True)
            if plan.clipping.norm != "l2":
                raise Refused(
                    f"the quantile is one of l2 norms, but {plan.clipping.name} clipping bounds the "
                    f"{plan.clipping.norm} norm: use l2 clipping, or leave out adaptive_clipping"
                )
        super().check(plan)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        found = []
        if self.centring:
            found.append(
                Assumption(
                    "the public gradient is subtracted from every record's gradient before clipping",
                    "it is a function of public rows and released weights; the difference is clipped",
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if set(values) != {"centring", "quantile"}:
            raise InputError(
                f"the method {cls.name} has the options centring and quantile, got {', '.join(values) or 'none'}"
            )
        return cls(**values)

    def gradient_sum(
        self,
        plan: Plan,
        model: nn.Module,
        loss: Callable[..., Tensor],
        dataset: Any,
        *,
        past: Callable[[], PastIterates],
        seed: int,
        public: PublicUse | None = None,
    ) -> GradientSum | None:
        if public is not None:
            return CoupledUpdate(public, plan, model, loss).gradient_sum(dataset, past=past, seed=seed)
        if self.centring or self.quantile is not None:
            raise Refused(
                "the plan states gradients that are centred or scaled by public rows: give train these rows "
                "(public=), or use plan_gradients with public="
            )
        return None

    def update(
        self, plan: Plan, model: nn.Module, loss: Callable[..., Tensor], public: PublicUse | None = None
    ) -> CoupledUpdate:
        if public is None:
            raise Refused("a coupling plan also trains on public rows: give public=PublicUse(rows, rule=…)")
        return CoupledUpdate(public, plan, model, loss)

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        """The plan of a coupling recipe, without its public rows: their digest is known once they are read."""
        recipe = request.recipe
        if not recipe.public.given:
            raise InputError(f"the method {cls.name} needs public rows: say which in [public] (fraction or records)")
        if recipe.features.private is not None:
            raise Refused(
                "[features] private spends privacy on statistics that public rows give at no cost: leave it out"
            )
        public_use(recipe, None)  # raises for an unknown rule or option
        options = recipe.method.options
        return plan(
            public=None, centring=options.get("centring", False), quantile=options.get("adaptive_clipping"),
            **request.arguments(),
            cap=recipe.sampling.cap, relation=recipe.privacy.relation, accountant=recipe.privacy.accountant,
        )  # fmt: skip

    @classmethod
    def public_use(cls, recipe: Recipe, rows: Split | None) -> PublicUse:
        return public_use(recipe, rows)


@with_options(make_plan)
def plan(
    *,
    public: PublicSet | None,
    centring: bool = False,
    quantile: float | None = None,
    relation: str | None = None,
    **shared: Unpack[SharedOptions],
) -> Plan:
    """A coupling plan; its ε is that of DP-SGD with the same options.

    Args:
        public: The declared public rows; None for a plan that is made before they are read: training refuses it until
            they are declared.
        centring: Subtract the public gradient from a record's gradient before clipping.
        quantile: Scale a record's gradient by the clip norm over this quantile of public norms before clipping.
        relation: add-remove or replace-one; the default is that of the sampler.

    Returns:
        The plan.

    Raises:
        InputError: a value is wrong, or not exactly one of two alternatives is given.
        Refused: no theorem covers the combination.
    """
    return make_plan(Coupling(centring=centring, quantile=quantile), **shared, relation=relation, public=public)
