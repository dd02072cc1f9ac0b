"""Grouped products: rows sorted by expert, each part times the weights of its own expert (mixtures of experts).

The product is split into one product for each expert, handled by the rules for linear maps. Unlike torch's own kernel,
this also runs in double precision.
"""

from __future__ import annotations

from typing import Any

import torch

from sordino.gradients.labels.flow_layers import grouped_call
from sordino.gradients.tape.tape import Tape


def grouped_mm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """F.grouped_mm(x (S, d_in), weights (experts, d_in, d_out), offs=the end of each expert's part of x)."""
    x, weights, ends, more = grouped_call(args, kwargs)
    if more or tape.slot(x) is not None or ends is None or x.ndim != 2 or weights.ndim != 3:
        return NotImplemented
    if tape.lineage(ends) is not None and not tape.book.granted():
        tape.book.suspect()  # the numbers of other rows decide which expert's part a row is in
    with tape:
        parts, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            parts.append(torch.matmul(x[start:end], weights[expert]))
            start = end
        if start < len(x):  # rows that belong to no expert
            parts.append(x.new_zeros(len(x) - start, weights.shape[2]))
        return torch.cat(parts)
