"""Nothing changes for users: every method's runs give the same ledgers, metrics and weights, bit for bit.

Where a change of the numbers is meant, `python tests/bit_identity/make.py` writes the record anew. On another processor
than the record's the last bits may differ, and nothing else (make.py says why).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import make
import pytest

from sordino import report
from sordino.methods import METHODS
from sordino.runs.best import best_names
from sordino.runs.run import run_recipe

pytestmark = pytest.mark.usefixtures("few_test_rows")
RECORD = json.loads(make.RECORD.read_text("utf8"))
SAME_ARITHMETIC = RECORD["arithmetic"] == make.arithmetic()


def agree(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    if SAME_ARITHMETIC:
        assert found == recorded
    else:
        assert make.rounded_alike(found, recorded), (found, recorded)


def test_the_record_covers_every_method() -> None:
    assert set(RECORD["runs"]) == set(make.KINDS)
    assert set(METHODS) <= set(make.KINDS)
    assert {f"best-{name}" for name in best_names()} <= set(make.KINDS)


@pytest.mark.parametrize("kind", make.KINDS)
def test_a_run_gives_the_recorded_bits(kind: str, tmp_path: Path) -> None:
    found, target = make.outcome(kind, tmp_path / "run"), make.recipe(kind).privacy.epsilon
    agree(found, RECORD["runs"][kind])
    assert target is None or found["epsilon"] <= target


def test_on_another_processor_nothing_but_rounding_may_differ() -> None:
    recorded = RECORD["runs"]["dpsgd"]
    name, value = next(iter(recorded["norms"].items()))
    assert make.rounded_alike(recorded | {"digests": {}, "epsilon": recorded["epsilon"] * (1 + 1e-13)}, recorded)
    for other in (
        {"epsilon": recorded["epsilon"] * (1 + 1e-8)},
        {"norms": recorded["norms"] | {name: 1.01 * value}},
        {"entries": recorded["entries"][:-1]},
        {"entries": [entry | {"sensitivity": 2.0} for entry in recorded["entries"]]},
    ):
        assert not make.rounded_alike(recorded | other, recorded)


def test_a_run_directory_of_an_earlier_version_is_resumed_and_reported(tmp_path: Path) -> None:
    """It was written before the rooms were moved: recipe, ledger header and checkpoint are of the old form."""
    out = tmp_path / "run"
    shutil.copytree(make.OLD_RUN, out)
    before = (out / "ledger.jsonl").read_text("utf8").splitlines()
    result = run_recipe(make.old_recipe(), out, resume=True, progress=False)
    after = (out / "ledger.jsonl").read_text("utf8").splitlines()
    assert 0 < len(before) - 1 < 4
    assert after[: len(before)] == before, "what was released before is neither released again nor changed"
    assert len(after) - 1 == 4
    assert result["skipped_steps"] == 0
    agree(make.described(out), RECORD["old_run"])
    (out / "report.html").unlink()
    assert "agrees with the plan" in report.write(out).read_text("utf8")
