"""Audits of random allocation and of users: below their claims, and broken ones are caught."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy as mean_cross_entropy

from small_audits import small_data, small_model, small_plan
from sordino.audit import audit_plan, check_neighbouring
from sordino.audit.allocation import check_allocation
from sordino.errors import ClaimBroken
from sordino.randomness import RandomSource
from sordino.records.gradients import Stated, record_gradients
from sordino.records.reading import users_of
from sordino.sampling import Allocation, LogicalBatch, Poisson, batches


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return mean_cross_entropy(outputs, targets, reduction="none")


def test_an_audit_of_allocation_stays_below_its_claim_and_half_the_noise_does_not() -> None:
    plan = small_plan(epsilon=4.0, expected_batch=16, steps=16, sampling="allocation")
    arguments = (plan, small_model(), cross_entropy, small_data())
    correct = audit_plan(*arguments, canaries=2000, seed=0)
    assert (correct.holds, correct.sampler) == (True, "allocation")
    assert not audit_plan(*arguments, canaries=2000, seed=0, noise_scale=0.5).holds
    everyone = audit_plan(*arguments, canaries=2000, seed=0, tamper=lambda run: replace(run, sampling=Poisson(1.0)))
    assert not everyone.holds


def test_an_audit_of_users_stays_below_its_claim_and_half_the_noise_does_not() -> None:
    plan = small_plan(epsilon=4.0, expected_batch=32, unit="user")
    arguments = (plan, small_model(), cross_entropy, small_data())
    assert audit_plan(*arguments, canaries=2000, seed=1).holds
    assert not audit_plan(*arguments, canaries=2000, seed=1, noise_scale=0.5).holds


def epochs(orders: list[list[list[int]]]) -> list[LogicalBatch]:
    every = [batch for order in orders for batch in order]
    return [LogicalBatch(step, torch.tensor(sorted(batch), dtype=torch.int64), 8) for step, batch in enumerate(every)]


def test_the_sampler_draws_what_is_claimed_and_a_fixed_order_or_shuffle_and_cut_does_not() -> None:
    genuine = batches(Allocation(10), records=500, steps=200, source=RandomSource.seeded(1), chunk=8)
    assert check_allocation(genuine, batches=10, records=500).holds()
    generator = np.random.default_rng(0)
    labels = generator.integers(10, size=500)
    fixed = [[np.flatnonzero(labels == b).tolist() for b in range(10)]] * 20
    assert not check_allocation(epochs(fixed), batches=10, records=500).holds()
    cut = [np.split(generator.permutation(500), 10) for _ in range(20)]
    assert not check_allocation(epochs([[b.tolist() for b in c] for c in cut]), batches=10, records=500).holds()
    missing = [[[0, 1], [2]], [[0], [1]]]
    assert not check_allocation(epochs(missing), batches=2, records=3).once


@pytest.mark.parametrize("rows_counted_apart", [False, True])
def test_users_whose_rows_are_clipped_apart_are_caught(rows_counted_apart: bool) -> None:
    model, (x, y) = small_model(), small_data(24)
    plan = small_plan(records=4, expected_batch=4, unit="user", noise_multiplier=1.0)
    owner = np.repeat(np.arange(4), 6)
    x = x[:1].repeat(24, 1)  # the rows of a user pull in one direction
    y = y[:1].repeat(24)
    right = record_gradients(model, cross_entropy, users_of((x, y), owner, None), plan.clipping)
    rows = record_gradients(model, cross_entropy, (x, y), plan.clipping)

    def wrong(batch: LogicalBatch) -> object:
        members = np.flatnonzero(np.isin(owner, batch.indices.numpy()))
        return rows(LogicalBatch(batch.step, torch.from_numpy(members), 64))

    others = torch.arange(4)
    if rows_counted_apart:
        with pytest.raises(ClaimBroken):
            check_neighbouring(plan, Stated(wrong, plan.clipping, plan.contribution), 2, others=others)
    else:
        assert check_neighbouring(plan, right, 2, others=others).holds
