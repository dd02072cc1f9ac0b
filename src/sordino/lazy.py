"""Imports a package's public names on first use, so that `sordino --help` loads neither torch nor scipy."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module


def lazy_names(package: str, homes: Mapping[str, Iterable[str]]) -> tuple[Callable[[str], object], dict[str, str]]:
    """A `__getattr__` for a package, and the module of each of its names.

    Args:
        package: The package's `__name__`.
        homes: The names that each submodule provides.

    Returns:
        The function to bind to `__getattr__` (it also imports submodules), and {name: submodule}.
    """
    modules = {name: module for module, names in homes.items() for name in names}

    def find(name: str) -> object:
        if name in modules:
            found: object = getattr(import_module(f"{package}.{modules[name]}"), name)
            setattr(sys.modules[package], name, found)
            return found
        try:
            if not name.startswith("_"):
                return import_module(f"{package}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{package}.{name}":
                raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find, modules
