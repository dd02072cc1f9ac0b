"""Two further kinds of noise: uniform noise on top (ModelMix) and a fine grid (hidden iterates)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from sordino.errors import InputError, Refused
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, Laplace, fine_rounding, release
from sordino.release.ledger import Ledger
from sordino.release.mechanisms import release_grid

ENTRY = Entry("gradient", 0, {"name": "poisson", "sampling_rate": 0.1}, "add-remove")


def send(values: dict[str, Tensor], ledger: Ledger | None = None, **changes: Any) -> dict[str, Tensor]:
    options: dict[str, Any] = {
        "sensitivity": 1.0,
        "norm": "l2",
        "noise": Gaussian(0.5),
        "source": RandomSource.seeded(3),
        "ledger": ledger or Ledger.open(None, {"plan": "test"}),
        "entry": ENTRY,
    }
    return release(values, **options | changes)


def test_uniform_noise_comes_on_top_of_the_gaussian_with_the_width_of_each_coordinate() -> None:
    values = {"w": torch.zeros(40_000), "b": torch.zeros(40_000)}
    widths = {"b": torch.full((40_000,), 8.0), "w": torch.full((40_000,), 2.0)}
    noisy = send(values, widths=widths)
    for name, width in (("w", 2.0), ("b", 8.0)):
        z = torch.randn(40_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        u = torch.rand(40_000, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        drawn = 0.5 * z + width * (u - 0.5)
        assert stats.ks_2samp(noisy[name].numpy(), drawn.numpy()).pvalue > 1e-4
        assert float(noisy[name].double().var()) == pytest.approx(0.25 + width**2 / 12, rel=0.05)


def test_no_width_means_the_noise_of_a_plain_release() -> None:
    values = {"w": torch.linspace(-3, 3, 1000)}
    plain = send(values)
    assert torch.equal(plain["w"], send(values, widths={"w": torch.zeros(1000)})["w"])


def test_the_least_width_is_on_record() -> None:
    ledger = Ledger.open(None, {"plan": "test"})
    send({"w": torch.zeros(3)}, ledger, widths={"w": torch.tensor([0.5, 0.25, 9.0])})
    assert ledger.entries[0]["least_width"] == 0.25


@pytest.mark.parametrize(
    ("widths", "says"),
    [
        ({"w": torch.tensor([1.0, -1.0])}, "negative"),
        ({"w": torch.tensor([1.0, float("nan")])}, "not finite"),
        ({"w": torch.ones(3)}, "same shapes"),
        ({"v": torch.ones(2)}, "every coordinate"),
    ],
)
def test_wrong_widths_release_nothing(widths: dict[str, Tensor], says: str) -> None:
    ledger = Ledger.open(None, {"plan": "test"})
    with pytest.raises(InputError, match=says):
        send({"w": torch.zeros(2)}, ledger, widths=widths)
    assert not ledger.entries


def test_laplace_noise_takes_uniform_noise_too() -> None:
    noisy = send({"w": torch.zeros(40_000)}, noise=Laplace(1.0), norm="l1", widths={"w": torch.full((40_000,), 6.0)})
    assert float(noisy["w"].double().var()) == pytest.approx(2.0 + 3.0, rel=0.05)


def test_a_fine_release_lies_on_its_grid_and_moves_a_value_by_no_more_than_it_says() -> None:
    values = {"w": torch.linspace(-50, 50, 10_001, dtype=torch.float64)}
    noise = Gaussian(0.5)
    spacing = release_grid(noise, 1.0, 10_001, fine=True).spacing
    assert 0.5 * 2.0**-33 < spacing <= 0.5 * 2.0**-32
    once = send(values, fine=True)["w"]
    assert torch.equal(once, torch.round(once / spacing) * spacing)
    drawn = once - values["w"]
    assert stats.kstest(drawn.numpy() / 0.5, "norm").pvalue > 1e-4
    # the same stream on other values: the noise is the same to within the rounding of the values
    again = send({"w": values["w"] + 1 / 3}, fine=True)["w"] - (values["w"] + 1 / 3)
    assert float((again - drawn).abs().max()) <= spacing * (1 + 1e-6)
    assert float((again - drawn).norm()) <= fine_rounding(noise, 1.0, 10_001)


def test_what_no_proof_needs_is_refused() -> None:
    with pytest.raises(Refused, match="Gaussian noise only"):
        send({"w": torch.zeros(2)}, fine=True, noise=Laplace(1.0), norm="l1")
    with pytest.raises(Refused, match="Gaussian noise only"):
        send({"w": torch.zeros(2)}, fine=True, widths={"w": torch.ones(2)})
