"""docs/hidden_state.md shows the result files; the schedule that raises the noise at the end."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from scripts import experiment
from sordino.methods.hidden_state.schedules import closing


def test_the_page_shows_the_result_files() -> None:
    made = experiment("hidden_state_page")
    page = made.PAGE.read_text(encoding="utf8")
    assert made.filled(page, json.loads(made.RESULTS.read_text())) == page, "run experiments/hidden_state_page.py"
    if made.TABLE1.exists():
        assert "<!-- table 1 -->" in page
        assert made.pages.filled(page, made.table1()) == page, "run experiments/hidden_state_page.py"


@pytest.mark.parametrize("steps", [1, 2, 5, 30, 1000, 40000])
def test_closing_noise_follows_its_formula(steps: int) -> None:
    found, left = closing(steps, 2.0, 12.0).over(steps), np.arange(steps, 0, -1)
    wanted = np.maximum(1 + left / steps, 12 / np.sqrt(left))
    assert np.all(np.abs(np.log(found / wanted)) < math.log(1.35))
    assert found[-1] == pytest.approx(wanted[-1], rel=1e-9)


def test_closing_noise_evens_out_the_places() -> None:
    from sordino.methods.hidden_state import Softmax, plan

    def noise(**options: object) -> float:
        made = plan(
            loss=Softmax(3, cap=0.1), features=10, records=6400, batch=64, steps=2000, regularisation=1e-6,
            epsilon=3.0, delta=1e-5, **options,  # type: ignore[arg-type]
        )  # fmt: skip
        return made.noise.noise_multiplier

    assert noise(noise_factors=closing(2000, 1.0, 8.0)) < 0.7 * noise()
