"""Training: private steps, the one loop around them, updates, checkpoints, metrics."""

from __future__ import annotations

from sordino.training.fit import Loss, Result, train, train_without_noise
from sordino.training.loop import Evaluate, Settings
from sordino.training.steps import DEFAULT_CHUNK, PrivateStep, Widths, private_steps
from sordino.training.updates import Averaging

__all__ = [
    "DEFAULT_CHUNK",
    "Averaging",
    "Evaluate",
    "Loss",
    "PrivateStep",
    "Result",
    "Settings",
    "Widths",
    "private_steps",
    "train",
    "train_without_noise",
]
