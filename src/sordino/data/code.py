"""`module:function` in a recipe: datasets and models from the user's own code.

Reading somebody else's recipe must not run code. So such a name is refused unless the user who starts the command gives
`--allow-code` (in Python: `Recipe.read(path, allow_code=True)`); no key of the recipe can allow it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.data.own import LICENCE
from sordino.data.tabular import Labels, Problems
from sordino.data.types import Dataset
from sordino.errors import InputError, SordinoError
from sordino.split import Split

CONTRACT = (
    'must return {"train": (inputs, targets), "test": (inputs, targets) or None, "classes": a number or a list}; '
    "inputs and targets are tensors or arrays with one entry per record, or train and test are map-style datasets of "
    "(inputs, target)"
)


def is_code(name: str) -> bool:
    """Whether a name refers to a function.

    Args:
        name: The name in a recipe.

    Returns:
        True for module:function and file.py:function.
    """
    return ":" in name


def function_of(name: str) -> Callable[..., Any]:
    """Imports a function of the user's code. This runs its module: the caller must have the user's permission.

    Args:
        name: `package.module:function`, or `folder/file.py:function`; the working directory is searched first.

    Returns:
        The function.

    Raises:
        InputError: there is no such function, or its module fails.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise InputError(f"{name!r}: write module:function, or file.py:function")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    except SordinoError:
        raise
    except ImportError as error:
        raise InputError(f"{name!r}: the module can't be imported: {error}") from error
    except Exception as error:  # whatever the user's module raises when it is run
        raise _failed(f"{name!r}: the module fails", error) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise InputError(f"{name!r}: {place} has no function {attribute!r}")
    function: Callable[..., Any] = found
    return function


def called(name: str, arguments: Sequence[Any], options: Mapping[str, Any], *, private: bool = False) -> Any:
    """Calls a function of the user's code.

    Args:
        name: module:function, or file.py:function.
        arguments: Its positional arguments.
        options: The keys of its section in the recipe, as keyword arguments.
        private: Whether it reads records: then only their owner may see the message of an error.

    Returns:
        What the function returns.

    Raises:
        InputError: there is no such function, it does not take these arguments, or it fails; the message names the
            error, the file and the line.
    """
    function = function_of(name)
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise InputError(f"{name} can't be called with the keys of its section: {error}") from error
    except ValueError:  # a function without a signature
        pass
    try:
        return function(*arguments, **options)
    except SordinoError:
        raise
    except Exception as error:
        raise _failed(f"{name} fails", error, private=private) from error


def _failed(what: str, error: Exception, *, private: bool = False) -> InputError:
    """The error with the last line of the user's code in which it occurred."""
    if os.environ.get("SORDINO_TRACEBACK"):
        raise error
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _own(f.filename)]
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    if isinstance(error, SyntaxError) and error.filename:
        place = f" in {Path(error.filename).name}, line {error.lineno}"
    message = type(error).__name__ if private else f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return InputError(
        f"{what}{place}; nothing was spent: {message} (SORDINO_TRACEBACK=1 shows the whole traceback)",
        private=str(error) if private else "",
    )


def _own(filename: str) -> bool:
    """Whether a file is the user's: neither installed, nor of this package or the interpreter."""
    path = Path(filename)
    return path.is_file() and "site-packages" not in path.parts and Path(__file__).parents[1] not in path.parents


def _imported(name: str) -> Any:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(here)


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"sordino_own_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"there is no file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def dataset_of(name: str, options: Mapping[str, Any]) -> Dataset:
    """The dataset that the function returns, checked; InputError says what it must return."""
    made = called(name, (), options, private=True)
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, Mapping) or "train" not in made or "classes" not in made:
        raise InputError(f"{name} {CONTRACT}")
    labels = Labels.of(made["classes"])
    train = _split(name, "train", made["train"], labels)
    test = made.get("test")
    held = Split(train.inputs[:0], train.targets[:0]) if test is None else _split(name, "test", test, labels)
    for side, split in (("train", train), ("test", held)):
        if split.targets.is_floating_point() or split.targets.ndim != 1:
            raise InputError(f"{name}: the targets of {side} must be whole numbers, one for each record")
        outside = (split.targets < 0) | (split.targets >= len(labels.names))
        if bool(outside.any()):
            raise InputError(
                f"{name}: {side} has labels that are not in 0 … {len(labels.names) - 1}; nothing was spent"
            )
        if split.inputs.is_floating_point() and not bool(split.inputs.isfinite().all()):
            raise InputError(f"{name}: {side} has inputs that are not finite; nothing was spent")
    named = None if isinstance(made["classes"], int) else labels.names
    users = _users(name, made.get("users"), len(train))
    return Dataset(name, train, held, len(labels.names), f"the data of {name}", LICENCE, labels=named, users=users)


def _users(name: str, given: Any, rows: int) -> tuple[str, ...] | None:
    """The user of each row of train, if the function returns them."""
    if given is None:
        return None
    ids = given.tolist() if isinstance(given, Tensor | np.ndarray) else list(given)
    if len(ids) != rows:
        raise InputError(f"{name}: users must have one id for each row of train, in the same order")
    kinds = {type(one) for one in ids}
    if len(kinds) > 1 or not kinds <= {int, str}:  # 1 and "1" may be two users
        raise InputError(f"{name}: users must be ids: all whole numbers or all texts, without missing values")
    return tuple(str(one) for one in ids)


def _split(name: str, side: str, given: Any, labels: Labels) -> Split:
    if isinstance(given, Split):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        if not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
            raise InputError(f"{name}: {side} {CONTRACT}")
        given = _stacked(f"{name}: {side}", [given[i] for i in range(len(given))])
    inputs, targets = _tensor(f"{name}: the inputs of {side}", given[0]), given[1]
    if not isinstance(targets, Tensor) and np.asarray(targets).dtype.kind in "UO":  # texts: the names of the classes
        problems = Problems(f"{name}: {side}", range(len(targets)))
        targets = labels(list(targets), "targets", problems)
        problems.raise_any()
    targets = _tensor(f"{name}: the targets of {side}", targets)
    if not inputs.ndim or not targets.ndim or len(inputs) != len(targets):
        raise InputError(f"{name}: {side} has inputs and targets of different lengths")
    return Split(inputs.float() if inputs.dtype == torch.float64 else inputs, targets)


def _stacked(where: str, items: list[Any]) -> tuple[Tensor, list[Any]]:
    """(inputs, targets) of the items of a map-style dataset."""
    if not items:
        raise InputError(f"{where} has no records")
    if any(not isinstance(one, tuple | list) or len(one) != 2 for one in items):
        raise InputError(f"{where}: each item must be a pair (inputs, target)")
    rows = [_tensor(f"{where}: an item's inputs", inputs) for inputs, _ in items]
    if len({row.shape for row in rows}) > 1:
        raise InputError(f"{where} has inputs of different shapes: cut or pad them to a public one")
    return torch.stack(rows), [one.item() if isinstance(one, Tensor) and one.ndim == 0 else one for _, one in items]


def _tensor(where: str, values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of different lengths
        raise InputError(f"{where} can't become a tensor: its rows have different shapes") from error
    if array.dtype.kind not in "fiub":
        raise InputError(f"{where} are of type {array.dtype}, which can't become a tensor: give numbers")
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "u" and array.itemsize > 1 else array.copy())
