"""Membership inference stays below what the guarantee allows, and sees a model that has no noise to speak of."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from small_audits import small_plan
from sordino.audit.bounds import GaussianCurve
from sordino.audit.membership import allowed, membership, membership_figure
from sordino.errors import InputError


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(40, 60, generator=generator), torch.randint(0, 4, (40,), generator=generator)


def test_what_is_allowed_is_the_inverse_of_the_trade_off_curve() -> None:
    (most,) = allowed(GaussianCurve(1.0), (0.1,))
    assert GaussianCurve(1.0).least_false(most) == pytest.approx(0.1)


def test_without_much_noise_members_are_told_apart_and_the_guarantee_says_that_they_may_be() -> None:
    plan = small_plan(noise_multiplier=0.05, records=20, expected_batch=20, steps=3)
    found = membership(plan, nn.Linear(60, 4), cross_entropy, data(), shadows=12, targets=2, lr=5.0)
    at = found.false.index(0.15)
    assert found.true[at] > 0.5
    assert all(a <= b + 1e-9 for a, b in zip(found.true, found.allowed, strict=True))
    assert ElementTree.fromstring(membership_figure(found)).tag.endswith("svg")


def test_too_few_shadows_are_refused() -> None:
    plan = small_plan(noise_multiplier=1.0, records=20, expected_batch=20, steps=2)
    with pytest.raises(InputError, match="shadows"):
        membership(plan, nn.Linear(60, 4), cross_entropy, data(), shadows=2)
