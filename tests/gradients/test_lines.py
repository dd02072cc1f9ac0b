"""Single lines that carry the guarantee: each was taken out, and no other test failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradients.cases import Fn, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import ClippedSum, Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance

ROWS = 6


def refused(forward: Any, **parts: Any) -> None:
    torch.manual_seed(0)
    model = Fn(forward, a=nn.Linear(4, 5), b=nn.Linear(5, 3), **parts).double()
    with pytest.raises(Refused, match="reaches positions of other records"):
        clipped_sum(model, squared, Rows(noise(ROWS, 4), noise(ROWS)), FlatClip(1.0))


class Mixing(torch.autograd.Function):
    """Its result required a gradient already where it was made."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] + 3 * gradients[0].mean(0)


def test_a_backward_pass_that_mixes_records_behind_a_forward_pass_with_gradients() -> None:
    refused(lambda m, x: m.b(Mixing.apply(torch.tanh(m.a(x)))))


def zeros_behind_the_rows(m: Any, x: Tensor) -> Tensor:
    wide = torch.zeros(len(x) + 1, 4, dtype=x.dtype)
    wide[:-1] = x
    return m.a(wide)  # type: ignore[no-any-return]


def ones_behind_the_rows(m: Any, x: Tensor) -> Tensor:
    return torch.cat([x[:, :1], torch.ones(1, 1, dtype=x.dtype)]) * m.w  # type: ignore[no-any-return]


@pytest.mark.parametrize("made", [zeros_behind_the_rows, ones_behind_the_rows])
def test_a_place_of_no_row_that_all_rows_use(made: Any) -> None:
    """Its gradient is the sum over all records: none of them owns it, and it must not be lost."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = made(m, x)
        return m.b(torch.tanh(y[:-1] + y[-1:]))  # type: ignore[no-any-return]

    refused(forward, w=noise(5))


def single(model: nn.Module, x: Tensor, gradient: Tensor, clip_norm: float = 1.0, assurance: Any = None) -> ClippedSum:
    """The sum where the gradient that arrives at the outputs of each row is given."""
    rows = Rows(x, torch.zeros(len(x), dtype=x.dtype))
    losses = lambda out, _: (out * gradient[: len(out)]).flatten(1).sum(1)  # noqa: E731
    keys = torch.arange(len(x))
    return clipped_sum(model, losses, rows, FlatClip(clip_norm), keys=keys, narrow=True, assurance=assurance)


def test_a_row_so_long_that_its_weight_is_denormal() -> None:
    """weight · gradient in single precision would be rounded up by a fifth."""
    x = torch.zeros(3, 4)
    x[0, 0] = 1e-6 / (2.51 * 2.0**-149)
    model, gradient = Fn(lambda s, x: F.linear(x, s.w, s.b), w=torch.zeros(2, 4), b=torch.zeros(2)), torch.zeros(3, 2)
    gradient[0, 0] = 1e-18
    found = single(model, x, gradient, 1e-6)
    assert sum(float(t.double().square().sum()) for t in found.sums.values()) ** 0.5 <= 1e-6 * (1 + 2.0**-12)


def test_rows_that_views_of_a_parameter_share_are_summed_twice_in_the_first_batch() -> None:
    def forward(s: Any, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, s.w[:3], s.b[:3])), s.w[3:, :3], s.b[3:])

    torch.manual_seed(0)
    model, x = Fn(forward, w=torch.randn(6, 4), b=torch.randn(6)), torch.randn(5, 4)
    gradient = torch.randn(1, 3).expand(5, 3)
    found, again = (single(model, x, gradient, assurance=how) for how in (Assurance(), None))
    for name, value in found.sums.items():
        assert torch.allclose(value, again.sums[name], atol=1e-6)


def test_a_record_whose_positions_overflow_in_between_is_dropped_alone() -> None:
    x, gradient = 1e-3 * torch.randn(3, 40, 200), torch.ones(3, 40, 200)
    x[0], gradient[0] = 1e30, 1e8
    found = single(Fn(lambda s, x: F.linear(x, s.w), w=torch.zeros(200, 200)), x, gradient)
    assert found.dropped == 1
    assert all(bool(t.isfinite().all()) for t in found.sums.values())


def test_positions_that_cancel_do_not_disturb_the_sum_of_the_others() -> None:
    """Weighted up they would be large, and the others' digits lost where they are added."""

    def calls(s: Any, x: Tensor) -> Tensor:
        return torch.stack([F.linear(x[:, 2 * j : 2 * j + 2], s.w) for j in range(4)], 1).flatten(1, 2)

    torch.manual_seed(0)
    x, model = noise(20, 8, 300), Fn(calls, w=torch.zeros(8, 300, dtype=torch.float64))
    x[-1] = 1e12 * x[-1, 0]
    x[-1, 1] = x[-1, 0] * (1 + 2.0**-50)
    gradient = (torch.tensor([1.0, -1.0]).repeat(4)[:, None] * torch.linspace(1, 2, 8)).double().expand(20, 8, 8)
    with_it, without = (single(model, part, gradient).sums["w"] for part in (x, x[:-1]))
    assert float((with_it - without).norm()) < 1e-9


def test_norms_of_tiny_gradients_are_not_those_of_denormal_products() -> None:
    torch.manual_seed(0)
    x, gradient = torch.randn(6, 4, 64) * 2.0**20, torch.randn(4, 64).expand(6, 4, 64) * 2.0**-74
    found = single(Fn(lambda s, x: F.linear(x, s.w), w=torch.zeros(64, 64)), x, gradient, 2.0**-70)
    true = torch.einsum("nsq,nsp->npq", x.double(), gradient.double()).flatten(1).norm(dim=1)
    assert bool((found.norms.double() >= true * (1 - 2.0**-15)).all())
