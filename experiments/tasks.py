"""Small tasks for tables of many runs: rows of a dataset as vectors, and a linear model or one hidden layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino import data

Rows = tuple[Tensor, Tensor]


def rows_of(task: Mapping[str, Any], folder: Path) -> tuple[Rows, Rows]:
    """(training rows, test rows) as vectors. `every`: use every n-th training row; `words`: hashed words that occur."""
    found = data.load(task["dataset"], folder)
    parts = []
    for split, every in ((found.train, task["every"]), (found.test, 1)):
        x, y = split.inputs[::every], split.targets[::every]
        if "words" in task:
            x = torch.zeros(len(y), task["words"]).scatter_(1, x % task["words"], 1.0)
        parts.append((x.flatten(1).float(), y))
    return parts[0], parts[1]


def held_out(rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Splits off a share of the rows, chosen at random with a fixed seed: (the others, the share)."""
    order = torch.randperm(len(rows[1]), generator=torch.Generator().manual_seed(0))
    cut = round(len(order) * (1 - share))
    most, rest = order[:cut], order[cut:]
    return (rows[0][most], rows[1][most]), (rows[0][rest], rows[1][rest])


def model_of(task: Mapping[str, Any], rows: Rows, seed: int) -> nn.Module:
    """A linear model initialised with zeros, or a network with one hidden tanh layer initialised from a seed."""
    inputs, outputs = rows[0].shape[1], int(rows[1].max()) + 1
    torch.manual_seed(seed)
    if "hidden" in task:
        return nn.Sequential(nn.Linear(inputs, task["hidden"]), nn.Tanh(), nn.Linear(task["hidden"], outputs))
    model = nn.Linear(inputs, outputs)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    return model


def accuracy(model: nn.Module, rows: Rows) -> float:
    """The share of rows whose largest output is that of their class."""
    with torch.no_grad():
        return float((model(rows[0]).argmax(1) == rows[1]).double().mean())
