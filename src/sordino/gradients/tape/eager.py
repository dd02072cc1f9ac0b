"""Functions under torch.compile run as they are written during a pass.

Dynamo would trace through the mode that records the operations, and what it compiles hides them: in an early engine the
sums of parameters inside were zero. Run as written, a function's operations are seen one by one, with the same values.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from sordino.errors import Refused


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Inside this context nothing is compiled. Raises Refused if the model compiled its very first function there."""
    if "torch._dynamo" in sys.modules:  # it takes seconds to load, and without it nothing is compiled
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.utils.counters["frames"]["total"]:
        raise Refused(
            "the model calls torch.compile in its forward pass, which hides operations from sordino; compile the "
            "function before training, or leave it as it is"
        )
