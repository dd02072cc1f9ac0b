"""Random graphs of single operations: what is accepted equals a loop over the records."""

from __future__ import annotations

import pytest
from graphs import outcome

EACH = 10


@pytest.mark.parametrize("start", range(0, 80, EACH))
def test_what_is_accepted_equals_a_loop(start: int) -> None:
    found = [outcome(seed) for seed in range(start, start + EACH)]
    assert all(gap < 1e-7 for _, gap, _ in found), found
    assert sum(kind == "accepted" for kind, _, _ in found) >= EACH // 2
