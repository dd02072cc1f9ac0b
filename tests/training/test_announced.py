"""The line before a run: the expected time is that of the run's own steps, for every method."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sordino
from small_recipes import shorten_test_rows, small_recipe
from sordino.methods.coupling import use
from sordino.methods.dp_mac.coefficients import Coefficients
from sordino.methods.hidden_state import training as hidden
from sordino.plan import Plan
from sordino.plan.contribution import RecordMomentum
from sordino.records import gradients
from sordino.release import noise
from sordino.runs.run import run_recipe
from sordino.training import announced, fit
from sordino.training.announced import extrapolated, header

STEPS = 40
METHODS: dict[str, dict[str, Mapping[str, Any]]] = {
    "dpsgd": {},
    "modelmix": {"method": {"lr": 0.5, "tau_over_lr": 0.1}, "train": {"lr": None}},
    "coupling": {"method": {"alpha": 0.5}, "public": {"records": 500}},
    "correlated": {"method": {"strategy": "lambda", "lambda": 0.9}},
    "hidden-state": {
        "method": {"regularisation": 0.01}, "train": {"lr": None}, "sampling": {"name": "partition"},
        "privacy": {"noise_multiplier": 0.5},
    },
    "dp-mac": {"model": {"name": "classifier", "hidden": [4]}, "train": {"lr": 0.05, "optimizer": "adam"}},
}  # fmt: skip


class Clock:
    """Time that passes only where a test says so: the load of the machine does not matter."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def charging(self, function: Callable[..., Any], seconds: Callable[..., float]) -> Callable[..., Any]:
        """The function; each call takes `seconds` of its arguments."""

        def charged(*args: Any, **options: Any) -> Any:
            self.now += seconds(*args, **options)
            return function(*args, **options)

        return charged


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A second for every thousand records that are summed, and for every hundred earlier steps' noise in a release."""
    clock = Clock()
    monkeypatch.setattr(announced, "clock", clock)
    for module in (gradients, use):
        made = clock.charging(module.clipped_sum, lambda model, loss, rows, *rest, **options: len(rows.targets) / 1e3)
        monkeypatch.setattr(module, "clipped_sum", made)
    public = clock.charging(use.mean_gradient, lambda model, loss, rows, *rest: len(rows.targets) / 1e3)
    monkeypatch.setattr(use, "mean_gradient", public)
    summed = clock.charging(hidden.gradient_sum, lambda loss, records, weights, batch: len(batch) / 1e3)
    monkeypatch.setattr(hidden, "gradient_sum", summed)
    coefficients = clock.charging(Coefficients.__call__, lambda self, batch: len(batch) / 1e3)
    monkeypatch.setattr(Coefficients, "__call__", coefficients)
    mixed = clock.charging(noise._add_mixture, lambda parts, out, earlier, *rest: len(earlier) / 1e2)
    monkeypatch.setattr(noise, "_add_mixture", mixed)
    return clock


