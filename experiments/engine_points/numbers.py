"""Norms and sums whose rounding no bound covered; rows that are not finite; norms that squares do not hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import sordino
from sordino.sampling import LogicalBatch

from .common import MOST, Fn, Seen, flat, point, squared

NORMS = "norms from Gram matrices too small; float32 sums beyond the margin"
NAN = "a NaN row where layouts are measured; large norms"
SENSITIVITY = "tests/gradients/test_sensitivity.py"
KINDS = ((2, 4096), (2, 1024), (2, 8192))


def signed(outputs: Tensor, targets: Tensor) -> Tensor:
    pooled = outputs.flatten(2).sum(2) if outputs.ndim == 3 else outputs
    return (pooled.flatten(1) @ torch.linspace(0.1, 1.0, pooled[0].numel())) * targets


class Pooled(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.l = nn.Linear(features, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.l(x).sum(1)
        return found


def _longest(kernel: bool) -> tuple[float, str]:
    """The longest clipped record among many whose positions, of equal features, nearly cancel."""
    worst, where = 0.0, ""
    generator = torch.Generator().manual_seed(0)
    for positions, features in KINDS:
        model: nn.Module = nn.Conv1d(features, 64, 1, bias=False) if kernel else Pooled(features)
        for _ in range(30):
            value, power = (float(torch.rand((), generator=generator)) for _ in range(2))
            c, gap = torch.tensor(1 + value), torch.tensor(10 ** (-4 + 2 * power))
            x = c.expand(1, positions, features).clone()
            x[:, positions // 2 :] = -c * (1 + gap)
            rows = sordino.Rows(x.mT.contiguous() if kernel else x, torch.ones(1))
            length = float(flat(sordino.clipped_sum(model, signed, rows, sordino.FlatClip(1e-3)).sums).norm()) / 1e-3
            if length > worst:
                worst, where = length, f"{positions} positions of {features} features"
    return worst, where


@point(
    NORMS,
    "two positions that nearly cancel over 4096 equal features (3.46); a slack of 4 eps is no bound",
    f"{SENSITIVITY}::test_positions_of_equal_features_that_nearly_cancel",
    "tests/gradients/test_cancellation.py::test_positions_of_a_row",
)
def nearly_cancelling_positions() -> Seen:
    worst, where = _longest(kernel=False)
    return Seen(worst > MOST, f"a clipped record has up to {worst:.4f} clip norms ({where})")


@point(
    NORMS, "1×1 convolutions (1.93)", f"{SENSITIVITY}::test_positions_of_equal_features_that_nearly_cancel"
)  # fmt: skip
def convolution_of_one_by_one() -> Seen:
    worst, where = _longest(kernel=True)
    return Seen(worst > MOST, f"a clipped record has up to {worst:.4f} clip norms ({where})")


def _rounded(n: int, chunk: int, powers: range) -> float:
    """What one record moves a float32 sum by, where the others are rounded to its grid."""
    found = []
    for power in powers:
        count, model = 2**power, nn.Linear(8, 1, bias=False)
        x, y = torch.zeros(n, 8), torch.ones(n, 1)
        x[: count - 1, 0], x[count - 1, 0], x[count, 0] = 1, 0.5, 1
        x[count + 1 :, 0] = -(2.0 ** (power - 24))
        sums = sordino.record_gradients(model, lambda out, t: (out * t).sum(1), (x, y), sordino.FlatClip(1.0))
        there = torch.tensor([i for i in range(n) if i != count])
        both = [sums(LogicalBatch(0, indices, chunk)).sums for indices in (torch.arange(n), there)]
        found.append(float((flat(both[0]) - flat(both[1])).norm()))
    return max(found)


@point(
    NORMS,
    "float32 sums exceed the 2⁻¹⁰ margin: 0.39 % at the default chunk",
    f"{SENSITIVITY}::test_the_rounding_of_a_long_sum_does_not_depend_on_one_record",
)
def long_sums_of_a_chunk() -> Seen:
    most = _rounded(512, 512, range(8, 9))
    return Seen(most > MOST, f"one record moves the sum by {most:.5f} clip norms, of which the noise covers {MOST:.5f}")


@point(
    NORMS,
    "the same: 25 % at 4096 rows",
    f"{SENSITIVITY}::test_the_rounding_of_a_long_sum_does_not_depend_on_one_record",
)
def long_sums_of_4096_rows() -> Seen:
    most = _rounded(4096, 4096, range(11, 12))
    return Seen(most > MOST, f"one record moves the sum by {most:.5f} clip norms, of which the noise covers {MOST:.5f}")


def _custom() -> nn.Module:
    """A product that no rule of either engine knows, so that its rows are measured or found by their length."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x).permute(1, 0, 2).reshape(-1, 4)
        found: Tensor = s.b(torch.tanh(h)).reshape(3, len(x), 2).sum(0)
        return found

    return Fn(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2)).double()


def _dropped(bad: int, n: int) -> tuple[float, int]:
    """How far the sum is from that of the other records, relative to it, and how many were dropped."""
    model = _custom()
    x, y = torch.randn(n, 3, 4, dtype=torch.float64), torch.randn(n, dtype=torch.float64)
    rest = torch.tensor([i for i in range(n) if i != bad])
    clip = sordino.FlatClip(1.0)
    wanted = flat(sordino.clipped_sum(model, squared, sordino.Rows(x[rest], y[rest]), clip).sums)
    x[bad] = torch.nan
    found = sordino.clipped_sum(model, squared, sordino.Rows(x, y), clip)
    return float((flat(found.sums) - wanted).norm() / wanted.norm()), found.dropped


@point(
    NAN,
    "a NaN row: an IndexError",
    "tests/gradients/test_measure.py::test_a_row_that_is_not_finite_is_dropped_alone_and_the_others_stay",
)
def nan_row_is_an_error() -> Seen:
    off, dropped = _dropped(0, 6)
    return Seen(dropped != 1 or off > 1e-9, f"{dropped} record dropped; the sum is {off:.0e} from that of the others")


@point(
    NAN,
    "a NaN row: another record dropped in its place",
    "tests/gradients/test_measure.py::test_a_row_that_is_not_finite_is_dropped_alone_and_the_others_stay",
)
def nan_row_drops_another() -> Seen:
    worst, text = 0.0, "each of four NaN rows is dropped alone"
    for bad in range(4):
        off, dropped = _dropped(bad, 4)
        if off > worst:
            worst, text = (
                off,
                f"record {bad} is NaN: {dropped} dropped, and the sum is {off:.0%} from that of the others",
            )
    return Seen(worst > 1e-9, text)


@point(
    NAN,
    "norms above 1.8e19 dropped instead of clipped",
    f"{SENSITIVITY}::test_norms_above_the_range_of_squares_are_clipped_and_told",
)
def norms_above_the_range_of_squares() -> Seen:
    model, rows = nn.Linear(5, 3), sordino.Rows(torch.full((2, 5), 1e20), torch.ones(2))
    found = sordino.clipped_sum(model, lambda out, t: out.sum(1) * t, rows, sordino.FlatClip(1.0))
    length = float(flat(found.sums).norm())
    return Seen(found.dropped > 0, f"{found.dropped} of 2 records dropped; their sum has {length:.3f} clip norms")
