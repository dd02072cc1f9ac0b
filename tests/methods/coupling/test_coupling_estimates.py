"""What public rows say: spread, shrinkage and bias by hand, the Hessian's largest eigenvalue, and overfitting."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import AutomaticClip, FlatClip, PerLayerClip
from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.methods import coupling
from sordino.methods.coupling import LeastError, Situation
from sordino.methods.coupling.estimates import (
    gradient_and_norms,
    lasting_error,
    loss_spread,
    mean_gradient,
    moments,
    quantile_of_norms,
    smoothness,
)
from sordino.plan import Plan


def inner(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss whose gradient with respect to the weight is the row itself."""
    return outputs[:, 0]


def row(values: Tensor) -> Rows:
    return Rows(values, torch.zeros(len(values)))


def one_weight(width: int) -> nn.Module:
    return nn.Linear(width, 1, bias=False)


def normal(count: int, width: int = 5, seed: int = 0, shift: float = 0.0) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + shift


def test_moments_by_hand_without_clipping() -> None:
    values = normal(200, shift=1.0)
    found = moments(one_weight(5), inner, row(values), FlatClip(1e6))
    assert found.trace == pytest.approx(float(values.double().var(0).sum()), rel=1e-5)
    assert found.clipped_trace == pytest.approx(found.trace, rel=1e-5)
    assert found.clipped_square == pytest.approx(float(values.square().sum(1).mean()), rel=1e-5)
    assert (found.shrinkage, found.bias) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_moments_by_hand_with_clipping(scale: float) -> None:
    values = normal(300, shift=1.0)
    clipped = scale * values / (scale * values.norm(dim=1, keepdim=True) + 1)
    found = moments(one_weight(5), inner, row(values), AutomaticClip(1.0, gamma=1.0), scale)
    kappa = float((clipped * values).sum() / values.square().sum())
    assert found.shrinkage == pytest.approx(kappa, rel=1e-4)
    assert found.clipped_trace == pytest.approx(float(clipped.var(0).sum()), rel=1e-3)
    off = clipped / kappa - values
    assert found.bias == pytest.approx(float(off.mean(0).square().sum() - off.var(0).sum() / 300), abs=1e-5)


def test_the_shrinkage_is_the_best_common_factor() -> None:
    values = normal(100, shift=0.5)
    clipped = values * (1 / values.norm(dim=1, keepdim=True)).clamp_max(1.0)
    found = moments(one_weight(5), inner, row(values), FlatClip(1.0)).shrinkage

    def error(factor: float) -> float:
        return float((clipped - factor * values).square().sum())

    assert error(found) < min(error(found * 1.01), error(found * 0.99))


def test_moments_need_a_clipping_that_scales_records_as_a_whole() -> None:
    with pytest.raises(Refused, match="per-layer"):
        moments(one_weight(5), inner, row(normal(10)), PerLayerClip(1.0))


def test_the_engine_and_a_plain_pass_agree_on_the_public_gradient() -> None:
    model, rows = nn.Linear(5, 3), Rows(normal(40), torch.arange(40) % 3)
    plain, loss = mean_gradient(model, nn.functional.cross_entropy, rows)
    found, norms = gradient_and_norms(model, nn.functional.cross_entropy, rows)
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value.double(), rtol=1e-4, atol=1e-6)
    assert len(norms) == 40
    assert loss == pytest.approx(loss_spread(model, nn.functional.cross_entropy, rows)[0], rel=1e-6)


def test_smoothness_is_the_largest_eigenvalue_of_the_hessian() -> None:
    """Squared error of a linear model: the Hessian is 2 XᵀX/n."""
    values = normal(60, 4) * torch.tensor([3.0, 1.0, 0.5, 0.1])

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).square()

    found = smoothness(one_weight(4), squared, row(values), iterations=40)
    wanted = float(torch.linalg.eigvalsh(2 * values.double().mT @ values.double() / 60).max())
    assert found == pytest.approx(wanted, rel=1e-4)


