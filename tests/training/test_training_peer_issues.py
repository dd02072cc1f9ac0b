"""What hurt the users of other libraries, as seen from training. Sampling, accounting and engine have their own."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.plan import Plan
from sordino.training import train

Records = tuple[Tensor, Tensor]


def test_opacus_504_secure_noise_is_the_default_and_needs_no_package_that_may_die(
    records: Records, linear: nn.Module
) -> None:
    """secure_mode needed torchcsprng, which stopped installing; without it the noise came from a seedable generator."""
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=1e-5, records=200, expected_batch=40, steps=3)
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        result = train(model, nn.functional.cross_entropy, records, plan, lr=0.1)
        assert result.guarantee is not None
        assert result.guarantee.secure
        weights.append(model.weight.detach().clone())
    assert not torch.equal(*weights), "torch's seed must not decide the noise"
    assert "torchcsprng" not in sys.modules


def test_opacus_455_augmentations_of_a_record_are_bounded_together(records: Records, linear: nn.Module) -> None:
    """Augmentation multiplicity: four views of each record, averaged before clipping, one bound for all of them."""
    inputs, targets = records[0][:5], records[1][:5]
    views = torch.cat([inputs + 0.1 * k for k in range(4)])
    rows = Rows(views, targets.repeat(4), record=torch.arange(5).repeat(4), records=5)
    found = clipped_sum(linear, nn.functional.cross_entropy, rows, FlatClip(0.05), reduction="mean")
    expected = torch.zeros(3, 6, dtype=torch.float64)
    for i in range(5):
        mean = nn.functional.cross_entropy(linear(views[i::5]), targets[i].repeat(4))
        gradient = torch.autograd.grad(mean, list(linear.parameters()))
        norm = float(torch.cat([g.flatten() for g in gradient]).norm())
        expected += gradient[0] * min(1.0, 0.05 / norm)
    assert torch.allclose(found.sums["weight"], expected, atol=1e-6)
