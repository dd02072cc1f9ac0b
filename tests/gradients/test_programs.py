"""Random programs against a plain loop over records. Ten thousand of them: experiments/random_programs.py."""

from __future__ import annotations

from collections import Counter

import pytest

from gradients.programs import outcome

GROUPS, EACH = 10, 12


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_programs_have_the_gradients_of_a_loop(group: int) -> None:
    found = [one for seed in range(group * EACH, (group + 1) * EACH) for one in outcome(seed)]
    kinds = Counter(one.kind for one in found)
    assert kinds["proven"] > len(found) // 4, kinds
    assert kinds["tie"] <= 1, kinds
    for one in found:
        assert one.kind != "refused", one
        assert one.gap < 1e-8, one


def test_gradients_that_are_nothing_but_rounding_do_not_make_records_interact() -> None:
    """A linear map before a normalisation that removes all it does: this sound program was refused."""
    assert {one.kind for one in outcome(9427)} == {"measured"}
