"""The black-box audit: a true claim holds, a broken one does not, and initial weights are the adversary's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import sordino.audit.black_box as module
from small_audits import small_plan
from sordino.audit.black_box import audit_black_box, fitted
from sordino.errors import InputError


def setting() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(12, 20, generator=generator), torch.randint(0, 3, (12,), generator=generator)
    torch.manual_seed(0)
    net = fitted(nn.Linear(20, 3), cross_entropy, (inputs, targets), steps=300)
    record = torch.randn(20, generator=generator)
    return net, (inputs, targets), (record, net(record).argmin().detach())


def test_the_loss_of_one_record_shows_most_of_a_true_epsilon_and_no_more() -> None:
    net, data, record = setting()
    plan = small_plan(epsilon=8.0, records=13, expected_batch=13, steps=2)
    found = audit_black_box(plan, net, cross_entropy, data, record, runs=100, lr=0.05, seed=3)
    assert found.holds
    assert 1.0 < found.epsilon_lower < 8.0
    assert "does not contradict" in found.sentence


def test_noise_that_is_claimed_and_not_there_is_found() -> None:
    """The same losses, judged under a claim of a tenth of the ε."""
    _, data, record = setting()
    plan = small_plan(noise_multiplier=0.6, records=13, expected_batch=13, steps=3)
    claim = plan.with_noise(8.0)
    scores = [module._score(plan, nn.Linear(20, 3), cross_entropy, data, record, 0.05, s) for s in range(2)]
    assert scores[0] != scores[1]
    alarms = np.array([True] * 60 + [False] * 60)
    coins = np.array([True] * 60 + [False] * 60)
    assert not module._judged(claim, alarms, coins, 0.95, 120).holds


def test_it_is_made_for_add_remove_and_enough_runs() -> None:
    net, data, record = setting()
    with pytest.raises(InputError, match="add-remove"):
        audit_black_box(
            small_plan(noise_multiplier=1.0, sampling="partition", records=13, expected_batch=13), net, cross_entropy,
            data, record,
        )  # fmt: skip
    with pytest.raises(InputError, match="runs"):
        audit_black_box(
            small_plan(noise_multiplier=1.0, records=13, expected_batch=13), net, cross_entropy, data, record, runs=3
        )
