"""What a pass leaves in Python objects: attributes of modules are put back, so no pass can see an earlier batch.

Labels follow tensors. A number that the model reads (``x.max().item()``) can be kept in an attribute, a list or an
array, and the next batch can use it: then a record moves the sums of batches that it is not in. So the state of Python
is taken before a pass and put back after it:

| where                                                      | what happens                                          |
|------------------------------------------------------------|-------------------------------------------------------|
| attributes of modules; lists, dicts and objects in them    | put back: every pass begins with the same values      |
| a list, queue or set of a module that grew                 | put back, and refused: it collects something          |
| an array of a module that was written to                   | put back, and refused                                 |
| a tensor of a module, not registered, that was written to  | refused                                               |
| a new buffer, parameter or module                          | removed, and refused                                  |
| variables of functions and classes, global variables       | refused if they change, unless the operations of the  |
|                                                            | pass show that records are independent                |

Modules of torch that the user has not changed have no such state and are not searched. Longer lists and larger arrays
(LONGEST, LARGEST), files, and objects that only C code sees are not covered: there the checks of ``assurance.py``
compare losses before and after batches with large rows.
"""

from __future__ import annotations

import functools
import itertools
import operator
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from sordino.errors import Refused

_PACKAGES = """
    torch torchvision torchaudio sordino numpy scipy sklearn pandas transformers timm peft diffusers einops safetensors
    accelerate datasets tokenizers PIL tqdm pytest _pytest pluggy hypothesis
"""
LIBRARIES = frozenset(_PACKAGES.split()) | frozenset(sys.stdlib_module_names)
LONGEST = 4096
"""Longer lists, dicts and sets are not copied: only their length is compared."""
LARGEST = 1 << 20
"""Bytes. Larger arrays are not copied: they can't be written to during a pass."""
_REGISTERED = ("_parameters", "_buffers", "_modules")
_NUMBERS = (int, float, complex, bool, str, bytes, type(None))
_INTERNAL = frozenset(nn.Module().__dict__)
_MISSING: Any = object()


@functools.lru_cache(1 << 12)
def is_own(name: str | None) -> bool:
    """Is a module of this name the user's, not torch's or another library's?"""
    return name is None or name.partition(".")[0] not in LIBRARIES


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


