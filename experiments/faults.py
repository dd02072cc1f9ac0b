"""Bad input, damaged files, failing disks and kills, by the thousand: nothing uncaught, nothing lost.

    python experiments/faults.py recipes --count 22000
    python experiments/faults.py datasets --count 11000
    python experiments/faults.py commands --count 1000
    python experiments/faults.py disk --count 500

Each writes its part of experiments/results/faults.json; with --first it goes on at another seed. `uncaught` counts
tracebacks; `left_behind` the wrong inputs after which something was on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results" / "faults.json"
sys.path.insert(0, str(ROOT / "experiments"))
os.environ["SORDINO_CACHE"] = tempfile.mkdtemp()

import torch  # noqa: E402

from faulty import commands, datasets, disk, recipes  # noqa: E402
from faulty.outcome import Tally, limit_memory  # noqa: E402

Fuzz = Callable[[int, Tally, Path], None]
KINDS: Mapping[str, tuple[Fuzz, Callable[[], AbstractContextManager[None]]]] = {
    "recipes": (recipes.fuzz, recipes.small_world),
    "datasets": (datasets.fuzz, nullcontext),
    "commands": (commands.fuzz, nullcontext),
}


def commit() -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def keep(path: Path, kind: str, found: Mapping[str, Any]) -> None:
    """Puts one part into the JSON file, with the sums that a table of trust shows."""
    document = json.loads(path.read_text()) if path.exists() else {}
    parts = {**document.get("parts", {}), kind: dict(found)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**sums(parts), "parts": parts}, indent=2, ensure_ascii=False) + "\n")


def sums(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    bad = [one for name, one in parts.items() if name != "disk"]
    return {
        "bad_inputs": sum(one["tried"] for one in bad),
        "uncaught": sum(one["uncaught"] for one in parts.values()),
        "left_behind": sum(len(one.get("left_behind", ())) for one in bad),
        "kills": parts.get("disk", {}).get("kills", 0),
        "faults": parts.get("disk", {}).get("tried", 0) - parts.get("disk", {}).get("kills", 0),
        "entries_lost": sum(one.get("entries_lost", 0) for one in parts.values()),
        "steps_redrawn": sum(one.get("steps_redrawn", 0) for one in parts.values()),
    }


def _memory() -> str | None:
    return "/dev/shm" if os.path.isdir("/dev/shm") else None  # thousands of fsyncs


def run(kind: str, first: int, count: int, path: Path) -> Tally:
    fuzz, world = KINDS[kind]
    tally, started = Tally(), time.monotonic()
    torch.set_num_threads(1)
    with world(), tempfile.TemporaryDirectory(dir=_memory()) as folder:
        for seed in range(first, first + count):
            fuzz(seed, tally, Path(folder) / "try")
            if seed % 100 == 99 or seed == first + count - 1:
                command = f"python experiments/faults.py {kind} --count {count}"
                about = {"command": command, "commit": commit(), "seeds": [first, seed + 1]}
                keep(path, kind, {**about, "seconds": round(time.monotonic() - started), **tally.document()})
                print(kind, seed + 1, dict(tally.outcomes), f"{time.monotonic() - started:.0f} s", flush=True)
    return tally


def run_disk(count: int, path: Path) -> Tally:
    """`count` faults and kills at file operations of a run, evenly over both kinds."""
    tally, started = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        found = disk.sweep(tally, Path(folder) / "try", count)
    about = {"command": f"python experiments/faults.py disk --count {count}", "commit": commit()}
    kept = {**about, "seconds": round(time.monotonic() - started), **tally.document(), **found}
    keep(path, "disk", kept)
    print(json.dumps(kept, indent=2))
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=[*sorted(KINDS), "disk"])
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=1000, metavar="N")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FILE")
    arguments = parser.parse_args()
    limit_memory()
    if arguments.kind == "disk":
        tally = run_disk(arguments.count, arguments.json)
        return 1 if tally.uncaught or tally.left_behind else 0
    tally = run(arguments.kind, arguments.first, arguments.count, arguments.json)
    return 1 if tally.uncaught or tally.left_behind else 0


if __name__ == "__main__":
    raise SystemExit(main())
