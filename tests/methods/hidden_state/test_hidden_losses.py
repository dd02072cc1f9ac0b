"""Each certified loss keeps what it shows: gradient, convexity, slope and curvature, by adversarial search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.errors import InputError, Refused
from sordino.methods.hidden_state import (
    Geometry,
    Huber,
    Loss,
    OneVsRest,
    Softmax,
    Squared,
    certify,
    clipped_softmax,
    loss_from_dict,
)

LOSSES: list[Loss] = [
    Softmax(2),
    Softmax(3),
    Softmax(10),
    Softmax(10, cap=0.7),
    Softmax(10, cap=0.5),
    Softmax(10, cap=0.1),
    Softmax(3, cap=0.02),
    OneVsRest(1),
    OneVsRest(10),
    OneVsRest(5, cap=0.2),
    Huber(1, bound=0.3),
    Huber(10, bound=0.5, length=2.0),
    Squared(1),
    Squared(4, target_norm=0.5),
]
names = [f"{loss.to_dict()}" for loss in LOSSES]


def some_targets(loss: Loss, count: int, generator: torch.Generator) -> Tensor:
    if isinstance(loss, Huber | Squared) and loss.outputs == 1:
        return torch.randn(count, generator=generator, dtype=torch.float64)
    classes = 2 if loss.outputs == 1 else loss.outputs
    return torch.randint(classes, (count,), generator=generator)


def hessians(loss: Loss, scores: Tensor, targets: Tensor) -> Tensor:
    """∂residual/∂scores of each record, by autograd through the residual: (n, K, K)."""
    scores = scores.clone().requires_grad_()
    residual = loss.residual(scores, targets)
    rows = [torch.autograd.grad(residual[:, k].sum(), scores, retain_graph=True)[0] for k in range(loss.outputs)]
    return torch.stack(rows, 1)


def adversarial_scores(loss: Loss, generator: torch.Generator) -> Tensor:
    """Scores of all sizes, near ties, and near the corner where a cap begins."""
    base = torch.randn(200, loss.outputs, generator=generator, dtype=torch.float64)
    sizes = torch.logspace(-3, 2, 200, dtype=torch.float64)[torch.randperm(200, generator=generator)]
    sparse = base * (torch.rand(base.shape, generator=generator) < 0.3)
    return torch.cat([base * sizes[:, None], sparse * 8, base.round() * 3])


@pytest.mark.parametrize("loss", LOSSES, ids=names)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_the_residual_is_the_gradient_of_the_value(loss: Loss, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = adversarial_scores(loss, generator).requires_grad_()
    targets = some_targets(loss, len(scores), generator)
    (expected,) = torch.autograd.grad(loss.value(scores, targets).sum(), scores)
    assert torch.allclose(loss.residual(scores.detach(), targets), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("loss", LOSSES, ids=names)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_convex_and_no_more_curved_than_it_says(loss: Loss, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = adversarial_scores(loss, generator)
    found = hessians(loss, scores, some_targets(loss, len(scores), generator))
    assert torch.allclose(found, found.transpose(1, 2), atol=1e-10)  # a gradient has a symmetric Jacobian
    eigenvalues = torch.linalg.eigvalsh(found)
    assert eigenvalues.min() >= -1e-10
    assert eigenvalues.max() <= loss.curvature + 1e-10


@pytest.mark.parametrize("loss", LOSSES, ids=names)
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.floats(0.01, 1e4))
def test_no_gradient_is_longer_than_the_slope(loss: Loss, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = adversarial_scores(loss, generator)
    scores = scores / scores.norm(dim=1, keepdim=True).clamp(min=1e-9) * size
    lengths = loss.residual(scores, some_targets(loss, len(scores), generator)).norm(dim=1)
    assert lengths.max() <= loss.slope(size) * (1 + 1e-12)


@pytest.mark.parametrize(
    "loss", [Softmax(5), Softmax(10, cap=0.3), Softmax(4, cap=0.05), OneVsRest(3, cap=0.2)], ids=str
)
def test_slope_and_curvature_are_attained(loss: Softmax | OneVsRest) -> None:
    """The constants are not only bounds but suprema: climbing comes within a hundredth, so does the corner."""
    generator = torch.Generator().manual_seed(0)
    targets = some_targets(loss, 32, generator)
    scores = torch.randn(32, loss.outputs, generator=generator, dtype=torch.float64).requires_grad_()
    best = 0.0
    for _ in range(100):
        reached = loss.residual(scores, targets).norm(dim=1)
        best = max(best, float(reached.detach().max()))
        (slopes,) = torch.autograd.grad(reached.sum(), scores)
        scores = (scores + slopes.sign()).detach().requires_grad_()
    assert loss.slope(math.inf) * 0.99 <= best <= loss.slope(math.inf) * (1 + 1e-9)
    pull = min(loss.cap, 0.5) * (1 - 1e-6)  # just where the cap does not yet hold, one rival alone
    corner = torch.full((1, loss.outputs), -60.0, dtype=torch.float64)
    corner[0, 0] = math.log(1 / pull - 1)
    if isinstance(loss, Softmax):
        corner[0, 1] = 0.0
    found = torch.linalg.eigvalsh(hessians(loss, corner, torch.zeros(1, dtype=torch.long))).max()
    assert loss.curvature * 0.99 <= found <= loss.curvature


def test_the_cap_leaves_the_softmax_alone_where_it_is_not_reached() -> None:
    scores = torch.randn(200, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = scores.argmax(1)
    plain, capped = Softmax(10).residual(scores, targets), Softmax(10, cap=0.5).residual(scores, targets)
    small = plain.gather(1, targets[:, None]).abs().squeeze(1) <= 0.5
    assert small.any()
    assert torch.equal(plain[small], capped[small])
    expected = torch.softmax(scores, 1) - torch.eye(10, dtype=torch.float64)[targets]
    assert torch.allclose(plain, expected, atol=1e-14)


def clipped_residual(scores: Tensor, targets: Tensor, clip: float, loss: Loss) -> Tensor:
    residual = loss.residual(scores, targets)
    return residual * (clip / residual.norm(dim=1, keepdim=True)).clamp(max=1.0)


def smallest_symmetric_eigenvalue(loss: Loss, clip: float) -> tuple[float, Tensor, Tensor]:
    """Search for the most negative curvature of a jointly clipped loss: (value, scores, direction)."""
    generator = torch.Generator().manual_seed(0)
    scores = (
        torch.randn(4000, loss.outputs, dtype=torch.float64, generator=generator)
        * torch.linspace(0.1, 6, 4000)[:, None]
    )
    targets = torch.zeros(4000, dtype=torch.long)
    wanted = scores.requires_grad_()
    clipped = clipped_residual(wanted, targets, clip, loss)
    rows = [torch.autograd.grad(clipped[:, k].sum(), wanted, retain_graph=True)[0] for k in range(loss.outputs)]
    jacobian = torch.stack(rows, 1)
    values, vectors = torch.linalg.eigh((jacobian + jacobian.transpose(1, 2)) / 2)
    worst = int(values[:, 0].argmin())
    return float(values[worst, 0]), scores.detach()[worst], vectors[worst, :, 0]


def test_the_counter_example_to_clipped_softmax() -> None:
    """Prop. 6.2 of the paper fails: the clipped gradient of ten classes is not monotone, and a step expands."""
    value, scores, direction = smallest_symmetric_eigenvalue(Softmax(10), 0.75)
    assert value < -0.005
    targets, step = torch.zeros(1, dtype=torch.long), 1e-4 * direction
    moved = [s - clipped_residual(s, targets, 0.75, Softmax(10)) for s in (scores[None], (scores + step)[None])]
    assert (moved[1] - moved[0]).norm() > step.norm() * 1.004
    capped = Softmax(10, cap=0.75 / math.sqrt(2))
    kept = [s - capped.residual(s, targets) for s in (scores[None], (scores + step)[None])]
    assert (kept[1] - kept[0]).norm() <= step.norm()


def test_clipping_all_classes_of_one_vs_rest_together_is_not_convex_either() -> None:
    value, _, _ = smallest_symmetric_eigenvalue(OneVsRest(10), 0.5)
    assert value < -1e-3


def test_clipped_softmax_is_refused_from_three_classes_on() -> None:
    with pytest.raises(Refused, match=r"cap = 0\.5303"):
        clipped_softmax(10, 0.75)
    with pytest.raises(Refused, match="3 classes"):
        loss_from_dict({"name": "softmax", "outputs": 3, "clip": 1.41})
    assert clipped_softmax(10, math.sqrt(2)) == Softmax(10)
    two = clipped_softmax(2, 0.5)
    scores = torch.randn(100, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * 4
    targets = torch.randint(2, (100,), generator=torch.Generator().manual_seed(3))
    assert torch.allclose(two.residual(scores, targets), clipped_residual(scores, targets, 0.5, Softmax(2)), atol=1e-12)


def test_squared_loss_needs_a_ball() -> None:
    with pytest.raises(Refused, match="radius"):
        certify(Squared(1), Geometry(), 0.1)
    bounded = certify(Squared(1, target_norm=1.0), Geometry(feature_norm=2.0, bias=0.0, radius=3.0), 0.1)
    assert bounded.sensitivity == 2 * (3.0 * 2.0 + 1.0) * 2.0


def test_extreme_scores_and_wrong_targets() -> None:
    scores = torch.tensor([[1e300, -1e300, 0.0], [-1e300, 1e300, 1e300]], dtype=torch.float64)
    targets = torch.tensor([0, 0])
    for loss in (Softmax(3), Softmax(3, cap=0.1), OneVsRest(3), Huber(3), Squared(3)):
        assert loss.residual(scores, targets).isfinite().all(), loss
    with pytest.raises(InputError, match="outside"):
        Softmax(3).residual(scores, torch.tensor([0, 3]))
    with pytest.raises(InputError, match="whole numbers"):
        Softmax(3).residual(scores, torch.zeros(2))
    for values in (
        {"name": "hinge"},
        {"name": "softmax", "outputs": 3, "temperature": 2},
        {"name": "softmax", "outputs": 1},
    ):
        with pytest.raises(InputError):
            loss_from_dict(values)
    with pytest.raises(InputError, match="cap"):
        Softmax(3, cap=1.5)


@pytest.mark.parametrize("loss", LOSSES, ids=names)
def test_losses_are_plain_values(loss: Loss) -> None:
    assert loss_from_dict(loss.to_dict()) == loss
    assert set(loss.reasons()) == {"convexity", "slope", "curvature"}
