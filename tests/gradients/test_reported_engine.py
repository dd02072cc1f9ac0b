"""Each example of issue 16's section "Wrong today": the program that shows it on the engine of that day finds nothing.

docs/engine_lines.md has what the same programs saw on that engine (experiments/old_engine.py).
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import old_engine  # type: ignore[import-not-found]
from engine_points.common import tried  # type: ignore[import-not-found]


@pytest.mark.parametrize("name", old_engine.points())
def test_what_was_wrong_is_right_or_refused(name: str) -> None:
    seen = tried(name)
    assert not seen.wrong, seen.text
