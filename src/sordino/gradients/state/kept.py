"""What a pass leaves in Python objects: attributes of modules are put back, so no pass can see an earlier batch.

Labels follow tensors. A number that the model reads (``x.max().item()``) can be kept in an attribute, a list or an
array, and the next batch can use it: then a record moves the sums of batches that it is not in. So the state of Python
is taken before a pass and put back after it:

| where                                                      | what happens                                          |
|------------------------------------------------------------|-------------------------------------------------------|
| attributes of modules and their tensors, and what is in it | put back: every pass begins with the same values      |
| a list, queue or set of a module that grew                 | put back, and refused: it collects something          |
| an array of a module that was written to                   | put back, and refused                                 |
| a tensor of a module, not registered, that was written to  | refused                                               |
| a new buffer, parameter or module                          | removed, and refused                                  |
| variables of functions and classes, global variables       | refused if they change, unless the operations of the  |
|                                                            | pass show that records are independent                |
| random generators                                          | put back (``generators.py``)                          |
| attributes of libraries' classes, modules and functions    | as variables (``libraries.py``)                       |
| files, processes, connections                              | as variables (``watch.py``)                           |

Modules of torch that the user has not changed are not searched. Longer lists (LONGEST) are compared by their length."""

from __future__ import annotations

import functools
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
from sordino.gradients.state import hooks
from sordino.gradients.state.generators import GENERATORS, Numbers, drawing, is_generator
from sordino.gradients.state.libraries import Libraries
from sordino.gradients.state.marks import (
    LARGEST,
    LONGEST,
    MISSING,
    NUMBERS,
    Collected,
    content,
    content_of,
    functions,
    has_hiding_name,
    hides,
    holds_values,
    is_own,
    mark,
    names_in,
    outside,
    present,
    slots_of,
    stored_in,
    without_tensors,
)
from sordino.gradients.state.watch import UNCOUNTED, WRITING, OpenFiles, Seen, watching

_REGISTERED = ("_parameters", "_buffers", "_modules")
_INTERNAL = frozenset(nn.Module().__dict__)