@pytest.mark.parametrize("method", METHODS)
def test_the_expected_time_is_that_of_the_steps(
    method: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shorten_test_rows(monkeypatch, 10)
    changed = METHODS[method]
    sections = {
        **changed,
        "method": {"name": method, **changed.get("method", {})},
        "sampling": {"expected_batch": 400, **changed.get("sampling", {})},
        "train": {"steps": STEPS, **changed.get("train", {})},
        "privacy": {"noise_multiplier": 2.0, **changed.get("privacy", {})},
    }
    expected: list[float] = []

    def noticed(plan: Plan, guarantee: Any, seconds: float | None, **options: Any) -> str:
        expected.append(seconds or 0.0)
        return header(plan, guarantee, seconds, **options)

    for module in (fit, hidden):
        monkeypatch.setattr(module, "header", noticed)
    monkeypatch.setattr("sordino.methods.dp_mac.training.header", noticed)
    begun: list[float] = []
    run_recipe(small_recipe(**sections), tmp_path / "run", begin=lambda plan: begun.append(clock.now))
    truth = (clock.now - begun[0]) / STEPS
    assert truth > 0.1
    assert expected[-1] == pytest.approx(truth, rel=0.5)
    assert "minute" in capsys.readouterr().err


def test_a_step_that_takes_a_fixed_time_and_some_for_each_record_is_extrapolated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(announced, "clock", clock)
    checked: set[int] = set()

    def step(most: int) -> int:
        clock.now += 0.01 + most * 1e-3 + (0 if most in checked else 5.0)  # the engine checks what is new to it
        checked.add(most)
        return most

    assert extrapolated(step, 5000) == pytest.approx(0.01 + 5.0, rel=0.1)


def test_nothing_that_was_summed_in_a_rehearsal_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values to which noise is added before the run begins are zeros."""
    released: list[bool] = []
    begun: list[bool] = []
    plain = sordino.training.steps.release

    def noticed(values: Any, **options: Any) -> Any:
        if not begun:
            released.append(all(bool((value == 0).all()) for value in values.values()))
        return plain(values, **options)

    monkeypatch.setattr("sordino.training.steps.release", noticed)
    rows = torch.randn(200, 3), torch.arange(200) % 2
    plan = sordino.dpsgd(noise_multiplier=1.0, delta=1e-5, records=200, expected_batch=50, steps=5)
    result = sordino.train(
        nn.Linear(3, 2), nn.functional.cross_entropy, rows, plan, lr=0.1,
        callbacks=[sordino.training.callbacks.AtStart(lambda plan: begun.append(True))],
    )  # fmt: skip
    assert released
    assert all(released)
    assert result.guarantee == plan.guarantee()


def test_the_rehearsal_leaves_the_model_and_its_random_numbers_alone(capsys: pytest.CaptureFixture[str]) -> None:
    def trained(progress: bool | None) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        rows = torch.randn(200, 3), torch.arange(200) % 2
        plan = sordino.dpsgd(noise_multiplier=1.0, delta=1e-5, records=200, expected_batch=50, steps=5, insecure_seed=1)
        settings = sordino.Settings(progress=progress)
        sordino.train(model, nn.functional.cross_entropy, rows, plan, lr=0.1, settings=settings)
        return [p.detach() for p in model.parameters()] + [torch.rand(3)]

    assert all(torch.equal(one, other) for one, other in zip(trained(None), trained(False), strict=True))
    assert "less than a minute" in capsys.readouterr().err


def test_momenta_of_single_records_are_timed_with_whole_batches(capsys: pytest.CaptureFixture[str]) -> None:
    rows = torch.randn(60, 3), torch.arange(60) % 2
    plan = sordino.dpsgd(
        noise_multiplier=1.0, delta=1e-5, records=60, expected_batch=60, steps=5, record_momentum=RecordMomentum(0.9)
    )
    sordino.train(nn.Linear(3, 2), nn.functional.cross_entropy, rows, plan, lr=0.1)
    assert "less than a minute" in capsys.readouterr().err


def test_a_rehearsal_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: Any) -> float:
        raise RuntimeError("only whole batches")

    monkeypatch.setattr(announced, "extrapolated", failing)
    rows = torch.randn(60, 3), torch.arange(60) % 2
    plan = sordino.dpsgd(noise_multiplier=1.0, delta=1e-5, records=60, expected_batch=30, steps=5)
    result = sordino.train(nn.Linear(3, 2), nn.functional.cross_entropy, rows, plan, lr=0.1)
    assert result.guarantee == plan.guarantee()
    assert "minute" not in capsys.readouterr().err


def test_a_slow_first_step_on_a_busy_machine_is_not_extrapolated_to_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo announced 1.6 hours and took 83 seconds: steps of 16 records had been interrupted by other processes."""
    clock = Clock()
    monkeypatch.setattr(announced, "clock", clock)

    def step(most: int) -> int:
        clock.now += 0.01 + most * 1e-5 + (0.15 if most == 16 else 0)
        return most

    assert extrapolated(step, 2048) > 10  # a run of one step: nothing more is rehearsed
    assert extrapolated(step, 2048, steps=300) == pytest.approx(0.03, rel=0.3)
