"""Where a model and its loss may keep something: the modules and functions that ``kept.py`` searches."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from torch import nn

from sordino.gradients.state.marks import is_own


def has_state(module: nn.Module) -> bool:
    """Can code that is not torch's run in this module's call?"""
    held = module.__dict__
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or "forward" in held  # fmt: skip


def roots_of(modules: Sequence[nn.Module], loss: Any) -> list[Any]:
    """What is searched for state. modules: those of the model, if any is the user's, else none."""
    found: list[Any] = list(modules)
    if isinstance(loss, nn.Module):
        own = list(loss.modules())
        if any(not type(m).__module__.startswith("torch.nn.") or has_state(m) for m in own):
            found += own
    else:
        function = loss.func if isinstance(loss, functools.partial) else loss
        if is_own(getattr(function, "__module__", None)):
            found.append(loss)
    return found
