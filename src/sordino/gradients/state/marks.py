"""Marks of Python objects: what is compared before and after a pass where nothing can be put back.

A mark contains the numbers and texts that are reachable from an object through containers, attributes, what functions
have closed over, and the state of Python's own objects that hold values (queues, buffers in memory, generators,
iterators, locks, caches). It does not contain modules, which ``kept.py`` handles; of tensors it contains the identity
only (their content is compared there), of open files the position.
"""

from __future__ import annotations

import array
import contextvars
import dis
import functools
import gc
import io
import logging
import mmap
import os
import pickle
import sqlite3
import sys
import threading
import types
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sordino.gradients.state.generators import is_generator, state_of
from sordino.gradients.sums.memory import checksum

_PACKAGES = """
    torch torchvision torchaudio sordino numpy scipy sklearn pandas transformers timm peft diffusers einops safetensors
    accelerate datasets tokenizers PIL tqdm pytest _pytest pluggy hypothesis
"""
LIBRARIES = frozenset(_PACKAGES.split()) | frozenset(sys.stdlib_module_names)
LONGEST = 4096
"""Longer lists, dicts and sets are not copied: only their length is compared."""
LARGEST = 1 << 20
"""Bytes. Larger arrays are not copied: they can't be written to during a pass."""
NUMBERS = (int, float, complex, bool, str, bytes, type(None))
MISSING: Any = object()
MOST = 4096
"""The number of objects in one mark."""

# modules of Python whose objects hold values for their user; loggers, locks and paths change by themselves
_MODULES = """
    collections argparse queue _queue array ctypes _thread threading weakref itertools _io mmap sqlite3 multiprocessing
    shelve dbm _dbm _gdbm tempfile _asyncio contextlib
"""
_HOLDING = frozenset(_MODULES.split())
# what runs where calls are not intercepted, as objects and as names
_HIDING = (Executor, threading.Thread, torch.jit.ScriptFunction, torch.jit.ScriptModule)
_NAMES = (
    "ThreadPoolExecutor ProcessPoolExecutor ThreadPool submit start_new_thread to_thread run_in_executor apply_async"
)
_HIDING_NAMES = frozenset((*_NAMES.split(), "Thread", "Timer", "DisableTorchFunction"))
_IN_MEMORY = (bytearray, memoryview, array.array, mmap.mmap)
_FOLLOWED = (functools._lru_cache_wrapper, type(functools.partial(int)))
_ITERATED: tuple[Any, ...] = ([], (), {}, {}.values(), {}.items(), set(), "", b"", range(1))
_ITERATORS = frozenset(type(iter(one)) for one in _ITERATED)
_ITERATORS |= {enumerate, zip, map, filter, reversed, type(reversed([])), type(iter(int, 1))}


_NOTHING = ("nothing",)  # the mark of a variable that does not exist


class Collected(dict[int, Any]):
    """The objects that were looked at for a mark, by their id. Random generators among them are put back
    (``generators.py``), so their state is not part of the mark."""


class Which(NamedTuple):
    """The mark of a tensor: which one it is."""

    identity: int


@functools.lru_cache(1 << 12)
def is_own(name: str | None) -> bool:
    """Is a module of this name the user's, not torch's or another library's?"""
    return name is None or name.partition(".")[0] not in LIBRARIES


@functools.lru_cache(1 << 10)
def holds_values(kind: Any) -> bool:
    """Is it a class of Python's own whose objects hold values that can't be put back?"""
    simple = kind in (*_IN_MEMORY, *_FOLLOWED, io.BytesIO, io.StringIO, contextvars.ContextVar, types.GeneratorType)
    simple = simple or kind in _ITERATORS or issubclass(kind, (logging.Logger, torch.UntypedStorage))
    return simple or kind.__module__.partition(".")[0] in _HOLDING or kind.__module__ == "_ctypes"


