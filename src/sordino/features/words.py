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
    "efficientnet-lite0": {"resolution": 128, "normalise": None},
    "minilm": {"tokens": 128, "normalise": None},
}
