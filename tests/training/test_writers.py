"""TensorBoard and MLflow, with the real packages where they are installed: what their own readers find."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sordino
from sordino.training.writers import _single

INPUTS = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()
PUBLISHED = {"epsilon", "test_accuracy", "lr"}
STEPS = [4, 8, 12]


def trained(*callbacks: Any, noise_multiplier: float = 1.0, evaluate: Any = None) -> sordino.Plan:
    plan = sordino.dpsgd(
        noise_multiplier=noise_multiplier, delta=1e-5, records=200, expected_batch=40, steps=12, insecure_seed=1
    )

    def accuracy(model: nn.Module) -> dict[str, float]:
        return {"test_accuracy": float((model(INPUTS).argmax(1) == TARGETS).float().mean())}

    sordino.train(
        nn.Linear(3, 2), nn.functional.cross_entropy, (INPUTS, TARGETS), plan, lr=0.1, callbacks=list(callbacks),
        evaluate=evaluate or accuracy, settings=sordino.Settings(eval_every=4, progress=False),
    )  # fmt: skip
    return plan


def test_an_epsilon_in_single_precision_is_never_below_its_value() -> None:
    for value in (1 / 3, 0.1, 4.619051358839215, 2.0, 1e-9):
        assert value <= _single("epsilon", value) <= value * (1 + 2e-7)
    assert _single("lr", 0.1) == pytest.approx(0.1)


def test_tensorboards_own_reader_finds_released_numbers_alone(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the package tensorboard is not installed (pip install tensorboard)")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plan = trained(sordino.TensorBoard(tmp_path))
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    tags = {kind: names for kind, names in found.Tags().items() if names}
    assert set(tags) == {"scalars", "tensors"}
    assert set(tags["scalars"]) == PUBLISHED
    assert tags["tensors"] == ["guarantee/text_summary"]
    scalars = found.Scalars("epsilon")
    assert [one.step for one in scalars] == STEPS
    assert scalars[-1].value >= plan.guarantee().epsilon
    assert scalars[-1].value == pytest.approx(plan.guarantee().epsilon, rel=1e-6)
    (text,) = found.Tensors("guarantee/text_summary")
    assert text.tensor_proto.string_val[0].decode() == str(plan.guarantee())


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[Any]:
    found = pytest.importorskip("mlflow", reason="the package mlflow is not installed (pip install mlflow)")
    before = found.get_tracking_uri()
    found.set_tracking_uri(f"sqlite:///{tmp_path / 'runs.db'}")
    found.set_experiment("private")
    yield found
    while found.active_run() is not None:
        found.end_run()
    found.set_tracking_uri(before)


def logged(mlflow: Any) -> list[Any]:
    """The runs of the store, oldest first."""
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("private")
    return sorted(client.search_runs([experiment.experiment_id]), key=lambda one: one.info.start_time)


def test_mlflows_own_store_has_released_numbers_alone(mlflow: Any) -> None:
    plan = trained(sordino.MLflow())
    (run,) = logged(mlflow)
    assert run.info.status == "FINISHED"
    assert set(run.data.metrics) == PUBLISHED
    assert run.data.metrics["epsilon"] == plan.guarantee().epsilon
    assert run.data.params["noise_multiplier"] == "1.0"
    assert set(run.data.params) == {
        "method", "epsilon", "delta", "relation", "noise_multiplier", "steps", "records", "expected_batch",
    }  # fmt: skip
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "epsilon")
    assert [one.step for one in history] == STEPS


def test_two_trainings_are_two_runs_of_mlflow_also_after_a_failure(mlflow: Any) -> None:
    def failing(model: nn.Module) -> dict[str, float]:
        raise RuntimeError("the test rows are gone")

    with pytest.raises(RuntimeError, match="gone"):
        trained(sordino.MLflow(), evaluate=failing)
    trained(sordino.MLflow(), noise_multiplier=2.0)
    assert mlflow.active_run() is None
    assert [run.info.status for run in logged(mlflow)] == ["FAILED", "FINISHED"]


def test_an_active_run_of_mlflow_is_used_and_left_open(mlflow: Any) -> None:
    with mlflow.start_run() as own:
        trained(sordino.MLflow())
        assert mlflow.active_run() is not None
        assert mlflow.active_run().info.run_id == own.info.run_id
    (run,) = logged(mlflow)
    assert run.info.run_id == own.info.run_id
