"""Private steps: sample, compute gradients, clip, release.

`private_steps` is the only way from records to a gradient that an optimizer may see. It takes everything that the
guarantee depends on from the plan, so what is accounted is what is run:

    batch  ~ plan.sampling                 (which records take part)
    sums   = gradient_sum(batch)           (every record's gradient bounded by plan.clipping, summed)
    noisy  = release(sums, plan.noise)     (noise; the ledger entry is written before the value is returned)
    step   = noisy / plan.divisor          (a public constant, never the size of the batch)

For a method that also needs uniform noise, the caller, who knows the iterates, provides its widths; a step whose widths
are missing, or narrower than the plan's, is refused before anything is released.

Everything that can be refused is refused when `private_steps` is called. The iterator that it returns is lazy: the
gradients of step t+1 are computed at the weights after the caller has applied step t.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from sordino.checks import fewest_records
from sordino.errors import InputError, Refused
from sordino.gradients import ClippedSum, Rows
from sordino.plan.contribution import Contribution
from sordino.plan.core import Plan
from sordino.plan.explained import Explained
from sordino.randomness import RandomSource
from sordino.randomness.masks import masks_of
from sordino.records.companions import refuse_undeclared
from sordino.records.gradients import GradientSum, stated_unit
from sordino.records.reading import as_records, rows_of_users, users_of
from sordino.records.users import Protects, RowsOfUsers, UserRows
from sordino.release import Entry, release
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch, TruncatedPoisson, batches

Widths = Callable[[int], Mapping[str, Tensor]]
"""Maps a step to the width of the uniform noise on each coordinate, in units of the summed gradient."""

DEFAULT_CHUNK = 512
"""The default number of records whose activations are in memory at once."""


@dataclass(frozen=True)
class PrivateStep:
    """A released gradient: it may be used, published and post-processed in any way.

    Args:
        step: The number of the step, from 0.
        gradients: The noisy sum divided by the plan's divisor, by parameter name.
    """

    step: int
    gradients: dict[str, Tensor]

    def assign(self, model: nn.Module) -> None:
        """Stores the gradients in `parameter.grad`, where any torch optimizer expects them.

        Args:
            model: The model whose gradients these are.
        """
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.gradients[name].to(parameter.dtype)


def private_steps(
    plan: Plan,
    gradient_sum: GradientSum,
    *,
    records: int,
    source: RandomSource,
    ledger: Ledger,
    chunk: int = DEFAULT_CHUNK,
    start: int = 0,
    widths: Widths | None = None,
) -> Iterator[PrivateStep]:
    """The plan's steps from `start` on.

    Edge cases: an empty batch still makes a noisy step; leaving the loop early leaves nothing behind but the ledger's
    entries; repeating steps that were already released is refused by the ledger (or, with an insecure seed, gives the
    same values again).

    Args:
        plan: The plan that is accounted and run.
        gradient_sum: The function that sums over a batch; its stated clipping and contribution must be the plan's.
        records: The number of records to sample from.
        source: `plan.source()`.
        ledger: A ledger opened with this plan's to_dict().
        chunk: The number of records in memory at once.
        start: The first step to make.
        widths: Called once for each step, at the weights at which its gradients are computed; for methods that add
            uniform noise.

    Returns:
        An iterator of released gradients, divided by the plan's divisor.

    Raises:
        Refused, InputError: at the call, before anything is drawn.
    """
    check_records(plan, records)
    since = check_same_plan(plan, gradient_sum, source, ledger, start)
    check_uniform(plan, widths)
    drawn = plan_batches(plan, records=records, source=source, chunk=chunk, start=start)
    return _released(plan, gradient_sum, drawn, source, ledger, widths, since)


def _released(
    plan: Plan,
    gradient_sum: GradientSum,
    drawn: Iterator[LogicalBatch],
    source: RandomSource,
    ledger: Ledger,
    widths: Widths | None,
    since: int,
) -> Iterator[PrivateStep]:
    for batch in _expected(drawn, gradient_sum):
        uniform = None if widths is None else _wide_enough(plan, widths(batch.step), batch.step)
        # A new dict, so that a caller who holds the original sums does not see them overwritten.
        total = summed(gradient_sum, batch, source)
        sums, dtype = dict(total.sums), total.dtype
        del total
        noisy = release(
            sums,
            sensitivity=plan.sensitivity,
            norm=plan.clipping.norm,
            noise=plan.noise_at(batch.step),
            source=source,
            ledger=ledger,
            entry=Entry("gradient", batch.step, plan.sampled(batch.step), plan.relation),
            widths=uniform,
            factor=1.0 / plan.divisor,
            in_place=True,
            dtype=dtype,
            earlier=plan.method.earlier_noise(plan, batch.step, since),
        )
        sums.clear()
        yield PrivateStep(batch.step, noisy)


def _expected(drawn: Iterator[LogicalBatch], gradient_sum: GradientSum) -> Iterator[LogicalBatch]:
    """The batches; each is drawn before the previous one is summed, so that its rows can be read at the same time."""
    expect = getattr(gradient_sum, "expect", None)
    if expect is None:
        yield from drawn
        return
    batch = next(drawn, None)
    while batch is not None:
        after = next(drawn, None)
        if after is not None:
            expect(after)
        yield batch
        batch = after


def summed(gradient_sum: GradientSum, batch: LogicalBatch, source: RandomSource) -> ClippedSum:
    """The sum over a batch, with torch's random numbers (dropout masks) drawn from the run's source.

    So masks are as secret as batches. A mask is assigned to a position in the batch: if its seed were public, removing
    one record would give all later ones other masks, and change the sum by more than one record's contribution. With
    secret masks the two runs are compared with each record keeping its own mask (docs/guarantees/clipping_bias.md).
    """
    with masks_of(mask_seed(source, batch.step)):
        return gradient_sum(batch)


def mask_seed(source: RandomSource, step: int) -> int:
    """The secret seed of a step's masks."""
    return int(source.stream("dropout", step).bits64(1)[0]) >> 1


