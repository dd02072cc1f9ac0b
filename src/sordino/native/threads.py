"""Divides one job into pieces for several threads, all of which end before the call returns."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch


def workers(pieces: int) -> int:
    """The number of threads for so many pieces of work: as many as torch uses in this thread, and at most one per
    piece."""
    return max(1, min(torch.get_num_threads(), pieces))


def share(make: Callable[[], Callable[[int], None]], pieces: int) -> None:
    """work(0), …, work(pieces − 1), each once, in `workers(pieces)` threads, this one among them.

    `work` is what `make` returns; `make` is called once in each thread, so that each has its own buffers. A thread
    takes the next piece when it has finished one: a slow core delays the others by one piece at most. An exception,
    also a keyboard interrupt, stops the threads from taking further pieces and is raised here after all of them have
    ended.
    """
    count = workers(pieces)
    if count == 1:
        alone = make()
        for piece in range(pieces):
            alone(piece)
        return
    numbers, stop = itertools.count(), threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work = make()
            while not stop.is_set() and (piece := next(numbers)) < pieces:  # next() of a count is atomic
                work(piece)
        except BaseException as failure:
            failures.append(failure)
            stop.set()

    helpers = [threading.Thread(target=run, name=f"sordino-{i}") for i in range(1, count)]
    try:
        for helper in helpers:
            helper.start()
        run()
    except BaseException as failure:  # an interrupt between two calls, or no more threads available
        failures.append(failure)
        stop.set()
    _join(helpers, stop, failures)
    if failures:
        raise failures[0]


def _join(threads: Sequence[threading.Thread], stop: threading.Event, failures: list[BaseException]) -> None:
    """Wait until all have ended, even if the wait is interrupted."""
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as failure:
                failures.append(failure)
                stop.set()