def mark(obj: Any, room: list[int] | None = None, seen: dict[int, Any] | None = None) -> Any:
    """The numbers and texts that are reachable from an object. room: how many more objects are looked at."""
    if isinstance(obj, NUMBERS):
        return obj
    if obj is MISSING:
        return _NOTHING
    room, seen = [MOST] if room is None else room, {} if seen is None else seen
    if isinstance(obj, Tensor):
        seen[id(obj)] = obj
        return Which(id(obj))
    if isinstance(obj, (nn.Module, types.ModuleType)) or id(obj) in seen or room[0] < 0:
        return None
    seen[id(obj)] = obj
    room[0] -= 1
    if isinstance(obj, types.FunctionType):
        return _of_function(obj, room, seen) if is_own(obj.__module__) else None
    if isinstance(obj, types.MethodType):
        return [mark(obj.__self__, room, seen), mark(obj.__func__, room, seen)]
    if isinstance(obj, np.ndarray):
        small = obj.tobytes() if obj.nbytes <= LARGEST and not obj.dtype.hasobject else None
        return mark(obj.tolist(), room, seen) if obj.dtype.hasobject and obj.size <= LONGEST else small
    if isinstance(obj, Mapping) and isinstance(obj, (dict, types.MappingProxyType)):
        return _marks(((mark(key), value) for key, value in obj.items()), len(obj), room, seen)
    if isinstance(obj, (list, tuple, set, frozenset, deque)):
        return _marks(((None, value) for value in obj), len(obj), room, seen)
    if isinstance(obj, logging.Logger):  # its cache changes by itself
        return [value for value in vars(obj).values() if isinstance(value, NUMBERS)]
    kind = type(obj)
    if is_generator(obj):
        return None if isinstance(seen, Collected) else pickle.dumps(state_of(obj))
    if isinstance(obj, type):
        return mark(_values_of(obj), room, seen) if is_own(obj.__module__) else None
    if holds_values(kind):  # type: ignore[arg-type]
        return [_inside(obj, room, seen), mark(getattr(obj, "__dict__", None), room, seen)]
    if not (is_own(kind.__module__) or kind is types.SimpleNamespace):
        return None
    return [mark(getattr(obj, "__dict__", None), room, seen), *(mark(v, room, seen) for v in _slotted(obj))]


def _of_function(function: types.FunctionType, room: list[int], seen: dict[int, Any]) -> Any:
    """What a function of the user holds besides its code."""
    cells = [mark(content(cell), room, seen) for cell in function.__closure__ or ()]
    held = (function.__defaults__, function.__kwdefaults__, function.__dict__, function.__doc__)
    return [*cells, *(mark(one, room, seen) for one in held)]


def without_tensors(found: Any) -> Any:
    """The mark without tensors and the keys at which they are: a cache of masks, for example. Of lists the length
    remains."""
    if isinstance(found, list):
        kept = ((part[0], without_tensors(part[1])) if type(part) is tuple else without_tensors(part) for part in found)
        kept = ((None, None) if part == (None, MISSING) else part for part in kept)
        return [part for part in kept if part is not MISSING and not (type(part) is tuple and part[1] is MISSING)]
    return MISSING if isinstance(found, Which) else found


def _marks(items: Iterator[tuple[Any, Any]], length: int, room: list[int], seen: dict[int, Any]) -> Any:
    if length > LONGEST:
        return length
    return [(key, mark(value, room, seen)) for key, value in items]


def _values_of(cls: type) -> dict[str, Any]:
    skipped = (types.FunctionType, staticmethod, classmethod, property)
    shown = ("__doc__", "__annotations__")
    found = ((key, value) for key, value in vars(cls).items() if key in shown or not key.startswith("__"))
    return {key: value for key, value in found if not isinstance(value, skipped)}


def _inside(obj: Any, room: list[int], seen: dict[int, Any]) -> Any:
    kind = type(obj)
    if isinstance(obj, _IN_MEMORY) or type(obj).__module__ in ("_ctypes", "ctypes"):
        try:
            content = memoryview(obj)
        except TypeError:
            return None
        return content.tobytes() if content.nbytes <= LARGEST else content.nbytes
    if isinstance(obj, (io.BytesIO, io.StringIO)):
        return None if obj.closed else (obj.tell(), obj.getvalue())
    if isinstance(obj, torch.UntypedStorage):
        return bytes(obj) if obj.nbytes() <= LONGEST else None
    if kind.__module__ == "_thread" and kind.__name__ in ("lock", "RLock"):
        return repr(obj)  # whether it is held
    if kind in _ITERATORS or kind.__module__ == "itertools":
        return mark(_reduced(obj), room, seen)
    if isinstance(obj, io.IOBase):
        return _position(obj)
    if isinstance(obj, sqlite3.Connection):
        return obj.total_changes
    if isinstance(obj, SharedMemory):
        return None if obj.buf is None else mark(obj.buf, room, seen)
    if isinstance(obj, contextvars.ContextVar):
        return mark(obj.get(None), room, seen)
    if isinstance(obj, types.GeneratorType):
        frame = obj.gi_frame
        return None if frame is None else [frame.f_lasti, mark(dict(frame.f_locals), room, seen)]  # a view since 3.13
    return [mark(one, room, seen) for one in gc.get_referents(obj) if not isinstance(one, type)]


