"""Which records take part in a step: samplers as frozen values, and batches that are read in chunks.

Formal contract. Batch t is a function of (sampling, records, source, t) only: it can be drawn again, out of order, or
not at all, without changing other batches; `start` resumes at any step; leaving the loop early leaves no state behind.
With allocation the batches of an epoch are drawn together, `WINDOW` records of them at a time, in equal shares by the
steps before them: every step costs O(batch). The distributions that the accountants rely on, given an ideal generator:

| sampling             | law of batch t                                                                   |
|----------------------|----------------------------------------------------------------------------------|
| Poisson              | every record independently with probability ⌊q·2⁶⁴⌋/2⁶⁴ ≤ q; may be empty          |
| TruncatedPoisson     | the same; when more than `cap`, a uniform subset of `cap` of them                 |
| WithoutReplacement   | a uniform subset of exactly `batch` records, independent between steps            |
| Partition            | one uniform shuffle for the whole run, cut into ⌊records/batch⌋ batches, visited   |
|                      | in the same order every epoch; the remainder is never used                        |
| Allocation           | in every epoch of `batches` steps each record is in exactly one batch, uniformly   |
|                      | and independently of all other records and epochs; a batch may be empty           |
| Cyclic               | each record is in one of `batches` groups, drawn uniformly and independently of    |
|                      | the others, once for the whole run; step t draws each record of group t mod        |
|                      | `batches` independently with probability `sampling_rate`                          |

Rates, sizes and the number of records are public constants given by the caller; nothing is read from a data loader, and
no sampler is silently replaced by another. An empty batch is yielded like any other: the step takes place and has its
privacy cost. A partition is *not* a Poisson sample; plan and ledger name the sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino.errors import InputError, Refused, did_you_mean
from sordino.randomness import RandomSource, Stream
from sordino.randomness.skips import RARE

MANY = 1 << 22
"""Above this number of records, rare ones are found by skipping to them: O(batch) instead of O(records) per step."""

WINDOW = 1 << 20
"""Records of random allocation held in memory at a time, in whole batches: 8 MB, and the next ones, which are being
drawn."""

_BLOCK = 1 << 20  # records decided at a time, so that memory does not grow with the dataset


class _Named:
    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The sampling as JSON-serialisable values; `sampling_from_dict` is the inverse."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]

    def at(self, step: int) -> dict[str, Any]:
        """The description of the batch of one step, for the ledger."""
        return self.to_dict()


@dataclass(frozen=True)
class Poisson(_Named):
    """Each record independently with probability `sampling_rate`, in (0, 1]."""

    sampling_rate: float
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        _check_rate(self.sampling_rate)


@dataclass(frozen=True)
class TruncatedPoisson(_Named):
    """Poisson sampling whose batch never exceeds `cap`: excess records are dropped uniformly at random."""

    sampling_rate: float
    cap: int
    name: ClassVar[str] = "truncated-poisson"

    def __post_init__(self) -> None:
        _check_rate(self.sampling_rate)
        _check_count("cap", self.cap)


@dataclass(frozen=True)
class Partition(_Named):
    """One shuffle, then the same disjoint batches of exactly `batch` records every epoch."""

    batch: int
    name: ClassVar[str] = "partition"

    def __post_init__(self) -> None:
        _check_count("batch", self.batch)


@dataclass(frozen=True)
class WithoutReplacement(_Named):
    """A fresh uniform subset of exactly `batch` records every step."""

    batch: int
    name: ClassVar[str] = "without-replacement"

    def __post_init__(self) -> None:
        _check_count("batch", self.batch)


@dataclass(frozen=True)
class Allocation(_Named):
    """Each record in exactly one of the `batches` batches of every epoch, uniformly, independently of the others.

    This differs from shuffling and cutting: there batches have a fixed size, so records depend on each other.
    """

    batches: int
    name: ClassVar[str] = "allocation"

    def __post_init__(self) -> None:
        _check_count("batches", self.batches)

    def at(self, step: int) -> dict[str, Any]:
        epoch, batch = divmod(step, self.batches)
        return {**self.to_dict(), "epoch": epoch, "batch": batch}


@dataclass(frozen=True)
class Cyclic(_Named):
    """A fixed order: each record belongs to one of `batches` groups, and step t draws from group t mod `batches` alone.

    With `sampling_rate` 1 a batch is its whole group, so a record takes part every `batches` steps. The group of a
    record is drawn uniformly and independently of all others, once for the run; no guarantee relies on its secrecy.
    """

    batches: int
    sampling_rate: float = 1.0
    name: ClassVar[str] = "cyclic"

    def __post_init__(self) -> None:
        _check_count("batches", self.batches)
        _check_rate(self.sampling_rate)


Sampling = Poisson | TruncatedPoisson | Partition | WithoutReplacement | Allocation | Cyclic
_KINDS: dict[str, type[Sampling]] = {
    kind.name: kind for kind in (Poisson, TruncatedPoisson, Partition, WithoutReplacement, Allocation, Cyclic)
}


def cycle(sampling: Sampling) -> int:
    """The number of consecutive steps whose batches are drawn jointly under one key; 1 if steps are independent.

    A run that is resumed with a new key continues at the next multiple of this number: before it, a record could take
    part twice.
    """
    return sampling.batches if isinstance(sampling, Allocation | Cyclic) else 1


def sampling_from_dict(description: Mapping[str, Any]) -> Sampling:
    """The inverse of `to_dict`. Raises InputError for an unknown name or option."""
    options = dict(description)
    name = options.pop("name", None)
    if name not in _KINDS:
        raise InputError(f"unknown sampling {name!r}: {did_you_mean(name, _KINDS)}")
    try:
        return _KINDS[name](**options)
    except TypeError as error:
        wanted = ", ".join(_KINDS[name].__dataclass_fields__)
        raise InputError(f"sampling {name!r} takes {wanted}; got {', '.join(options) or 'nothing'}") from error


@dataclass(frozen=True, eq=False)
class LogicalBatch:
    """The records of one step, read at most `chunk` at a time."""

    step: int
    indices: Tensor  # int64, sorted
    chunk: int

    def __len__(self) -> int:
        return self.indices.numel()

    def chunks(self) -> Iterator[Tensor]:
        """The indices in order, at most `chunk` at a time; an empty batch has one empty chunk."""
        return iter(torch.split(self.indices, self.chunk))


def batches(
    sampling: Sampling, *, records: int, steps: int, source: RandomSource, chunk: int, start: int = 0
) -> Iterator[LogicalBatch]:
    """The batches of steps start, …, steps − 1. Arguments are checked by the call, not at the first batch."""
    if not isinstance(sampling, Sampling):
        raise Refused(
            f"{type(sampling).__name__} is not a sampling that can be accounted for, and it is not silently replaced "
            f"by one; choose one of {', '.join(_KINDS)}"
        )
    _check_count("records", records)
    _check_count("chunk", chunk)
    if steps < 0 or not 0 <= start <= steps:
        raise InputError(f"steps and start must satisfy 0 ≤ start ≤ steps, got start={start}, steps={steps}")
    draw = _drawer(sampling, records, source, start)
    return (LogicalBatch(t, torch.from_numpy(draw(t)), chunk) for t in range(start, steps))


_Indices = npt.NDArray[np.int64]


def _drawer(sampling: Sampling, records: int, source: RandomSource, start: int) -> Callable[[int], _Indices]:
    """The function that maps a step to its sorted indices."""
    if isinstance(sampling, Partition):
        _check_batch(sampling.batch, records)
        return _partition(sampling.batch, records, source)
    if isinstance(sampling, WithoutReplacement):
        size = _check_batch(sampling.batch, records)
        return lambda t: source.stream("sampling", t).subset(records, size)
    if isinstance(sampling, Allocation):
        return _allocation(sampling.batches, records, source, start)
    if isinstance(sampling, Cyclic):
        return _cyclic(sampling, records, source, start)
    rate = sampling.sampling_rate
    cap = sampling.cap if isinstance(sampling, TruncatedPoisson) else records
    return lambda t: _poisson(rate, cap, records, source, t)


def _poisson(rate: float, cap: int, records: int, source: RandomSource, step: int) -> _Indices:
    stream = source.stream("sampling", step)
    if records > MANY and 2.0**-40 <= rate <= RARE:
        chosen = stream.successes(rate, records)
        return chosen if len(chosen) <= cap else chosen[stream.subset(len(chosen), cap)]
    parts = [
        first + np.flatnonzero(stream.bernoulli(rate, min(_BLOCK, records - first)))
        for first in range(0, records, _BLOCK)
    ]
    chosen = np.concatenate(parts).astype(np.int64, copy=False)
    return chosen if len(chosen) <= cap else chosen[stream.subset(len(chosen), cap)]


def _partition(batch: int, records: int, source: RandomSource) -> Callable[[int], _Indices]:
    order = source.stream("partition", 0).permutation(records)
    count = records // batch
    return lambda t: np.sort(order[(t % count) * batch : (t % count + 1) * batch])


def _allocation(count: int, records: int, source: RandomSource, start: int) -> Callable[[int], _Indices]:
    return _in_batches(count, records, lambda epoch: source.stream("allocation", epoch), start)


def _cyclic(sampling: Cyclic, records: int, source: RandomSource, start: int) -> Callable[[int], _Indices]:
    group = _in_batches(sampling.batches, records, lambda _: source.stream("cyclic", 0), start, again=True)

    def draw(step: int) -> _Indices:
        members = group(step)
        if sampling.sampling_rate == 1:
            return members
        return members[source.stream("sampling", step).bernoulli(sampling.sampling_rate, len(members))]

    return draw


def _in_batches(
    count: int, records: int, stream_of: Callable[[int], Stream], start: int, *, again: bool = False
) -> Callable[[int], _Indices]:
    """Maps a step to its records; each record is in one uniformly drawn batch of every epoch of `count` steps.

    The records of as many batches as fit in WINDOW records, a window, are kept at a time, sorted by batch. A window is
    found by drawing the labels of its whole epoch: the first one here, each later one in equal shares by the steps
    before it. So memory is bounded, and a step costs O(batch + records / batches in a window).

    Args:
        count: Batches in an epoch.
        records: The number of records.
        stream_of: The stream of an epoch's labels.
        start: The step that will be drawn first.
        again: Every epoch has the batches of the first one.
    """
    width = max(1, min(count, WINDOW * count // records))  # batches in a window

    def window_at(step: int) -> tuple[int, int]:
        epoch, batch = divmod(step, count)
        return 0 if again else epoch, batch // width * width

    def begun(step: int) -> _Window:
        epoch, first = window_at(step)
        return _Window(stream_of(epoch), count, records, first, width)

    held = window_at(start), begun(start).complete()
    ahead: tuple[tuple[int, int], _Window] | None = None

    def prepare(step: int) -> None:
        """Draws this step's share of the next window, and what is missing of earlier steps' shares."""
        nonlocal ahead
        here = window_at(step)
        place, size = step % count - here[1], min(width, count - here[1])
        follows = step - place + size  # the next window's first step
        after = window_at(follows)
        if after == here:
            return
        if ahead is None or ahead[0] != after:
            ahead = after, begun(follows)
        ahead[1].advance(-(-records * (place + 1) // size))

    def draw(step: int) -> _Indices:
        nonlocal held
        here = window_at(step)
        if held[0] != here:
            held = here, (ahead[1] if ahead is not None and ahead[0] == here else begun(step)).complete()
        prepare(step)
        (chosen, ends), place = held[1], step % count - here[1]
        return chosen[ends[place] : ends[place + 1]].copy()

    if start and window_at(start - 1) == held[0]:  # a run that is resumed within a window
        prepare(start - 1)
    return draw


class _Window:
    """The records of consecutive batches of an epoch, found block by block."""

    def __init__(self, stream: Stream, count: int, records: int, first: int, width: int) -> None:
        self._stream, self._count, self._records, self._first, self._width = stream, count, records, first, width
        self._labels: list[npt.NDArray[Any]] = []
        self._places: list[npt.NDArray[Any]] = []
        self._done = 0  # records whose label has been drawn

    def advance(self, until: int) -> None:
        """Draws the labels of whole blocks of records as long as they end before `until`."""
        while self._done < self._records and min(self._done + _BLOCK, self._records) <= until:
            drawn = self._stream.below(self._count, min(_BLOCK, self._records - self._done))
            here = np.flatnonzero((drawn >= self._first) & (drawn < self._first + self._width))
            self._labels.append((drawn[here] - self._first).astype(np.min_scalar_type(self._width - 1)))
            self._places.append((here + self._done).astype(np.min_scalar_type(self._records)))
            self._done += len(drawn)

    def complete(self) -> tuple[_Indices, _Indices]:
        """All records of the window, sorted by batch, and the place where each batch begins and ends."""
        self.advance(self._records)
        held = np.concatenate(self._labels)
        order = np.argsort(held, kind="stable")  # linear time for small integers
        ends = np.cumsum(np.bincount(held, minlength=self._width))
        chosen = np.concatenate(self._places)[order].astype(np.int64)
        self._labels, self._places = [], []
        return chosen, np.concatenate([[0], ends])


def _check_rate(rate: float) -> None:
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0.0 < rate <= 1.0:  # NaN fails too
        raise InputError(f"sampling_rate must lie in (0, 1], got {rate!r}; it is expected_batch / records")


def _check_count(what: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{what} must be an integer of at least 1, got {value!r}")


def _check_batch(batch: int, records: int) -> int:
    if batch > records:
        raise InputError(f"a batch of {batch} can't be drawn from {records} records; lower expected_batch")
    return batch
