"""Norms and sums of many small gradients (biases, scales) in one call of the compiled loops.

A network has hundreds of them, and for a few thousand numbers the calls take longer than the sums.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from sordino.gradients.sums.contributions import Contribution, Dense
from sordino.gradients.sums.memory import by_record
from sordino.native.kernels import compiled, readable

LARGEST = 1 << 18  # numbers of all records


def small(gradients: Mapping[str, Contribution], measured: bool = True) -> dict[str, Tensor]:
    """Those that the loops can read, as (records, coordinates). measured: also those whose norms are known."""
    if compiled() is None:
        return {}
    found = {}
    for name, of in gradients.items():
        if (
            type(of) is Dense
            and (measured or not of.measured)
            and of.gradient.numel() <= LARGEST
            and of.gradient.dtype == torch.float32
        ):
            rows = by_record(of.gradient)
            if readable(rows) and rows.stride(1) == 1 and rows.numel():
                found[name] = rows
    return found


def norms_of_all(rows: Mapping[str, Tensor], records: int) -> Tensor:
    """(records,) the sum of their squared norms, each as of `memory.squares`."""
    kernels, out = compiled(), torch.empty(records, dtype=torch.float64)
    assert kernels is not None
    arrays = [number for t in rows.values() for number in (t.data_ptr(), t.shape[1], t.stride(0), 0)]
    kernels.squares_of_all(arrays, records, out.data_ptr())
    return out


def sums_of_all(rows: Mapping[str, Tensor], weight: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Σ_i weight_i · g_i in the parameters' shapes, in single precision: see `narrow.narrow_sum`."""
    if not rows:
        return {}
    kernels, weight = compiled(), weight.double().contiguous()
    assert kernels is not None
    out = {name: torch.empty(parameters[name].shape, dtype=torch.float32) for name in rows}
    pairs = [(t, out[name].data_ptr()) for name, t in rows.items()]
    arrays = [number for t, to in pairs for number in (t.data_ptr(), t.shape[1], t.stride(0), to)]
    kernels.gathered_all(arrays, weight.shape[0], weight.data_ptr())
    return out