class Taken:
    """The state of all objects that are reachable from the roots, at one moment."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._seen: dict[int, Any] = {}
        self.modules: list[
            tuple[nn.Module, dict[str, Any], tuple[int, int, int]]
        ] = []  # (module, attributes, registered)
        self.dicts: list[tuple[Any, Any, str]] = []
        self.slots: list[tuple[Any, str, Any]] = []
        self.lists: list[tuple[Any, Any, str]] = []
        self.long: list[tuple[Any, int, str]] = []
        self.arrays: list[tuple[Any, Any, str]] = []
        self.locked: list[Any] = []
        self.tensors: list[tuple[Tensor, int, str]] = []
        self.variables: list[tuple[Any, str, Any]] = []  # of functions and classes: (holder, name, value)
        self._waiting: list[tuple[Any, str]] = [(root, "") for root in roots]
        while self._waiting:
            self._visit(*self._waiting.pop())

    def _visit(self, obj: Any, name: str) -> None:
        kind = type(obj)
        if kind in _SKIPPED or id(obj) in self._seen:
            return
        self._seen[id(obj)] = obj
        if isinstance(obj, nn.Module):
            self._module(obj, name)
        elif isinstance(obj, Tensor):
            if not isinstance(obj, nn.Parameter) and not obj.is_inference():
                self.tensors.append((obj, obj._version, name))
        elif isinstance(obj, np.ndarray):
            self._array(obj, name)
        elif isinstance(obj, (dict, list, set, deque)):
            self._container(obj, name)
        elif isinstance(obj, tuple):
            self._waiting += [(item, name) for item in obj]
        elif isinstance(obj, types.FunctionType):
            self._function(obj)
        elif isinstance(obj, types.MethodType):
            self._waiting += [(obj.__self__, name), (obj.__func__, name)]
        elif isinstance(obj, functools.partial):
            self._waiting += [(obj.func, name), (obj.args, name), (obj.keywords, name)]
        elif not isinstance(obj, (type, types.ModuleType)) and _walked(kind):  # type: ignore[arg-type]
            self._object(obj, name)

    def _module(self, module: nn.Module, name: str) -> None:
        held = module.__dict__
        self.modules.append(
            (module, held.copy(), (len(module._parameters), len(module._buffers), len(module._modules)))
        )
        label = name or type(module).__name__
        for key, value in held.items():
            if type(value) not in _SKIPPED and (key not in _INTERNAL or (value and key not in _REGISTERED)):
                self._waiting.append((value, f"{label}.{key}"))
        self._class(type(module))

    def _object(self, obj: Any, name: str) -> None:
        held = getattr(obj, "__dict__", None)
        if isinstance(held, dict):
            self._container(held, name)
        for key in _slots(type(obj)):  # type: ignore[arg-type]
            value = getattr(obj, key, _MISSING)
            self.slots.append((obj, key, value))
            self._waiting.append((value, name))
        self._class(type(obj))

    def _container(self, obj: Any, name: str) -> None:
        if len(obj) > LONGEST:
            self.long.append((obj, len(obj), name))
            return
        copied = obj.copy()
        (self.dicts if isinstance(obj, dict) else self.lists).append((obj, copied, name))
        values = obj.values() if isinstance(obj, dict) else obj
        self._waiting += [(value, name) for value in values if type(value) not in _SKIPPED]

    def _array(self, array: Any, name: str) -> None:
        if array.nbytes <= LARGEST:
            self.arrays.append((array, array.copy(), name))
        elif array.flags.writeable:
            array.flags.writeable = False
            self.locked.append(array)

    def _class(self, kind: type) -> None:
        if id(kind) in self._seen:
            return
        self._seen[id(kind)] = kind
        for one in kind.__mro__:
            if is_own(one.__module__):
                for key, value in vars(one).items():
                    if isinstance(value, types.FunctionType):
                        self._waiting.append((value, key))
                    elif not key.startswith("__"):
                        self._variable(one, key, value)

    def _function(self, function: types.FunctionType) -> None:
        if not is_own(function.__module__):
            return
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._variable(cell, key, _content(cell))
        for key in _names(function.__code__):
            if key in function.__globals__:
                self._variable(function.__globals__, key, function.__globals__[key])
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), function.__dict__):
            if not isinstance(value, _NUMBERS):
                self._variable(None, function.__name__, value)

    def _variable(self, holder: Any, key: str, value: Any) -> None:
        """A variable that is not put back: numbers in it, in its items or attributes are compared."""
        if isinstance(value, _NUMBERS):
            self.variables.append((holder, key, value))
        elif isinstance(value, (nn.Module, types.FunctionType, functools.partial)):
            self._waiting.append((value, key))
        elif isinstance(value, (dict, list, set, deque, np.ndarray)):
            self.variables.append((value, f"in {key}", _numbers_in(value)))
        elif is_own(type(value).__module__) and isinstance(held := getattr(value, "__dict__", None), dict):
            self.variables.append((held, f"in {key}", _numbers_in(held)))

    # afterwards

    def put_back(self) -> str | None:
        """Restores attributes, containers and arrays; returns why the pass is refused, or None."""
        found = [*self._grown(), *self._written(), *self._registered()]
        for array in self.locked:
            array.flags.writeable = True
        for array, values, _ in self.arrays:
            if not np.array_equal(array, values, equal_nan=array.dtype.kind in "fc"):
                array[...] = values
        for obj, values, _ in self.lists:
            if not _same(obj, values):
                obj.clear()
                (obj.update if isinstance(obj, set) else obj.extend)(values)
        for obj, values, _ in self.dicts:
            _restore(obj, values)
        for obj, key, value in self.slots:
            if value is not _MISSING and getattr(obj, key, _MISSING) is not value:
                setattr(obj, key, value)
        for module, values, registered in self.modules:
            if not _alike(module.__dict__, values):
                _warn_of_counters(module, values)
                _restore(module.__dict__, values)
            for held, known in zip(_tables(module), registered, strict=True):
                for key in list(held)[known:] if len(held) > known else ():
                    del held[key]
        return found[0] if found else None

    def _grown(self) -> Iterator[str]:
        for obj, values, name in self.lists:
            if len(obj) > len(values) or (isinstance(obj, deque) and not _same(obj, values)):
                yield (
                    f"{name}: the forward pass adds something to this {type(obj).__name__}, which keeps something of "
                    "every batch without noise; remove it, or make a new one at the start of the pass"
                )
        for obj, length, name in self.long:
            if len(obj) != length:
                yield f"{name}: the forward pass changes the length of this {type(obj).__name__}; remove the update"

    def _written(self) -> Iterator[str]:
        for array, values, name in self.arrays:
            if not np.array_equal(array, values, equal_nan=array.dtype.kind in "fc"):
                yield (
                    f"{name}: the forward pass writes to this array, which the model keeps, so the next batch would "
                    "see records without noise; make a new array in every pass"
                )
        for tensor, version, name in self.tensors:
            if not tensor.is_inference() and tensor._version != version:
                yield (
                    f"{name}: the forward pass writes to this tensor, which the model keeps, so the next batch would "
                    "see records without noise; make a new tensor in every pass"
                )

    def _registered(self) -> Iterator[str]:
        for module, _, registered in self.modules:
            for held, known, kind in zip(_tables(module), registered, ("parameter", "buffer", "module"), strict=True):
                if len(held) != known:
                    yield (
                        f"{type(module).__name__}: the forward pass adds or removes a {kind} "
                        f"({', '.join(list(held)[known:]) or 'removed'}), which would be published without noise, or "
                        "not be trained; create it before training (run the model once on public or random rows)"
                    )

    def changed_variable(self) -> str | None:
        """The name of a variable of a function, a class or a Python module that has another value now."""
        for holder, name, value in self.variables:
            if isinstance(holder, types.CellType):
                now = _content(holder)
            elif name.startswith("in "):
                now = _numbers_in(holder)
            else:
                now = (holder if isinstance(holder, dict) else vars(holder)).get(name, _MISSING)
            if now is not value and repr(now) != repr(value):  # repr: NaN is as NaN
                return name.removeprefix("in ")
        return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _numbers_in(held: Any) -> Any:
    """The numbers among the items of a container, or the bytes of an array."""
    if isinstance(held, np.ndarray):
        return held.tobytes() if held.nbytes <= LARGEST else None
    if len(held) > LONGEST:
        return len(held)
    items = held.items() if isinstance(held, dict) else ((None, one) for one in held)
    return [(key, one) for key, one in items if isinstance(one, _NUMBERS)]


@functools.lru_cache(1 << 10)
def _slots(kind: Any) -> tuple[str, ...]:
    own = (vars(one).get("__slots__", ()) for one in kind.__mro__ if is_own(one.__module__))
    names = itertools.chain.from_iterable((one,) if isinstance(one, str) else one for one in own)
    return tuple(name for name in names if not name.startswith("__"))


_SKIPPED = frozenset((*_NUMBERS, types.BuiltinFunctionType, type))


@functools.lru_cache(1 << 10)
def _walked(kind: Any) -> bool:
    """Are the attributes of objects of this class searched? Not those of Python's own (loggers, locks, files)."""
    return kind.__module__.partition(".")[0] not in _UNSEARCHED


