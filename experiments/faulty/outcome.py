"""Runs a command on one input, with limits on time and memory, and classifies how it ends."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

GIGABYTES = 12
SECONDS = 4


class TooSlow(BaseException):
    """The input needs more time than the fuzzer allows; this is not a fault of the program."""


@dataclass
class Tally:
    """The outcomes of the inputs of one kind. `uncaught`: where tracebacks occurred, and inputs that cause them."""

    tried: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    uncaught: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)

    def add(self, outcome: str, given: str) -> None:
        self.tried += 1
        kind, _, place = outcome.partition(" at ")
        self.outcomes[kind.partition(":")[0]] += 1
        if kind.startswith("uncaught"):
            found = self.uncaught.setdefault(f"{kind} at {place}", {"count": 0, "example": given[:2000]})
            found["count"] += 1

    def document(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "outcomes": dict(self.outcomes),
            "uncaught": sum(one["count"] for one in self.uncaught.values()),
            "places": self.uncaught,
            "left_behind": self.left_behind,
        }


def limit_memory(gigabytes: int = GIGABYTES) -> None:
    """Limits the memory, so that a model of a billion units raises MemoryError and the kernel kills no process."""
    resource.setrlimit(resource.RLIMIT_AS, (gigabytes << 30, gigabytes << 30))


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooSlow

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # processor time, independent of other load on the machine
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def tried(function: Callable[[], int], seconds: int = SECONDS) -> str:
    """How a call of the command line ends: `exit N`, `slow`, or `uncaught: kind at file:line`."""
    os.environ["SORDINO_TRACEBACK"] = "1"
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stderr(quiet), contextlib.redirect_stdout(quiet), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _time_limit(seconds):
                code = function()
        return f"exit {code}"
    except TooSlow:
        return "slow"
    except SystemExit as error:  # argparse
        return f"exit {error.code}"
    except BaseException as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "sordino" in Path(f.filename).parts]
        last = frames[-1]
        return f"uncaught: {type(error).__name__} at {'/'.join(Path(last.filename).parts[-2:])}:{last.lineno}"