def check_uniform(plan: Plan, widths: Widths | None) -> None:
    """Requires uniform noise if the guarantee needs it, and refuses it otherwise."""
    if plan.method.adds_uniform_noise and widths is None:
        raise Refused(
            f"the guarantee of {plan.method.name} needs uniform noise on every coordinate: give `widths` (train "
            "takes them from the method's update)"
        )
    if widths is not None and not plan.method.adds_uniform_noise:
        raise Refused(f"the method {plan.method.name} does not account for uniform noise: leave out `widths`")


def _wide_enough(plan: Plan, given: Mapping[str, Tensor], step: int) -> Mapping[str, Tensor]:
    """The widths of a step; Refused if one is narrower than the guarantee requires."""
    least = plan.method.least_width(plan, step)
    for name, value in given.items():
        if value.numel() and not float(value.min()) >= least:  # also refuses NaN
            raise Refused(
                f"step {step}: the uniform noise on {name!r} has width {float(value.min()):g}, but the guarantee of "
                f"{plan.method.name} requires at least {least:g}: the gap between the iterates was not enforced"
            )
    return given


def check_same_plan(plan: Plan, gradient_sum: GradientSum, source: RandomSource, ledger: Ledger, start: int) -> int:
    """Checks that gradient sum, source and ledger belong to the plan.

    Returns:
        The first step whose noise may be added again.

    Raises:
        Refused, InputError: one of them does not belong to the plan.
    """
    if plan.method.publishes is not None:
        raise Refused(
            f"the guarantee of {plan.method.name} covers {plan.method.publishes} only, but these steps would return "
            "every released gradient: use its own training function, or a plan of another method"
        )
    check_gradient_sum(plan, gradient_sum)
    if source.secure != (plan.insecure_seed is None):
        raise Refused("the plan and the random source disagree on whether the noise is secure: use plan.source()")
    if {**ledger.header, "kind": "plan"} != {**json.loads(json.dumps(plan.to_dict())), "kind": "plan"}:
        raise InputError("the ledger was opened for another plan: open it with this plan's to_dict()")
    source.claim(ledger.name)
    explained = Explained(plan, ledger.entries)
    explained.require_source(source)
    explained.require_start(start, source)
    ledger.guard(explained)
    return explained.noise_since(start, source)


def check_gradient_sum(plan: Plan, gradient_sum: GradientSum) -> None:
    """Refuses a gradient sum whose stated clipping or contribution differs from the plan's."""
    if not isinstance(gradient_sum, GradientSum):
        raise Refused(
            f"a {type(gradient_sum).__name__} does not state how it bounds a record: use record_gradients or "
            "plan_gradients, or wrap your own function in sordino.records.gradients.Stated"
        )
    if gradient_sum.clipping != plan.clipping:
        raise Refused(
            f"the gradients are clipped by {gradient_sum.clipping}, but the plan accounts for {plan.clipping}: use the "
            "plan's clipping"
        )
    stated, planned = gradient_sum.contribution, plan.contribution
    if stated.without_companions() != planned.without_companions():
        raise Refused(
            f"a record's vector consists of {_parts(stated)}, but the plan states {_parts(planned)}: use "
            "plan_gradients, or make the plan with that contribution (inner=, augmentation=, record_momentum=)"
        )
    refuse_undeclared(plan, stated)
    _check_unit(plan, stated_unit(gradient_sum))


