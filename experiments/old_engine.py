"""Shows each example of issue 16's section "Wrong today" on the engine in which it was found, and on today's.

    python experiments/old_engine.py            every point; writes results/engine_lines.json
    python experiments/old_engine.py NAME…      some points anew
    python experiments/old_engine.py --page     docs/engine_lines.md from that file

The package of commit OLD is unpacked from git's history, with its loops in C if there is a compiler. The points
(engine_points/) are programs that use what both packages have; a process for each package and file of points runs them.
A point *is shown* if its program finds a fault in the old package, and is mended if the same program finds none in
today's. Exit code 1 if one is neither.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from pages import table
from provenance import origin

ROOT = Path(__file__).resolve().parents[1]
OLD = "750c4ee"  # 2026-11-16 14:56, the last commit before work on the issue began
TARGET = ROOT / "experiments" / "results" / "engine_lines.json"
PAGE = ROOT / "docs" / "engine_lines.md"
FILES = ("attribution", "interaction", "states", "derivatives", "numbers", "sound", "crashes")
FLAGS = ("-shared", "-fPIC", "-O3", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math")  # of the old pyproject.toml
HEAD = """# What was wrong with the engine, example by example

An early engine was attacked, and the issue that began [today's engine](engine.md) lists what was found. Below, each
example of that list is a small program (`experiments/engine_points/`) that runs on that engine and on today's: it uses
names alone that both packages have. In brackets is what the issue measured, on models that were not kept; the programs
are new models with the same mistake. On today's engine each program is also a test
(`tests/gradients/test_reported_engine.py`); the last column names further tests of the same kind.

*A record moves the sum by* so many clip norms when it is removed; it may be 1.
"""


def points() -> dict[str, Any]:
    """The points by name, in the order of the issue."""
    for name in FILES:
        import_module(f"engine_points.{name}")
    return dict(import_module("engine_points.common").POINTS)


def unpacked(folder: Path) -> tuple[Path, bool]:
    """The old package from git's history, and whether its C loops could be built."""
    archive = subprocess.run(["git", "archive", OLD, "src"], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        file.extractall(folder, filter="data")
    package, compiler = folder / "src" / "sordino", shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return folder / "src", False
    library = package / f"_kernels{sysconfig.get_config_var('EXT_SUFFIX')}"
    include = f"-I{sysconfig.get_paths()['include']}"
    built = [compiler, *FLAGS, include, str(package / "kernels.c"), "-o", str(library), "-lm"]
    return folder / "src", subprocess.run(built, capture_output=True, check=False).returncode == 0


CODE = """
import importlib, json, sys
import torch
torch.set_num_threads(1)
from engine_points import common
importlib.import_module("engine_points." + sys.argv[1])
for name in sys.argv[2:]:
    seen = common.tried(name)
    print("POINT", json.dumps({"name": name, "wrong": seen.wrong, "seen": seen.text}), flush=True)
"""


def tried(source: Path, file: str, names: list[str]) -> dict[str, dict[str, Any]]:
    """Points of one file on the package in `source`, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join((str(source), str(ROOT / "experiments")))
        own = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "SORDINO_CACHE": str(Path(folder) / "cache")}
        command = [sys.executable, "-W", "ignore", "-c", CODE, file, *names]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, **own}, cwd=folder, check=False
        )
    lines = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("POINT ")]
    if done.returncode:
        raise RuntimeError(f"{file}: {done.stderr.strip().splitlines()[-3:]}")
    return {line["name"]: {"wrong": line["wrong"], "seen": line["seen"]} for line in lines}


def status(row: dict[str, Any]) -> str:
    """Whether a row is shown on the old code and mended today."""
    if row["today"]["wrong"]:
        return "STILL WRONG"
    return "shown, mended" if row["old"]["wrong"] else "not shown on the old code"


def lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    """The page, from the rows of the result file."""
    known = points()
    groups = dict.fromkeys(known[row["point"]].line for row in rows)
    for group in groups:
        own = [row for row in rows if known[row["point"]].line == group]
        yield f"\n## {group[0].upper()}{group[1:]}\n"
        cells = []
        for row in own:
            one = known[row["point"]]
            old = row["old"]["seen"] if row["old"]["wrong"] else f"**not shown**: {row['old']['seen']}"
            today = f"**still wrong**: {row['today']['seen']}" if row["today"]["wrong"] else row["today"]["seen"]
            tests = ", ".join(f"`{test.split('/')[-1].split('[')[0]}`" for test in one.tests)
            cells.append(
                [one.example, *(text.replace("|", "/") for text in (old, today)), f"`{row['point']}`; {tests}"]
            )
        yield table(["example", f"engine of {OLD}", "today's", "tests"], cells)


def page() -> str:
    """docs/engine_lines.md as the result file says it."""
    document = json.loads(TARGET.read_text(encoding="utf8"))
    rows = document["points"]
    shown, mended = sum(r["old"]["wrong"] for r in rows), sum(not r["today"]["wrong"] for r in rows)
    made = (
        f"\n{len(rows)} examples: {shown} are shown on the engine of commit {document['code_of']}"
        f"{'' if document['with_loops_in_c'] else ' (without its loops in C)'}, {mended} are not wrong on today's "
        f"(commit {document['commit']}). Made by `{document['command']}`.\n"
    )
    return HEAD + made + "\n".join(lines(rows)) + "\n"


def main(names: list[str]) -> int:
    if names == ["--page"]:
        PAGE.write_text(page(), encoding="utf8")
        return 0
    every = points()
    earlier = json.loads(TARGET.read_text(encoding="utf8"))["points"] if names and TARGET.exists() else []
    rows = {row["point"]: row for row in earlier}
    with tempfile.TemporaryDirectory() as folder:
        source, built = unpacked(Path(folder))
        for file in FILES:
            own = [n for n, one in every.items() if one.run.__module__.endswith(f".{file}") and n in (names or every)]
            if own:
                old, today = tried(source, file, own), tried(ROOT / "src", file, own)
                rows |= {name: {"point": name, "old": old[name], "today": today[name]} for name in own}
            for name in own:
                print(f"{status(rows[name]):26s} {name}: {rows[name]['old']['seen']}", flush=True)
    about = {**origin("python experiments/old_engine.py"), "code_of": OLD, "with_loops_in_c": built}
    kept = [rows[name] for name in every if name in rows]
    TARGET.write_text(json.dumps({**about, "points": kept}, indent=1, ensure_ascii=False) + "\n", encoding="utf8")
    PAGE.write_text(page(), encoding="utf8")
    return 0 if all(status(row) == "shown, mended" for row in kept) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
