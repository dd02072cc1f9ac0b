"""Complex activations: real parameters that meet them in any way; complex parameters are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import Fn, matches, noise, squared
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.gradients.checks.assurance import Assurance

rfft, irfft, joined = torch.fft.rfft, torch.fft.irfft, torch.view_as_complex


def linear(self: Any, x: Tensor) -> Tensor:
    return F.linear(rfft(x), joined(self.w), joined(self.b)).abs()


def spectral(self: Any, x: Tensor) -> Tensor:
    """A layer of a Fourier neural operator."""
    return irfft(torch.einsum("bix,iox->box", rfft(x), joined(self.w)), n=4)


def state_space(self: Any, x: Tensor) -> Tensor:
    kernel = torch.exp(torch.complex(self.a, self.b)[:, None] * torch.arange(4)).real.sum(0)
    return irfft(rfft(x, n=8) * rfft(kernel, n=8), n=8)[..., :4]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a filter": lambda: Fn(lambda s, x: irfft(rfft(x) * joined(s.w), n=4), w=noise(3, 2)),
    "a real scale": lambda: Fn(lambda s, x: (rfft(x) * s.w).abs(), w=noise(3)),
    "a product": lambda: Fn(lambda s, x: (rfft(x) @ torch.complex(s.w, s.v)).abs(), w=noise(3, 2), v=noise(3, 2)),
    "a linear map": lambda: Fn(linear, w=noise(2, 3, 2), b=noise(2, 2)),
    "a spectral convolution": lambda: Fn(spectral, w=noise(3, 2, 3, 2)),
    "a convolution": lambda: Fn(lambda s, x: F.conv1d(rfft(x), joined(s.w)).abs(), w=noise(2, 3, 2, 2)),
    "a state space": lambda: Fn(state_space, a=noise(3), b=noise(3)),
    "a window": lambda: Fn(lambda s, x: torch.stft(x[:, 0], 4, 2, window=s.w, return_complex=True).abs(), w=noise(4)),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", MODELS)
def test_real_parameters_and_complex_activations(name: str) -> None:
    for rows in (1, 2, 3, 4, 5):
        torch.manual_seed(rows)
        matches(MODELS[name](), noise(rows, 3, 4), rows=rows)


def test_a_complex_parameter_is_refused_with_the_remedy() -> None:
    model = Fn(lambda s, x: (rfft(x) @ s.w).abs(), w=torch.randn(3, 2, dtype=torch.complex128))
    with pytest.raises(Refused, match=r"^w: a complex parameter.*view_as_complex"):
        clipped_sum(model, squared, Rows(noise(5, 4), noise(5)), FlatClip(1.0))


def test_a_constant_that_is_conjugated_in_a_model_that_asks_for_its_size() -> None:
    """Its content is compared between passes; torch has conjugated it in name only."""
    constant = torch.tensor([1 + 2j, 0.5j, -1, 2 - 1j]).conj()
    model = Fn(lambda s, x: (s.a(x).reshape(x.shape[0], 4) * constant).abs().sum(1), a=nn.Linear(4, 4))
    rows = Rows(torch.randn(6, 4), torch.randn(6))
    found = clipped_sum(model, lambda out, y: (out - y).square(), rows, FlatClip(1.0), assurance=Assurance())
    wanted = brute_force(model, lambda out, y: (out - y).square(), rows, FlatClip(1.0))
    for name, total in found.sums.items():
        assert torch.allclose(total.double(), wanted.sums[name].double(), atol=1e-5)
