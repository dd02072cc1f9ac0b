"""Tensors that were computed from several parameters: F.linear(x, U @ V), a bias b + c, a weight-normalised kernel.

A contribution to such a tensor is asked for by each of its parameters, where that to a parameter is asked for once.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from sordino.gradients.contributions import Contribution


class Shared:
    """A contribution that several parameters ask for: a sum with the same weights is taken once for all of them.

    A sum may take the memory of what it was taken of (single.Scaled), so a second one would find nothing there.
    """

    def __init__(self, through: Contribution) -> None:
        self.through = through
        self.records = through.records
        self._norm2: Tensor | None = None
        self._sum: tuple[Tensor, Tensor] | None = None

    def norm2(self) -> Tensor:
        if self._norm2 is None:
            self._norm2 = self.through.norm2()
        return self._norm2

    def weighted(self, weight: Tensor) -> Tensor:
        if self._sum is None or self._sum[0] is not weight:
            self._sum = weight, self.through.weighted(weight)
        return self._sum[1]

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.through.dense(lo, hi)

    def drop(self, bad: Tensor) -> None:
        self._norm2 = self._sum = None
        self.through.drop(bad)


def reached(tensor: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the leaves that the tensor was computed from, by autograd's graph.

    A parameter may have given its shape alone (u.expand_as(v)), or have gone into another of several results
    (torch.broadcast_tensors).
    """
    names = {id(leaf): name for name, leaf in leaves.items()}
    if id(tensor) in names:
        return {names[id(tensor)]: tensor}
    found: set[str] = set()
    waiting, seen = [tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (name := names.get(id(getattr(node, "variable", None)))) is not None:
            found.add(name)
        waiting += [earlier for earlier, _ in node.next_functions]
    return {name: leaf for name, leaf in leaves.items() if name in found}
