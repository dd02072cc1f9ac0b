"""The tests of noise: their level on honest noise, and what each kind of fault looks like."""

from __future__ import annotations

import pytest
import torch
from scipy import stats
from torch import Tensor

from sordino.audit.noise_check import LEVEL, NoiseCheck, enough, noise_tests, worst


def normal(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def found(noise: list[Tensor], values: list[Tensor] | None = None) -> tuple[str, float]:
    return worst(noise_tests([torch.special.ndtr(z) for z in noise], values or []))


def test_honest_noise_gives_p_values_that_are_not_small() -> None:
    small = [found([normal(500, 10 * seed + k) for k in range(4)])[1] for seed in range(60)]
    assert min(small) > 1e-3
    assert sum(p < 0.05 for p in small) <= 6  # 3 expected


FAULTS = {
    "scale": [0.9 * normal(6000, 1)],
    "tails": [normal(6000, 2).clamp(-2, 2)],
    "mean": [normal(3000, k) + 0.2 for k in range(3)],
    "steps": [normal(3000, 3), normal(3000, 4), normal(3000, 3)],
    "coordinates": [normal(3000, 5).repeat(2)],
}


@pytest.mark.parametrize("kind", FAULTS)
def test_each_fault_is_seen_by_the_test_that_is_for_its_kind(kind: str) -> None:
    noise = FAULTS[kind]
    tests = noise_tests([torch.special.ndtr(z) for z in noise])
    assert tests[kind] * len(tests) < LEVEL


def test_noise_that_depends_on_the_values_is_seen() -> None:
    values = normal(3000, 8)
    assert found([0.98 * normal(3000, 9) + 0.2 * values], [values])[0] == "values"


def test_neighbouring_coordinates_that_share_noise_are_seen() -> None:
    assert found([normal(2000, 6).repeat_interleave(2)])[0] == "coordinates"


def test_enough_is_enough_and_half_of_it_is_not_twice_enough() -> None:
    """The power analysis against the distribution itself."""
    count = enough(0.9)
    rejected = stats.chi2.ppf(LEVEL / 16, count)
    assert stats.chi2.cdf(rejected / 0.81, count) > 0.99
    assert stats.chi2.cdf(stats.chi2.ppf(LEVEL / 16, count // 3) / 0.81, count // 3) < 0.99


def test_laplace_noise_is_judged_as_laplace() -> None:
    check = NoiseCheck(2.0, laplace=True)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(20_000, generator=generator, dtype=torch.float64) - 0.5
    check.add(-2.0 * torch.sign(uniform) * torch.log1p(-2 * uniform.abs()), torch.zeros(20_000, dtype=torch.float64))
    assert check.p_value() > 1e-3
    wrong = NoiseCheck(2.0, laplace=False, places=list(check.places))
    wrong.places.clear()
    wrong.add(-2.0 * torch.sign(uniform) * torch.log1p(-2 * uniform.abs()), torch.zeros(20_000, dtype=torch.float64))
    assert wrong.p_value() < LEVEL