def test_a_loss_without_curvature_says_so() -> None:
    with pytest.raises(Refused, match="give `smoothness`"):
        smoothness(one_weight(3), inner, row(normal(5, 3)))


def test_the_quantile_ignores_what_is_not_finite_and_refuses_zero() -> None:
    assert quantile_of_norms(torch.tensor([1.0, 2.0, 3.0, torch.inf]), 0.5, 7.0) == 2.0
    assert quantile_of_norms(torch.tensor([0.0, 0.0, 0.0, 0.5]), 0.5, 7.0) == 0.5  # most rows are fitted perfectly
    assert quantile_of_norms(torch.zeros(5), 0.9, 7.0) == 7.0
    with pytest.raises(InputError, match="not finite"):
        quantile_of_norms(torch.full((3,), torch.nan), 0.9, 7.0)


def test_the_lasting_error_is_what_a_set_of_that_size_misses() -> None:
    """Rows of one distribution: ‖difference of the means‖² less its noise is about nothing; the floor is tr Σ / n."""
    held = moments(one_weight(5), inner, row(normal(4000)), FlatClip(1e6))
    lasting, trace = lasting_error(one_weight(5), inner, row(normal(500, seed=1)), held, 500)
    assert trace == pytest.approx(5.0, rel=0.2)
    assert held.trace / 500 <= lasting < 5 * held.trace / 500
    shifted, _ = lasting_error(one_weight(5), inner, row(normal(500, seed=1, shift=0.5)), held, 500)
    assert shifted == pytest.approx(5 * 0.25, rel=0.3)


def situation(model: nn.Module, loss: Any, rows: Rows, held: Rows | None) -> Situation:
    plan: Plan = coupling.plan(
        public=None, noise_multiplier=1.0, delta=1e-5, records=1000, expected_batch=100, steps=10,
        clipping=AutomaticClip(1.0, gamma=1.0),
    )  # fmt: skip
    return Situation(
        plan=plan, step=0, public_records=50, public_batch=50, model=model, loss=loss, draw=lambda count: rows,
        held_back=None if held is None else lambda count: held,
    )  # fmt: skip


def test_rows_that_were_held_back_notice_that_the_public_rows_were_fitted() -> None:
    """Noise labels learnt by heart: the public rows' own gradients vanish and claim to be almost without error."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = normal(100, 60, shift=0.1), torch.randint(0, 2, (100,), generator=generator)
    fitted, held = Rows(inputs[:50], labels[:50]), Rows(inputs[50:], labels[50:])
    model = nn.Linear(60, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(fitted.inputs), fitted.targets).backward()
        optimizer.step()
    rule = LeastError(horizon=10)
    deceived = rule.weight(situation(model, nn.functional.cross_entropy, fitted, None)).alpha
    noticed = rule.weight(situation(model, nn.functional.cross_entropy, fitted, held)).alpha
    assert deceived > 0.9
    assert noticed < 0.5


def test_the_least_error_by_hand_where_nothing_is_clipped() -> None:
    """The formula of a single step: held_back = 0, H = 1, no clipping."""
    values = normal(50, 5, shift=0.2)
    plan: Plan = coupling.plan(
        public=None, noise_multiplier=0.1, delta=1e-5, records=1000, expected_batch=100, steps=10,
        clipping=FlatClip(100.0),
    )  # fmt: skip
    at = Situation(
        plan=plan, step=0, public_records=50, public_batch=20, model=one_weight(5), loss=inner,
        draw=lambda count: row(values),
    )  # fmt: skip
    found = LeastError(held_back=0.0).weight(at)
    private = float(values.square().sum(1).mean()) / 100 + (0.1 * plan.sensitivity / 100) ** 2 * 5
    public = float(values.var(0).sum()) / 20
    assert found.alpha == pytest.approx(private / (private + public), rel=1e-4)
    assert found.scale == pytest.approx(1.0, rel=1e-6)
