"""After a resume a run says what its weights are worth, which steps they have not seen, and ends whole when told to."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

import sordino
from small_recipes import small_recipe
from sordino.cli import train as train_command
from sordino.errors import SordinoError
from sordino.files import locked
from sordino.plan import Plan
from sordino.report import page
from sordino.runs import run as runs
from sordino.training import Settings, train

Records = tuple[Tensor, Tensor]


def secure_plan() -> Plan:
    return Plan.dpsgd(noise_multiplier=3.0, delta=1e-5, records=200, expected_batch=40, steps=12)


def run(records: Records, out: Path, evaluate: Callable[[nn.Module], Any], **options: Any) -> sordino.Result:
    settings = Settings(eval_every=2, checkpoint_every=5, progress=False)
    loss, model = nn.functional.cross_entropy, nn.Linear(6, 3)
    return train(model, loss, records, secure_plan(), lr=1.0, settings=settings, evaluate=evaluate, out=out, **options)


@pytest.mark.parametrize("surviving", [2, 1, 0])
def test_metrics_of_lost_weights_are_dropped(records: Records, tmp_path: Path, surviving: int) -> None:
    """A kill between the last evaluation and the last checkpoint (or the loss of all): the old accuracy is not kept."""
    run(records, tmp_path, lambda model: {"test_accuracy": 0.7085})
    saved = sorted((tmp_path / "checkpoint").glob("step-*"))
    assert [path.stem for path in saved] == ["step-000000010", "step-000000012"]
    for path in saved[surviving:]:
        path.unlink()
    result = run(records, tmp_path, lambda model: {"test_accuracy": 0.1}, resume=True)
    assert result.skipped_steps == {2: 0, 1: 2, 0: 12}[surviving]
    assert result.metrics[-1]["step"] == 12
    assert result.metrics[-1]["test_accuracy"] == (0.7085 if surviving == 2 else 0.1)
    known = {2: 12, 1: 10, 0: 0}[surviving]
    assert all(row["test_accuracy"] == 0.1 for row in result.metrics if row["step"] > known)


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)], ids=["term", "int"]
)
def test_a_signal_saves_the_step_under_way(
    records: Records, tmp_path: Path, number: signal.Signals, error: type[BaseException]
) -> None:
    before = signal.getsignal(number)
    seen: list[int] = []

    def told(model: nn.Module) -> dict[str, float]:
        seen.append(len(seen))
        if len(seen) == 5:  # one before the first step; after step 8, which no checkpoint is due at
            os.kill(os.getpid(), number)
        return {}

    with pytest.raises(error):
        run(records, tmp_path, told)
    assert signal.getsignal(number) is before
    assert (tmp_path / "checkpoint" / "step-000000008.safetensors").exists()
    result = run(records, tmp_path, lambda model: {}, resume=True)
    assert result.skipped_steps == 0


def test_a_run_that_was_finished_meanwhile_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two overlapping `--resume`: the second began to read its data before the first was done."""
    recipe, out = small_recipe(privacy={"insecure_seed": None}), tmp_path / "run"
    read = runs.work_of

    def meanwhile(*arguments: Any) -> Any:
        monkeypatch.setattr(runs, "work_of", read)
        runs.run_recipe(recipe, out, progress=False)
        return read(*arguments)

    out.mkdir()
    monkeypatch.setattr(runs, "work_of", meanwhile)
    result = runs.run_recipe(recipe, out, resume=True, progress=False)
    assert result["skipped_steps"] == 0
    assert (out / "result.json").exists()


def test_a_directory_is_held_by_one_run_at_a_time(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(SordinoError, match="another run is using"), locked(tmp_path):
        pass
    with locked(tmp_path):
        pass


def test_skipped_steps_are_on_the_screen_and_in_the_report() -> None:
    guarantee = secure_plan().guarantee().to_dict()
    result = {
        **guarantee, "guarantee": guarantee, "test_accuracy": 0.1, "noise_free_accuracy": None, "seconds": 1.0,
        "skipped_steps": 5, "steps": 12,
    }  # fmt: skip
    assert train_command._rows(result, Path("run"))["skipped steps"].startswith("5 of 12")
    assert "skipped steps" not in train_command._rows({**result, "skipped_steps": 0}, Path("run"))
    (verdict,) = page._skipped(result)
    assert verdict.title == "5 of 12 steps were skipped"
    assert page._skipped({**result, "skipped_steps": 0}) == []
