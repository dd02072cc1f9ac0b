"""The scattering transform: kymatio's numbers, one record at a time, whatever the chunk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.errors import InputError
from sordino.features import Scattering2D

REFERENCE = Path(__file__).with_name("kymatio_reference.npz")


def reference(name: str) -> tuple[Tensor, Tensor]:
    with np.load(REFERENCE, allow_pickle=False) as arrays:
        return torch.from_numpy(arrays[f"x{name}"]), torch.from_numpy(arrays[f"s{name}"])


@pytest.mark.parametrize(("name", "J", "L"), [("28", 2, 8), ("32", 2, 8), ("24x40", 3, 6)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_numbers_are_kymatios(name: str, J: int, L: int, dtype: torch.dtype) -> None:
    images, expected = reference(name)
    actual = Scattering2D(J, L)(images.unsqueeze(1).to(dtype))
    assert actual.shape == expected.shape
    assert actual.dtype == dtype
    assert (actual - expected).abs().max() < 1e-5


def test_channels_are_transformed_one_by_one_and_lie_side_by_side() -> None:
    images, expected = reference("32")
    actual = Scattering2D()(images.unsqueeze(0))  # three images as three channels
    assert actual.shape == (1, 243, 8, 8)
    assert torch.allclose(actual[0], expected.flatten(0, 1), atol=1e-5)


@settings(deadline=None, max_examples=10)
@given(n=st.integers(1, 9), chunk=st.integers(1, 10), seed=st.integers(0, 99))
def test_a_record_depends_on_itself_alone_and_not_on_the_chunk(n: int, chunk: int, seed: int) -> None:
    images = torch.randn(n, 1, 12, 16, generator=torch.Generator().manual_seed(seed))
    together = Scattering2D(chunk=chunk)(images)
    single = Scattering2D()
    alone = torch.cat([single(image.unsqueeze(0)) for image in images])
    assert torch.allclose(together, alone, atol=1e-6)


def test_an_empty_batch_has_the_right_shape() -> None:
    assert Scattering2D()(torch.zeros(0, 3, 32, 32)).shape == (0, 243, 8, 8)


def test_a_constant_image_has_only_its_mean() -> None:
    maps = Scattering2D()(torch.full((1, 1, 28, 28), 2.0, dtype=torch.float64))
    assert torch.allclose(maps[:, 0], torch.tensor(2.0, dtype=torch.float64), atol=1e-3)
    assert maps[:, 1:].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (torch.zeros(28, 28), "not \\(28, 28\\)"),
        (torch.zeros(1, 1, 30, 28), "multiples of 4"),
        (torch.zeros(1, 1, 4, 28), "larger than it"),
        (torch.zeros(1, 1, 28, 28, dtype=torch.uint8), "divide bytes by 255"),
    ],
)
def test_what_it_cannot_take_is_said(images: Tensor, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        Scattering2D()(images)


def test_settings_below_one_are_refused() -> None:
    with pytest.raises(InputError, match="J must be an integer of at least 1"):
        Scattering2D(J=0)
