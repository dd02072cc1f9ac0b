"""Hashes of the values that a program reads from tensors (``item``, numpy), to compare them with later passes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.sums.memory import checksum

unlike_any = itertools.count(1 << 61)


def hash_of(value: Any) -> int:
    """Equal for equal values that were read. Memory (a numpy array, a storage) gets a unique hash."""
    known = isinstance(value, (bool, int, float, complex, str, list, tuple))
    return hash(repr(value)) if known else next(unlike_any)  # of the text: −1 and −2 have one hash


def content_of(t: Tensor) -> int:
    """Equal for small tensors with equal contents. Within torch.func, where labels do not follow, nothing is equal."""
    if torch._C._are_functorch_transforms_active():
        return next(unlike_any)
    if t.device.type != "cpu" or t.layout != torch.strided or t.numel() * t.element_size() > 1 << 20:
        return next(unlike_any)
    return checksum(t)