def _check_unit(plan: Plan, found: Protects) -> None:
    """Raises Refused if the records are rows although the plan protects users."""
    if plan.unit != "user":
        return
    unit, most = found
    drawn = plan.examples_per_user
    if (unit == "user" and drawn is None) or (unit == "row" and None not in (most, drawn) and most <= drawn):  # type: ignore[operator]
        return
    wanted = "users_of" if drawn is None else "rows_of_users"
    raise Refused(
        f"the plan protects users, and the gradient sum's records are {unit}s"
        + (f" ({most} of a user)" if most is not None else "")
        + f": its ε would be about rows. Give the dataset as sordino.records.reading.{wanted} makes it of one id for "
        "each row (train does so with users=)"
    )


def _parts(contribution: Contribution) -> str:
    parts = [getattr(contribution, kind) for kind in contribution.kinds if kind != "companions"]
    return " and ".join(str(part) for part in parts) or "the record's gradient itself"


def plan_batches(
    plan: Plan, *, records: int, source: RandomSource, chunk: int = DEFAULT_CHUNK, start: int = 0
) -> Iterator[LogicalBatch]:
    """The batches of the plan, drawn by the sampler that the plan accounts for."""
    return batches(plan.sampling, records=records, steps=plan.steps, source=source, chunk=chunk, start=start)


def unit_dataset(plan: Plan, dataset: Any, users: Any = None) -> Any:
    """The dataset with the plan's unit of privacy as its record.

    Raises:
        Refused: the plan's unit does not fit what is known about the rows' users.
        InputError: the ids are wrong.
    """
    if users is not None:
        if plan.unit != "user":
            raise Refused(
                "users are given, but the plan's unit is a record: its ε would be about rows. Make the plan with "
                "unit='user', records = the public number of users, and expected_batch in users"
            )
        if plan.examples_per_user is not None:
            return rows_of_users(dataset, users, plan.examples_per_user)
        return users_of(dataset, users, plan.rows_per_user)
    if plan.unit != "user":
        return dataset
    if plan.examples_per_user is not None:
        if isinstance(dataset, RowsOfUsers) and dataset.examples_per_user <= plan.examples_per_user:
            return dataset
        raise Refused(
            "the plan samples rows and protects users who have at most examples_per_user of them, but the rows have no "
            "owners: give users=, one id for each row"
        )
    if isinstance(dataset, Rows) and dataset.record is not None:
        dataset = as_records(dataset)
        dataset.rows_per_user = plan.rows_per_user
    if not isinstance(dataset, UserRows) or isinstance(dataset, RowsOfUsers):
        raise Refused(
            "the plan's unit is a user, but the rows have no owners: give users=, one id for each row (otherwise each "
            "row would be protected as if it came from a different user)"
        )
    if plan.rows_per_user is not None and (dataset.rows_per_user or math.inf) > plan.rows_per_user:
        raise Refused(
            f"the plan says that at most {plan.rows_per_user} rows of a user form a record, and the dataset takes "
            f"{'all' if dataset.rows_per_user is None else dataset.rows_per_user}: make it with the plan's number"
        )
    return dataset


def check_records(plan: Plan, records: int) -> None:
    """Compares the plan's public number of records with the data's.

    Under add/remove the true number is itself private, and nothing that is released depends on it: rate and divisor are
    the plan's. A number that is far off is a mistake, though, and is reported. Under replace-one the number is public
    and must be exact, because the batches are cut from it. A cap on the batch is accounted for every number from
    checks.fewest_records to the plan's.
    """
    exact = plan.relation == "replace-one"
    if records > plan.records and isinstance(plan.sampling, TruncatedPoisson):
        raise InputError(
            f"the dataset has more {plan.counted}s than the plan's {plan.records}: the cap on the batch was accounted "
            "for at most that many; make the plan with a public number that is not below the dataset's",
            private=f"the dataset has {records} {plan.counted}s",
        )
    if records != plan.records and (exact or abs(records - plan.records) > plan.records - fewest_records(plan.records)):
        raise InputError(
            f"the plan is for {plan.records} {plan.counted}s, but the dataset has another number: give the plan "
            + (
                "the dataset's number (under replace-one the number of records is public and must be exact)"
                if exact
                else "a public number within ten percent of it (known without looking at the data)"
            ),
            private=f"the dataset has {records} {plan.counted}s",
        )
