"""Ownership of memory: a result may overwrite values that nothing refers to any more.

This saves passes over memory, which for a small model take longer than the arithmetic. It is decided by counting
references and comparing with the count of a tensor that has exactly one holder: in case of doubt a tensor counts as
held.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def alone(box: Mapping[str, Tensor]) -> bool:
    """Is this mapping the only holder of these tensors and of their memory?

    True only if no other name refers to one of them, no view, graph or array shares its storage, and torch
    allocated that storage (numpy's memory may have other holders). The caller must not hold one in its own variable.
    """
    counted = _of_one_alone()
    return counted is not None and all(_holders(box, name) == counted for name in box)


def _holders(box: Mapping[str, Tensor], name: str) -> tuple[Any, ...] | None:
    """The numbers of references to the tensor and to its storage, from Python and elsewhere, and whether torch owns
    it."""
    storage = box[name].untyped_storage()
    try:
        uses = box[name]._use_count(), torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    except AttributeError:  # these two are not part of torch's public interface
        return None
    return sys.getrefcount(box[name]), sys.getrefcount(storage), *uses, storage.resizable()


@functools.cache
def _of_one_alone() -> tuple[Any, ...] | None:
    """The counts of a tensor with one holder, in this version of Python and torch."""
    return _holders({"it": torch.empty(1, device="cpu")}, "it")
