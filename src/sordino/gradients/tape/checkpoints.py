"""Gradient checkpointing inside a pass: the checkpointed function is called directly, and nothing is recomputed.

A recomputation would run during the backward pass with the parameters themselves instead of the slots, and the variant
with use_reentrant=True does not run under torch.autograd.grad at all. Neither variant changes a value or a gradient, so
a pass stores the activations instead; if memory is too small for them, use smaller chunks. The names that
torch.utils.checkpoint looks up are replaced during the forward pass. Checkpoints of another thread then also store
their activations; their results are the same.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as checkpointing

from sordino.gradients.tape.eager import as_written

_lock = threading.Lock()
_torchs: dict[str, Any] = {}  # torch's own objects, while a pass has replaced them
_passes = 0


class _Called:
    """Replaces CheckpointFunction (use_reentrant=True)."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        return function(*args)


def _surrounding(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Replaces the context that torch runs around the function (use_reentrant=False)."""
    yield


_OURS = {
    "CheckpointFunction": _Called,
    "_checkpoint_without_reentrant_generator": _surrounding,
    "_checkpoint_without_reentrant_generator_impl": _surrounding,  # the name since torch 2.15
}


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Inside this context checkpoints store their activations, and compiled functions run as they are written."""
    global _passes
    with _lock:
        if not _passes:
            for name, ours in _OURS.items():
                if not hasattr(checkpointing, name):
                    continue
                _torchs[name] = getattr(checkpointing, name)
                setattr(checkpointing, name, ours)
        _passes += 1
    try:
        with as_written():
            yield
    finally:
        with _lock:
            _passes -= 1
            if not _passes:
                for name, own in _torchs.items():
                    setattr(checkpointing, name, own)
                _torchs.clear()
