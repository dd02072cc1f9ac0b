"""Masks follow from all bits of their seed, and torch's generator is afterwards what it was."""

from __future__ import annotations

import torch

from sordino.randomness.masks import masks_of, seed_masks

RECORDED = [0.419812, 0.44278, 0.896305]


def drawn(seed: int) -> torch.Tensor:
    with masks_of(seed):
        return torch.rand(700)


def test_seeds_that_differ_in_their_upper_half_give_other_masks() -> None:
    assert not torch.equal(drawn(5), drawn(5 + (1 << 32)))
    assert not torch.equal(drawn(5), drawn(6))


def test_the_same_seed_gives_the_same_masks_and_is_told_again() -> None:
    assert torch.equal(drawn(1 << 62), drawn(1 << 62))
    with masks_of(1 << 62):
        assert torch.initial_seed() == 1 << 62


def test_masks_look_uniform_and_normal() -> None:
    with masks_of(3):
        uniform, normal = torch.rand(20_000, dtype=torch.float64), torch.randn(20_000, dtype=torch.float64)
    assert abs(float(uniform.mean()) - 0.5) < 0.01
    assert abs(float(uniform.var()) - 1 / 12) < 0.005
    assert abs(float(normal.mean())) < 0.03
    assert abs(float(normal.var()) - 1) < 0.05


def test_the_generator_is_left_as_it_was() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    drawn(2)
    assert torch.equal(torch.get_rng_state(), before)
    seed_masks(2)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_numbers_after_a_seed_have_not_changed() -> None:
    """A run with an insecure seed is repeatable across versions of sordino."""
    with masks_of(7):
        assert [round(value, 6) for value in torch.rand(3, dtype=torch.float64).tolist()] == RECORDED
