"""Training: private steps, the training loop around them, updates, checkpoints, metrics."""

from __future__ import annotations

from sordino.records.reading import pad_to
from sordino.training.callbacks import Callback, EarlyStopping
from sordino.training.fit import Loss, train, train_without_noise
from sordino.training.job import Result
from sordino.training.loop import Evaluate, Settings
from sordino.training.steps import DEFAULT_CHUNK, PrivateStep, Widths, private_steps
from sordino.training.updates import Averaging
from sordino.training.writers import MLflow, TensorBoard

__all__ = [
    "DEFAULT_CHUNK",
    "Averaging",
    "Callback",
    "EarlyStopping",
    "Evaluate",
    "Loss",
    "MLflow",
    "PrivateStep",
    "Result",
    "Settings",
    "TensorBoard",
    "Widths",
    "pad_to",
    "private_steps",
    "train",
    "train_without_noise",
]
