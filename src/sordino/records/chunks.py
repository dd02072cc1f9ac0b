"""Divides a batch into chunks by the records' indices, so that removing one record does not change other chunks.

What a pass computes for a record, and how a sum is rounded, may depend on the other records in the pass. If chunks were
cut by position in the batch, removing one record would shift all later chunks (docs/guarantees/noise.md, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.sums.runs import stable
from sordino.sampling import LogicalBatch

LONGEST_SUM = 4096
"""Largest number of records in one pass, for any chunk size."""


def stable_chunks(batch: LogicalBatch, most: int = LONGEST_SUM) -> Sequence[Tensor]:
    """The records of a batch, at most its chunk (and `most`) at a time, none of them empty."""
    indices, size = batch.indices, max(1, min(most, batch.chunk))
    if not len(indices) or not rising(indices):  # an empty batch, or one that was constructed by hand
        return torch.split(indices, size) if len(indices) else ()
    return torch.split(indices, np.diff(stable(indices.numpy(), size)).tolist())


def rising(indices: Tensor) -> bool:
    """Whether the indices increase strictly, as the keys of records must."""
    return bool((np.diff(indices.numpy(), prepend=-1) > 0).all())
