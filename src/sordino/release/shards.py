"""Noise for a part of a vector, where a model's parameters are divided over processes.

Formal guarantee: that of `door.release`, for all processes together. Coordinate i of the whole vector gets the noise
that one process would give it, from the same stream, whose keys the leader hands out once the ledger's entry is on
disk. A process that has not got them has added no noise, and has nothing to return.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino.errors import Refused, SordinoError
from sordino.native.boxmuller import BLOCK
from sordino.randomness import RandomSource, Stream
from sordino.release import door
from sordino.release.door import Entry, Gaussian, Noise
from sordino.release.ledger import Ledger


@dataclass(frozen=True)
class Shard:
    """A part of a vector that several processes release together: this process's coordinates, and how they agree.

    Args:
        begins: The first coordinate of each value in the whole vector; the value's own coordinates follow one another.
        coordinates: Of the whole vector.
        agree: Takes what this process refuses, if anything; raises at every process where one refuses.
        from_leader: What the leader's function returns, at every process; raises at every process where it raises.
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
    """`release` of a vector of which each process holds a part: together exactly what one process would return.

    The leader, which has the ledger, writes the entry and passes on the keys of this one release's noise once it is on
    disk; every process draws the noise of its own coordinates. Nobody but the leader's `source` is used.
    """
    error = None
    try:
        if not isinstance(noise, Gaussian):
            raise Refused("the noise of a sharded model is Gaussian: train with Laplace noise in one process")
        door._check_request(noise, noise.norm, entry)
        kinds = {value.dtype for value in values.values()}
        lattice = door.choose_lattice(noise, sensitivity, shard.coordinates)
        here = {name: value for name, value in values.items() if value.numel()}
        if here:
            door._check_values(here, kinds)
            door._check_range(here, dtype, door._parts(here, torch.float64)[0], lattice, entry, 0.0, factor)
    except SordinoError as found:
        error = found
    shard.agree(error)

    def recorded() -> tuple[bytes, bytes]:
        assert ledger is not None, "the leader has the ledger"
        ledger.record(door.line_of(noise, sensitivity, entry, source, shard.coordinates))
        return source.stream(f"release/{entry.purpose}{door.salt(source)}", entry.step).keys

    stream = Stream(*shard.from_leader(recorded))
    result = {name: torch.empty(value.shape, dtype=dtype or value.dtype) for name, value in values.items()}
    for start, size, own in _runs(shard, values):
        flat, out = torch.zeros(size, dtype=torch.float64), torch.empty(size, dtype=dtype or torch.float64)
        for name, first, last in own:
            at = shard.begins[name] - start
            flat[at + first : at + last] = values[name].reshape(-1)[first:last]
        stream.skip_to(start)
        stream.rounded_sum_of(door._vectors([flat]), door._vectors([out]), lattice.scale, lattice.spacing, factor)
        for name, first, last in own:
            at = shard.begins[name] - start
            result[name].view(-1)[first:last] = out[at + first : at + last]
    return {name: value.to(values[name].device) for name, value in result.items()}


_RUN = 16  # blocks of noise that are drawn at a time


def _runs(shard: Shard, values: Mapping[str, Tensor]) -> list[tuple[int, int, list[tuple[str, int, int]]]]:
    """The blocks of noise that meet coordinates of this process: (first coordinate, how many, own parts in it).

    An own part is a value's name and which of its coordinates lie there.
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
