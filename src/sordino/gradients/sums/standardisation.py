"""Weight standardisation: a kernel that is a function of its parameter, with a pull-back in closed form.

The general method (``Pulled``) sends every record's gradient through autograd a second time, only for the norms.
Here it is one pass in the cache, in place, after which the record's gradient is with respect to the parameter itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from sordino.gradients.sums.contributions import Contribution, Dense, add_dense, dense_norm2
from sordino.gradients.sums.memory import CACHE_BYTES, blocks, by_record, squares
from sordino.gradients.sums.totals import keep

Pull = Callable[[Tensor], None]
"""Converts m gradients of the derived tensor, (m, *shape) and contiguous, to the parameter's; linear, and in place."""


def standardised_weight(weight: Tensor, eps: float = 1e-6) -> Tensor:
    """(w − mean)/(std + eps)/√fan_in for every filter w of a kernel (filters, …); std divides by fan_in − 1.

    Filters of a single weight have no spread and become zero. For the engine's tape this is one operation.
    """
    if has_torch_function_unary(weight):
        return handle_torch_function(standardised_weight, (weight,), weight, eps)
    centred, std, fan_in = _parts(weight)
    return (centred / ((std + eps) * math.sqrt(fan_in))).reshape(weight.shape)


def _parts(weight: Tensor) -> tuple[Tensor, Tensor, int]:
    flat = weight.flatten(1)
    centred = flat - flat.mean(1, keepdim=True)
    fan_in = flat.shape[1]
    square = centred.square().sum(1, keepdim=True) / max(1, fan_in - 1)
    return centred, square.clamp_min(torch.finfo(weight.dtype).tiny).sqrt(), fan_in


def pull_back(weight: Tensor, eps: float = 1e-6) -> Pull:
    """Jᵀ of ``standardised_weight`` at this weight. With u = w − mean and a = 1/((std + eps)·√fan_in):

    Jᵀg = a·(g − mean g − u·⟨u, g⟩/((fan_in − 1)·std·(std + eps))), filter by filter.
    """
    u, std, fan_in = _parts(weight.detach())
    scale = 1 / ((std + eps) * math.sqrt(fan_in))
    read = torch.stack((torch.full_like(u, 1 / fan_in), u), 2)  # (filters, fan_in, 2)
    write = torch.stack((scale.expand_as(u), scale * u / (max(1, fan_in - 1) * std * (std + eps))), 1)

    def pull(g: Tensor) -> None:
        filters = g.view(len(g), *u.shape).transpose(0, 1)  # (filters, m, fan_in)
        found = torch.bmm(filters, read)
        filters.mul_(scale[:, None]).baddbmm_(found, write, alpha=-1)

    return pull


def pulled(through: Contribution, pull: Pull) -> Contribution:
    """The contribution to the parameter, from that to the derived tensor."""
    if not isinstance(through, Dense):
        return Mapped(through, pull)
    gradient = through.gradient.contiguous()
    norm2 = gradient.new_empty(through.records, dtype=torch.float64)
    coordinates = gradient[0].numel()
    for lo, hi in blocks(through.records, coordinates, gradient.element_size(), CACHE_BYTES):
        pull(gradient[lo:hi])
        norm2[lo:hi] = squares(by_record(gradient[lo:hi]))
    return Dense(gradient, norm2, owned=through.owned)


class Mapped:
    """A contribution behind a linear map that is applied when its gradients are requested."""

    def __init__(self, through: Contribution, pull: Pull) -> None:
        self.through, self.pull = through, pull
        self.records = through.records
        keep(through)

    def norm2(self) -> Tensor:
        return dense_norm2(self, self._size())

    def slack(self) -> float:
        return 0.0

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        add_dense(self, total, weight, self._size())

    def _size(self) -> int:
        return self.dense(0, 1).numel()

    def dense(self, lo: int, hi: int) -> Tensor:
        gradient = self.through.dense(lo, hi).clone(memory_format=torch.contiguous_format)
        self.pull(gradient)
        return gradient

    def drop(self, bad: Tensor) -> None:
        self.through.drop(bad)
