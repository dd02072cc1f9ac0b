"""Opacus as one row of a comparison: its own rate, whole steps, and an outcome that states what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from small_recipes import shorten_test_rows, small_toml
from sordino.runs import compare_job
from sordino.runs.recipe import Recipe

pytest.importorskip("opacus")


def outcome(folder: Path, **train: Any) -> dict[str, Any]:
    """Opacus on the embedded data: 12,000 records, 5,000 expected in a batch, six steps."""
    (folder / "recipe.toml").write_text(
        small_toml(
            privacy={"insecure_seed": None, "noise_multiplier": None, "epsilon": 3.0},
            sampling={"expected_batch": 5000},
            train={"steps": 6, "lr": 0.5, **train},
        )
    )
    return compare_job.carried_out("opacus", Recipe.read(folder / "recipe.toml"), folder / "run", None)


def test_the_rate_is_that_with_which_opacus_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12,000 records in batches of 5,000 are three batches: Opacus draws a third of the records, not 5 / 12."""
    shorten_test_rows(monkeypatch)
    found = outcome(tmp_path, chunk=4096)
    assert found["expected_batch"] == pytest.approx(4000)
    assert found["steps"] == 6
    assert found["our_epsilon"] == pytest.approx(found["epsilon"], rel=0.02)


def test_a_batch_in_parts_is_one_step_of_the_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_test_rows(monkeypatch, 1000)
    seen: list[list[float]] = []
    steps = compare_job._steps

    def watched(model: Any, optimizer: Any, batches: Any, prepared: Any) -> float:
        rates: list[float] = []
        seen.append(rates)
        inner = optimizer.original_optimizer
        taken = inner.step
        inner.step = lambda *args: (rates.append(inner.param_groups[0]["lr"]), taken(*args))[1]
        return steps(model, optimizer, batches, prepared)

    monkeypatch.setattr(compare_job, "_steps", watched)
    outcome(tmp_path, chunk=4999, scheduler="cosine")
    outcome(tmp_path, chunk=1000, scheduler="cosine")
    assert len(seen) == 2
    assert len(seen[0]) == 6
    assert seen[0] == sorted(seen[0], reverse=True)
    assert seen[0][-1] < 0.1 * seen[0][0]
    assert seen[1] == pytest.approx(seen[0])
