"""Hooks that a pass adds to modules: they would run in every later pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from torch import nn
from torch.utils.hooks import RemovableHandle

_TABLES = frozenset(nn.Module().__dict__) - {"_parameters", "_buffers", "_modules"}


def counted() -> int:
    """A number that grows with every hook on a module or a tensor."""
    return RemovableHandle.next_id


def remove(modules: Iterable[nn.Module], known: Collection[int]) -> None:
    """Empties the tables of hooks, except for those that were not empty before. known: their ids."""
    for module in modules:
        for key in _TABLES:
            table = module.__dict__.get(key)
            if isinstance(table, dict) and table and id(table) not in known:
                table.clear()
