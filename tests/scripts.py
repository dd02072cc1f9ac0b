"""Loads a script of experiments/ as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

EXPERIMENTS = Path(__file__).parents[1] / "experiments"


def experiment(name: str) -> Any:
    """The module of experiments/NAME.py, under a name of its own: `coupling` would hide a folder of the tests."""
    if str(EXPERIMENTS) not in sys.path:
        sys.path.append(str(EXPERIMENTS))  # last, for the modules that the script imports from its folder
    spec = importlib.util.spec_from_file_location(f"experiment_{name}", EXPERIMENTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(found)
    return found
