"""Metrics to TensorBoard or MLflow: callbacks that pass on rows of the metrics, which are released or public numbers.

They receive nothing else: losses of training records, norms and batch sizes are not part of a row, and the duration of
the steps is removed from it. (The services record when they were called; docs/threat-model.md.) Both packages are
optional.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from sordino.errors import SordinoError
from sordino.plan.core import Plan
from sordino.plan.guarantee import Guarantee
from sordino.training.callbacks import Callback, Row


def _written(row: Row) -> dict[str, float]:
    """A row without its step and its time: the duration of steps depends on the batches, which are private."""
    return {name: float(value) for name, value in row.items() if name not in ("step", "seconds")}


def _single(name: str, value: float) -> float:
    """The value as TensorBoard stores it, in single precision; an ε is rounded up, since it is an upper bound."""
    single = np.float32(value)
    if name.startswith("epsilon") and float(single) < value:
        single = np.nextafter(single, np.float32(np.inf))
    return float(single)


class TensorBoard(Callback):
    """Writes each number of a row as a scalar, and the guarantee's sentence as a text.

    Args:
        folder: The directory of TensorBoard's log.

    Raises:
        SordinoError: the package tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            self._writer: Any = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))
        except ImportError as error:
            raise SordinoError("TensorBoard(…) needs the package tensorboard: pip install tensorboard") from error

    def begin(self, plan: Plan, guarantee: Guarantee) -> None:
        self._writer.add_text("guarantee", str(guarantee), 0)

    def told(self, row: Row) -> None:
        for name, value in _written(row).items():
            self._writer.add_scalar(name, _single(name, value), int(row["step"]))

    def seen(self, row: Row) -> None:
        """Does nothing: the earlier part of the run wrote these rows."""

    def end(self, rows: Sequence[Row]) -> None:
        self._writer.flush()
        self._writer.close()

    def failed(self) -> None:
        self.end(())


class MLflow(Callback):
    """Logs the plan's public constants as parameters and each row as metrics.

    They go to MLflow's active run; if there is none, a run is started, and ended with the training.

    Args:
        run: A module or client with MLflow's log_params and log_metrics; None: the package mlflow itself.

    Raises:
        SordinoError: the package mlflow is not installed.
    """

    def __init__(self, run: Any = None) -> None:
        try:
            self._mlflow: Any = import_module("mlflow") if run is None else run
        except ImportError as error:
            raise SordinoError("MLflow(…) needs the package mlflow: pip install mlflow") from error
        self._started = False

    def begin(self, plan: Plan, guarantee: Guarantee) -> None:
        if hasattr(self._mlflow, "active_run") and self._mlflow.active_run() is None:
            self._mlflow.start_run()
            self._started = True
        self._mlflow.log_params(
            {
                "method": plan.method.name,
                "epsilon": guarantee.epsilon,
                "delta": guarantee.delta,
                "relation": guarantee.relation,
                "noise_multiplier": plan.noise.noise_multiplier,
                "steps": plan.steps,
                "records": plan.records,
                "expected_batch": plan.expected_batch,
            }
        )

    def told(self, row: Row) -> None:
        self._mlflow.log_metrics(_written(row), step=int(row["step"]))

    def seen(self, row: Row) -> None:
        """Does nothing: the earlier part of the run logged these rows."""

    def end(self, rows: Sequence[Row]) -> None:
        self._end("FINISHED")

    def failed(self) -> None:
        self._end("FAILED")

    def _end(self, status: str) -> None:
        """Ends the run that `begin` started, so that the next training does not log into it."""
        if self._started:
            self._mlflow.end_run(status)
        self._started = False
