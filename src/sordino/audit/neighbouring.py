"""Grey-box check: the same step on neighbouring datasets, with the same randomness.

The output of the gradient stage on two neighbouring datasets must differ, before noise, by at most the sensitivity
that the plan declares, for every record and every batch. A run can't prove this, but one counter-example
refutes it; the tests of every method search for one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import ClaimBroken, InputError
from sordino.plan import ROUNDING_MARGIN, Plan
from sordino.records.gradients import GradientSum
from sordino.sampling import LogicalBatch
from sordino.training.steps import DEFAULT_CHUNK


@dataclass(frozen=True)
class Neighbouring:
    """The distance between the sums of two neighbouring datasets, and the distance that is allowed."""

    difference: float
    sensitivity: float
    norm: str
    relation: str

    @property
    def holds(self) -> bool:
        """Whether the distance is at most the sensitivity, with the margin for rounding that the noise covers."""
        return self.difference <= self.sensitivity * (1 + ROUNDING_MARGIN)


def neighbouring(
    plan: Plan,
    gradient_sum: GradientSum,
    record: int,
    *,
    others: Tensor,
    replaced: GradientSum | None = None,
    step: int = 0,
) -> Neighbouring:
    """Compares the sum over a batch that contains a record with the sum of the neighbouring dataset.

    Args:
        plan: The plan; its relation determines the neighbouring dataset.
        gradient_sum: The gradient sum of the dataset.
        record: The index of the record.
        others: The indices of the other records of the batch.
        replaced: Under replace-one, the gradient sum of the dataset in which `record` is another record, at the same
            weights. Under add-remove None: the neighbouring dataset lacks the record.
        step: The step of the batch.

    Returns:
        The distance between the two sums, and the distance that the plan allows.

    Raises:
        InputError: `replaced` is missing under replace-one, or given under add-remove.
    """
    rest = others[others != record]
    batch = torch.cat([rest, torch.tensor([record], dtype=torch.int64)]).sort().values
    if plan.relation == "add-remove":
        if replaced is not None:
            raise InputError("under add-remove the neighbour lacks the record: leave out `replaced`")
        there = gradient_sum(LogicalBatch(step, rest, DEFAULT_CHUNK)).sums
    elif replaced is None:
        raise InputError("under replace-one give `replaced`, the gradient sum of the neighbouring dataset")
    else:
        there = replaced(LogicalBatch(step, batch, DEFAULT_CHUNK)).sums
    here = gradient_sum(LogicalBatch(step, batch, DEFAULT_CHUNK)).sums
    order = 1 if plan.clipping.norm == "l1" else 2
    a, b = _flat(here), _flat(there)
    return Neighbouring(
        difference=float(torch.linalg.vector_norm(a - b, order)),
        sensitivity=plan.clipping.sensitivity(plan.relation),
        norm=plan.clipping.norm,
        relation=plan.relation,
    )


def check_neighbouring(
    plan: Plan,
    gradient_sum: GradientSum,
    record: int,
    *,
    others: Tensor,
    replaced: GradientSum | None = None,
    step: int = 0,
) -> Neighbouring:
    """`neighbouring`, with an exception if the sums differ by more than the plan allows.

    Args:
        plan: The plan; its relation determines the neighbouring dataset.
        gradient_sum: The gradient sum of the dataset.
        record: The index of the record.
        others: The indices of the other records of the batch.
        replaced: As in `neighbouring`.
        step: The step of the batch.

    Returns:
        The distance between the two sums, and the distance that the plan allows.

    Raises:
        ClaimBroken: the sums differ by more than the declared sensitivity.
        InputError: `replaced` is missing under replace-one, or given under add-remove.
    """
    found = neighbouring(plan, gradient_sum, record, others=others, replaced=replaced, step=step)
    if not found.holds:
        raise ClaimBroken(
            f"record {record} changes the clipped sum by {found.difference:.6g} in {found.norm}, more than the "
            f"sensitivity {found.sensitivity:.6g} that the plan declares under {found.relation}: the clipping does not "
            "bound this record, or records influence each other"
        )
    return found


def _flat(sums: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([value.detach().flatten().double() for value in sums.values()])
