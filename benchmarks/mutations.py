"""Is damage of single bytes detected? Changes every file of a run in thousands of ways.

    python benchmarks/mutations.py                  2,000 changes of each file
    python benchmarks/mutations.py --each 100       fewer

A change is a flipped bit, a replaced, removed or inserted byte, sixteen zeroed bytes, a truncated file, or two
exchanged lines, at positions spread over the whole file. Files of a finished run are tested with `sordino.runs.verify`;
the ledger and the checkpoint of a killed run are tested by resuming it. A change is

    noticed     an error names it
    harmless    the values that are read are the same (a space in JSON, the last newline), and no release is lost
    UNNOTICED   anything else

Exits with 1 if a change is unnoticed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sordino.errors import SordinoError
from sordino.plan import Plan
from sordino.release import Ledger, read_ledger
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.runs.verify import QUICK, verify
from sordino.training import Settings, train
from sordino.training.state import TrainState

RECIPE: dict[str, dict[str, Any]] = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5},
    "sampling": {"expected_batch": 40},
    "train": {"steps": 5, "lr": 0.5},
}
FINISHED = ("ledger.jsonl", "result.json", "model.safetensors", "recipe.toml", "metrics.jsonl", "report.html")
Judge = Callable[[bytes], str]


class _Killed(BaseException):
    pass


def changes(content: bytes, each: int, chance: random.Random) -> Iterator[bytes]:
    """`each` changed versions of the content, with changes spread over all of it."""
    for number in range(each):
        at = min(len(content) - 1, int((number + chance.random()) * len(content) / each))
        head, byte, tail = content[:at], content[at], content[at + 1 :]
        lines = content.splitlines(keepends=True)
        kinds = [
            head + bytes([byte ^ (1 << chance.randrange(8))]) + tail,
            head + bytes([chance.randrange(256)]) + tail,
            head + tail,
            head + bytes([chance.randrange(256), byte]) + tail,
            head + bytes(min(16, len(content) - at)) + content[at + 16 :],
            head,
        ]
        if len(lines) > 2:
            one, other = chance.sample(range(len(lines)), 2)
            lines[one], lines[other] = lines[other], lines[one]
            kinds.append(b"".join(lines))
        changed = kinds[number % len(kinds)]
        if changed != content:
            yield changed


def finished_judge(folder: Path, name: str) -> Judge:
    """Whether `verify` detects the change; the checks without an accountant come first."""
    path, whole = folder / name, (folder / name).read_bytes()
    quick = ("result", "report") if name == "report.html" else QUICK
    read: dict[str, Callable[[bytes], Any]] = {
        ".json": json.loads,
        ".toml": lambda content: tomllib.loads(content.decode()),
    }

    def judge(changed: bytes) -> str:
        path.write_bytes(changed)
        try:
            if not verify(folder, only=quick).genuine or not verify(folder).genuine:
                return "noticed"
            if name == "ledger.jsonl":
                return "harmless" if len(read_ledger(path)[1]) == RECIPE["train"]["steps"] else "UNNOTICED"
            same = path.suffix in read and read[path.suffix](changed) == read[path.suffix](whole)
            return "harmless" if same else "UNNOTICED"
        finally:
            path.write_bytes(whole)

    return judge


def killed_run(folder: Path) -> Plan:
    """A run that was killed at its eighth step, with a checkpoint after the sixth."""
    plan = Plan.dpsgd(noise_multiplier=3.0, delta=1e-5, records=100, expected_batch=20, steps=9)
    settings = Settings(eval_every=8, checkpoint_every=6, progress=False)

    def killed(row: object) -> None:
        raise _Killed

    try:
        data = torch.randn(100, 4), torch.arange(100) % 2
        loss = nn.functional.cross_entropy
        train(nn.Linear(4, 2), loss, data, plan, lr=0.5, settings=settings, callbacks=[killed], out=folder)
    except _Killed:
        pass
    return plan


def ledger_judge(folder: Path, plan: Plan) -> Judge:
    """How a resumed run treats the ledger. Truncation after the checkpoint looks like a kill and counts as harmless."""
    path, whole = folder / "ledger.jsonl", (folder / "ledger.jsonl").read_bytes()
    saved = _newest(folder)
    releases = len(read_ledger(path)[1])

    def judge(changed: bytes) -> str:
        path.write_bytes(changed)
        try:
            with Ledger.open(path, plan.to_dict()) as ledger:
                assert saved.ledger is not None
                ledger.require_reached(saved.ledger, "the checkpoint")
                as_killed = whole.startswith(changed) and len(ledger.entries) >= saved.ledger.entries
                return "harmless" if len(ledger.entries) == releases or as_killed else "UNNOTICED"
        except SordinoError:
            return "noticed"
        finally:
            path.write_bytes(whole)

    return judge


def checkpoint_judge(folder: Path) -> Judge:
    """Whether a damaged checkpoint is refused."""
    path = max((folder / "checkpoint").glob("step-*"))
    whole, fingerprint = path.read_bytes(), _fingerprint(path)

    def judge(changed: bytes) -> str:
        path.write_bytes(changed)
        try:
            TrainState.load(path.parent, fingerprint)
        except SordinoError:
            return "noticed"
        finally:
            path.write_bytes(whole)
        return "UNNOTICED"

    return judge


def sweep(each: int, seed: int = 0) -> Iterator[tuple[str, Counter[str]]]:
    """For each file the numbers of changes that were noticed, harmless and unnoticed."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        run_recipe(Recipe.from_dict(RECIPE), folder / "run", progress=False)
        plan = killed_run(folder / "killed")
        judges = {name: (folder / "run" / name, finished_judge(folder / "run", name)) for name in FINISHED}
        judges["resumed ledger"] = folder / "killed" / "ledger.jsonl", ledger_judge(folder / "killed", plan)
        checkpoint = max((folder / "killed" / "checkpoint").glob("step-*"))
        judges["checkpoint"] = checkpoint, checkpoint_judge(folder / "killed")
        for what, (path, judge) in judges.items():
            chance = random.Random(f"{seed} {what}")
            yield what, Counter(judge(changed) for changed in changes(path.read_bytes(), each, chance))


def _newest(folder: Path) -> TrainState:
    path = max((folder / "checkpoint").glob("step-*"))
    state = TrainState.load(path.parent, _fingerprint(path))
    assert state is not None
    return state


def _fingerprint(path: Path) -> str:
    from sordino.training.sealed import read_sealed

    return str(read_sealed(path)[1]["fingerprint"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=2000, help="changes of each file")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    unnoticed = 0
    print("| file | changes | noticed | harmless | unnoticed |\n|---|---|---|---|---|", flush=True)
    for name, counts in sweep(arguments.each, arguments.seed):
        row = (counts.total(), counts["noticed"], counts["harmless"], counts["UNNOTICED"])
        print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)
        unnoticed += counts["UNNOTICED"]
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
