"""Disk failures and kills at every file operation of a run: checks that no entry is lost and no step is drawn twice.

A run of a few steps with secure noise is made. At its k-th file operation the disk fails or the process is killed;
nothing that the process does afterwards reaches the disk. Then the run is resumed without faults.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch

from faulty.outcome import Tally
from faulty.recipes import RECORDS, small_world
from sordino.errors import SordinoError
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.training import steps as private_steps

STEPS = 4
OPERATIONS = ("open", "write", "fsync", "replace", "ftruncate", "mkdir", "unlink", "rmdir", "stat", "scandir")
KINDS = ("EIO", "ENOSPC", "kill before", "kill after", "torn")


def recipe() -> Recipe:
    """A recipe with all records in every step: ε then has a closed form, and a run takes a tenth of a second."""
    return Recipe.from_dict(
        {
            "data": {"name": "fashion-mnist-mini", "records": RECORDS},
            "model": {"name": "linear"},
            "privacy": {"noise_multiplier": 20.0, "delta": 1e-5},
            "sampling": {"expected_batch": RECORDS},
            "train": {"steps": STEPS, "lr": 0.1, "eval_every": 1, "checkpoint_every": 2},
        }
    )


class Killed(BaseException):
    """The process was killed: nothing that it does afterwards reaches the disk."""


class Disk:
    """Counts the file operations of sordino's own code and makes one of them fail."""

    def __init__(self, at: int | None, kind: str) -> None:
        self.at, self.kind, self.count, self.dead = at, kind, 0, False
        self.real = {name: getattr(os, name) for name in OPERATIONS}

    def ours(self) -> bool:
        """Whether the package made the call, directly or through pathlib; not torch or the interpreter."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(4):
            if frame is None:
                return False
            if f"{os.sep}sordino{os.sep}" in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False

    def operation(self, name: str) -> Callable[..., Any]:
        def called(*given: Any, **named: Any) -> Any:
            if not self.ours():
                return self.real[name](*given, **named)
            if self.dead:
                raise Killed
            self.count += 1
            if self.count != self.at:
                return self.real[name](*given, **named)
            if self.kind in ("EIO", "ENOSPC"):
                raise OSError(getattr(errno, self.kind), os.strerror(getattr(errno, self.kind)))
            self.dead = True
            if self.kind == "torn" and name == "write":
                self.real[name](given[0], bytes(given[1])[: len(given[1]) // 2])
            if self.kind == "kill after":
                self.real[name](*given, **named)
            raise Killed

        return called

    @contextmanager
    def failing(self) -> Iterator[None]:
        changed: dict[str, Any] = {name: self.operation(name) for name in OPERATIONS}
        with mock.patch.multiple(os, **changed):
            yield


def _run(out: Path, seen: Counter[int], disk: Disk, resume: bool) -> str:
    """`exit N`, `killed`, or `uncaught: kind`."""
    released = private_steps.PrivateStep

    def handed_out(step: int, *given: Any, **named: Any) -> Any:
        seen[step] += 1
        return released(step, *given, **named)

    try:
        with mock.patch.object(private_steps, "PrivateStep", handed_out), warnings.catch_warnings(), disk.failing():
            warnings.simplefilter("ignore")
            run_recipe(recipe(), out, resume=resume, progress=False)
        return "exit 0"
    except Killed:
        return "killed"
    except SordinoError as error:
        return f"exit {error.exit_code}"
    except OSError:
        return "exit 1"  # the command line prints it as one sentence
    except BaseException as error:
        return f"uncaught: {type(error).__name__}"


def operations(folder: Path) -> int:
    """The number of file operations of a run without faults."""
    disk = Disk(None, "")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    _run(folder / "run", Counter(), disk, resume=False)
    return disk.count


def attempt(folder: Path, at: int, kind: str) -> dict[str, Any]:
    """The effects of one fault: how both runs ended, entries lost, steps drawn twice."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    out, seen = folder / "run", Counter[int]()
    first = _run(out, seen, Disk(at, kind), resume=False)
    second = _run(out, seen, Disk(None, ""), resume=(out / "recipe.toml").exists()) if first != "exit 0" else ""
    ledger = (out / "ledger.jsonl").read_text().splitlines()[1:] if (out / "ledger.jsonl").exists() else []
    entries = [json.loads(line) for line in ledger]
    recorded = {entry["step"] for entry in entries if entry.get("purpose") == "gradient"}
    return {
        "first": first,
        "second": second,
        "lost": len(set(seen) - recorded),
        "redrawn": sum(count > 1 for count in seen.values()),
        "complete": recorded == set(range(STEPS)) and (out / "result.json").exists(),
    }


def every_fault(folder: Path, seed: int = 0) -> list[tuple[int, str]]:
    """Every kind of fault at every operation, in random order, so that any part of the list is a fair sample."""
    every = [(at, kind) for at in range(1, operations(folder) + 1) for kind in KINDS]
    return random.Random(seed).sample(every, len(every))


def sweep(tally: Tally, folder: Path, limit: int | None = None, seed: int = 0) -> dict[str, int]:
    """Tries every kind of fault at every operation, or `limit` of them; returns the numbers of losses."""
    found = {"entries_lost": 0, "steps_redrawn": 0, "not_resumed": 0, "kills": 0}
    with small_world():
        for at, kind in every_fault(folder, seed)[:limit]:
            add(tally, found, folder, at, kind)
    return found


def add(tally: Tally, found: dict[str, int], folder: Path, at: int, kind: str) -> None:
    """Tries one fault and counts its effects."""
    torch.set_num_threads(1)
    one = attempt(folder, at, kind)
    codes = f"{one['first']}, then {one['second'] or 'whole'}"
    worst = next((run for run in (one["first"], one["second"]) if run.startswith("uncaught")), None)
    tally.add(f"{worst} at operation {at}" if worst else codes, f"{kind} at operation {at}")
    found["entries_lost"] += one["lost"]
    found["steps_redrawn"] += one["redrawn"]
    found["kills"] += kind not in ("EIO", "ENOSPC")
    if not one["complete"]:
        found["not_resumed"] += 1
        tally.left_behind.append(f"{kind} at operation {at}: {codes}")
