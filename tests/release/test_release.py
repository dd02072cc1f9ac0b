"""Releases: no entry without noise, no noise without entry, and the noise is what was promised."""

from __future__ import annotations

import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from sordino.errors import InputError, Refused, SordinoError
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, Laplace, Noise, release
from sordino.release import noise as noise_module
from sordino.release.ledger import Ledger
from sordino.release.mechanisms import Norm, release_grid

SAMPLING = {"name": "poisson", "sampling_rate": 0.01}
LEVEL = 1e-4


def memory() -> Ledger:
    return Ledger.open(None, {"records": 100})


def send(values: dict[str, Tensor], **changes: Any) -> dict[str, Tensor]:
    step = changes.pop("step", 0)
    relation = changes.pop("relation", "add-remove")
    options: dict[str, Any] = {
        "sensitivity": 1.0,
        "norm": "l2",
        "noise": Gaussian(1.0),
        "source": RandomSource.seeded(0),
        "ledger": memory(),
        "entry": Entry("gradient", step, SAMPLING, relation),
        **changes,
    }
    return release(values, **options)


# What comes back


def test_shapes_types_and_keys_are_those_of_the_values() -> None:
    values = {
        "w": torch.ones(3, 4),
        "scalar": torch.tensor(2.0, dtype=torch.float64),
        "none": torch.empty(0, 5),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "transposed": torch.ones(4, 3).t(),
    }
    noisy = send(values)
    assert list(noisy) == list(values)
    for name, value in values.items():
        assert noisy[name].shape == value.shape
        assert noisy[name].dtype == value.dtype
        assert noisy[name].is_contiguous()
        assert not torch.equal(noisy[name], value) or value.numel() == 0


def test_a_narrower_type_is_what_is_released_rounded_after_the_noise() -> None:
    values = {"a": torch.randn(3, 5, dtype=torch.float64) * 1e3, "b": torch.randn(70_001, dtype=torch.float64)}
    wide, narrow = send(values), send(values, dtype=torch.float32, in_place=True)
    assert list(narrow) == ["a", "b"]
    for name, value in wide.items():
        assert narrow[name].dtype == torch.float32
        assert torch.equal(narrow[name], value.float())
    with pytest.raises(InputError, match="floating-point"):
        send(values, dtype=torch.int64)
    with pytest.raises(Refused, match=r"range of torch.float32"):
        send({"a": torch.tensor([1e39], dtype=torch.float64)}, dtype=torch.float32)


def test_the_values_themselves_stay_untouched_and_no_graph_is_kept() -> None:
    value = torch.ones(5, requires_grad=True)
    noisy = send({"w": value})
    assert torch.equal(value, torch.ones(5))
    assert not noisy["w"].requires_grad


class TestInPlace:
    """The caller gives the values away: what changes is whose memory the result is in."""

    def test_the_result_is_the_same_and_takes_the_place_of_the_values(self) -> None:
        sizes = (70_000,), (3,), (5, 4)
        values = {str(k): torch.randn(size, generator=torch.Generator().manual_seed(k)) for k, size in enumerate(sizes)}
        expected = send(values, factor=0.5)
        places = [value.data_ptr() for value in values.values()]
        given = {name: values.pop(name) for name in list(values)}
        noisy = send(given, factor=0.5, in_place=True)
        assert [value.data_ptr() for value in noisy.values()] == places
        assert all(torch.equal(noisy[name], value) for name, value in expected.items())

    @pytest.mark.parametrize(
        ("changes", "dtype"),
        [
            ({}, torch.float32),
            ({"noise": Laplace(1.0), "norm": "l1"}, torch.float32),
            ({"fine": True}, torch.float32),
            ({"widths": {"a": torch.ones(6), "b": torch.ones(2)}}, torch.float32),
            ({}, torch.float64),
            ({}, torch.bfloat16),
        ],
        ids=["held", "laplace", "fine", "widths", "beside doubles", "beside halves"],
    )
    def test_values_that_others_hold_or_that_need_another_form_are_left(
        self, changes: dict[str, Any], dtype: torch.dtype
    ) -> None:
        values = {"a": torch.arange(6.0), "b": torch.ones(2, dtype=dtype)}
        kept = values["a"]
        noisy = send(values, in_place=True, **changes)
        assert torch.equal(kept, torch.arange(6.0))
        assert torch.equal(values["b"], torch.ones(2, dtype=dtype))
        assert all(torch.equal(noisy[name], value) for name, value in send(values, **changes).items())

    def test_nothing_is_overwritten_when_nothing_is_released(self) -> None:
        values = {"a": torch.arange(6.0)}
        book = memory()
        book.close()
        with pytest.raises(SordinoError):
            send(values, in_place=True, ledger=book)
        assert torch.equal(values["a"], torch.arange(6.0))


