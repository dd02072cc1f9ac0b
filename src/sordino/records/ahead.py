"""Reads the rows of the next chunk in a thread while the current chunk is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from sordino.gradients import ClippedSum, Rows
from sordino.records.reading import RowReader

_MOST = 3  # chunks being read or waiting: the current one, the one after it, the first of the next batch


class ReadingAhead:
    """Wraps a reader of rows: `start` reads rows in a thread before they are requested. The rows are the same.

    It holds the next chunk of this batch and the first chunk of the next batch. The thread ends with the process.
    """

    def __init__(self, fetch: RowReader) -> None:
        self._fetch = fetch
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: list[tuple[Tensor, int, Future[Rows]]] = []

    def start(self, indices: Tensor, step: int) -> None:
        """Starts to read these records' rows."""
        if self._place(indices, step) is not None:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="sordino-reading")
        self._waiting.append((indices, step, self._pool.submit(self._fetch, indices, step)))
        for _, _, late in self._waiting[:-_MOST]:  # never requested
            late.cancel()
        del self._waiting[:-_MOST]

    def __call__(self, indices: Tensor, step: int = 0) -> Rows:
        place = self._place(indices, step)
        return self._fetch(indices, step) if place is None else self._waiting.pop(place)[2].result()

    def _place(self, indices: Tensor, step: int) -> int | None:
        found = (k for k, (known, at, _) in enumerate(self._waiting) if at == step and torch.equal(known, indices))
        return next(found, None)


class Part:
    """One chunk of a batch: its records, and the function that sums them."""

    def __init__(self, indices: Tensor, make: Callable[[], ClippedSum]) -> None:
        self.indices, self._make = indices, make

    def __call__(self) -> ClippedSum:
        return self._make()


def one_ahead(
    parts: Sequence[Callable[[], ClippedSum]], start: Callable[[Tensor], None] | None
) -> Iterator[Callable[[], ClippedSum]]:
    """Yields the parts in order. Before it yields one, it starts to read the rows of the next one."""
    for number, part in enumerate(parts):
        after = parts[number + 1] if number + 1 < len(parts) else None
        if start is not None and isinstance(after, Part):
            start(after.indices)
        yield part
