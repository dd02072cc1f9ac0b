"""`module:function` in a recipe: datasets and models from the user's own code.

Reading somebody else's recipe must not run code. So such a name is refused unless the user who starts the command gives
`--allow-code` (in Python: `Recipe.read(path, allow_code=True)`); no key of the recipe can allow it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino.data.own import LICENCE
from sordino.data.tabular import Labels
from sordino.data.types import Dataset
from sordino.errors import InputError
from sordino.split import Split

CONTRACT = (
    'must return {"train": (inputs, targets), "test": (inputs, targets) or None, "classes": a number or a list}; '
    "inputs and targets are tensors or arrays with one entry per record, or train and test are map-style datasets of "
    "(inputs, target)"
)


def is_code(name: str) -> bool:
    """Whether the name refers to a function (module:function)."""
    return ":" in name


def function_of(name: str) -> Callable[..., Any]:
    """The function `package.module:function`, or `folder/file.py:function`; the working directory is searched first.

    This runs the module. The caller must have the user's permission.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise InputError(f"{name!r}: write module:function, or file.py:function")
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _imported(place)
    except ImportError as error:
        raise InputError(f"{name!r}: the module can't be imported: {error}") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise InputError(f"{name!r}: {place} has no function {attribute!r}")
    function: Callable[..., Any] = found
    return function


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
    made = function_of(name)(**options)
    if isinstance(made, Dataset):
        return made
    if not isinstance(made, Mapping) or "train" not in made or "classes" not in made:
        raise InputError(f"{name} {CONTRACT}")
    labels = Labels.of(made["classes"])
    train = _split(name, "train", made["train"])
    test = made.get("test")
    held = Split(train.inputs[:0], train.targets[:0]) if test is None else _split(name, "test", test)
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
    if any(isinstance(one, bool) or not isinstance(one, int | str) for one in ids):
        raise InputError(f"{name}: users must be ids: whole numbers or texts, without missing values")
    return tuple(str(one) for one in ids)


def _split(name: str, side: str, given: Any) -> Split:
    if isinstance(given, Split):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        if not (hasattr(given, "__getitem__") and hasattr(given, "__len__")):
            raise InputError(f"{name}: {side} {CONTRACT}")
        pairs = [given[i] for i in range(len(given))]
        given = (torch.stack([_tensor(x) for x, _ in pairs]), torch.tensor([int(y) for _, y in pairs]))
    inputs, targets = (_tensor(one) for one in given)
    if len(inputs) != len(targets):
        raise InputError(f"{name}: {side} has inputs and targets of different lengths")
    return Split(inputs.float() if inputs.dtype == torch.float64 else inputs, targets)


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.asarray(values).copy())
