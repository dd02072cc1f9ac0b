"""White-box canaries: made-up records whose clipped gradient is as large as the plan allows.

Each canary has a few coordinates of the gradient for itself, and its vector there has the clipping bound as norm.
So canaries do not disturb each other, and given the coins their scores are
independent. For Gaussian noise every orthonormal system is equivalent to the coordinates; for Laplace noise and
l1 clipping a single coordinate is the worst case; and coordinates need no memory.

The canaries enter the training loop through its own `gradient_sum`: an index beyond the real records denotes
a canary, the plan's sampler draws it like any other record, and its vector is added to the clipped sum.

    add-remove    in: the canary is a record of the dataset.     out: it is not.
    replace-one   in: a record whose gradient is +c·v.           out: one whose gradient is −c·v in its place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sordino.clipping import Clipping, L2LinfClip, PerLayerClip
from sordino.errors import InputError
from sordino.gradients import ClippedSum
from sordino.randomness import RandomSource
from sordino.records.gradients import GradientSum, Wrapper
from sordino.records.users import Protects
from sordino.sampling import LogicalBatch


@dataclass(frozen=True, eq=False)
class Canaries:
    """m canaries of s coordinates each, in the concatenation of the parameters `names`, in that order."""

    names: tuple[str, ...]
    coordinates: Tensor  # (m, s) int64, all different
    values: Tensor  # (m, s) float64
    coins: Tensor  # (m,) bool
    relation: str
    rows: int = 1  # records per canary: a user with several rows

    def __len__(self) -> int:
        return len(self.coins)

    @property
    def members(self) -> Tensor:
        """The canary that the i-th record after the real ones is."""
        everyone = torch.arange(len(self))
        chosen = everyone if self.relation == "replace-one" else everyone[self.coins]
        return chosen.repeat_interleave(self.rows)

    def flat(self, gradient: Mapping[str, Tensor]) -> Tensor:
        """All parameters as one vector, in the order of `names`."""
        return torch.cat([gradient[name].detach().flatten().double() for name in self.names])

    def contribution(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(flat coordinates, values) that the chosen canaries, all of which are in, add to the clipped sum."""
        sign = 2.0 * self.coins[chosen].double()[:, None] - 1.0
        return self.coordinates[chosen].flatten(), (sign * self.values[chosen]).flatten()


@dataclass(frozen=True)
class _Block:
    """Coordinates start, …, stop − 1, of which each canary has `each`, with `value` (up to its sign) on each."""

    start: int
    stop: int
    each: int
    value: float


def make_canaries(
    shapes: Mapping[str, torch.Size], clipping: Clipping, count: int, relation: str, source: RandomSource, rows: int = 1
) -> Canaries:
    """`count` canaries at random coordinates with random signs; the coins are fair and independent."""
    if count < 1:
        raise InputError(f"canaries = {count}: an audit needs at least one, better thousands")
    columns, values = [], []
    for number, block in enumerate(_pattern(shapes, clipping, count)):
        order = source.stream("audit/coordinates", number).permutation(block.stop - block.start)
        chosen = torch.from_numpy(order[: count * block.each].copy()).reshape(count, block.each)
        columns.append(chosen + block.start)
        signs = torch.from_numpy(source.stream("audit/signs", number).bernoulli(0.5, count * block.each))
        values.append(block.value * (2.0 * signs.reshape(chosen.shape).double() - 1.0))
    coins = torch.from_numpy(source.stream("audit/coins", 0).bernoulli(0.5, count))
    return Canaries(tuple(shapes), torch.cat(columns, dim=1), torch.cat(values, dim=1), coins, relation, rows)


def most_canaries(shapes: Mapping[str, torch.Size], clipping: Clipping) -> int:
    """The number of canaries with their own coordinates that fit into the gradient."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    if isinstance(clipping, PerLayerClip):
        return max(stop - start for start, stop in _layers(shapes))
    return sum(sizes) // _coordinates_each(clipping)


def _pattern(shapes: Mapping[str, torch.Size], clipping: Clipping, count: int) -> list[_Block]:
    """The form of a clipped record of the largest norm such that `count` of them do not overlap."""
    most = most_canaries(shapes, clipping)
    if count > most:
        raise InputError(
            f"canaries = {count}: the model's gradient has coordinates for {most} of them; "
            f"give at most {most}, or audit a larger model with the same plan"
        )
    if isinstance(clipping, PerLayerClip):
        # layers that are too small for all canaries are left out: the bound stays valid and becomes weaker
        layers = _layers(shapes)
        bounds = clipping.bounds([stop - start for start, stop in layers])
        return [
            _Block(start, stop, 1, bound)
            for (start, stop), bound in zip(layers, bounds, strict=True)
            if stop - start >= count
        ]
    each = _coordinates_each(clipping)
    value = clipping.clip_norm / (math.sqrt(max(clipping.p, 1.0)) if isinstance(clipping, L2LinfClip) else 1.0)
    return [_Block(0, sum(math.prod(shape) for shape in shapes.values()), each, value)]


def _coordinates_each(clipping: Clipping) -> int:
    return max(1, math.floor(clipping.p)) if isinstance(clipping, L2LinfClip) else 1


def _layers(shapes: Mapping[str, torch.Size]) -> list[tuple[int, int]]:
    """(start, stop) of each layer: consecutive parameters of one module, as PerLayerClip counts them."""
    sizes: dict[str, int] = {}
    for name, shape in shapes.items():
        layer = name.rpartition(".")[0]
        sizes[layer] = sizes.get(layer, 0) + math.prod(shape)
    stops = list(accumulate(sizes.values()))
    return list(zip([0, *stops[:-1]], stops, strict=True))


class CanaryGradients(Wrapper):
    """The real gradient sum plus the canaries' vectors. `real` is the last sum over the real records alone.

    `silent`: the other records contribute zero, as records of zero gradient would. The claim holds for those too.
    `protects`: the unit of privacy that a canary represents; the other records need no protection.
    """

    def __init__(
        self,
        gradient_sum: GradientSum,
        canaries: Canaries,
        records: int,
        *,
        silent: bool = False,
        protects: Protects = ("record", None),
    ) -> None:
        super().__init__(gradient_sum)
        self._protects, self._canaries, self._records = protects, canaries, records
        self._silent = silent
        self._members = canaries.members
        self.real: dict[str, Tensor] = {}
        self.drawn = torch.zeros(0, dtype=torch.int64)

    @property
    def protects(self) -> Protects:
        return self._protects

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        indices = batch.indices
        others = indices[indices < self._records]
        total = self._gradient_sum(LogicalBatch(batch.step, others[:0] if self._silent else others, batch.chunk))
        self.drawn = self._members[indices[indices >= self._records] - self._records]
        self.real = {name: value.clone() for name, value in total.sums.items()}
        coordinates, values = self._canaries.contribution(self.drawn)
        extra = torch.zeros(sum(value.numel() for value in total.sums.values()), dtype=torch.float64)
        extra.index_add_(0, coordinates, values)
        sums, start = {}, 0
        for name in self._canaries.names:
            value = total.sums[name]
            sums[name] = value.double() + extra[start : start + value.numel()].reshape(value.shape)
            start += value.numel()
        return ClippedSum(sums=sums, norms=total.norms, dropped=total.dropped, losses=total.losses)
