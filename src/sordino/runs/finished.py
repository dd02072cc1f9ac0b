"""Reads the result of a finished run; if it is damaged, the error names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from sordino.errors import InputError
from sordino.files import read_json

_NUMBER = (int, float)
KEYS: Mapping[str, tuple[type, ...]] = {
    "name": (str,),
    "method": (str,),
    "epsilon": _NUMBER,
    "delta": _NUMBER,
    "relation": (str,),
    "sampler": (str,),
    "accountant": (str,),
    "secure": (bool,),
    "guarantee": (dict,),
    "test_accuracy": (*_NUMBER, NoneType),
    "steps": (int,),
    "skipped_steps": (int,),
    "records": (int,),
}
"""The keys that every result.json has, and their types."""


def read_result(path: Path) -> dict[str, Any]:
    """The content of a result.json.

    Raises:
        InputError: it can't be read, is not JSON, or lacks a required key.
    """
    document = read_json(path, "the result of the run")
    for key, kinds in KEYS.items():
        value = document.get(key)
        wrong = key not in document or not isinstance(value, kinds) or isinstance(value, bool) != (kinds == (bool,))
        if wrong or (isinstance(value, float) and not math.isfinite(value)):
            raise InputError(f"{path}, the result of the run, is damaged: {key!r} is missing or has a wrong type")
    beside = document["guarantee"].get("beside")
    if not isinstance(beside, dict) or not all(isinstance(value, _NUMBER) for value in beside.values()):
        raise InputError(f"{path}, the result of the run, is damaged: its guarantee has a wrong type")
    return document
