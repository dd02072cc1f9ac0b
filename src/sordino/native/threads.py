"""Pieces of one job in several threads, none of which outlives the call."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence

import torch


def workers(pieces: int) -> int:
    """How many threads share so many pieces of work: as many as torch uses in this one, and no more than pieces."""
    return max(1, min(torch.get_num_threads(), pieces))


def share(make: Callable[[], Callable[[int], None]], pieces: int) -> None:
    """work(0), …, work(pieces − 1), each once, in `workers(pieces)` threads, this one among them.

    `work` is what `make` returns; it is called once in each thread, so that each has buffers of its own. A thread takes
    the next piece when it is done with one: a slow core delays the others by one piece at most. An exception, also a
    keyboard interrupt, keeps the threads from taking further pieces, and is raised here once all of them have ended.
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
    except BaseException as failure:  # an interrupt between two calls, or no more threads to be had
        failures.append(failure)
        stop.set()
    _join(helpers, stop, failures)
    if failures:
        raise failures[0]


def _join(threads: Sequence[threading.Thread], stop: threading.Event, failures: list[BaseException]) -> None:
    """Wait until all have ended, also if the waiting is interrupted."""
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as failure:
                failures.append(failure)
                stop.set()
