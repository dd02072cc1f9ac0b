"""The compiled loop of the noise: the same integers as the passes it stands in for."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

from sordino import boxmuller, fused
from sordino.boxmuller import Pairs
from sordino.randomness import RandomSource, Stream


def stream() -> Stream:
    return RandomSource.seeded(7).stream("noise", 3)


def by_passes(values: torch.Tensor, scale: float, spacing: float) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "loop", lambda: None)
        result = values.clone()
        stream().rounded_sum(result, scale, spacing)
    return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [fused.WORTHWHILE, fused.WORTHWHILE + 1, 2 * boxmuller.BLOCK + 12_345])
@pytest.mark.parametrize("scale", [1.0, 64.0, 127.9, 4096.0])
def test_the_noise_does_not_tell_whether_it_was_compiled(dtype: torch.dtype, n: int, scale: float) -> None:
    assert fused.loop() is not None, "numba belongs to the test extra"
    values = torch.randn(n, dtype=dtype, generator=torch.Generator().manual_seed(1)) * 3
    compiled = values.clone()
    stream().rounded_sum(compiled, scale, 2.0**-6)
    assert torch.equal(compiled, by_passes(values, scale, 2.0**-6))
    assert (compiled != values).float().mean() > 0.9


@pytest.mark.parametrize("offset", [0.4999999, -0.4999999, 0.5, -0.5, 0.0, 1e7 + 0.5])
def test_sums_beside_a_half_integer_come_out_the_same(offset: float) -> None:
    values = torch.full((fused.WORTHWHILE,), offset)
    compiled = values.clone()
    stream().rounded_sum(compiled, 64.0)
    assert torch.equal(compiled, by_passes(values, 64.0, 1.0))


def test_zero_has_no_sign() -> None:
    values = torch.full((fused.WORTHWHILE,), -0.0)
    stream().rounded_sum(values, 1.0)
    zeros = values[values == 0]
    assert len(zeros) > 10_000
    assert not torch.signbit(zeros).any()


def test_what_it_leaves_open_is_as_rare_as_the_note_says_and_untouched() -> None:
    loop, pairs, scale = fused.loop(), 1 << 19, 100.0
    assert loop is not None
    digits = np.random.default_rng(0).integers(0, 1 << 32, (2, pairs), dtype=np.uint32)
    digits[0, :3] = 0, 1, (1 << 32) - 1  # U beyond both ends of the range
    values = np.random.default_rng(1).normal(size=2 * pairs).astype(np.float32)
    before, open_ = values.copy(), np.zeros(pairs, np.bool_)
    loop(values, digits, scale, 1.0, open_)
    assert open_[:3].all()
    assert open_.mean() < 1.15 * (2.0**-13 + 2.0**-11 + 4 * scale * fused.TOLERANCE)
    rows = np.concatenate([open_, open_])
    assert np.array_equal(values[rows], before[rows])


def test_its_error_is_within_its_bound() -> None:
    """Against double precision of numpy's functions, at both ends of what the digits leave open."""
    rng, pairs = np.random.default_rng(2), 1 << 16
    u = np.concatenate([rng.integers(1 << 19, 1 << 20, pairs // 2), rng.integers(1 << 19, 1 << 32, pairs // 2)])
    v = rng.integers(0, 1 << 32, pairs)
    loop, scale = fused.loop(), 2.0**12
    assert loop is not None
    values, open_ = np.zeros(2 * pairs, np.float64), np.zeros(pairs, np.bool_)
    loop(values, np.stack([u, v]).astype(np.uint32), scale, 2.0**-0, open_)
    for du, dv in ((0.0, 0.0), (1.0, 1.0), (0.0, 1.0), (1.0, 0.0)):
        radius = np.sqrt(-2 * np.log((u + du) * 2.0**-32))
        angle = (v.astype(np.uint32).view(np.int32) + dv) * (2 * np.pi * 2.0**-32)
        z = scale * np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        decided = ~np.concatenate([open_, open_])
        assert np.abs(z - values)[decided].max() <= 0.5  # the rounding is right whatever the digits are
    assert (~open_).mean() > 0.97


def test_without_numba_there_is_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert fused.loop.__wrapped__() is None  # type: ignore[attr-defined]


def test_small_releases_do_not_wait_for_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    def unwanted() -> None:
        raise AssertionError("asked for the compiled loop")

    monkeypatch.setattr(fused, "loop", unwanted)
    stream().rounded_sum(torch.zeros(fused.WORTHWHILE - 1), 64.0)
    assert Pairs(1, np.dtype(np.float32)).open.shape == (1,)
