"""The whole command on other records, with the same releases: nothing that leaves it differs, but for times and names.

What a run publishes is a function of its releases and of public values. So the releases of one run are put in the place
of another's, whose records are all different, and every file and every line of both is compared.
"""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from sordino.audit.tap import Call, watched
from sordino.cli import main

RECIPE = """
[run]
name = "leaks"
[data]
name = "csv"
records = 300
path = "records.csv"
test_path = "test.csv"
target = "ill"
classes = ["no", "yes"]
[data.columns]
age = {kind = "number", low = 0, high = 100}
sex = {kind = "category", values = ["f", "m"]}
note = {kind = "text", buckets = 16}
[privacy]
noise_multiplier = 2.0
delta = 1e-5
insecure_seed = 7
norm_histogram = 4.0
[model]
name = "mlp"
hidden = [8]
[sampling]
expected_batch = 60
[train]
steps = 4
lr = 0.1
"""
TIMES = re.compile(r'"?(seconds|finished|time)"?:? +\S+.*|[0-9.]+ s(?=<)|[0-9-]{10}T[0-9:]{8}Z')
HASHES = re.compile(r"[0-9a-f]{32,}")
"""Digests of files that hold a time, and the random names of a ledger."""


def table(path: Path, seed: int, rows: int) -> None:
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["age", "sex", "note", "ill"])
        for _ in range(rows):
            words = [draw.choice(["fever", "cough", "x" * draw.randint(1, 30)]) for _ in range(draw.randint(1, 12))]
            writer.writerow([draw.randint(0, 100), draw.choice("fm"), " ".join(words), draw.choice(["no", "yes"])])


@contextmanager
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    table(tmp_path / "test.csv", 3, 50)
    yield tmp_path


Run = tuple[Sequence[Call], dict[str, str]]


def published(folder: Path, seed: int, forced: Sequence[Call] | None, said: Any) -> Run:
    """The releases of one run, and all that it wrote and said."""
    table(folder / "records.csv", seed, 300)
    with watched(forced) as seen:
        codes = [main(["train", "recipe.toml", "--out", "run"]), main(["card", "run"])]
    spoken = said.readouterr()
    files = {path.name: path.read_bytes() for path in sorted((folder / "run").rglob("*")) if path.is_file()}
    del files["not_private.json"]
    weights = {name: value.tolist() for name, value in sorted(load(files["model.safetensors"]).items())}
    document = {name: content.decode("latin1") for name, content in files.items()} | {"model.safetensors": str(weights)}
    shutil.rmtree(folder / "run")
    return tuple(seen.calls), document | {"codes": str(codes), "stdout": spoken.out, "stderr": spoken.err}


def plain(text: str) -> str:
    return HASHES.sub("#", TIMES.sub("", re.sub(r" *│ *| +", " ", text)))


def test_other_records_under_the_same_releases_change_nothing_that_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with place(tmp_path, monkeypatch) as folder:
        calls, first = published(folder, 1, None, capsys)
        _, second = published(folder, 2, calls, capsys)
    assert first["codes"] == "[0, 0]"
    assert set(first) == set(second) >= {"result.json", "report.html", "model.safetensors", "metrics.jsonl", "card.md"}
    for name in first:
        assert plain(first[name]) == plain(second[name]), name
    one, other = (json.loads(document["result.json"]) for document in (first, second))
    for document in (one, other):
        for key in ("seconds", "environment", "ledger", "files"):
            del document[key]
    assert one == other