class Taken:
    """The state of all objects that are reachable from the roots, at one moment."""

    def __init__(self, roots: Sequence[Any], thorough: bool = False, reads: bool = False) -> None:
        """thorough: also what is outside of the model and of the user's modules: libraries, open files. reads: values
        may be read, so that the content of small tensors counts as well."""
        self._seen: dict[int, Any] = {}
        # (module, its class, attributes, registered)
        self.modules: list[tuple[nn.Module, type, dict[str, Any], tuple[int, int, int]]] = []
        self.dicts: list[tuple[Any, Any, str]] = []
        self.slots: list[tuple[Any, str, Any]] = []
        self.lists: list[tuple[Any, Any, str]] = []
        self.long: list[tuple[Any, int, str]] = []
        self.arrays: list[tuple[Any, Any, str]] = []
        self.locked: list[Any] = []
        self.tensors: list[tuple[Tensor, int, int | None, str]] = []  # (tensor, version, content, name)
        self.variables: list[tuple[Any, str, Any]] = []  # of functions and classes: (holder, name, value)
        self.attributes: list[Any] = []  # of parameters and buffers
        self.generators: list[Any] = []
        self.libraries, self._reads = Libraries() if thorough else None, thorough or reads
        self.seen: Seen
        self._files: OpenFiles | None = None
        self._hooks = hooks.counted()
        self.restored = False  # whether the pass had left something in an attribute, a list or an object
        self.hidden = False  # whether something may run where calls are not intercepted: in a thread, scripted
        self._waiting: list[tuple[Any, str]] = [(root, "") for root in roots]
        while self._waiting:
            self._visit(*self._waiting.pop())
        if self.libraries is not None and self.libraries.everywhere:
            self.libraries.add_all()
        self._numbers = list(map(len, self.attributes))

    def _visit(self, obj: Any, name: str) -> None:
        kind = type(obj)
        if kind in _SKIPPED or id(obj) in self._seen:
            return
        self._seen[id(obj)] = obj
        self.hidden = self.hidden or hides(obj)
        if isinstance(obj, nn.Module):
            self._module(obj, name)
        elif is_generator(obj):
            self.generators.append(obj)
            self._object(obj, name)
        elif isinstance(obj, Tensor):
            self._tensor(obj, name)
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
        elif isinstance(obj, (type, types.ModuleType)):
            return
        elif holds_values(kind):  # type: ignore[arg-type]
            self._marked(obj, name)
        elif _walked(kind):  # type: ignore[arg-type]
            self._object(obj, name)

    def _tensor(self, t: Tensor, name: str) -> None:
        if isinstance(t, nn.Parameter) or t.is_inference():
            return
        small = self._reads and t.numel() * t.element_size() <= LARGEST and not t.requires_grad
        self.tensors.append((t, t._version, content_of(t) if small else None, name))
        if t.__dict__:
            self._marked(t.__dict__, name)

    def _marked(self, obj: Any, name: str) -> None:
        """What is reachable from an object is compared, and so is the content of tensors there."""
        found = Collected()
        self.variables.append((obj, f"in {name}", mark(obj, None, found)))
        kinds = (Tensor, *GENERATORS)
        self._waiting += [(one, name) for one in found.values() if isinstance(one, kinds) and id(one) not in self._seen]

    def _module(self, module: nn.Module, name: str) -> None:
        held = module.__dict__
        self.modules.append(
            (module, type(module), held.copy(), (len(module._parameters), len(module._buffers), len(module._modules)))
        )
        label = name or type(module).__name__
        for key, value in held.items():
            if type(value) not in _SKIPPED and (key not in _INTERNAL or (value and key not in _REGISTERED)):
                self._waiting.append((value, f"{label}.{key}"))
        for table in (module._parameters, module._buffers) if module._parameters or module._buffers else ():
            found = [t.__dict__ for t in table.values() if t is not None]
            self.attributes += found
            self.dicts += [(one, one.copy(), label) for one in found]
            for one in filter(None, found):
                self._marked(one, "an attribute of a tensor")
        self._class(type(module))

    def _object(self, obj: Any, name: str) -> None:
        held = getattr(obj, "__dict__", None)
        if isinstance(held, dict):
            self._container(held, name)
        for key in slots_of(type(obj)):  # type: ignore[arg-type]
            value = getattr(obj, key, MISSING)
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
            if not is_own(one.__module__):
                if self.libraries is not None:
                    self.libraries.add(one)
            else:
                self.variables.append((one, "", mark(one)))
                for key, value in vars(one).items():
                    for function in functions(value):
                        self._waiting.append((function, key))
                    if isinstance(value, nn.Module):
                        self._waiting.append((value, key))

    def _function(self, function: types.FunctionType) -> None:
        if not is_own(function.__module__):
            return
        self.hidden = self.hidden or has_hiding_name(function.__code__)
        for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._variable(cell, key, content(cell))
        names = names_in(function.__code__)
        if self.libraries is not None:
            self.libraries.add_function(function)
            if not (WRITING | UNCOUNTED).isdisjoint(names):
                self._files = self._files or OpenFiles()
                self._files.uncounted |= not UNCOUNTED.isdisjoint(names)
        for key in names:
            value = function.__globals__.get(key, MISSING)
            if isinstance(value, (type, types.ModuleType)):
                self._elsewhere(value, names)
            elif value is not MISSING or key in stored_in(function.__code__):
                self._variable(function.__globals__, key, value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), function.__dict__):
            if not isinstance(value, NUMBERS):
                self._variable(None, function.__name__, value)
        if self.libraries is not None:
            self._marked(function, function.__name__)

    def _elsewhere(self, value: Any, names: tuple[str, ...]) -> None:
        """Variables of a module or a class that a function with these names uses."""
        for holder, key in outside(value, names):
            self.variables.append((holder, key, present(holder, key)))

    def _variable(self, holder: Any, key: str, value: Any) -> None:
        """A variable that is not put back: what is reachable from it is compared."""
        self.hidden = self.hidden or hides(value)
        if isinstance(value, (nn.Module, Tensor, types.FunctionType, functools.partial)) or is_generator(value):
            self._waiting.append((value, key))
        elif isinstance(value, NUMBERS) or value is MISSING:
            self.variables.append((holder, key, mark(value)))
        else:
            self._marked(value, key)

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
                self.restored = True
                obj.clear()
                (obj.update if isinstance(obj, set) else obj.extend)(values)
        for obj, values, _ in self.dicts:
            self._restore(obj, values)
        for obj, key, value in self.slots:
            if value is not MISSING and getattr(obj, key, MISSING) is not value:
                self.restored = True
                setattr(obj, key, value)
        for module, kind, values, registered in self.modules:
            if type(module) is not kind:
                module.__class__, self.restored = kind, True
            if not _alike(module.__dict__, values):
                _warn_of_counters(module, values)
                self._restore(module.__dict__, values)
            for held, known in zip(_tables(module), registered, strict=True):
                for key in list(held)[known:] if len(held) > known else ():
                    del held[key]
        if self._hooks != hooks.counted():
            hooks.remove((module for module, *_ in self.modules), {id(obj) for obj, _, _ in self.dicts})
        return found[0] if found else None

    def _restore(self, held: Any, known: Mapping[Any, Any]) -> None:
        if not _alike(held, known):
            self.restored = True
            held.clear()
            held.update(known)

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
        for tensor, version, known, name in self.tensors:
            if tensor._version != version or (known is not None and content_of(tensor) != known):
                yield (
                    f"{name}: the forward pass writes to this tensor, which the model keeps, so the next batch would "
                    "see records without noise; make a new tensor in every pass"
                )

    def _registered(self) -> Iterator[str]:
        for module, _, _, registered in self.modules:
            for held, known, kind in zip(_tables(module), registered, ("parameter", "buffer", "module"), strict=True):
                if len(held) != known:
                    yield (
                        f"{type(module).__name__}: the forward pass adds or removes a {kind} "
                        f"({', '.join(list(held)[known:]) or 'removed'}), which would be published without noise, or "
                        "not be trained; create it before training (run the model once on public or random rows)"
                    )

    def changed_variable(self, tensors: bool) -> str | None:
        """The name of a variable of a function, a class or a Python module that has another value now. tensors: other
        tensors count as well."""
        if list(map(len, self.attributes)) != self._numbers:
            return "an attribute of a tensor"
        for holder, name, value in self.variables:
            now = present(holder, name)
            if now == value:
                continue
            if not tensors:
                now, value = without_tensors(now), without_tensors(value)
            if repr(now) != repr(value):  # repr: NaN is as NaN
                return name.removeprefix("in ") or holder.__name__
        return None

    def acted(self) -> str | None:
        """What the pass did outside of Python's objects."""
        if self._files is not None and self._files.changed():
            return "writes to a file"
        return self.seen.acts[0] if self.seen.acts else None


