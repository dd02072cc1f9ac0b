"""Shows each numbered break of breaks.py on the code in which it was found.

    python experiments/old_breaks.py            every point; writes results/breaks.json
    python experiments/old_breaks.py NAME…      some points anew

The package of commit OLD is unpacked from git's history into a temporary directory, and every point is tried in a
process of its own that imports that package and uses its interface (today's tests can't run there: modules and
signatures have changed). A point *is shown* if the fault occurs. Exit code 1 if one is not.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from provenance import origin

ROOT = Path(__file__).resolve().parents[1]
OLD = "750c4ee"  # 2026-11-16 14:56, the last commit before the first of these breaks was mended
TARGET = ROOT / "experiments" / "results" / "breaks.json"


def unpacked(folder: Path) -> Path:
    """The old package, from git's history."""
    archive = subprocess.run(["git", "archive", OLD, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(folder, filter="data")
    return folder / "src"


def tried(source: Path, name: str) -> dict[str, Any]:
    """One point, in a process and a directory of its own."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "SORDINO_CACHE": str(Path(folder) / "cache")}
        environment = {**os.environ, **own}
        command = [sys.executable, str(ROOT / "experiments" / "old_points.py"), name, folder]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        return {"shown": False, "seen": f"the script failed: {done.stderr.strip().splitlines()[-1:]}"}
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def points() -> list[str]:
    """Names of the points, in their order: "1 …", "2 …"."""
    command = [sys.executable, str(ROOT / "experiments" / "old_points.py")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def main(names: list[str]) -> int:
    known = json.loads(TARGET.read_text(encoding="utf8"))["points"] if names and TARGET.exists() else []
    rows = {f"{row['break']} {row['point']}": row for row in known}
    with tempfile.TemporaryDirectory() as folder:
        source = unpacked(Path(folder))
        for name in names or points():
            number, _, text = name.partition(" ")
            rows[name] = {"break": int(number), "point": text, **tried(source, name)}
            print(f"{'shown' if rows[name]['shown'] else 'NOT SHOWN':10s} {name}: {rows[name]['seen']}", flush=True)
    about = {**origin("python experiments/old_breaks.py"), "code_of": OLD}
    kept = [rows[name] for name in points() if name in rows]
    TARGET.write_text(json.dumps({**about, "points": kept}, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    return 0 if all(row["shown"] for row in kept) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
