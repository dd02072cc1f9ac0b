"""DP-MAC as a method: noisy sums of scaled Taylor coefficients, all of them visible.

A record's coefficients of all layers are one vector of norm at most 1 (by construction, `coefficients`), summed over a
Poisson batch and released once per step. That is the subsampled Gaussian mechanism with clip norm 1, accounted as
DP-SGD (Abadi et al. 2016; docs/guarantees/dp_mac.md, Theorem 1). DP-PCA and private thresholds are
`Statistic`s of the same plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, Unpack

from sordino import checks
from sordino.clipping import FlatClip
from sordino.data import published
from sordino.errors import InputError, Refused
from sordino.methods.dp_mac.recipe import read
from sordino.methods.dp_mac.run import MacWork, restored
from sordino.plan.core import Plan
from sordino.plan.make import make_plan
from sordino.plan.method import Assumption, Method, Request
from sordino.plan.options import PlanOptions, with_options

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from sordino.runs.recipe import Recipe

_ANY_SHAPE = ((1,), 2)
"""A shape and classes for plans, which depend on the number of layers only."""


@dataclass(frozen=True)
class DPMAC(Method):
    """Harder et al. 2018. `parts`: the number of bounded parts (layers × coefficients) in a record's vector."""

    parts: int = 1
    name: ClassVar[str] = "dp-mac"
    trained_by: ClassVar[str | None] = "sordino.methods.dp_mac.training.train_mac"
    threat_model: ClassVar[str] = (
        "the adversary sees every noisy vector of Taylor coefficients that was released, hence every iterate and the "
        "final model; the auxiliary coordinates are never released"
    )
    bounded_by: ClassVar[str] = "its coefficients are computed from it and the released weights, and scaled: see below"
    reads_own_data: ClassVar[bool] = True

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    def restored(
        self, plan: Plan, recipe: Recipe, folder: Path, shape: tuple[int, ...], classes: int
    ) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        return restored(recipe, folder, shape, classes)

    def check(self, plan: Plan) -> None:
        checks.count("parts", self.parts)
        if plan.clipping != FlatClip(1.0):
            raise Refused(f"DP-MAC scales a record's coefficients to norm 1: clip_norm must be 1, not {plan.clipping}")
        if plan.relation != "add-remove" or plan.sampling.name != "poisson":
            raise Refused("DP-MAC is proven for Poisson sampling under add-remove only")
        super().check(plan)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        return (
            Assumption(
                f"a record's {self.parts} coefficient blocks, each divided by its bound and √{self.parts}, have joint "
                "norm at most 1",
                "every block of every record is clipped to its bound, also if the bound is analytic",
            ),
            Assumption(
                "a record's auxiliary coordinates depend on no other record",
                "they start from the record and the released weights, and are updated coordinate by coordinate",
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "parts": self.parts}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        if set(values) != {"parts"}:
            raise InputError(f"the method {cls.name} has the option parts, got {', '.join(values) or 'none'}")
        return cls(**values)

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        public = published(request.recipe.data)
        unknown = public.shape is None or public.classes is None  # arrays, or a function: known once they are read
        return read(request.recipe, known=_ANY_SHAPE if unknown else None).plan

    @classmethod
    def work(cls, recipe: Recipe, data_dir: Path | None, progress: bool | None) -> MacWork:
        return MacWork.of(recipe, data_dir, progress)

    def result_entries(self, metrics: Mapping[str, Any], noise_free: Mapping[str, Any] | None) -> dict[str, Any]:
        return {"test_error": metrics.get("test_error"), "noise_free_error": (noise_free or {}).get("test_error")}


@with_options(
    make_plan, "delta", "records", "expected_batch", "epsilon", "noise_multiplier", "epochs", "steps", "accountant",
    "insecure_seed", "statistics",
)  # fmt: skip
def plan(*, parts: int, **shared: Unpack[PlanOptions]) -> Plan:
    """A DP-MAC plan. A target `epsilon` is that of all releases, statistics included.

    Args:
        parts: The number of bounded parts (layers × coefficients) in a record's vector.

    Returns:
        The plan.

    Raises:
        InputError: a value is wrong, or not exactly one of two alternatives is given.
        Refused: no theorem covers the combination.
    """
    return make_plan(DPMAC(parts), **shared)
