"""Whether the sampling noise of a record repeats over the iterations: Xiao et al. 2023, Fig. 5a.

With ξ_l^(i) = ∇f(w_l, record i) − ∇F(w_l), the average over records of ‖(1/K₀) Σ_{l=k}^{k+K₀−1} ξ_l^(i)‖: if the noise
of different iterations were independent it would fall as 1/√K₀; if it were the same in all of them it would stay
constant. Per-record momentum reduces clipping bias only as far as it falls (Thm 4.1).

Exact, on few records: their gradients are computed one by one and kept for K₀ iterations (records × K₀ × parameters
numbers); ∇F is the mean over all rows. The average is over those few records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sordino.diagnostics.instruments.reading import UNCLIPPED, all_rows, flat, mean_gradient, whose
from sordino.errors import InputError
from sordino.gradients import clipped_sum
from sordino.records.companions import with_companions
from sordino.records.reading import count_records, row_reader


def noise_vectors(
    model: nn.Module,
    loss: Callable[..., Tensor],
    rows: Any,
    records: int,
    *,
    public: str | None = None,
    not_private: bool = False,
    seed: int = 0,
) -> Tensor:
    """The sampling noise ξ^(i) of single rows at the model's weights.

    Args:
        model: The model.
        loss: A loss of outputs and targets, one number per row.
        rows: A dataset as for `train`; ∇F is the mean over all of its rows.
        records: The number of rows, from the first, whose noise is returned.
        public: Where the rows come from, if they are public.
        not_private: Measure although the rows are not declared public.
        seed: The seed of dropout.

    Returns:
        (records, parameters), in double precision.

    Raises:
        InputError: `records` is out of its range, or not exactly one of `public` and `not_private` is given.
    """
    whose(public, not_private)
    if not 1 <= records <= count_records(rows):
        raise InputError(f"records = {records} must lie between 1 and the {count_records(rows)} rows")
    mean = mean_gradient(model, loss, all_rows(rows), UNCLIPPED, seed).mean
    fetch = row_reader(rows)
    singles = []
    for i in range(records):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            row = with_companions(fetch(torch.tensor([i])), model, seed=seed, step=0)
            singles.append(flat(clipped_sum(model, loss, row, UNCLIPPED).sums))
    return torch.stack(singles) - mean


def windowed_noise(vectors: Sequence[Tensor], length: int) -> float:
    """The mean over records of the norm of the average of the last `length` noise vectors.

    Args:
        vectors: What `noise_vectors` returned, one tensor for each iteration.
        length: The number of iterations that are averaged.

    Returns:
        The mean norm.

    Raises:
        InputError: there are fewer iterations than `length`.
    """
    if not 1 <= length <= len(vectors):
        raise InputError(f"a window of {length} needs that many iterations; there are {len(vectors)}")
    total = torch.zeros_like(vectors[-1])
    for vector in vectors[len(vectors) - length :]:
        total = total + vector
    return float((total / length).norm(dim=1).mean())
