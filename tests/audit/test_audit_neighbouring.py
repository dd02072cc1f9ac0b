"""The grey-box check: real engines pass it, and each way to break a sensitivity is caught."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from small_audits import RECORDS, small_data, small_model, small_plan
from sordino.audit import check_neighbouring, neighbouring
from sordino.clipping import AutomaticClip, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
from sordino.errors import ClaimBroken, InputError
from sordino.gradients import ClippedSum
from sordino.records.gradients import GradientSum, record_gradients
from sordino.sampling import LogicalBatch

OTHERS = torch.arange(0, RECORDS, 3)
CLIPPINGS = [
    FlatClip(0.1), AutomaticClip(0.1), NormalisedClip(0.1), PerLayerClip(0.1), L1Clip(0.1), L2LinfClip(0.1, p=4.0)
]  # fmt: skip


def engine(clipping: Any, data: Any = None) -> GradientSum:
    return record_gradients(small_model(), cross_entropy, data or small_data(), clipping)


@pytest.mark.parametrize("clipping", CLIPPINGS, ids=lambda c: c.name)
def test_adding_a_record_moves_the_sum_by_at_most_the_bound(clipping: Any) -> None:
    plan = small_plan(noise_multiplier=1.0, clipping=clipping)
    for record in (0, 1, 17, 63):
        found = check_neighbouring(plan, engine(clipping), record, others=OTHERS)
        assert found.difference > 0.0
        assert found.sensitivity == 0.1


@pytest.mark.parametrize("clipping", [FlatClip(0.1), L2LinfClip(0.1, p=4.0)], ids=lambda c: c.name)
def test_replacing_a_record_moves_the_sum_by_at_most_twice_the_bound(clipping: Any) -> None:
    plan = small_plan(noise_multiplier=1.0, clipping=clipping, sampling="without-replacement", expected_batch=16)
    inputs, targets = small_data()
    other = inputs.clone()
    other[5] = -40.0 * other[5]
    found = check_neighbouring(plan, engine(clipping), 5, others=OTHERS, replaced=engine(clipping, (other, targets)))
    assert found.sensitivity == 0.2
    assert found.difference > 0.05


def test_fastdp_46_a_clip_norm_that_is_ignored_is_caught() -> None:
    plan = small_plan(noise_multiplier=1.0, clip_norm=0.1)
    with pytest.raises(ClaimBroken, match=r"more than the sensitivity 0\.1"):
        check_neighbouring(plan, engine(FlatClip(10.0)), 3, others=OTHERS)


def test_a_mean_over_the_batch_is_caught() -> None:
    """Dividing by the size of the batch before the noise: every record moves everybody's share."""
    plan = small_plan(noise_multiplier=1.0, clip_norm=0.1)
    honest = engine(FlatClip(0.1))

    def mean(batch: LogicalBatch) -> ClippedSum:
        total = honest(batch)
        return replace(total, sums={name: 64 * value / max(len(batch), 1) for name, value in total.sums.items()})

    with pytest.raises(ClaimBroken):
        check_neighbouring(plan, mean, 3, others=OTHERS)


def test_records_that_influence_each_other_are_caught() -> None:
    """As batch normalisation does: the presence of a record changes the gradients of the others."""
    plan = small_plan(noise_multiplier=1.0, clip_norm=0.1)
    honest = engine(FlatClip(0.1))

    def coupled(batch: LogicalBatch) -> ClippedSum:
        total = honest(batch)
        sign = -1.0 if 3 in batch.indices.tolist() else 1.0
        return replace(total, sums={name: sign * value for name, value in total.sums.items()})

    assert not neighbouring(plan, coupled, 3, others=OTHERS).holds


def test_the_record_alone_and_a_record_already_among_the_others() -> None:
    plan = small_plan(noise_multiplier=1.0, clip_norm=0.1)
    nobody = torch.zeros(0, dtype=torch.int64)
    alone = neighbouring(plan, engine(FlatClip(0.1)), 3, others=nobody)
    among = neighbouring(plan, engine(FlatClip(0.1)), 3, others=OTHERS)
    assert alone.holds
    assert alone.difference == pytest.approx(among.difference, rel=1e-4)


def test_the_neighbour_must_fit_the_relation() -> None:
    flat = engine(FlatClip(1.0))
    with pytest.raises(InputError, match="lacks the record"):
        neighbouring(small_plan(noise_multiplier=1.0), flat, 0, others=OTHERS, replaced=flat)
    plan = small_plan(noise_multiplier=1.0, sampling="without-replacement", expected_batch=16)
    with pytest.raises(InputError, match="give `replaced`"):
        neighbouring(plan, flat, 0, others=OTHERS)
