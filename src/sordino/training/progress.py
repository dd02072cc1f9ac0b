"""Progress on a terminal, by rich; silence elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sordino.shown import up


@contextmanager
def working(what: str, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """A line that says what is being done, for work without steps to count; call what it gives to say more."""
    console = Console(stderr=True)
    if console.is_terminal if shown is None else shown:
        with console.status(what) as status:
            yield lambda more: status.update(f"{what}: {more}")
    else:
        yield lambda more: None


class ProgressBar:
    """A bar over the steps with the latest metrics beside it. `shown=None`: only on a terminal."""

    def __init__(self, steps: int, done: int = 0, shown: bool | None = None, label: str = "training") -> None:
        console = Console(stderr=True)
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

    def advance(self, done: int, latest: Mapping[str, float] | None = None) -> None:
        self._bar.update(self._task, completed=done, latest=_brief(latest) if latest else "")

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
