"""How a batch is cut into chunks: by the records' own numbers, so that one record less leaves the others' chunks alone.

What a pass computes for a record, and how a sum is rounded, may depend on the other records in the pass. Chunks cut by
place in the batch would all shift with one record less; these do not (docs/guarantees/noise.md, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sordino.gradients.runs import stable
from sordino.sampling import LogicalBatch

LONGEST_SUM = 4096
"""Records in one pass, however large the chunk."""


def stable_chunks(batch: LogicalBatch, most: int = LONGEST_SUM) -> Sequence[Tensor]:
    """The records of a batch, at most its chunk (and `most`) at a time, none of them empty."""
    indices, size = batch.indices, max(1, min(most, batch.chunk))
    if not len(indices) or not rising(indices):  # a batch that somebody made by hand
        return torch.split(indices, size) if len(indices) else ()
    return torch.split(indices, np.diff(stable(indices.numpy(), size)).tolist())


def rising(indices: Tensor) -> bool:
    """Can they be the keys of records?"""
    return bool((np.diff(indices.numpy(), prepend=-1) > 0).all())