def _reduced(iterator: Any) -> Any:
    """An iterator's own description of where it is, or what it refers to."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return iterator.__reduce__()
    except (TypeError, AttributeError):
        return gc.get_referents(iterator)


def _position(file: Any) -> int | None:
    """Where the next byte is read or written; None for the output of the process."""
    try:
        shown = file in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        return None if shown else int(file.tell())
    except (OSError, ValueError):  # it is closed, or a pipe
        return None


def _slotted(obj: Any) -> list[Any]:
    return [getattr(obj, key, MISSING) for key in slots_of(type(obj))]  # type: ignore[arg-type]


@functools.lru_cache(1 << 10)
def slots_of(kind: Any) -> tuple[str, ...]:
    """The names in ``__slots__`` of the user's classes."""
    own = (vars(one).get("__slots__", ()) for one in kind.__mro__ if is_own(one.__module__))
    each = (name for one in own for name in ((one,) if isinstance(one, str) else one))
    return tuple(name for name in each if not name.startswith("__"))


@functools.lru_cache(1 << 12)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals and attributes that a function uses, and its texts that may be names (``setattr``); also in
    functions within it."""
    inner = (names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    texts = (c for c in code.co_consts if isinstance(c, str) and c.isidentifier())
    return tuple(dict.fromkeys((*code.co_names, *texts, *(name for names in inner for name in names))))


@functools.lru_cache(1 << 12)
def stored_in(code: types.CodeType) -> frozenset[str]:
    """The global variables that a function sets, also in functions within it."""
    inner = (stored_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    own = (i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"))
    return frozenset(own).union(*inner)


def hides(obj: Any) -> bool:
    """Does it run code in another thread, or scripted code: where nothing is intercepted?"""
    return isinstance(obj, _HIDING)


@functools.lru_cache(1 << 12)
def has_hiding_name(code: types.CodeType) -> bool:
    """Does a function use a name of such a thing?"""
    return not _HIDING_NAMES.isdisjoint(names_in(code))


def outside(value: Any, names: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    """(holder, key) of the variables of a module or a class that a function with these names may set."""
    if value is os and "environ" in names:
        yield os.environ._data, "environ"  # type: ignore[attr-defined]
    held = vars(value)
    if isinstance(value, type) and is_own(value.__module__):
        yield value, ""
    elif isinstance(value, types.ModuleType) and is_own(value.__name__):
        yield from ((value, key) for key in names if not callable(held.get(key)))
    else:  # in libraries.py: sys.modules, and attributes that are set
        values = ((key, held.get(key, MISSING)) for key in names)
        yield from ((value, k) for k, v in values if isinstance(v, (*NUMBERS, dict, list)) and v is not sys.modules)


def present(holder: Any, name: str) -> Any:
    """The mark of a variable now."""
    if isinstance(holder, types.CellType):
        return mark(content(holder))
    if not name or name.startswith("in ") or name == "environ":
        return mark(holder, None, Collected() if name.startswith("in ") else None)
    return mark((holder if isinstance(holder, dict) else vars(holder)).get(name, MISSING))


def content_of(t: Tensor) -> int | None:
    """A checksum of a tensor's values, which writes without a new version change as well."""
    plain = t.layout == torch.strided and t.is_cpu and not t.is_quantized
    return checksum(t) if plain else None


def content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def functions(value: Any) -> Iterator[Any]:
    """The functions of an attribute of a class: a method, a property."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, (staticmethod, classmethod)):
        yield value.__func__
    elif isinstance(value, property):
        yield from (one for one in (value.fget, value.fset, value.fdel) if one is not None)


_PLAIN = frozenset(NUMBERS)
_INTERNAL = frozenset(nn.Module().__dict__) - {"training"}


def settings_of(roots: Sequence[Any]) -> list[Any]:
    """The numbers and texts in the attributes of modules, which a user may change between two steps."""
    found: list[Any] = []
    for module in roots:
        for key, value in module.__dict__.items() if isinstance(module, nn.Module) else ():
            if key in _INTERNAL:
                continue
            kind = type(value)
            if kind is bool or kind is int:
                found.append(value)
            elif isinstance(value, NUMBERS) or (type(value) is tuple and _PLAIN.issuperset(map(type, value))):
                found.append(repr(value) if type(value) is float else value)  # NaN is as NaN
            elif not isinstance(value, (Tensor, nn.Module)):
                found.append(repr(mark(value)))
    return found