_UNSEARCHED = (frozenset(sys.stdlib_module_names) - {"__main__", "types"}) | {
    "torch",
    "numpy",
    "builtins",
    "tokenizers",
}


@functools.lru_cache(1 << 12)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The global names that a function uses, also in functions within it."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return tuple(dict.fromkeys((*code.co_names, *itertools.chain.from_iterable(inner))))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return len(a) == len(b) and a == b
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers, module._modules


def _alike(held: Mapping[Any, Any], known: Mapping[Any, Any]) -> bool:
    return len(held) == len(known) and all(map(operator.is_, held.values(), known.values()))


def _restore(held: Any, known: Mapping[Any, Any]) -> None:
    if not _alike(held, known):
        held.clear()
        held.update(known)


def _warn_of_counters(module: nn.Module, known: Mapping[str, Any]) -> None:
    """A counter does not count: each pass begins with the same values, because the number of passes is private.

    Python shows the same warning once.
    """
    for key, value in known.items():
        if type(value) is int and module.__dict__.get(key) == value + 1:
            warnings.warn(
                f"the forward pass of {type(module).__name__} counts in self.{key}; the number of passes depends on "
                "the batches, so it is put back after every pass. Set it between two steps instead",
                stacklevel=2,
            )


@contextmanager
def put_back(roots: Sequence[Any]) -> Iterator[Taken | None]:
    """Runs a pass; afterwards the state of the roots is as before. Raises Refused if the pass left more than that."""
    if not roots:
        yield None
        return
    taken = Taken(roots)
    try:
        yield taken
    except BaseException:
        taken.put_back()
        raise
    reason = taken.put_back()
    if reason is not None:
        raise Refused(reason)


def refuse_kept_values(taken: Taken | None) -> None:
    """Called after a pass whose operations alone do not show that records are independent."""
    name = None if taken is None else taken.changed_variable()
    if name is not None:
        raise Refused(
            f"{name}: the forward pass changes this variable outside of the model, and it reads values of the data or "
            "has its own backward pass, so that a later batch could see records without noise; pass values on by "
            "tensors, or remove the variable"
        )
