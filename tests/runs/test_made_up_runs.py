"""A run directory that somebody made up: what its model says about the inputs is not trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sordino.errors import InputError
from sordino.plan import Plan
from sordino.runs import trained

RIGHT: dict[str, Any] = {"input_shape": [1, 28, 28], "input_type": "float32", "classes": 10, "labels": ["a", "b"]}


def test_what_runs_write_is_accepted() -> None:
    for inputs in (RIGHT, {}, {"labels": None}, {key: RIGHT[key] for key in ("input_shape", "input_type")}):
        assert trained._checked_inputs(Path("run"), {"inputs": inputs}) == inputs


@pytest.mark.parametrize(
    "change",
    [
        {"input_shape": "x"}, {"input_shape": [1, -28]}, {"input_shape": [1.5]}, {"input_shape": [True]},
        {"input_shape": [10**6, 10**6]}, {"input_shape": {"a": 1}}, {"classes": "10"}, {"classes": 10**40},
        {"classes": None}, {"input_type": "load"}, {"input_type": "os"}, {"input_type": 7}, {"input_type": None},
        {"labels": "abc"}, {"labels": [1]}, {"labels": {"a": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_run_writes_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="no run writes"):
        trained._checked_inputs(Path("run"), {"inputs": {**RIGHT, **change}})


@pytest.mark.parametrize("value", [None, "x", [], {"name": "x"}, {"name": []}, 10**400, float("nan"), True])
@pytest.mark.parametrize("key", ["noise", "sampling", "clipping", "method", "steps", "records", "delta", "statistics"])
def test_a_plan_with_any_value_is_a_plan_or_an_input_error(key: str, value: Any) -> None:
    plan = Plan.dpsgd(noise_multiplier=3.0, delta=1e-5, records=200, expected_batch=40, steps=12)
    for inner in (None, "noise_multiplier", "name", "sampling_rate", "clip_norm"):
        document = plan.to_dict()
        if inner is None:
            document[key] = value
        elif isinstance(document[key], dict) and inner in document[key]:
            document[key] = {**document[key], inner: value}
        else:
            continue
        try:
            assert isinstance(Plan.from_dict(document), Plan)
        except InputError:
            continue