@pytest.mark.parametrize(("noise", "norm", "law"), [(Gaussian(1.7), "l2", "norm"), (Laplace(1.7), "l1", "laplace")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_noise_has_the_promised_scale_and_law(noise: Noise, norm: str, law: str, dtype: torch.dtype) -> None:
    value = torch.linspace(-50, 50, 200_000, dtype=dtype)
    noisy = send({"w": value}, sensitivity=0.3, norm=norm, noise=noise)["w"]
    drawn = (noisy.double() - value.double()).numpy() / (1.7 * 0.3)
    assert stats.kstest(drawn, law).pvalue > LEVEL
    variance, fourth = (1, 3) if law == "norm" else (2, 24)
    assert abs((drawn**2).mean() - variance) < 4 * math.sqrt((fourth - variance**2) / len(drawn))


def test_the_noise_is_fresh_for_every_step_purpose_and_run_and_across_tensors() -> None:
    value = {"a": torch.zeros(40_000), "b": torch.zeros(40_000)}
    draws = [send(value, step=0), send(value, step=1), send(value, source=RandomSource.seeded(1))]
    draws += [send(value, entry=Entry("statistics", 0, SAMPLING, "add-remove"))]
    draws += [send(value, source=RandomSource.from_os()) for _ in range(2)]
    flat = [noisy[name].numpy() for noisy in draws for name in value]
    for i, x in enumerate(flat):
        for y in flat[:i]:
            assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(40_000)


def test_a_seeded_release_repeats_itself_bit_by_bit() -> None:
    value = {"a": torch.randn(70_000), "b": torch.randn(3, 3)}
    one, two = send(value, step=5), send(value, step=5)
    assert all(torch.equal(one[name], two[name]) for name in value)


def test_a_secure_source_never_repeats_its_noise_even_with_another_ledger() -> None:
    source = RandomSource.from_os()
    one, two = (send({"w": torch.zeros(1_000)}, source=source, ledger=memory())["w"] for _ in range(2))
    assert (one == two).sum() < 50  # on the grid, four in a thousand agree by chance


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
@settings(deadline=None, max_examples=40)
def test_the_result_does_not_depend_on_how_the_vector_is_cut_into_tensors(sizes: list[int]) -> None:
    whole = torch.arange(1 + sum(sizes), dtype=torch.float64)
    parts = dict(zip(map(str, range(len(sizes) + 1)), whole.split([1, *sizes]), strict=True))
    assert torch.equal(torch.cat(list(send(parts).values())), send({"all": whole})["all"])


def test_large_vectors_are_worked_on_in_blocks_that_cross_tensors() -> None:
    whole = torch.randn(3 * noise_module._BLOCK + 17)
    parts = dict(zip("abcd", whole.split([5, noise_module._BLOCK, 2 * noise_module._BLOCK, 12]), strict=True))
    assert torch.equal(torch.cat(list(send(parts).values())), send({"all": whole})["all"])


# The grid: what a result can tell about the value below the noise


@given(
    st.floats(1e-3, 1e3),
    st.floats(1e-6, 1e6),
    st.sampled_from([1, 10, 10**3, 10**6, 10**9]),
    st.sampled_from([Gaussian, Laplace]),
)
@settings(deadline=None, max_examples=200)
def test_the_noise_covers_the_rounding_and_the_grid_is_a_public_power_of_two(
    multiplier: float, sensitivity: float, coordinates: int, kind: type[Gaussian] | type[Laplace]
) -> None:
    noise = kind(multiplier)
    try:
        grid = release_grid(noise, sensitivity, coordinates)
    except Refused:
        assert kind is Laplace
        assert multiplier * coordinates > 2.0**noise.grid_bits
        return
    width = multiplier * sensitivity
    assert math.frexp(grid.spacing)[0] == 0.5
    assert width * 2.0 ** -(noise.grid_bits + 1) < grid.spacing <= width * 2.0**-noise.grid_bits
    moved = grid.spacing * coordinates if kind is Laplace else 0.0  # the Gaussian sum is rounded after the noise
    assert grid.scale * grid.spacing >= multiplier * (sensitivity + moved)
    assert grid.scale * grid.spacing <= multiplier * (sensitivity + moved) * (1 + 1e-12)


def test_the_grid_adds_less_than_a_fiftieth_of_a_thousandth_to_the_variance() -> None:
    for multiplier in (0.5, 0.7, 1.0, 1.999):
        grid = release_grid(Gaussian(multiplier), 1.0, 10**6)
        assert grid.spacing**2 / 12 < 2.1e-5 * multiplier**2


@pytest.mark.parametrize(("noise", "norm"), [(Gaussian(0.8), "l2"), (Laplace(0.8), "l1")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_result_lies_on_the_grid(noise: Noise, norm: str, dtype: torch.dtype) -> None:
    """Mironov's attack reads the value from the low digits of the sum. Here there are none."""
    spacing = release_grid(noise, 1.0, 3_000).spacing
    value = torch.randn(3_000, dtype=dtype)
    steps = send({"w": value.double()}, noise=noise, norm=norm)["w"] / spacing
    assert torch.equal(steps.round(), steps)
    assert torch.equal(send({"w": value}, noise=noise, norm=norm)["w"], (steps * spacing).to(dtype)) or norm == "l1"


def test_values_in_one_cell_are_indistinguishable_under_laplace_noise() -> None:
    spacing = release_grid(Laplace(0.8), 1.0, 3_000).spacing
    value = torch.randn(3_000, dtype=torch.float64)
    moved = (value / spacing).round() * spacing + (torch.rand(3_000, dtype=torch.float64) - 0.5) * 0.999 * spacing
    noisy, other = (send({"w": v}, noise=Laplace(0.8), norm="l1")["w"] for v in (value, moved))
    assert not torch.equal(value, moved)
    assert torch.equal(noisy, other)


@pytest.mark.parametrize("sensitivity", [1.0, 0.37, 3e-12, 2e11, 1e-25, 1e25])  # the last ones not in float32
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_gaussian_release_is_the_rounded_sum_of_the_value_and_the_noise(
    sensitivity: float, dtype: torch.dtype
) -> None:
    value = (torch.randn(5_000, dtype=torch.float64) * 30 * sensitivity).to(dtype)
    grid = release_grid(Gaussian(1.3), sensitivity, 5_000)
    expected = value.double() / grid.spacing
    RandomSource.seeded(0).stream("release/gradient", 0).rounded_sum(expected, grid.scale)
    noisy = send({"w": value}, sensitivity=sensitivity, noise=Gaussian(1.3))["w"]
    assert torch.equal(noisy, (expected * grid.spacing).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1 / 256, 1 / 60_000, 0.3, 7.0])
@pytest.mark.parametrize(
    ("noise", "norm", "fine"), [(Gaussian(1.3), "l2", False), (Gaussian(1.3), "l2", True), (Laplace(0.8), "l1", False)]
)
def test_a_factor_multiplies_what_was_released_and_nothing_else(
    dtype: torch.dtype, factor: float, noise: Noise, norm: Norm, fine: bool
) -> None:
    value, ledgers = {"a": torch.randn(700, dtype=dtype), "b": torch.randn(3, 5, dtype=dtype)}, (memory(), memory())
    plain = send(value, noise=noise, norm=norm, fine=fine, ledger=ledgers[0])
    scaled = send(value, noise=noise, norm=norm, fine=fine, ledger=ledgers[1], factor=factor)
    for name in value:
        assert torch.allclose(scaled[name], plain[name] * factor, rtol=4 * torch.finfo(dtype).eps, atol=0)
    first, second = (({**e, "time": ""}) for ledger in ledgers for e in ledger.entries)
    assert first == second, "the factor is post-processing: the ledger does not know it"


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf"), 1e30])
def test_a_factor_that_is_no_ordinary_number_is_refused_before_anything_is_recorded(factor: float) -> None:
    ledger = memory()
    with pytest.raises(InputError, match="factor on a released value"):
        send({"w": torch.ones(3)}, factor=factor, ledger=ledger)
    with pytest.raises(Refused, match="out of the range"):
        send({"w": torch.full((3,), 1e38)}, factor=1e3, ledger=ledger)
    assert ledger.entries == ()


def test_a_tensor_in_double_precision_beside_others_does_not_change_their_noise() -> None:
    values = {"a": torch.randn(1_001), "b": torch.randn(70_000)}
    alone, beside = send(values), send({**values, "c": torch.zeros(3, dtype=torch.float64)})
    assert torch.equal(alone["a"], beside["a"])
    assert torch.equal(alone["b"][: noise_module._BLOCK - 1_001], beside["b"][: noise_module._BLOCK - 1_001])


def test_a_release_does_not_depend_on_the_number_of_threads() -> None:
    before, values = torch.get_num_threads(), {"a": torch.randn(150_001)}
    try:
        torch.set_num_threads(1)
        one = send(values)["a"]
        torch.set_num_threads(2)
        assert torch.equal(one, send(values)["a"])
    finally:
        torch.set_num_threads(before)


def test_a_negative_zero_does_not_tell_the_sign_of_the_value() -> None:
    for noise, norm in ((Gaussian(1.0), "l2"), (Laplace(1.0), "l1")):
        noisy = [send({"w": torch.full((20_000,), t)}, noise=noise, norm=norm)["w"] for t in (-1e-20, 1e-20)]
        assert noise.name == "laplace" or (noisy[0] == 0).sum() > 50
        assert torch.equal(noisy[0], noisy[1])
        assert not torch.signbit(noisy[0][noisy[0] == 0]).any()


def test_two_negative_zeros_of_laplace_noise_make_a_positive_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sordino.randomness.Stream.rounded_laplace", lambda self, out, scale: out.fill_(-0.0))
    noisy = [send({"w": torch.full((3,), t)}, noise=Laplace(1.0), norm="l1")["w"] for t in (-1e-20, 1e-20)]
    assert not torch.signbit(torch.cat(noisy)).any()


@pytest.mark.parametrize("size", [2.0**20, 2.0**32, 2.0**100])
def test_a_sum_far_above_the_noise_is_the_true_sum_of_integers_rounded_once(size: float) -> None:
    value = torch.tensor([size, -3 * size, 0.0, size * (1 + 2.0**-52)], dtype=torch.float64)
    big, noise = send({"w": value})["w"], send({"w": torch.zeros(4, dtype=torch.float64)})["w"]
    spacing = release_grid(Gaussian(1.0), 1.0, 4).spacing
    for total, drawn, sent in zip(big.tolist(), noise.tolist(), value.tolist(), strict=True):
        steps = round(Fraction(sent) / Fraction(spacing)) + int(drawn / spacing)  # exact: Python's integers
        assert total == float(steps) * spacing


# What the ledger says


def test_the_entry_says_what_was_done(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.jsonl", {"records": 100}) as ledger:
        send(
            {"a": torch.zeros(3, 4), "b": torch.zeros(5)}, sensitivity=0.5, noise=Gaussian(1.25), step=7, ledger=ledger
        )
        written = dict(ledger.entries[0])
    assert written.pop("time")
    assert len(written.pop("source")) == 32
    assert written == {
        "kind": "release",
        "purpose": "gradient",
        "step": 7,
        "mechanism": "gaussian",
        "noise_multiplier": 1.25,
        "sensitivity": 0.5,
        "norm": "l2",
        "sampling": SAMPLING,
        "relation": "add-remove",
        "secure": False,
        "coordinates": 17,
    }


def test_the_entry_is_written_before_any_noise_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    real_record, real_add = Ledger.record, noise_module._with_noise
    monkeypatch.setattr(Ledger, "record", lambda *a: (order.append("record"), real_record(*a))[1])
    monkeypatch.setattr(noise_module, "_with_noise", lambda *a, **k: (order.append("noise"), real_add(*a, **k))[1])
    send({"w": torch.zeros(3)})
    assert order == ["record", "noise"]


def test_when_the_ledger_cannot_be_written_nothing_is_returned(tmp_path: Path) -> None:
    with Ledger.open(tmp_path / "ledger.jsonl", {"records": 100}) as ledger:
        assert ledger._descriptor is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, ledger._descriptor)
        os.close(full)
        with pytest.raises(SordinoError, match="The value was not released"):
            send({"w": torch.zeros(3)}, ledger=ledger)
        assert ledger.entries == ()


def test_a_closed_ledger_releases_nothing() -> None:
    ledger = memory()
    ledger.close()
    with pytest.raises(SordinoError, match="nothing more is released"):
        send({"w": torch.zeros(3)}, ledger=ledger)


def test_the_same_step_twice_is_a_replay_with_a_seed_and_refused_without() -> None:
    value = {"w": torch.ones(4)}
    ledger = memory()
    one, two = (send(value, ledger=ledger) for _ in range(2))
    assert torch.equal(one["w"], two["w"])
    assert len(ledger.entries) == 1
    secure = memory()
    send(value, ledger=secure, source=RandomSource.from_os())
    with pytest.raises(SordinoError, match="already released"):
        send(value, ledger=secure, source=RandomSource.from_os())


# What is refused, always before anything is recorded


@pytest.mark.parametrize("multiplier", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("kind", [Gaussian, Laplace])
def test_no_way_out_without_noise(kind: type[Gaussian] | type[Laplace], multiplier: float) -> None:
    with pytest.raises(InputError, match="nothing is released without noise"):
        kind(multiplier)


REFUSED: list[tuple[dict[str, Tensor], dict[str, Any], str]] = [
    ({"w": torch.zeros(3)}, {"sensitivity": 0.0}, "finite and positive"),
    ({"w": torch.zeros(3)}, {"sensitivity": -1.0}, "finite and positive"),
    ({"w": torch.zeros(3)}, {"sensitivity": math.nan}, "finite and positive"),
    ({"w": torch.zeros(3)}, {"sensitivity": math.inf}, "finite and positive"),
    ({"w": torch.zeros(3)}, {"sensitivity": 1e-300}, "double precision"),
    ({"w": torch.zeros(3)}, {"norm": "l1"}, "calibrated to the l2 sensitivity"),
    ({"w": torch.zeros(3)}, {"norm": "l2", "noise": Laplace(1.0)}, "calibrated to the l1 sensitivity"),
    ({"w": torch.zeros(3)}, {"norm": "linf"}, "calibrated to the l2 sensitivity"),
    ({"w": torch.zeros(3)}, {"relation": "swap"}, "relation must be one of"),
    ({"w": torch.zeros(3)}, {"step": -1}, "counts from 0"),
    ({"w": torch.zeros(3, dtype=torch.int64)}, {}, "'w' has dtype torch.int64"),
    ({"w": torch.zeros(3, dtype=torch.complex64)}, {}, "'w' has dtype torch.complex64"),
    ({}, {}, "nothing to release"),
    ({"w": torch.zeros(0)}, {}, "nothing to release"),
    ({"w": torch.full((3,), 1e300, dtype=torch.float64)}, {"sensitivity": 1e-20}, "out of the range"),
    ({"w": torch.full((3,), 3e38)}, {"sensitivity": 1e37}, "out of the range"),
    ({"w": torch.full((3,), 1e37)}, {}, "out of the range"),  # with a grid of 2⁻⁶ no longer a float32
    ({"v": torch.zeros(2), "w": torch.full((3,), 6.5e4, dtype=torch.float16)}, {"sensitivity": 9.0}, "'w' is so large"),
    ({"w": torch.zeros(3, dtype=torch.float16)}, {"sensitivity": 5e4}, "out of the range"),
]


@pytest.mark.parametrize(("values", "changes", "message"), REFUSED, ids=[r[2] + str(i) for i, r in enumerate(REFUSED)])
def test_what_cannot_be_certified_is_refused_and_not_recorded(
    values: dict[str, Tensor], changes: dict[str, Any], message: str
) -> None:
    ledger = memory()
    with pytest.raises(InputError, match=message):
        send(values, ledger=ledger, **changes)
    assert ledger.entries == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_that_is_not_finite_is_refused_before_anything_is_recorded(bad: float) -> None:
    ledger = memory()
    value = torch.zeros(1_000)
    value[567] = bad
    with pytest.raises(SordinoError, match="the value 'w' of 'gradient', step 3, is not finite"):
        send({"ok": torch.zeros(4), "w": value}, ledger=ledger, step=3)
    assert ledger.entries == ()


def test_too_many_coordinates_for_the_grid_are_refused() -> None:
    with pytest.raises(Refused, match="to cover the rounding"):
        release_grid(Laplace(10.0), 1.0, 10**10)


def test_an_empty_batch_releases_noise_alone_and_is_recorded() -> None:
    ledger = memory()
    noisy = send({"w": torch.zeros(10_000)}, ledger=ledger)["w"]
    assert noisy.std().item() == pytest.approx(1.0, abs=0.05)
    assert len(ledger.entries) == 1
