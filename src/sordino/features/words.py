"""The extractors by name, and the options of each with their defaults (None: not set)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "scattering": {
        "J": 2,
        "L": 8,
        "normalise": "none",
        "groups": 27,
        "frequencies": None,
        "power": None,
        "whiten": None,
    },
    "patches": {
        "side": 6,
        "atoms": 256,
        "grid": 3,
        "threshold": 0.2,
        "soften": 0.3,
        "mirror": False,
        "upright": None,
        "power": 0.5,
        "whiten": None,
    },
    "word-bag": {"dimensions": 8192, "power": 0.0, "ranks": None},
    "efficientnet-lite0": {"resolution": 128, "mirror": None, "power": None, "normalise": None},
    "minilm": {"tokens": 128, "normalise": None},
}
