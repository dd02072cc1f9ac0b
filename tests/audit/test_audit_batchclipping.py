"""BatchClipping audited: below its claim, and BatchNorm across private records is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from small_audits import small_plan
from sordino import data
from sordino.audit import audit_plan, check_neighbouring, neighbouring
from sordino.clipping import FlatClip, NormalisedClip
from sordino.data import Split
from sordino.errors import ClaimBroken, Refused
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.plan import Plan
from sordino.plan.public import PublicSet
from sordino.records.companions import CompanionNet, companion_model, draw_companions
from sordino.records.gradients import GradientSum, record_gradients
from sordino.sampling import LogicalBatch

RECORDS = 64


@pytest.fixture(scope="module")
def images() -> tuple[Split, Split]:
    """(public, private) rows of the embedded images."""
    train = data.load("fashion-mnist-mini").train
    return Split(train.inputs[:20], train.targets[:20]), Split(train.inputs[20:84], train.targets[20:84])


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 6, 5, stride=3), nn.BatchNorm2d(6), nn.ReLU(),
            nn.Flatten(), nn.Linear(6 * 64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10),
        )  # fmt: skip


def declared(public: Split, **changes: Any) -> Plan:
    return small_plan(public=PublicSet.of(public, "embedded images"), **changes)


def test_the_audit_is_below_the_claim_and_sees_half_the_noise(images: tuple[Split, Split]) -> None:
    public, private = images
    net, plan = companion_model(network(), public, 3), declared(public)
    result = audit_plan(plan, net, cross_entropy, private, seed=0, canaries=4000)
    assert result.holds
    assert 0.3 * result.epsilon_claimed < result.epsilon_lower < result.epsilon_claimed
    broken = audit_plan(plan, net, cross_entropy, private, seed=0, canaries=4000, noise_scale=0.5)
    assert not broken.holds


OTHERS = torch.arange(0, RECORDS, 3)


@pytest.mark.parametrize("clipping", [FlatClip(0.1), NormalisedClip(0.1)], ids=lambda c: c.name)
@pytest.mark.parametrize("companions", [1, 5, 20])
def test_a_record_moves_the_sum_by_at_most_the_bound(
    images: tuple[Split, Split], companions: int, clipping: Any
) -> None:
    """Whatever the record is: ordinary, huge, blank, or one of its own companions in all but the last bit."""
    public, private = images
    inputs = private.inputs.clone()
    inputs[1], inputs[2], inputs[4] = 1e4 * inputs[1], 0.0, public.inputs[0] * 1.0001
    net = companion_model(network(), public, companions)
    plan = declared(public, noise_multiplier=1.0, clipping=clipping)
    gradient_sum = record_gradients(net, cross_entropy, (inputs, private.targets), clipping)
    for record in (0, 1, 2, 4, 63):
        found = check_neighbouring(plan, gradient_sum, record, others=OTHERS)
        assert found.difference > 0.05


def test_a_record_that_was_never_in_the_file_leaves_the_others_as_they_are(images: tuple[Split, Split]) -> None:
    """Without it all later records have other places, in the data and in the batch: still one vector of difference."""
    public, private = images
    net = companion_model(network(), public, 5)
    rest = Split(private.inputs[1:], private.targets[1:])
    with_it, without = (
        record_gradients(net, cross_entropy, rows, FlatClip(0.1))(LogicalBatch(0, torch.arange(len(rows)), 512)).sums
        for rows in (private, rest)
    )
    difference = torch.cat([(with_it[name] - without[name]).flatten() for name in with_it]).norm()
    assert 0.05 < float(difference) <= 0.1 * (1 + 1e-4)


def test_replacing_a_record_moves_the_sum_by_at_most_twice_the_bound(images: tuple[Split, Split]) -> None:
    public, private = images
    net = companion_model(network(), public, 5)
    plan = declared(public, noise_multiplier=1.0, clip_norm=0.1, sampling="without-replacement", expected_batch=16)
    other = private.inputs.clone()
    other[5] = -40 * other[5]
    here, there = (
        record_gradients(net, cross_entropy, (inputs, private.targets), plan.clipping)
        for inputs in (private.inputs, other)
    )
    found = check_neighbouring(plan, here, 5, others=OTHERS, replaced=there)
    assert 0.05 < found.difference <= found.sensitivity == 0.2


def shared_batch(net: nn.Module, private: Split, clipping: FlatClip) -> GradientSum:
    """The fault: ordinary BatchNorm over the private batch, each record's gradient clipped all the same."""
    net = net.train()

    def gradient_sum(batch: LogicalBatch) -> ClippedSum:
        outputs = net(private.inputs[batch.indices])
        losses = cross_entropy(outputs, private.targets[batch.indices], reduction="none")
        names, weights = zip(*net.named_parameters(), strict=True)
        sums, norms = {name: torch.zeros_like(w) for name, w in net.named_parameters()}, []
        for loss in losses:
            gradient = torch.autograd.grad(loss, weights, retain_graph=True)
            norm = torch.sqrt(sum((g**2).sum() for g in gradient))  # type: ignore[arg-type]
            norms.append(norm)
            for name, g in zip(names, gradient, strict=True):
                sums[name] += clipping.factors(norm[None])[0] * g
        return ClippedSum(sums, torch.stack(norms), 0, losses.detach())

    return gradient_sum


def companions_by_place(net: CompanionNet, private: Split, clipping: FlatClip) -> GradientSum:
    """The fault: companions drawn for the place in the batch, so that taking one record out changes all after it."""

    def gradient_sum(batch: LogicalBatch) -> ClippedSum:
        places = np.arange(len(batch.indices), dtype=np.uint64)
        drawn = draw_companions(places, len(net.public), net.companions, seed=0, step=batch.step)
        inputs: tuple[Tensor, Tensor] = (private.inputs[batch.indices], drawn)
        return clipped_sum(net, cross_entropy, Rows(inputs, private.targets[batch.indices]), clipping)

    return gradient_sum


def test_batchnorm_across_private_records_is_caught_by_the_audit_and_refused_by_the_engine(
    images: tuple[Split, Split],
) -> None:
    public, private = images
    plan = declared(public, noise_multiplier=1.0, clip_norm=0.1)
    inputs = private.inputs.clone()
    inputs[3] = 100 * inputs[3]
    loud = replace(private, inputs=inputs)
    with pytest.raises(ClaimBroken, match="records influence each other"):
        check_neighbouring(plan, shared_batch(network(), loud, FlatClip(0.1)), 3, others=OTHERS)
    with pytest.raises(Refused, match="BatchNorm in training mode"):
        neighbouring(
            plan, record_gradients(network().train(), cross_entropy, loud, FlatClip(0.1)), 3, others=OTHERS
        )  # fmt: skip


def test_companions_that_depend_on_the_batch_are_caught(images: tuple[Split, Split]) -> None:
    public, private = images
    plan = declared(public, noise_multiplier=1.0, clip_norm=0.1)
    net = companion_model(network(), public, 2)
    with pytest.raises(ClaimBroken):
        check_neighbouring(plan, companions_by_place(net, private, FlatClip(0.1)), 0, others=OTHERS)
