"""Random allocation against quadrature: complete and partial epochs, alone and composed with other releases."""

from __future__ import annotations

import numpy as np
import pytest
from two_batches import delta

from sordino.accounting import account
from sordino.accounting.events import Release, allocated, compose_events

_ROUNDING = 1e-8


def case(seed: int) -> tuple[int, float, list[tuple[float, float]], float]:
    """(batches, noise multiplier, other releases, δ), drawn at random."""
    generator = np.random.default_rng(seed)
    kind = seed % 4
    sigma, at = float(np.exp(generator.uniform(-2.2, 3.4))), float(10 ** generator.uniform(-14, -0.3))
    batches = int(np.exp(generator.uniform(1.1, 13.8))) if kind == 1 else 2
    noise = sigma * float(np.exp(generator.uniform(-0.7, 0.7)))
    others = [[], [], [(1.0, noise)], [(float(generator.uniform(0.01, 0.9)), noise)]][kind]
    return batches, sigma, others, at


@pytest.mark.parametrize("seed", range(12))
def test_the_bounds_lie_on_either_side_of_the_truth(seed: int) -> None:
    batches, sigma, others, at = case(seed)
    releases = [(allocated(sigma, batches, 2), 1), *((Release("gaussian", noise, rate), 1) for rate, noise in others)]
    found = account(compose_events(releases), at)
    assert found.epsilon_lower is not None
    for epsilon, sign in ((found.epsilon, 1), (found.epsilon_lower, -1)):
        true = max(delta(batches, sigma, epsilon, removing=way, others=others) for way in (True, False))
        assert sign * true <= sign * at * (1 + sign * _ROUNDING) or (sign < 0 and epsilon == 0)


def test_the_reference_knows_the_check_values_of_two_batches() -> None:
    """One epoch of two batches, of which δ(0) is the total variation: the same in both directions."""
    for sigma in (0.3, 1.0, 4.0):
        both = [delta(2, sigma, 0.0, removing=way, others=[]) for way in (True, False)]
        assert both[0] == pytest.approx(both[1], rel=1e-9)
