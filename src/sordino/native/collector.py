"""Python's collector of cyclic garbage, held off while a sum is computed.

A pass over a large model makes some ten thousand tuples, labels and closures that live until its end. The collector
counts what is alive, so it runs dozens of times in a pass and finds nothing; after the pass they are gone without it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside this context the collector does not run by itself; afterwards it does if it did before."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def collect_young() -> None:
    """Between two chunks: collects what the collector would have collected by now, so that cycles of a user's model
    (which may hold activations) do not pile up."""
    if gc.get_count()[0] > gc.get_threshold()[0] > 0:
        gc.collect(1)
