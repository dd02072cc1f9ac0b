"""Noise for a part of a vector, for models whose parameters are divided over processes.

Formal guarantee: that of `noise.release`, for all processes jointly. Coordinate i of the whole vector gets the noise
that one process would give it, from the same stream. The leader sends the keys of that stream once the ledger entry is
on disk; a process that has not received them has added no noise and returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import Refused, SordinoError
from sordino.native.boxmuller import BLOCK
from sordino.randomness import RandomSource, Stream
from sordino.release.ledger import Ledger
from sordino.release.mechanisms import Entry, Gaussian, Noise, ledger_entry, release_grid
from sordino.release.noise import salt
from sordino.release.requests import check_range, check_request, check_values, flat_parts, vectors


@dataclass(frozen=True)
class Shard:
    """This process's coordinates of a vector that several processes release together, and how the processes agree.

    Args:
        begins: The first coordinate of each value in the whole vector; the value's coordinates are contiguous.
        coordinates: The number of coordinates of the whole vector.
        agree: Called with this process's error, or None; raises in every process if one of them has an error.
        from_leader: Runs the given function in the leader and returns its result in every process; if it raises, every
            process raises.
    """

    begins: Mapping[str, int]
    coordinates: int
    agree: Callable[[SordinoError | None], None]
    from_leader: Callable[[Callable[[], tuple[bytes, bytes]]], tuple[bytes, bytes]]


def release_shard(
    values: Mapping[str, Tensor],
    shard: Shard,
    *,
    sensitivity: float,
    noise: Noise,
    source: RandomSource,
    ledger: Ledger | None,
    entry: Entry,
    factor: float = 1.0,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """`release` for a vector of which each process holds a part: jointly exactly what one process would return.

    The leader, which has the ledger, writes the entry and then sends the keys of this release's noise; every process
    draws the noise of its own coordinates. Only the leader's `source` is used.

    Args:
        values: This process's part of the vector.
        shard: Where that part lies in the whole vector.
        sensitivity: The l2 sensitivity of the whole vector.
        noise: The distribution of the noise; Gaussian.
        source: Where the leader's keys come from.
        ledger: The leader's ledger; None in the other processes.
        entry: What the ledger records.
        factor: A public number that the result is multiplied by.
        dtype: The dtype of the result; None keeps that of each value.

    Returns:
        This process's part, with noise.

    Raises:
        SordinoError: a process refuses its part, or the ledger can't be written; then every process raises.
    """
    error = None
    try:
        if not isinstance(noise, Gaussian):
            raise Refused("a sharded model needs Gaussian noise: train with Laplace noise in one process")
        check_request(noise, noise.norm, entry)
        kinds = {value.dtype for value in values.values()}
        grid = release_grid(noise, sensitivity, shard.coordinates)
        here = {name: value for name, value in values.items() if value.numel()}
        if here:
            check_values(here, kinds)
            check_range(here, dtype, flat_parts(here, torch.float64)[0], grid, entry, 0.0, factor)
    except SordinoError as found:
        error = found
    shard.agree(error)

    def recorded() -> tuple[bytes, bytes]:
        assert ledger is not None, "the leader has the ledger"
        ledger.record(ledger_entry(noise, sensitivity, entry, source, shard.coordinates))
        return source.stream(f"release/{entry.purpose}{salt(source)}", entry.step).keys

    stream = Stream(*shard.from_leader(recorded))
    result = {name: torch.empty(value.shape, dtype=dtype or value.dtype) for name, value in values.items()}
    for start, size, own in _runs(shard, values):
        flat, out = torch.zeros(size, dtype=torch.float64), torch.empty(size, dtype=dtype or torch.float64)
        for name, first, last in own:
            at = shard.begins[name] - start
            flat[at + first : at + last] = values[name].reshape(-1)[first:last]
        stream.skip_to(start)
        stream.rounded_sum_of(vectors([flat]), vectors([out]), grid.scale, grid.spacing, factor)
        for name, first, last in own:
            at = shard.begins[name] - start
            result[name].view(-1)[first:last] = out[at + first : at + last]
    return {name: value.to(values[name].device) for name, value in result.items()}


_RUN = 16  # blocks of noise drawn at a time


def _runs(shard: Shard, values: Mapping[str, Tensor]) -> list[tuple[int, int, list[tuple[str, int, int]]]]:
    """The ranges of noise that cover this process's coordinates: (first coordinate, length, own parts in the range).

    An own part is the name of a value and the range of its coordinates that lie there.
    """
    touched: dict[int, list[tuple[str, int, int]]] = {}
    for name, begin in sorted(shard.begins.items(), key=lambda item: item[1]):
        end = begin + values[name].numel()
        for run in range(begin // (_RUN * BLOCK), -(-end // (_RUN * BLOCK)) if end > begin else 0):
            low, high = run * _RUN * BLOCK, (run + 1) * _RUN * BLOCK
            touched.setdefault(run, []).append((name, max(begin, low) - begin, min(end, high) - begin))
    found = []
    for _, own in sorted(touched.items()):
        first = min(shard.begins[name] + low for name, low, _ in own) // BLOCK * BLOCK
        last = max(shard.begins[name] + high for name, _, high in own)
        stop = min(-(-last // BLOCK) * BLOCK, shard.coordinates)
        found.append((first, stop - first, own))
    return found
