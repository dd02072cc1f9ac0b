"""ModelMix (Xiao, Wan & Devadas 2022): Thm 4.2 against the accountant, and equations (7), (8) against Algorithm 1."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest

from sordino.methods.modelmix.accountant import MixStep, modelmix_epsilon

# n = 50,000, q = 0.02, c = 20, T = 5,000: the setting of Fig. 3; noise in clip norms, τ/η in units of the mean gradient
NOISE, RATE, CLIP, BATCH, STEPS, DELTA = 0.364, 0.02, 20.0, 1000.0, 5000, 1e-5


def epsilon(tau_over_lr: float, steps: int = STEPS, p: float = 1.0) -> float:
    step = MixStep(NOISE, tau_over_lr)
    return modelmix_epsilon(
        [(step, steps)], linf_p=p, sampling_rate=RATE, clip_norm=CLIP, expected_batch=BATCH, delta=DELTA
    )


@pytest.mark.parametrize("share", [4.0])
def test_epsilon_depends_on_steps_and_gap_through_their_ratio_as_theorem_4_2_says(share: float) -> None:
    """T and τ occur in (14) as ηT/τ alone; the accountant's ε agrees to one per cent."""
    assert epsilon(0.3 * share, round(STEPS * share)) == pytest.approx(epsilon(0.3), rel=0.01)


def test_a_fourfold_gap_divides_epsilon_by_no_more_than_its_root() -> None:
    """Thm 4.2 has the factor 2; the accountant 1.84, then 1.56: the conversion has a part that τ leaves as it is."""
    found = [epsilon(tau) for tau in (0.075, 0.3, 1.2)]
    gains = [one / two for one, two in pairwise(found)]
    assert gains == pytest.approx([1.84, 1.56], abs=0.02)


def test_the_delta_of_theorem_4_2_exceeds_one_in_every_setting_of_figure_3() -> None:
    """Its δ is at least T·σ/(τ/η) up to logarithms, σ the deviation in the mean gradient: 121 where τ is largest."""
    deviation = NOISE * CLIP / BATCH
    assert min(STEPS * deviation / tau for tau in (0.075, 0.15, 0.3)) == pytest.approx(121.3, rel=1e-3)


def test_the_two_models_of_equations_7_and_8_are_algorithm_1_with_an_older_gradient() -> None:
    """Alternating, they mix the last two states of one sequence; only the gradient is taken at the older of the two.

    So what is released has the noise and the gap of Algorithm 1, and the accountant serves it as it is.
    """
    generator = np.random.default_rng(0)
    steps, width, lr = 9, 4, 0.1
    mixes, noises = generator.uniform(size=(steps, width)), generator.normal(size=(steps, width))

    def gradient(w: np.ndarray) -> np.ndarray:
        return np.tanh(w) + w

    first, second = generator.normal(size=(2, width))
    sequence = [first, second]  # the states in the order in which they are made
    for k in range(steps):
        older, newer = sequence[-2:]
        sequence.append(mixes[k] * older + (1 - mixes[k]) * newer - lr * (gradient(older) + noises[k]))
    one, two = first, second
    for k in range(steps):  # (7) in even places, (8) in odd ones; there α weighs the other model
        if k % 2 == 0:
            one = mixes[k] * one + (1 - mixes[k]) * two - lr * (gradient(one) + noises[k])
        else:
            two = (1 - mixes[k]) * one + mixes[k] * two - lr * (gradient(two) + noises[k])
        assert np.allclose(one if k % 2 == 0 else two, sequence[k + 2])


def test_a_uniform_mixture_is_the_mean_and_uniform_noise_as_wide_as_the_gap() -> None:
    generator = np.random.default_rng(1)
    older, newer = generator.normal(size=(2, 1, 3))
    mixes = generator.uniform(size=(200_000, 3))
    left = mixes * older + (1 - mixes) * newer - (older + newer) / 2
    gap = np.abs(older - newer)
    assert np.all(np.abs(left) <= gap / 2)
    assert np.allclose(left.std(axis=0), gap / math.sqrt(12), rtol=0.01)
