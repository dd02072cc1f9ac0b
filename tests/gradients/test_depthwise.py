"""Per-record weight gradients of grouped convolutions equal those of torch's convolution_backward, record by record."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sordino.gradients.layers import depthwise
from sordino.gradients.layers.depthwise import Window, grouped_gradients
from sordino.native.kernels import compiled


def by_torch(g: Tensor, a: Tensor, window: Window) -> Tensor:
    """One record after the other, in double precision."""
    groups, n = a.shape[2] // window.weight[1], window.spatial
    weight = torch.empty(window.weight, dtype=torch.float64)
    sizes = window.stride, window.padding, window.dilation, False, (0,) * n, groups, (False, True, False)
    found = [
        torch.ops.aten.convolution_backward(g[i].double(), a[i].double(), weight, None, *sizes)[1]
        for i in range(len(g))
    ]
    return torch.stack(found)


def example(window: Window, groups: int, size: tuple[int, ...], m: int = 3, images: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    places = [
        (i + 2 * p - d * (k - 1) - 1) // s + 1
        for i, p, d, k, s in zip(size, window.padding, window.dilation, window.weight[2:], window.stride, strict=True)
    ]
    a = torch.randn(m, images, groups * window.weight[1], *size, generator=generator)
    return torch.randn(m, images, window.weight[0], *places, generator=generator), a


@pytest.fixture(params=["compiled", "taps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "taps":
        monkeypatch.setattr(depthwise, "compiled", lambda: None)
    elif compiled() is None:
        pytest.skip("no compiled loops here")
    return str(request.param)


CASES = [
    # weight, stride, padding, dilation, groups, size
    ((16, 1, 7, 7), (1, 1), (3, 3), (1, 1), 16, (4, 4)),
    ((40, 1, 7, 7), (1, 1), (3, 3), (1, 1), 40, (16, 16)),
    ((5, 1, 3, 3), (2, 2), (1, 1), (1, 1), 5, (9, 8)),
    ((17, 1, 3, 5), (2, 1), (0, 2), (1, 2), 17, (11, 13)),
    ((33, 1, 9, 9), (1, 1), (4, 4), (1, 1), 33, (2, 2)),
    ((6, 1, 3, 3), (1, 1), (1, 1), (3, 3), 6, (12, 12)),
    ((12, 1, 3, 3), (1, 1), (1, 1), (1, 1), 4, (6, 5)),  # three outputs of each channel
    ((3, 1, 2, 2), (3, 3), (5, 5), (1, 1), 3, (4, 4)),  # places that lie in the padding alone
    ((8, 1, 5), (1,), (2,), (1,), 8, (30,)),
    ((8, 1, 4), (2,), (1,), (2,), 4, (30,)),
    ((4, 1, 3, 3, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 4, (4, 5, 6)),
    ((12, 4, 3, 3), (1, 1), (1, 1), (1, 1), 3, (7, 6)),
    ((6, 3, 3), (2,), (1,), (1,), 2, (15,)),
]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("weight", "stride", "padding", "dilation", "groups", "size"), CASES)
def test_it_equals_torchs_gradient_of_each_record(
    weight: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    size: tuple[int, ...],
    images: int,
    way: str,
) -> None:
    window = Window(weight, stride, padding, dilation)
    g, a = example(window, groups, size, images=images)
    expected = by_torch(g, a, window)
    exact = grouped_gradients(g.double(), a.double(), window)
    assert exact.shape == (3, *weight)
    assert exact.is_contiguous()
    torch.testing.assert_close(exact, expected, rtol=1e-12, atol=1e-12)
    single = grouped_gradients(g, a, window)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_window(data: st.DataObject) -> None:
    spatial, channels = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 35))
    draw = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(spatial))  # noqa: E731
    kernel, stride, padding, dilation = draw(1, 5), draw(1, 3), draw(0, 4), draw(1, 3)
    extra = draw(0, 6)
    size = tuple(
        max(1, d * (k - 1) + 1 - 2 * p) + e for d, k, p, e in zip(dilation, kernel, padding, extra, strict=True)
    )
    window = Window((channels, 1, *kernel), stride, padding, dilation)
    g, a = example(window, channels, size, m=2, images=data.draw(st.integers(1, 2)))
    torch.testing.assert_close(
        grouped_gradients(g.double(), a.double(), window), by_torch(g, a, window), rtol=1e-11, atol=1e-11
    )


def test_memory_in_any_order_and_half_precision(way: str) -> None:
    window = Window((16, 1, 3, 3), (1, 1), (1, 1), (1, 1))
    g, a = example(window, 16, (6, 6))
    wanted = grouped_gradients(g, a, window)
    last = a[:, 0].contiguous(memory_format=torch.channels_last)[:, None]
    turned = grouped_gradients(g.transpose(3, 4).contiguous().transpose(3, 4), last, window)
    torch.testing.assert_close(turned, wanted, rtol=1e-5, atol=1e-5)
    half = grouped_gradients(g.bfloat16(), a.bfloat16(), window)
    torch.testing.assert_close(half.float(), wanted, rtol=0.1, atol=0.3)


def test_a_record_that_is_not_finite_spoils_no_other(way: str) -> None:
    window = Window((20, 1, 3, 3), (1, 1), (1, 1), (1, 1))
    g, a = example(window, 20, (5, 5))
    clean = grouped_gradients(g, a, window)
    a[1, 0, 3, 2, 2] = torch.nan
    found = grouped_gradients(g, a, window)
    assert torch.equal(found[[0, 2]], clean[[0, 2]])
    assert not found[1].isfinite().all()


def test_a_long_sum_is_as_good_as_torchs() -> None:
    """96 × 96 places of one sign, where errors of a running sum would add up."""
    window = Window((1, 1, 1, 1), (1, 1), (0, 0), (1, 1))
    g, a = torch.full((1, 1, 1, 96, 96), 1 / 3), torch.full((1, 1, 1, 96, 96), 1 / 7)
    wanted = 96 * 96 * float(g[0, 0, 0, 0, 0]) * float(a[0, 0, 0, 0, 0])
    assert abs(float(grouped_gradients(g, a, window)) - wanted) <= 5e-6 * wanted


def test_the_loop_refuses_memory_that_it_would_read_beyond() -> None:
    kernels = compiled()
    if kernels is None:
        pytest.skip("no compiled loops here")
    images, gradients = np.zeros((1, 1, 4, 5, 5), np.float32), np.zeros((1, 1, 4, 5, 5), np.float32)
    window = (1, 1), (1, 1), (1, 1)
    assert kernels.depthwise(images, gradients, window, np.zeros((1, 4, 3, 3), np.float32))
    assert not kernels.depthwise(images, gradients, window, np.zeros((1, 4, 5, 3), np.float32))
    assert not kernels.depthwise(images, gradients, window, np.zeros((2, 4, 3, 3), np.float32))
    assert not kernels.depthwise(images, gradients, window, np.zeros((1, 4, 3, 3)))
    assert not kernels.depthwise(images.mT, gradients.mT, window, np.zeros((1, 4, 3, 6), np.float32)[..., ::2])
