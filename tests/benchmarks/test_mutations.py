"""A short form of benchmarks/mutations.py: no change of a byte in any file of a run goes unnoticed."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import mutations


def test_no_changed_byte_of_any_file_goes_unnoticed() -> None:
    found = dict(mutations.sweep(25, seed=1))
    assert set(found) == {*mutations.FINISHED, "resumed ledger", "checkpoint"}
    assert {name: counts["UNNOTICED"] for name, counts in found.items() if counts["UNNOTICED"]} == {}
    assert all(counts["noticed"] >= 20 for counts in found.values()), found
