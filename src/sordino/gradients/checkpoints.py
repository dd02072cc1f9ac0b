"""Gradient checkpointing inside a pass: the function is called as it is, and nothing is computed a second time.

A second computation would run while autograd goes back, with the parameters themselves in place of the slots, and the
kind with use_reentrant=True does not run under torch.autograd.grad at all. Neither kind changes a value or a gradient,
so a pass holds the activations instead; who has too little memory for them takes smaller chunks. What
torch.utils.checkpoint calls by name is replaced for the time of the forward pass. Another thread's checkpoints then
hold their activations too, and have the same results.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as checkpointing

_lock = threading.Lock()
_torchs: dict[str, Any] = {}  # what stood there before, while a pass runs
_passes = 0


class _Called:
    """In the place of CheckpointFunction (use_reentrant=True)."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _surrounding(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In the place of what torch runs around the function (use_reentrant=False)."""
    yield


_OURS = {"CheckpointFunction": _Called, "_checkpoint_without_reentrant_generator": _surrounding}


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Checkpoints hold their activations meanwhile."""
    global _passes
    with _lock:
        if not _passes:
            for name, ours in _OURS.items():
                _torchs[name] = getattr(checkpointing, name)
                setattr(checkpointing, name, ours)
        _passes += 1
    try:
        yield
    finally:
        with _lock:
            _passes -= 1
            if not _passes:
                for name, own in _torchs.items():
                    setattr(checkpointing, name, own)
                _torchs.clear()
