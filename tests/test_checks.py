"""Numbers that promise nothing are refused before anything is made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from small_recipes import small_recipe
from sordino import checks
from sordino.checks import refuse_empty_delta
from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.plan import Plan
from sordino.runs.build import plan_from
from sordino.training import train


def test_a_delta_of_one_over_the_records_or_more_is_refused() -> None:
    refuse_empty_delta(0.0099, 100)
    with pytest.raises(Refused, match="a complete record"):
        refuse_empty_delta(0.01, 100)


def test_train_and_recipes_refuse_it_before_anything_is_written(tmp_path: Path) -> None:
    plan = Plan.dpsgd(noise_multiplier=1.0, delta=0.1, records=90, expected_batch=9, steps=1)
    with pytest.raises(Refused, match="a complete record"):
        train(
            nn.Linear(3, 2), cross_entropy, (torch.randn(90, 3), torch.zeros(90).long()), plan, lr=1.0,
            out=tmp_path / "run",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
    with pytest.raises(Refused, match="a complete record"):
        plan_from(small_recipe(privacy={"delta": 0.5}), FlatClip(1.0), 1000)


def test_records_in_the_place_of_another_argument_are_not_shown() -> None:
    """`train(model, loss, plan, (inputs, targets))` printed the first values of the records."""
    for value in (torch.full((2,), 7.125), np.full(2, 7.125), [7.125], (torch.full((2,), 7.125),), {"age": 7.125}):
        assert "7.125" not in checks.brief(value)
        with pytest.raises(InputError) as caught:
            checks.real("lr", value)
        assert "7.125" not in str(caught.value)
    assert checks.brief("adam") == "'adam'"
