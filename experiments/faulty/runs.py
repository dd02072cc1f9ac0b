"""Damaged run directories (ledgers, checkpoints, models, documents) and each command that reads them.

A run with an insecure seed, which may be copied, is made twice: once to its end, and once interrupted in the middle. In
a copy one file is damaged; then one command resumes or verifies the copy, or writes its report or its card.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import tomli_w

from faulty import mutate, recipes
from faulty.outcome import Tally, tried
from sordino import report
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.release.ledger import read_ledger
from sordino.training import steps as private_steps

STEPS = 4
_WRITE = report.write  # `small_world` replaces it for training; the command `report` uses the original


class Cut(BaseException):
    """The process was killed."""


@dataclass(frozen=True)
class World:
    """Two run directories, and their recipe."""

    recipe: Path
    finished: Path
    cut: Path


_WORLD: list[World] = []


@contextmanager
def small_runs() -> Iterator[None]:
    """The two runs, made once."""
    with recipes.small_world(), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "recipe.toml"
        path.write_text(tomli_w.dumps(recipes._base(train={"steps": STEPS, "checkpoint_every": 1})))
        assert tried(lambda: main(["train", str(path), "--out", str(folder / "finished")])) == "exit 0"
        _cut_run(path, folder / "cut")
        _WORLD.append(World(path, folder / "finished", folder / "cut"))
        try:
            yield
        finally:
            _WORLD.clear()


def _cut_run(recipe: Path, out: Path) -> None:
    released = private_steps.PrivateStep

    def dying(step: int, *given: object, **named: object) -> object:
        if step == STEPS - 1 and (out / "ledger.jsonl").exists():  # steps that are rehearsed before the run write none
            raise Cut
        return released(step, *given, **named)  # type: ignore[arg-type]

    with mock.patch.object(private_steps, "PrivateStep", dying):
        try:
            main(["train", str(recipe), "--out", str(out), "--json"])
        except Cut:
            return


def fuzz(seed: int, tally: Tally, folder: Path) -> None:
    """Damages one file and runs one command; a run that is accepted must be complete."""
    draw, world = random.Random(seed), _WORLD[0]
    cut = draw.random() < 0.5
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world.cut if cut else world.finished, folder)
    damaged = draw.choice(sorted(path for path in folder.rglob("*") if path.is_file()))
    before = damaged.read_bytes()
    after = mutate.content(draw, before)
    damaged.write_bytes(after)
    command = "train" if cut else draw.choice(["verify", "verify", "report", "card", "train"])
    words = {
        "train": ["train", str(world.recipe), "--out", str(folder), "--resume", "--json"],
        "verify": ["verify", str(folder)],
        "report": ["report", str(folder)],
        "card": ["card", str(folder)],
    }[command]
    what = f"{command} after {damaged.relative_to(folder)} was damaged, seed {seed}"
    with mock.patch.object(report, "write", _WRITE if command == "report" else report.write):
        outcome = tried(lambda: main(words))
    tally.add(outcome, what)
    if outcome != "exit 0" or before == after:
        return
    try:
        steps = {entry.get("step") for entry in read_ledger(folder / "ledger.jsonl")[1]}
    except SordinoError:
        steps = set()
    if not set(range(STEPS)) <= steps:
        tally.left_behind.append(f"{what}: accepted, and its ledger lacks steps")
    if command == "verify" and damaged.name in ("ledger.jsonl", "model.safetensors", "result.json"):
        tally.left_behind.append(f"{what}: called genuine")
