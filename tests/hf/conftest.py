"""peft imports torchvision, whose operators do not load on a CPU build of torch: see tests/models/conftest.py."""

from __future__ import annotations

from models.conftest import _OPERATORS

OPERATORS = _OPERATORS  # the declaration lives as long as this object
