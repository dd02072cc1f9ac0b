"""Random programs in which records do not interact: the engine's gradients against a plain loop, in float64.

    python experiments/random_programs.py --programs 10000 --jobs 2 --json experiments/results/random_programs.json

Resumes from the JSON file if it exists and the engine is the same. Each program is run with as many rows as all other
dimensions have, one in six also with another number of rows (tests/gradients/programs.py).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from gradients.programs import outcome  # type: ignore[import-not-found] # noqa: E402

WRONG = 1e-8


SOURCES = (
    "src/sordino/gradients",
    "src/sordino/clipping.py",
    "tests/gradients/programs.py",
    "tests/gradients/more_programs.py",
)


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def sources() -> str:
    """Identifies the content of the tested code: commits that do not change it do not invalidate a run."""
    return git("rev-parse", *(f"HEAD:{path}" for path in SOURCES)).replace("\n", " ")


def started(path: Path, programs: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "command": f"python experiments/random_programs.py --programs {programs}",
        "commit": git("rev-parse", "HEAD"),
        "sources": sources(),
        "torch": torch.__version__,
        "seeds": [0, 0],
        "programs": 0,
        "runs": {"proven": 0, "measured": 0, "refused": 0, "tie": 0, "unused": 0},
        "largest_difference": 0.0,
        "wrong": [],
        "refused": [],
        "crashed": [],
    }
    if path.exists():
        kept = json.loads(path.read_text())
        if kept["sources"] != found["sources"]:
            raise SystemExit(f"{path} is of commit {kept['commit']}, and the engine has changed since; remove it")
        return {**kept, "command": found["command"]}
    return found


def tried(seed: int) -> tuple[int, list[Any], str | None]:
    """(seed, the results of its runs, the error if it crashed)."""
    torch.set_num_threads(1)
    try:
        return seed, outcome(seed), None
    except Exception as error:
        return seed, [], f"{type(error).__name__}: {error}"


def add(result: dict[str, Any], seed: int, found: list[Any], error: str | None) -> None:
    if error is not None:
        result["crashed"].append({"seed": seed, "error": error})
    for one in found:
        result["runs"][one.kind] += 1
        result["largest_difference"] = max(result["largest_difference"], one.gap)
        if one.gap > WRONG:
            result["wrong"].append({"seed": seed, "blocks": one.names, "difference": one.gap})
        if one.kind == "refused":
            result["refused"].append({"seed": seed, "blocks": one.names, "message": one.message})
    result["programs"], result["seeds"] = seed + 1, [0, seed + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=10000)
    parser.add_argument("--json", type=Path, default=ROOT / "experiments/results/random_programs.json")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    result, begun = started(options.json, options.programs), time.time()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        _run(pool.imap(tried, range(result["programs"], options.programs)), result, options, begun)


def _run(
    outcomes: Iterable[tuple[int, list[Any], str | None]],
    result: dict[str, Any],
    options: argparse.Namespace,
    begun: float,
) -> None:
    for seed, found, error in outcomes:
        add(result, seed, found, error)
        if (seed + 1) % 100 == 0 or seed + 1 == options.programs:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
            bad = {name: len(result[name]) for name in ("wrong", "refused", "crashed")}
            print(
                seed + 1,
                result["runs"],
                f"{result['largest_difference']:.1e}",
                bad,
                f"{time.time() - begun:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
