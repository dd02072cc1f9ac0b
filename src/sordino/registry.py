"""Finds methods by name: built-in ones in a table, others through the entry points `sordino.methods`.

Another package registers its method in its pyproject.toml:

    [project.entry-points."sordino.methods"]
    my-method = "my_package.my_method:MyMethod"

`MyMethod` derives from `sordino.plan.Method`. Then `[method] name = "my-method"` works in recipes, and so do
accounting, training, sweeps, audits and reports. The classes are loaded by name on first use: no module of the core
imports a method.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sordino.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from sordino.plan.method import Method

GROUP = "sordino.methods"
"""The group of entry points, and the package with the table of built-in methods (`METHODS`, …)."""


@dataclass(frozen=True)
class Words:
    """The names that a method allows in recipes, so that a misspelling is found before anything slow is loaded.

    Attributes:
        keys: The keys of [method], with the meaning of each.
        choices: The allowed values of keys of [method] whose values are names.
        models: The method's own networks and their options, one of which [model] must name; empty: the common ones.
        features: The same for [features].
        optimizers: The same for [train] optimizer.
    """

    keys: Mapping[str, str] = field(default_factory=dict)
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    features: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    optimizers: tuple[str, ...] = ()


def words(name: str) -> Words | None:
    """The names that a built-in method allows; None for another package's method, whose class checks recipes itself."""
    table: Mapping[str, str] = import_module(GROUP).WORDS
    if name not in table:
        return None
    found: Words = import_module(table[name]).WORDS
    return found


def method_class(name: str, key: str = "the method") -> type[Method]:
    """The class of the method called `name`.

    Args:
        name: The name in a recipe's `[method] name`, or in a plan's ledger.
        key: What the error message calls the value.

    Raises:
        InputError: no package provides it, several do, or the class is not a method of that name.
    """
    own, others = _built_in(), [point for point in _others() if point.name == name]
    if len(others) + (name in own) > 1:
        packages = ", ".join(sorted(point.value for point in others))
        raise InputError(f"the method {name!r} is provided more than once (also by {packages}): uninstall one of them")
    if name in own:
        module, _, attribute = own[name].partition(":")
        return _checked(getattr(import_module(module), attribute), name)
    if others:
        return _checked(others[0].load(), name)
    raise InputError(f"{key} = {name!r} is unknown: {did_you_mean(str(name), names())}")


def names() -> list[str]:
    """The names of all methods, built-in ones first."""
    own = _built_in()
    return [*own, *sorted({point.name for point in _others()} - set(own))]


def names_with(capability: Callable[[type[Method]], bool]) -> list[str]:
    """The names of the methods that have a capability, for messages that say what to use instead."""
    return [name for name in names() if capability(method_class(name))]


def method_from_dict(values: Any) -> Method:
    """The inverse of Method.to_dict."""
    if not isinstance(values, Mapping) or "name" not in values:
        raise InputError(f"a plan's method must be an object with a name, got {values!r}")
    found = method_class(values["name"], "a plan's method")
    return found.from_dict({key: value for key, value in values.items() if key != "name"})


def flag_modules() -> Iterator[ModuleType]:
    """The modules with command-line flags of built-in methods; they import nothing slow."""
    table: Mapping[str, str] = import_module(GROUP).FLAGS
    yield from (import_module(module) for module in table.values())


def without_flags() -> list[str]:
    """The built-in methods that have no command-line flags: their steps are accounted as the default method's."""
    return [name for name in _built_in() if name not in import_module(GROUP).FLAGS]


def command_modules() -> Iterator[ModuleType]:
    """The modules with further commands of built-in methods; they import nothing slow."""
    table: Iterable[str] = import_module(GROUP).COMMANDS
    yield from (import_module(module) for module in table)


def default() -> str:
    """The method of a recipe that names none."""
    name: str = import_module(GROUP).DEFAULT
    return name


def other_methods() -> Iterator[type[Method]]:
    """The classes of methods from other packages."""
    yield from (method_class(name) for name in names() if name not in _built_in())


def _built_in() -> Mapping[str, str]:
    table: Mapping[str, str] = import_module(GROUP).METHODS
    return table


def _others() -> list[EntryPoint]:
    """The entry points of other packages: those that do not repeat a line of the table."""
    own = _built_in()
    return [point for point in _entry_points(tuple(sys.path)) if own.get(point.name) != point.value]


@lru_cache(maxsize=4)
def _entry_points(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points found on `path`. Cached: reading the metadata of all packages takes tens of milliseconds."""
    return tuple(entry_points(group=GROUP))


def _checked(found: Any, name: str) -> type[Method]:
    """The class, checked by its attributes because this module must not import the base class."""
    if not isinstance(found, type) or getattr(found, "name", None) != name or not hasattr(found, "from_dict"):
        raise InputError(f"the method {name!r} must be a class derived from sordino.plan.Method with name = {name!r}")
    return found
