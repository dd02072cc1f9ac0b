"""Ownership of memory: a result may overwrite values that nothing refers to any more.

That saves passes over memory, which on a small model cost more than the arithmetic. It is decided by counting
references, and compared with the count of a tensor that is certainly alone: whatever can't be told counts as held.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def alone(box: Mapping[str, Tensor]) -> bool:
    """Does nothing but this mapping hold these tensors, or any of their memory?

    True only if no name outside refers to one of them, no view, no graph and no array shares its storage, and torch
    allocated that (numpy's memory may be anybody's). The caller must not hold one in a variable of its own.
    """
    counted = _of_one_alone()
    return counted is not None and all(_holders(box, name) == counted for name in box)


def _holders(box: Mapping[str, Tensor], name: str) -> tuple[Any, ...] | None:
    """References to the tensor and to its storage, from Python and from elsewhere, and whether that one is torch's."""
    storage = box[name].untyped_storage()
    try:
        uses = box[name]._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    except AttributeError:  # these two are not part of torch's public interface
        return None
    return sys.getrefcount(box[name]), sys.getrefcount(storage), *uses, storage.resizable()


@functools.cache
def _of_one_alone() -> tuple[Any, ...] | None:
    """As this Python and this torch count."""
    return _holders({"it": torch.empty(1, device="cpu")}, "it")
