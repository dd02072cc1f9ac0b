"""SIGTERM and SIGINT end a run after the current step, whose update is saved: no release is lost."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stopping:
    """Inside the block, the first signal is stored in `signal`; a second one ends the process as usual.

    Handlers can be set in the main thread only: elsewhere nothing is changed.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stopping:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            self.end(number)
        self.signal = number

    def end(self, number: int) -> None:
        """Raises what the signal would have raised: KeyboardInterrupt, or for SIGTERM an exit with 128 + 15."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
