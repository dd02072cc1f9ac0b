"""The work of a recipe: a plan with everything that its run and its audit need, checked and in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sordino.audit.one_run import AuditResult
from sordino.data.types import Dataset
from sordino.plan.core import Plan
from sordino.training.callbacks import Callback
from sordino.training.job import Result


class Work(Protocol):
    """Used by `run_recipe` and `audit_recipe`. A method that reads its own data has its own class."""

    @property
    def plan(self) -> Plan:
        """The plan that is accounted and run."""

    @property
    def dataset(self) -> Dataset:
        """The private records and the public test rows, as they were read."""

    def changed(self, plan: Plan, dataset: Dataset) -> Work:
        """The same work with another plan of the same method and other rows, for attacks."""

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The form of the data, for users of the model: input_shape, input_type, classes, labels."""

    def train(self, out: Path, *, resume: bool, callbacks: Sequence[Callback] = ()) -> Result:
        """Trains in the run directory: ledger, metrics, checkpoints, and the method's own files."""

    def without_noise(self) -> Result:
        """The same run without noise, for comparison; not private."""

    def audit(self, **options: Any) -> AuditResult:
        """The audit of the plan with this model and these records."""
