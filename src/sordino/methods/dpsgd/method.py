"""DP-SGD: noisy sums of clipped gradients, all of them visible. What is done with them is post-processing.

One vector per record is clipped; the plan's `contribution` says what it consists of. None of its parts changes the
accounting (docs/guarantees/dpsgd.md, docs/guarantees/clipping_bias.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch

from sordino import checks
from sordino.errors import InputError
from sordino.methods.dpsgd.words import WORDS
from sordino.plan.contribution import KINDS, InnerMomentum, RecordMomentum
from sordino.plan.core import Plan
from sordino.plan.make import make_plan
from sordino.plan.method import Method, Request
from sordino.plan.options import PlanOptions, with_options

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe


@dataclass(frozen=True)
class DPSGD(Method):
    """Abadi et al. 2016, with the actual sampling and the accountant for it."""

    name: ClassVar[str] = "dpsgd"
    covers: ClassVar[frozenset[str]] = frozenset(KINDS)
    takes_public_rows: ClassVar[bool] = True
    rehearsed: ClassVar[bool] = True
    protects_users: ClassVar[bool] = True

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        checks.known_keys(recipe.method.options, WORDS.keys, f"[method] of {cls.name}")

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        recipe = request.recipe
        return make_plan(
            cls(),
            **request.arguments(),
            **record_vector(recipe),
            cap=recipe.sampling.cap,
            relation=recipe.privacy.relation,
            accountant=recipe.privacy.accountant,
            unit=recipe.privacy.unit,
            rows_per_user=recipe.privacy.rows_per_user,
            examples_per_user=recipe.privacy.examples_per_user,
        )

    @classmethod
    def optimizer_options(cls, recipe: Recipe, optimizer: Any) -> dict[str, Any]:
        """Outer momentum: M ← outer_kept · M + released sum is torch's SGD with that momentum."""
        kept = recipe.method.options.get("outer_kept")
        if kept is None:
            return {}
        if optimizer is not torch.optim.SGD or "momentum" in recipe.train.options:
            raise InputError(
                "[method] outer_kept is the momentum of the optimizer sgd: give it once, and no other optimizer"
            )
        return {"momentum": checks.within("outer_kept", kept, 0, 1, open_high=True)}


@with_options(make_plan)
def plan(**shared: Unpack[PlanOptions]) -> Plan:
    """A DP-SGD plan for a target `epsilon` (with the smallest noise that meets it) or for a given `noise_multiplier`.

    Returns:
        The plan; `plan.guarantee()` states what it guarantees.

    Raises:
        InputError: a value is wrong, or not exactly one of two alternatives is given.
        Refused: no theorem covers the combination.

    Example:
        >>> import sordino
        >>> plan = sordino.dpsgd(delta=1e-5, records=1000, expected_batch=100, steps=10, noise_multiplier=2.0)
        >>> round(plan.guarantee().epsilon, 1)
        0.8
    """
    return make_plan(DPSGD(), **shared)


def record_vector(recipe: Recipe) -> dict[str, Any]:
    """What a record's vector consists of, from [method] and [augmentation]: keywords of `make_plan`."""
    options = recipe.method.options
    given = [key for key in ("inner_length", "inner_decay") if key in options]
    if len(given) == 1:
        raise InputError(
            "[method] inner_length (past iterates) and inner_decay (factor per iterate of age) must be given together"
        )
    kept = options.get("record_momentum_kept")
    return {
        "inner": InnerMomentum(options["inner_length"], options["inner_decay"]) if given else None,
        "augmentation": recipe.augmentation if recipe.augmentation.changes else None,
        "record_momentum": None if kept is None else RecordMomentum(kept),
    }
