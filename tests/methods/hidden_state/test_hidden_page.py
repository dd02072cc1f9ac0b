"""docs/hidden_state.md shows the result file; the schedule that raises the noise at the end."""

from __future__ import annotations

import json
import math
import runpy
from pathlib import Path

import numpy as np
import pytest

from sordino.methods.hidden_state.schedules import closing

ROOT = Path(__file__).parents[3]


def test_the_page_shows_the_result_file() -> None:
    results = ROOT / "experiments" / "results" / "hidden_state.json"
    page = (ROOT / "docs" / "hidden_state.md").read_text(encoding="utf8")
    filled = runpy.run_path(str(ROOT / "experiments" / "hidden_state_page.py"))["filled"]
    assert filled(page, json.loads(results.read_text())) == page, "run experiments/hidden_state_page.py"


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
