"""Progress on standard error: a bar on a terminal, by rich; lines elsewhere (a log file, a batch system).

`shown`: None chooses by the terminal; True shows a bar; False nothing. A line is written with each evaluation, and
otherwise at most every half minute, so a short run prints only its header.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sordino.shown import up


@contextmanager
def working(what: str, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Shows what is being done, for work without steps to count; yields a function that changes the text."""
    console = Console(stderr=True)
    if console.is_terminal if shown is None else shown:
        with console.status(what) as status:
            yield lambda more: status.update(f"{what}: {more}")
    else:
        yield lambda more: None


EVERY = 30.0
"""Seconds between two lines, if there is no terminal."""


def say(text: str, shown: bool | None = None) -> None:
    """Prints a line on standard error, unless `shown` is False."""
    if text and shown is not False:
        print(text, file=sys.stderr, flush=True)


def tell_owner(text: str, private: str) -> None:
    """Prints a warning on standard error; on a terminal also `private`, which only the data's owner may see."""
    more = f" (for the data's owner only: {private})" if sys.stderr.isatty() else ""
    print(f"{text}{more}", file=sys.stderr, flush=True)


def remaining(seconds: float) -> str:
    """A duration in words; it is expected, so it has one or two digits."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"


def tell_not_finite(rows: int) -> None:
    """Warns, before anything is spent, that rows with values that are not finite will be left out."""
    if rows:
        tell_owner(
            "some rows have values that are NaN or infinite: they will contribute nothing. Nothing has been spent yet: "
            "stop now to repair them, or train without them (not_private.json will have their number)",
            f"{rows} row{'s' * (rows > 1)}",
        )


class ProgressBar:
    """A progress bar with the latest metrics; lines if there is no terminal (`shown=None`)."""

    def __init__(self, steps: int, done: int = 0, shown: bool | None = None, label: str = "training") -> None:
        console = Console(stderr=True)
        self._lines = shown is None and not console.is_terminal
        self._steps, self._first, self._label = steps, done, label
        self._started = self._said = time.monotonic()
        self._told: Mapping[str, float] | None = None
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[latest]}"),
            console=console,
            disable=not (console.is_terminal if shown is None else shown),
        )
        self._task = self._bar.add_task(label, total=steps, completed=done, latest="")

    def advance(self, done: int, latest: Mapping[str, float] | None = None, *, last: bool = False) -> None:
        self._bar.update(self._task, completed=done, latest=_brief(latest) if latest else "")
        if self._lines:
            self._line(done, latest, last)

    def _line(self, done: int, latest: Mapping[str, float] | None, last: bool) -> None:
        now = time.monotonic()
        new = latest is not None and latest is not self._told and latest.get("step") == done
        if not (new or last or now - self._said >= EVERY):
            return
        self._said, self._told = now, latest
        seconds = (now - self._started) / max(1, done - self._first) * (self._steps - done)
        left = "" if last or done >= self._steps else f", {remaining(seconds)} left"
        brief = _brief(latest) if new and latest is not None else ""
        said = f"{self._label}: {done} of {self._steps}{', ' if brief else ''}{brief}{left}"
        say(said + (", stopped early" if last else ""))

    def __enter__(self) -> ProgressBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def _brief(latest: Mapping[str, float]) -> str:
    parts = []
    if "epsilon" in latest:
        parts.append(f"ε {up(latest['epsilon'], 3)}")
    if "test_accuracy" in latest:
        parts.append(f"test accuracy {latest['test_accuracy']:.1%}")
    return ", ".join(parts)
