"""What torch tells about a tensor's history: how often it was written to, and by which function it was made."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction


def version(t: Tensor) -> int:
    """The number of writes to its memory that autograd knows of."""
    try:
        return t._version
    except RuntimeError:  # inference tensors have no version
        return 0


@functools.lru_cache(1 << 10)
def foreign(node: Any) -> bool:
    """Is it the backward node of an autograd.Function outside this package?"""
    ours = getattr(getattr(node, "_forward_cls", None), "__module__", "").startswith("sordino.")
    return issubclass(node, BackwardCFunction) and not ours
