"""Run directories made to do harm: a value of a file is another, and every hash and checksum is made anew.

Damage (runs.py) is mostly stopped by a checksum. Whoever writes the directory also writes the checksums, so here the
readers behind them are tried: `verify`, `report`, `card`, `predict`. Nothing may be a traceback, and nothing may be
written outside of the directory and the file of the predictions.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tomli_w

from faulty import mutate, runs
from faulty.outcome import Tally, tried
from sordino import report
from sordino.cli import main
from sordino.errors import SordinoError
from sordino.release.ledger import read_chain
from sordino.release.ledger_lines import encode
from sordino.release.ledger_lines import sealed as sealed_line
from sordino.runs.closing import result_digest
from sordino.training.sealed import read_sealed, sealed

_WRITE = report.write
FILES = ("model.safetensors", "model.safetensors", "ledger.jsonl", "result.json", "recipe.toml", "metrics.jsonl")


def changed(draw: random.Random, value: Any) -> Any:
    """The value with one of its parts, however deep, replaced or removed."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        key = draw.choice(sorted(value))
        if draw.random() < 0.1:
            return {name: part for name, part in value.items() if name != key}
        return {**value, key: changed(draw, value[key])}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        return [*value[:at], changed(draw, value[at]), *value[at + 1 :]]
    return mutate.value(draw, value)


def fuzz(seed: int, tally: Tally, folder: Path) -> None:
    """One changed value, one command."""
    draw, world = random.Random(seed), runs._WORLD[0]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(world.finished, folder / "run")
    name = draw.choice(FILES)
    try:
        forge(draw, folder / "run", name)
    except (SordinoError, ValueError, TypeError, AttributeError, OverflowError):  # JSON or TOML can't hold it
        return tally.add("not writable", name)
    np.savez(folder / "rows.npz", inputs=np.zeros((2, 1, 28, 28), np.float32))
    command = draw.choice(["verify", "report", "card", "predict", "predict"])
    further = ["--data", str(folder / "rows.npz"), "--out", str(folder / "out.csv")] if command == "predict" else []
    with mock.patch.object(report, "write", _WRITE):
        outcome = tried(lambda: main([command, str(folder / "run"), *further]))
    what = f"{command} after {name} was changed, seed {seed}"
    tally.add(outcome, what)
    if {path.name for path in folder.iterdir()} - {"run", "rows.npz", "out.csv"}:
        tally.left_behind.append(f"{what}: something was written outside of the run")


def forge(draw: random.Random, run: Path, name: str) -> None:
    """Changes one value of the file and makes everything agree with it."""
    result = json.loads((run / "result.json").read_text(encoding="utf8"))
    tensors, about = read_sealed(run / "model.safetensors")
    if name == "ledger.jsonl":
        lines = [json.loads(line) for line in (run / name).read_text(encoding="utf8").splitlines()]
        at = draw.choice([0, 0, draw.randrange(len(lines))])
        lines[at] = changed(draw, lines[at])
        content, before = b"", b""
        for line in lines:
            made, before = sealed_line(encode({k: v for k, v in line.items() if k != "hash"}, "a line"), before)
            content += made
        (run / name).write_bytes(content)
        head = read_chain(run / name).head
        result["ledger"] = {**result["ledger"], **head.to_dict()}
        about["ledger"] = head.to_dict()
    elif name == "recipe.toml":
        document = changed(draw, tomllib.loads((run / name).read_text(encoding="utf8")))
        (run / name).write_text(tomli_w.dumps(document), encoding="utf8")
    elif name == "metrics.jsonl":
        rows = [json.loads(line) for line in (run / name).read_text(encoding="utf8").splitlines()]
        (run / name).write_text("".join(json.dumps(changed(draw, row)) + "\n" for row in rows), encoding="utf8")
    elif name == "result.json":
        result = changed(draw, result)
    else:
        about = changed(draw, about)
    if isinstance(result.get("files"), dict):
        for listed in result["files"]:
            if (run / Path(listed).name).is_file():
                result["files"][listed] = hashlib.sha256((run / Path(listed).name).read_bytes()).hexdigest()
    about["result"] = result_digest(result)
    content = sealed(tensors, {key: value for key, value in about.items() if key != "format"})
    (run / "model.safetensors").write_bytes(content)
    if isinstance(result.get("files"), dict):
        result["files"]["model.safetensors"] = hashlib.sha256(content).hexdigest()
    (run / "result.json").write_text(json.dumps(result, indent=2), encoding="utf8")
