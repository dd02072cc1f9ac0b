"""Memory-mapped arrays as a dataset: rows are read, and converted, when they are needed.

Tensors in memory are converted once, as a whole (`fitting.fitted`). An array that is larger than the memory can't be
converted as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.errors import InputError
from sordino.gradients import Rows


@dataclass(frozen=True, eq=False)
class Mapped:
    """A pair of arrays of which at least one is memory-mapped; a map-style dataset of (inputs, target) pairs.

    Args:
        inputs: One entry per record.
        targets: One entry per record.
        kind: The dtype that floating-point inputs are converted to; None: their own.
        classes: Whether targets are classes, converted to int64.
    """

    inputs: Any
    targets: Any
    kind: torch.dtype | None = None
    classes: bool = False

    def __post_init__(self) -> None:
        if not np.ndim(self.inputs) or np.shape(self.inputs)[:1] != np.shape(self.targets)[:1]:
            raise InputError("inputs and targets must have one entry per record each, and their lengths differ")
        for part in (self.inputs, self.targets):
            if isinstance(part, np.ndarray) and part.dtype.kind not in "fiub":
                raise InputError(f"an array of type {part.dtype} can't become a tensor: give numbers")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(torch.tensor([index]))
        return rows.inputs[0], rows.targets[0]

    def rows(self, indices: Tensor, step: int = 0) -> Rows:
        """The rows of these records."""
        inputs, targets = _read(self.inputs, indices), _read(self.targets, indices)
        if self.kind is not None and inputs.is_floating_point():
            inputs = inputs.to(self.kind)
        return Rows(inputs=inputs, targets=targets.long() if self.classes else targets)


def mapped(dataset: Any) -> Any:
    """A pair of arrays as `Mapped` if one of them is memory-mapped; other datasets as they are."""
    pair = isinstance(dataset, tuple | list) and len(dataset) == 2
    if pair and any(isinstance(part, np.memmap) for part in dataset):
        inputs, targets = (part if isinstance(part, np.memmap | Tensor) else np.asarray(part) for part in dataset)
        return Mapped(inputs, targets)
    return dataset


def _read(values: Any, indices: Tensor) -> Tensor:
    if isinstance(values, Tensor):
        return values[indices]
    found = np.asarray(values[indices.numpy()])  # a copy: indices are an array
    if found.dtype.kind == "u" and found.dtype.itemsize > 1:
        found = found.astype(np.int64)
    return torch.from_numpy(found)
