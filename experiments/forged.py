"""Which check of `sordino verify` detects each forgery of tests/runs/forgeries.py: one JSON file.

    python experiments/forged.py

Makes two genuine runs of one small recipe, forges copies of the first, and writes results/forgeries.json. Exits with 1
if a forgery passes, if another check than the intended one detects it, or if a genuine run is called forged.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from provenance import origin
from sordino.runs.run import run_recipe
from sordino.runs.verify import failed, verify
from zoo import recipe

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "experiments" / "results" / "forgeries.json"


def forgeries() -> dict[str, Any]:
    """name → (the forgery, the check that must detect it); defined with the tests, which run them too."""
    sys.path.insert(0, str(ROOT / "tests" / "runs"))
    from forgeries import FORGERIES  # type: ignore[import-not-found]

    return dict(FORGERIES)


def tried() -> list[dict[str, Any]]:
    """One row for each forgery, and one for each genuine run."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        one, two, copy = (Path(folder) / name for name in ("one", "two", "copy"))
        noise: dict[str, Any] = {"epsilon": None, "noise_multiplier": 3.0}
        small = recipe("dpsgd", privacy=noise, clipping={"clip_norm": 1.0}, train={"steps": 6})
        for place in (one, two):
            run_recipe(small, place, progress=False)
            rows.append(_row(f"genuine, {place.name}", place, None))
        for name, (forge, named) in forgeries().items():
            shutil.copytree(one, copy)
            forge(copy, two)
            rows.append(_row(name, copy, named))
            shutil.rmtree(copy)
    return rows


def _row(name: str, place: Path, expected: str | None) -> dict[str, Any]:
    verdict = verify(place)
    found = [check.name for check in failed(verdict)]
    right = verdict.genuine if expected is None else not verdict.genuine and expected in found
    return {"forgery": name, "genuine": verdict.genuine, "named_by": found, "expected": expected, "right": right}


def main() -> int:
    torch.set_num_threads(1)
    rows = tried()
    document = {**origin("python experiments/forged.py"), "forgeries": rows}
    TARGET.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    wrong = [row["forgery"] for row in rows if not row["right"]]
    print(f"{sum(row['expected'] is not None for row in rows)} forgeries, wrong: {wrong or 'none'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
