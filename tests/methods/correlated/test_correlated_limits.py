"""Numbers without bounds are refused by a sentence, before memory or time is gone."""

from __future__ import annotations

from typing import Any

import pytest

import sordino
from sordino.errors import InputError


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
