"""Attributes that a pass sets on classes, modules and functions of libraries (``torch.nn.Linear.top = 1``).

Libraries have too many attributes to compare all of them in every pass. Compared are

- all attributes of the classes of the model's objects, and of their bases;
- the attributes that the user's functions set (by their code), on the modules, classes and functions that they name;
- all attributes of those, if a function sets attributes whose names its code does not show (``setattr``, ``__dict__``);
- all modules and their classes, if a function reaches modules in a way that its code does not show (``sys.modules``);
- settings of Python, numpy and torch (the number of threads, the default type).
"""

from __future__ import annotations

import builtins
import dis
import functools
import operator
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from sordino.gradients.state.marks import MISSING, is_own, mark, names_in, without_tensors
from sordino.gradients.state.settings import settings

_ANY_NAME = "setattr delattr __setattr__ __delattr__ __dict__ vars update setdefault setitem"
_ANY_PLACE = """
    modules import_module __import__ reload get_objects get_referrers get_referents __subclasses__ f_globals f_builtins
    f_back _getframe currentframe __globals__ __builtins__ globals exec eval compile attrgetter getmodule __closure__
    __defaults__ __kwdefaults__ __code__ cell_contents getclosurevars walk_packages
"""
ANY_NAME, ANY_PLACE = frozenset(_ANY_NAME.split()), frozenset(_ANY_PLACE.split())
# what Python itself adds to classes and modules
_PYTHONS = frozenset(("__annotations__", "__slotnames__", "__warningregistry__", "__abstractmethods__", "__doc__"))
_DEPTH = 5


@functools.lru_cache(1 << 12)
def set_in(code: types.CodeType) -> frozenset[str]:
    """The names of attributes that a function sets or deletes, also in functions within it."""
    inner = (set_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    own = (i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR"))
    return frozenset(own).union(*inner)


@functools.lru_cache(1 << 12)
def names_of(code: types.CodeType) -> frozenset[str]:
    return frozenset(names_in(code))


class Libraries:
    """The attributes of libraries at one moment, as far as they are compared."""

    def __init__(self) -> None:
        self._whole: dict[int, tuple[Any, dict[str, Any], bool]] = {}
        self._some: list[tuple[Any, str, Any]] = []
        self._names: set[str] = set()
        self._settings = settings()
        self._modules: frozenset[str] | None = None
        self.everywhere = False  # whether a function may set an attribute anywhere

    def add(self, holder: Any, values: bool = True) -> None:
        """All attributes of a class or a module are compared. values: also those that exist already; otherwise only
        whether there are others."""
        held = getattr(holder, "__dict__", None)
        if isinstance(held, Mapping) and id(holder) not in self._whole:
            self._whole[id(holder)] = holder, dict(held), values

    def add_function(self, function: types.FunctionType) -> None:
        """What this function of the user may set is compared."""
        names, stored = names_of(function.__code__), set_in(function.__code__)
        self.everywhere = self.everywhere or not names.isdisjoint(ANY_PLACE)
        hidden = not names.isdisjoint(ANY_NAME)
        if not stored and not hidden:
            return
        self._names |= stored
        for holder in _named(function, names):
            if hidden:
                self.add(holder)
            else:
                held = holder.__dict__
                self._some += [(holder, key, held.get(key, MISSING)) for key in stored]

    def add_all(self) -> None:
        """All modules and their classes are compared. Libraries have counters and clocks of their own: values that
        exist already count only if the user's code sets an attribute of this name."""
        self._modules = frozenset(sys.modules)
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType):
                self.add(module, values=False)
                for value in list(vars(module).values()):
                    if issubclass(type(value), type):  # isinstance would ask a deprecated object for its class
                        self.add(value, values=False)

    def changed(self) -> str | None:
        """An attribute that has another value now, by the name of its holder and its own; or a setting."""
        if (now := settings()) != self._settings:
            return "a setting of " + next(name for name, value in now.items() if value != self._settings[name])
        loaded = () if self._modules is None else sys.modules.keys() - self._modules
        for name in loaded:
            if getattr(sys.modules[name], "__spec__", None) is None:
                return f"sys.modules[{name!r}]"
        for holder, key, before in self._some:
            now = holder.__dict__.get(key, MISSING)
            if now is not before and _counts(key, before, now, named=True):
                return f"{_name(holder)}.{key}"
        for holder, known, values in self._whole.values():
            held = holder.__dict__
            if len(held) == len(known) and all(map(operator.is_, held.values(), known.values())):
                continue
            for key in {**known, **held}:
                before, now = known.get(key, MISSING), held.get(key, MISSING)
                new = (before is MISSING or now is MISSING) and not loaded  # an import adds attributes to other modules
                if not (values or new or key in self._names):
                    continue
                if now is not before and _counts(key, before, now, named=key in self._names):
                    return f"{_name(holder)}.{key}"
        return None


def _named(function: types.FunctionType, names: frozenset[str]) -> Iterator[Any]:
    """The modules, classes, functions and objects of libraries that a function names: ``torch``, ``torch.nn``."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    first = [function.__globals__.get(name, MISSING) for name in names]
    first += [cell.cell_contents for name, cell in cells if name in names and _filled(cell)]
    if "builtins" in names:
        first.append(builtins)
    todo, seen = [(value, 0) for value in first if _of_a_library(value)], set()
    while todo:
        holder, depth = todo.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        yield holder
        if depth < _DEPTH:
            found = (holder.__dict__.get(name, MISSING) for name in names)
            todo += [(value, depth + 1) for value in found if _of_a_library(value)]


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not MISSING
    except ValueError:
        return False


def _of_a_library(value: Any) -> bool:
    if value is MISSING or not isinstance(getattr(value, "__dict__", None), Mapping):
        return False
    if isinstance(value, types.ModuleType):
        return not is_own(value.__name__)
    of = value if isinstance(value, (type, types.FunctionType)) else type(value)
    return not is_own(of.__module__)


def _counts(key: str, before: Any, now: Any, *, named: bool) -> bool:
    """May this change tell something of the data? Not what an import adds, nor Python's own; where the user's code sets
    this name any change counts, elsewhere those of numbers and texts."""
    if key in _PYTHONS or _imported(key, now) or (not named and callable(now)):
        return False
    return named or repr(_carried(before)) != repr(_carried(now))


def _imported(key: str, value: Any) -> bool:
    if isinstance(value, types.ModuleType):
        return getattr(value, "__spec__", None) is not None
    return isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)) and (
        getattr(value, "__name__", "") == key and not is_own(value.__module__)
    )


def _carried(value: Any) -> Any:
    found = None if value is MISSING else without_tensors(mark(value))
    return None if found is MISSING or found == [] else found


def _name(holder: Any) -> str:
    return str(getattr(holder, "__qualname__", None) or getattr(holder, "__name__", None) or type(holder).__name__)
