"""Callbacks: told of released numbers alone; an early stop states what was spent, and the rest can still be made."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sordino
from sordino.errors import InputError, Refused, SordinoError
from sordino.plan.spent import epsilon_curve
from sordino.training.callbacks import Callback, EarlyStopping, epsilon_spent

LOSS = nn.functional.cross_entropy


def plan_of(**changes: Any) -> sordino.Plan:
    known = {"noise_multiplier": 2.0, "delta": 1e-5, "records": 200, "expected_batch": 40, "steps": 12}
    return sordino.dpsgd(**{**known, **changes})


def run(records: tuple[Tensor, Tensor], out: Path | None = None, **options: Any) -> sordino.Result:
    settings = sordino.Settings(eval_every=2)
    known = {"lr": 0.1, "settings": settings, "evaluate": lambda model: {"test_loss": 1.0}, "out": out}
    return sordino.train(nn.Linear(6, 3), LOSS, records, plan_of(), **{**known, **options})


def test_a_run_that_stops_early_says_what_was_spent_and_keeps_the_plans_promise(
    records: tuple[Tensor, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    result = run(records, out, callbacks=[EarlyStopping(patience=2)])
    assert result.stopped_at == 6
    assert result.guarantee is not None
    assert result.guarantee.epsilon == plan_of().guarantee().epsilon
    # the stop was chosen by looking: more than ε of six steps, less than ε of all
    assert epsilon_curve(plan_of(), [6])[0] < result.guarantee.beside["epsilon_spent"] < result.guarantee.epsilon
    document = json.loads((out / "result.json").read_text())
    assert document["stopped_at"] == 6
    assert document["epsilon_spent"] == result.guarantee.beside["epsilon_spent"]
    assert (out / "report.html").exists()
    said = capsys.readouterr().err
    assert "12 steps of about 40 of 200 records" in said
    assert "6 of 12" in said
    assert "stopped early" in said

    rest = run(records, out, resume=True)
    assert rest.stopped_at is None
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 13
    assert sordino.load(out, model=nn.Linear(6, 3)).result["epsilon"] == plan_of().guarantee().epsilon
    again = run(records, out, resume=True)
    assert torch.equal(again.model.weight, rest.model.weight)
    with pytest.raises(InputError, match="already contains a run"):
        run(records, out)
    with pytest.raises(InputError, match=r"give the module"):
        sordino.load(out)


def test_the_spent_epsilon_pays_for_every_stop_that_was_possible() -> None:
    plan = plan_of()
    assert epsilon_spent(plan, 6, 2) > epsilon_spent(plan, 6, 6) > epsilon_curve(plan, [6])[0]


def test_callbacks_that_could_not_be_accounted_for_are_refused(records: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(InputError, match="eval_every"):
        run(records, settings=sordino.Settings(), callbacks=[EarlyStopping()])
    with pytest.raises(InputError, match="needs the metric 'accuracy'"):
        run(records, callbacks=[EarlyStopping("accuracy")])
    with pytest.raises(InputError, match="instances"):
        run(records, callbacks=[EarlyStopping])


class Client:
    """Stands for MLflow."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def log_params(self, values: Mapping[str, Any]) -> None:
        self.seen.append(dict(values))

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        self.seen.append({"step": step, **values})


def test_writers_get_released_numbers_alone(records: tuple[Tensor, Tensor]) -> None:
    client = Client()
    run(records, callbacks=[sordino.MLflow(client)])
    first, *rows = client.seen
    assert first["epsilon"] == plan_of().guarantee().epsilon
    assert [row["step"] for row in rows] == [2, 4, 6, 8, 10, 12]
    assert set().union(*rows) == {"step", "epsilon", "test_loss", "lr"}, "and no time, which depends on the batches"


def test_a_writer_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(SordinoError, match="pip install mlflow"):
        sordino.MLflow()
    with pytest.raises(SordinoError, match="pip install tensorboard"):
        sordino.TensorBoard(tmp_path)


def test_a_function_is_a_callback_and_ends_a_run(records: tuple[Tensor, Tensor]) -> None:
    assert run(records, callbacks=[lambda row: row["step"] >= 4]).stopped_at == 4
    assert run(records, callbacks=[Callback()]).stopped_at is None


def test_a_run_that_publishes_its_end_alone_is_not_stopped() -> None:
    from sordino.methods.hidden_state.losses import Softmax
    from sordino.training.callbacks import checked

    plan = sordino.hidden_state(
        loss=Softmax(outputs=3), features=6, records=200, batch=50, delta=1e-5, regularisation=0.1,
        noise_multiplier=4.0, steps=4,
    )  # fmt: skip
    with pytest.raises(Refused, match="no callback can stop it"):
        checked([EarlyStopping()], plan, 2)


def test_a_resume_that_is_refused_loses_nothing_of_a_stopped_run(
    records: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    run(records, out, callbacks=[EarlyStopping(patience=2)])
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    with pytest.raises(InputError, match="give lr"):
        run(records, out, resume=True, lr=None)
    with pytest.raises(InputError, match="callbacks must be a list"):
        run(records, out, resume=True, callbacks=print)
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()} == before


def test_an_evaluation_that_fails_loses_no_step(records: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    out = tmp_path / "run"

    def wrong(model: nn.Module) -> dict[str, float]:
        raise ValueError("a typo")

    with pytest.raises(ValueError, match="a typo"):
        run(records, out, evaluate=wrong)
    with pytest.raises(SordinoError, match="a float: it must return a dict of numbers"):
        run(records, out, evaluate=lambda model: 0.5, resume=True)
    result = run(records, out, resume=True)
    assert result.skipped_steps == 0
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 13


def test_a_run_that_diverges_is_ended_and_the_rest_is_not_spent(records: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    settings = sordino.Settings(progress=False, optimizer_options={"momentum": 1e12})
    with pytest.raises(SordinoError, match=r"after step \d+ of 12 some weights are not finite"):
        run(records, tmp_path / "run", settings=settings)
    assert len((tmp_path / "run" / "ledger.jsonl").read_text().splitlines()) < 12
    assert not (tmp_path / "run" / "model.safetensors").exists()
