"""DP-SGD: noisy sums of clipped gradients, all of them visible. What becomes of them is post-processing.

What is clipped is one vector per record; the plan's `contribution` says what it is made of. None of its parts changes
what is accounted (docs/guarantees/dpsgd.md, docs/guarantees/clipping_bias.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from sordino import checks
from sordino.clipping import Clipping
from sordino.errors import InputError
from sordino.plan.contribution import KINDS, Augmentation, Contribution, InnerMomentum, RecordMomentum
from sordino.plan.core import Plan, Statistic
from sordino.plan.make import make_plan
from sordino.plan.method import Method, Request
from sordino.plan.public import PublicSet

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

RECORD_KEYS = ("inner_length", "inner_decay", "outer_kept", "record_momentum_kept")
"""[method]: how many past iterates join, the factor per iterate of age, the part of the released momentum that a step
keeps; Algorithm 1: the part of each record's own momentum that a step keeps."""


@dataclass(frozen=True)
class DPSGD(Method):
    """Abadi et al. 2016, with the sampling that is really used and the accountant that fits it."""

    name: ClassVar[str] = "dpsgd"
    covers: ClassVar[frozenset[str]] = frozenset(KINDS)
    takes_public_rows: ClassVar[bool] = True
    rehearsed: ClassVar[bool] = True

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        return plan(**options)

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        checks.known_keys(recipe.method.options, RECORD_KEYS, f"[method] of {cls.name}")

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        recipe = request.recipe
        return make_plan(
            cls(),
            **request.arguments(),
            contribution=record_vector(recipe),
            cap=recipe.sampling.cap,
            relation=recipe.privacy.relation,
            accountant=recipe.privacy.accountant,
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


def plan(
    *,
    delta: float,
    records: int,
    expected_batch: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    clip_norm: float | None = None,
    clipping: Clipping | None = None,
    sampling: str = "poisson",
    cap: int | None = None,
    relation: str | None = None,
    accountant: str = "pld",
    divisor: float | None = None,
    insecure_seed: int | None = None,
    statistics: Sequence[Statistic] = (),
    public: PublicSet | None = None,
    inner: InnerMomentum | None = None,
    augmentation: Augmentation | None = None,
    record_momentum: RecordMomentum | None = None,
) -> Plan:
    """A DP-SGD plan for a target `epsilon` (the smallest noise that meets it) or a given `noise_multiplier`.

    Args:
        delta: δ in (0, 1).
        records: the public number of records.
        expected_batch: the (expected) number of records in a step.
        epsilon: the target; or give `noise_multiplier`.
        noise_multiplier: standard deviation of the noise (Laplace: its scale) over the clip norm.
        epochs: passes over the data; or give `steps`.
        steps: the number of steps.
        clip_norm: the bound of flat l2 clipping (default 1.0); or give `clipping`.
        clipping: how a record is bounded. Its norm chooses the noise: l2 Gaussian, l1 Laplace.
        sampling: poisson, allocation (each record once per epoch), truncated-poisson, partition or without-replacement.
        cap: the largest batch of truncated-poisson sampling.
        relation: add-remove (the default of Poisson samplers and of allocation) or replace-one (that of the others).
        accountant: pld or rdp.
        divisor: the public number that sums are divided by (default: the expected batch).
        insecure_seed: makes the run repeatable, and the guarantee void for whoever knows it.
        statistics: further releases in the same budget.
        public: rows that the guarantee does not protect.
        inner: a record's vector is the sum of its gradients at past iterates; ε is the same with and without.
        augmentation: a record's vector is the mean over views of it; likewise.
        record_momentum: a record's vector is its momentum over all steps; likewise.

    Returns:
        The plan; `plan.guarantee()` says what it promises.

    Raises:
        InputError: a value is wrong, or one of a pair is missing.
        Refused: no theorem covers the combination.

    Example:
        >>> made = plan(delta=1e-5, records=1000, expected_batch=100, steps=10, noise_multiplier=2.0)
        >>> round(made.guarantee().epsilon, 1)
        0.9
    """
    return make_plan(
        DPSGD(), delta=delta, records=records, expected_batch=expected_batch, epsilon=epsilon,
        noise_multiplier=noise_multiplier, epochs=epochs, steps=steps, clip_norm=clip_norm, clipping=clipping,
        sampling=sampling, cap=cap, relation=relation, accountant=accountant, divisor=divisor,
        insecure_seed=insecure_seed, statistics=statistics, public=public,
        contribution=Contribution(inner=inner, augmentation=augmentation, record_momentum=record_momentum),
    )  # fmt: skip


def record_vector(recipe: Recipe) -> Contribution:
    """What a record's one vector is made of, from [method] and [augmentation]."""
    options = recipe.method.options
    given = [key for key in ("inner_length", "inner_decay") if key in options]
    if len(given) == 1:
        raise InputError(
            "[method] inner_length (past iterates) and inner_decay (factor per iterate of age) go together"
        )
    kept = options.get("record_momentum_kept")
    return Contribution(
        inner=InnerMomentum(options["inner_length"], options["inner_decay"]) if given else None,
        augmentation=recipe.augmentation if recipe.augmentation.changes else None,
        record_momentum=None if kept is None else RecordMomentum(kept),
    )