_SKIPPED = frozenset((*NUMBERS, types.BuiltinFunctionType, type))


@functools.lru_cache(1 << 10)
def _walked(kind: Any) -> bool:
    """Are the attributes of objects of this class searched? Not those of Python's own (loggers, locks, files)."""
    return kind.__module__.partition(".")[0] not in _UNSEARCHED


_OTHERS = {"torch", "numpy", "builtins", "tokenizers"}
_UNSEARCHED = (frozenset(sys.stdlib_module_names) - {"__main__", "types"}) | _OTHERS


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, set):
        return len(a) == len(b) and a == b
    return len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True))


def _tables(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers, module._modules


def _alike(held: Mapping[Any, Any], known: Mapping[Any, Any]) -> bool:
    return len(held) == len(known) and all(map(operator.is_, held.values(), known.values()))


def _warn_of_counters(module: nn.Module, known: Mapping[str, Any]) -> None:
    """A counter does not count: each pass begins with the same values, because the number of passes is private. (Python
    shows the same warning once.)"""
    for key, value in known.items():
        if type(value) is int and module.__dict__.get(key) == value + 1:
            warnings.warn(
                f"the forward pass of {type(module).__name__} counts in self.{key}; the number of passes depends on "
                "the batches, so it is put back after every pass. Set it between two steps instead",
                stacklevel=2,
            )


@contextmanager
def put_back(roots: Sequence[Any], numbers: Numbers | None = None, thorough: bool = False) -> Iterator[Taken | None]:
    """Runs a pass; afterwards the state of the roots is as before. Raises Refused if the pass left more than that.

    numbers: with which generators begin; None: with the state that they have. thorough: as in `Taken`.
    """
    if not roots:
        yield None
        return
    taken = Taken(roots, thorough, numbers is not None and numbers.needed)
    drawn = drawing(None, taken.generators) if numbers is None else numbers.drawing(taken.generators)
    try:
        with drawn, watching() as taken.seen:
            yield taken
    except BaseException:
        taken.put_back()
        raise
    reason = taken.put_back()
    if reason is not None:
        raise Refused(reason)
