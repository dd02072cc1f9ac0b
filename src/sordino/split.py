"""Rows with their targets: the type of datasets and of public rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Rows with their targets.

    Args:
        inputs: (n, ...) float32 images or rows, or int64 token ids.
        targets: (n,) int64 classes.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]
