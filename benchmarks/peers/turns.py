"""Engines that take turns: each runs in its own process, all processes exist at once, and only one works at a time.

The speed of a shared machine changes within seconds, by more than the differences that are to be measured. Engines that
are measured one after the other see different speeds; engines that take turns of a tenth of a second see the same, and
ratios are taken turn by turn.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class Failed(Exception):
    """A process that crashed or did not answer in time; `outcome` goes into the results."""

    def __init__(self, status: str, error: str) -> None:
        super().__init__(error)
        self.outcome = {"status": status, "error": error}


class Child:
    """A process of engine.py that answers each line that it receives with one line of JSON."""

    def __init__(self, job: Mapping[str, Any], threads: int, timeout: float) -> None:
        script, count = Path(__file__).resolve().parents[1] / "engine.py", str(threads)
        self.deadline, self._allowed = time.monotonic() + timeout, timeout
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            [sys.executable, str(script), "--child", json.dumps(job), "--threads", count],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count},
        )

    def answer(self) -> dict[str, Any]:
        """The next line; raises Failed if the process or its time ends before."""
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], max(0.0, self.deadline - time.monotonic()))
        if not ready:
            raise Failed("timeout", f"not done after {self._allowed:g} s")
        line = stdout.readline()
        if not line:
            code = self._process.wait()
            self._said.seek(0)
            said = self._said.read().decode(errors="replace").strip().splitlines() or [f"exit code {code}"]
            raise Failed("error", said[-1][:300])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self) -> dict[str, Any]:
        """Requests one more turn."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it crashed: `answer` reports how
        return self.answer()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._said.close()


@dataclass
class Taken:
    """The measurements of one engine so far."""

    budget: float
    least: int
    turns: list[dict[str, Any]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    extra_bytes: int = 0
    first_seconds: float = 0.0

    @property
    def done(self) -> bool:
        return len(self.seconds) >= self.least and sum(self.seconds) >= self.budget

    def add(self, cycle: int, answer: Mapping[str, Any]) -> None:
        self.seconds += answer["seconds"]
        self.cpu_seconds += answer["cpu_seconds"]
        self.extra_bytes = answer["extra_bytes"]
        medians = {clock: statistics.median(answer[clock]) for clock in ("seconds", "cpu_seconds")}
        self.turns.append({"cycle": cycle, **medians, "phases": answer["phases"]})

    def outcome(self) -> dict[str, Any]:
        names = self.turns[0]["phases"]
        return {
            "status": "ok",
            "seconds": statistics.median(self.seconds),
            "seconds_quartiles": [round(q, 7) for q in _quartiles(self.seconds)],
            "cpu_seconds": statistics.median(self.cpu_seconds),
            "first_seconds": self.first_seconds,
            "steps": len(self.seconds),
            "extra_bytes": self.extra_bytes,
            "phases": {name: statistics.median(t["phases"][name] for t in self.turns) for name in names},
            "turns": [[t["cycle"], round(t["seconds"], 7), round(t["cpu_seconds"], 7)] for t in self.turns],
        }


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4)
    return low, high


def interleaved(
    jobs: Mapping[str, Mapping[str, Any]], amounts: Mapping[str, tuple[float, int]], threads: int, timeout: float
) -> dict[str, dict[str, Any]]:
    """The outcome of each engine. jobs: the task of its process. amounts: (seconds of steps, least number of steps).

    In each cycle all engines that are not done take a turn; plain PyTorch continues until the last one is done, so that
    each turn has a neighbouring turn of plain.
    """
    taken = {engine: Taken(*amounts[engine]) for engine in jobs}
    failed: dict[str, dict[str, Any]] = {}
    children: dict[str, Child] = {}
    try:
        for engine, job in jobs.items():  # one after the other, so that only one process warms up at a time
            children[engine] = Child(job, threads, timeout)
            ready = _attempt(engine, children, failed)
            taken[engine].first_seconds = 0.0 if ready is None else ready["first_seconds"]
        cycle = 0
        while any(not taken[e].done for e in children):
            for engine in [e for e in children if e == "plain" or not taken[e].done]:
                answer = _attempt(engine, children, failed, ask=True)
                if answer is not None:
                    taken[engine].add(cycle, answer)
            cycle += 1
    finally:
        for child in children.values():
            child.close()
    return {e: failed[e] if e in failed else taken[e].outcome() for e in jobs}


def _attempt(
    engine: str, children: dict[str, Child], failed: dict[str, dict[str, Any]], ask: bool = False
) -> dict[str, Any] | None:
    """The answer of the engine's process; after a failure None, and the process is removed."""
    child = children[engine]
    try:
        return child.ask() if ask else child.answer()
    except Failed as failure:
        failed[engine] = failure.outcome
        children.pop(engine).close()
        return None
