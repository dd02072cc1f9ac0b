"""Numbers without bounds are refused by a sentence, before memory or time is gone."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

import sordino
from sordino.errors import InputError
from sordino.methods.correlated.sensitivity import repeated_norm
from sordino.methods.planner import Budget, default_batches


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 10**20}, "steps"),
        ({"expected_batch": 1e-320}, "groups|batches"),
        ({"strategy": "banded-lambda", "value": 0.9, "bands": 10**20}, "bands"),
        ({"strategy": "banded-root", "bands": 1e300}, "bands"),
        ({"strategy": "banded-root", "bands": 10.0}, "bands"),
    ],
)
def test_numbers_that_no_vector_can_hold_are_refused(changes: dict[str, Any], words: str) -> None:
    options: dict[str, Any] = {
        "delta": 1e-5, "records": 100, "expected_batch": 10, "steps": 20, "noise_multiplier": 2.0, "groups": 1,
        "strategy": "identity",
    }  # fmt: skip
    with pytest.raises(InputError, match=words):
        sordino.correlated(**options | changes)


def test_no_strategy_is_chosen_for_more_steps_than_can_be_looked_at() -> None:
    """Six million steps took minutes, and full batches a time that grows with the square of the steps."""
    with pytest.raises(InputError, match="name the strategy"):
        sordino.correlated(delta=1e-5, records=60_000, expected_batch=1, epochs=100, epsilon=8.0)
    with pytest.raises(InputError, match="take larger batches, fewer epochs or less time"):
        Budget(60_000, 60_000, 100, 8.0, 1e-5)
    assert default_batches(10**12) == [10**6]
    assert default_batches(60_000, 1e5) == [10]
    begin = time.process_time()
    column_norms = repeated_norm(np.ones(10**6), 1), repeated_norm(np.ones(10**6), 3)
    assert time.process_time() - begin < 1
    exact = [math.sqrt(sum((t // b + 1) ** 2 for t in range(10**6))) for b in (1, 3)]
    assert column_norms == pytest.approx(exact, rel=1e-12)
