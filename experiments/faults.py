"""Thousands of bad inputs, damaged files, disk failures and kills: counts tracebacks and losses; none is expected.

    python experiments/faults.py                       every kind, as many as `COUNTS` says
    python experiments/faults.py recipes --count 500   500 more of one kind

Each kind has its part of experiments/results/faults.json, which is written during the run. On the same commit an
interrupted run continues; a part that another commit wrote is started again. `uncaught` counts tracebacks;
`left_behind` counts wrong input after which something was on the disk, damage that was accepted, and runs that could
not be resumed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results" / "faults.json"
sys.path.insert(0, str(ROOT / "experiments"))
os.environ["SORDINO_CACHE"] = tempfile.mkdtemp()

import torch  # noqa: E402

from faulty import commands, datasets, disk, malicious, recipes, runs  # noqa: E402
from faulty.outcome import Tally, limit_memory  # noqa: E402
from provenance import COMMIT, origin  # noqa: E402

Fuzz = Callable[[int, Tally, Path], None]
KINDS: Mapping[str, tuple[Fuzz, Callable[[], AbstractContextManager[None]]]] = {
    "recipes": (recipes.fuzz, recipes.small_world),
    "datasets": (datasets.fuzz, nullcontext),
    "commands": (commands.fuzz, nullcontext),
    "runs": (runs.fuzz, runs.small_runs),
    "malicious": (malicious.fuzz, runs.small_runs),
}
COUNTS = {"disk": 2_000, "commands": 700, "datasets": 11_000, "runs": 500, "malicious": 2_000, "recipes": 22_000}


def keep(path: Path, kind: str, found: Mapping[str, Any]) -> None:
    """Writes one part into the JSON file, with the sums that docs/trust.md shows."""
    document = json.loads(path.read_text()) if path.exists() else {}
    parts = {**document.get("parts", {}), kind: dict(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    about = origin("python experiments/faults.py")
    path.write_text(json.dumps({**about, **sums(parts), "parts": parts}, indent=2, ensure_ascii=False) + "\n")


def sums(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    bad = [one for name, one in parts.items() if name != "disk"]
    return {
        "bad_inputs": sum(one["tried"] for one in bad),
        "uncaught": sum(one["uncaught"] for one in parts.values()),
        "left_behind": sum(len(one.get("left_behind", ())) for one in parts.values()),
        "kills": parts.get("disk", {}).get("kills", 0),
        "faults": parts.get("disk", {}).get("tried", 0) - parts.get("disk", {}).get("kills", 0),
        "entries_lost": sum(one.get("entries_lost", 0) for one in parts.values()),
        "steps_redrawn": sum(one.get("steps_redrawn", 0) for one in parts.values()),
    }


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of fsyncs


def earlier(path: Path, kind: str) -> tuple[Tally, dict[str, Any]]:
    """The counts of this commit so far."""
    part = (json.loads(path.read_text()) if path.exists() else {}).get("parts", {}).get(kind, {})
    if part.get("commit") != COMMIT or COMMIT.endswith("+changes"):
        return Tally(), {}
    tally = Tally(part["tried"], Counter(part["outcomes"]), part["places"], part["left_behind"])
    return tally, part


def about(kind: str, part: Mapping[str, Any], tally: Tally, started: float, **more: Any) -> dict[str, Any]:
    seconds = round(part.get("processor_seconds", 0) + time.process_time() - started)
    command = f"python experiments/faults.py {kind}"
    return {"command": command, "commit": COMMIT, "processor_seconds": seconds, **tally.document(), **more}


def run(kind: str, count: int, path: Path) -> Tally:
    fuzz, world = KINDS[kind]
    (tally, part), started = earlier(path, kind), time.process_time()
    first = tally.tried
    torch.set_num_threads(1)
    with world(), tempfile.TemporaryDirectory(dir=_memory()) as folder:
        for seed in range(first, first + count):
            fuzz(seed, tally, Path(folder) / "try")
            if seed % 100 == 99 or seed == first + count - 1:
                keep(path, kind, about(kind, part, tally, started, seeds=[0, seed + 1]))
                print(kind, seed + 1, dict(tally.outcomes), len(tally.left_behind), flush=True)
    return tally


def run_disk(count: int, path: Path) -> Tally:
    """`count` more faults and kills at file operations of a run, evenly over both kinds."""
    (tally, part), started = earlier(path, "disk"), time.process_time()
    found = {key: part.get(key, 0) for key in ("entries_lost", "steps_redrawn", "not_resumed", "kills")}
    torch.set_num_threads(1)
    with recipes.small_world(), tempfile.TemporaryDirectory(dir=_memory()) as folder:
        place = Path(folder) / "try"
        every = disk.every_fault(place)
        for number, (at, kind) in enumerate(every[tally.tried : tally.tried + count]):
            disk.add(tally, found, place, at, kind)
            if number % 10 == 9 or tally.tried in (len(every), count):
                keep(path, "disk", about("disk", part, tally, started, possible=len(every), **found))
                print("disk", tally.tried, "of", len(every), dict(tally.outcomes), found, flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(COUNTS))
    parser.add_argument("--count", type=int, metavar="N", help="try N more of each kind")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    limit_memory()
    wrong = False
    for kind in arguments.kinds or COUNTS:
        done = earlier(arguments.json, kind)[0].tried
        count = arguments.count or max(0, COUNTS[kind] - done)
        tally = run_disk(count, arguments.json) if kind == "disk" else run(kind, count, arguments.json)
        wrong = wrong or bool(tally.uncaught or tally.left_behind)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
