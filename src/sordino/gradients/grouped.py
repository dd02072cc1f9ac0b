"""Grouped products: rows sorted by expert, each part times the weights of its own expert (mixtures of experts).

The product is split into one product for each expert, handled by the rules for linear maps. Unlike torch's own kernel,
this also runs in double precision.
"""

from __future__ import annotations

from typing import Any

import torch

from sordino.gradients.tape import Tape


def grouped_mm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """F.grouped_mm(x (S, d_in), weights (experts, d_in, d_out), offs=the end of each expert's part of x)."""
    call = {**dict(zip(("mat_a", "mat_b"), args, strict=False)), **kwargs}
    x, ends = call.pop("mat_a"), call.pop("offs", None)
    weights = call.pop("weight") if "weight" in call else call.pop("mat_b")
    if any(option is not None for option in call.values()) or tape.slot(x) is not None:
        return NotImplemented
    if ends is None or x.ndim != 2 or weights.ndim != 3:
        return NotImplemented
    with tape:
        parts, start = [], 0
        for expert, end in enumerate(ends.tolist()):
            parts.append(torch.matmul(x[start:end], weights[expert]))
            start = end
        if start < len(x):  # rows that belong to no expert
            parts.append(x.new_zeros(len(x) - start, weights.shape[2]))
        return torch.cat(parts)
