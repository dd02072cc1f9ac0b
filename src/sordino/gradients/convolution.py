"""Convolutions. A record's weight gradient is one convolution_backward with a group per record, all at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.contributions import Contribution, Dense, Outer
from sordino.gradients.layout import Frame, split_dim
from sordino.gradients.tape import Slot, Tape, Use, hold

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")


@dataclass(frozen=True)
class Geometry:
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool = False
    output_padding: tuple[int, ...] = ()

    @property
    def spatial(self) -> int:
        return len(self.weight) - 2

    @property
    def patches(self) -> bool:
        """Kernel and stride agree and nothing overlaps (1×1 kernels, patch embeddings): a linear map."""
        kernel = self.weight[2:]
        return (
            not self.transposed
            and self.groups == 1
            and not any(self.padding)
            and self.stride == kernel
            and all(d == 1 or k == 1 for d, k in zip(self.dilation, kernel, strict=True))
        )


def _tuple(value: Any, n: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * n
    sizes = tuple(int(v) for v in value)
    return sizes * n if len(sizes) == 1 else sizes


def _bound(names: Sequence[str], args: Any, kwargs: Any) -> dict[str, Any]:
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def convolution(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = _bound(_CONV, args, kwargs)
    n = call["weight"].ndim - 2
    stride, dilation = _tuple(call["stride"], n), _tuple(call["dilation"], n)
    x, padding = call["input"], call["padding"]
    if isinstance(padding, str):
        x, padding = _named_padding(tape, x, padding, call["weight"].shape[2:], dilation)
    geometry = Geometry(tuple(call["weight"].shape), stride, _tuple(padding, n), dilation, call["groups"])
    return _apply(tape, func, x, call["weight"], call["bias"], geometry)


def transposed(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = _bound(_TRANSPOSED, args, kwargs)
    n = call["weight"].ndim - 2
    stride, padding, dilation = (_tuple(call[k], n) for k in ("stride", "padding", "dilation"))
    weight, extra = tuple(call["weight"].shape), _tuple(call["output_padding"], n)
    geometry = Geometry(weight, stride, padding, dilation, call["groups"], True, extra)
    return _apply(tape, func, call["input"], call["weight"], call["bias"], geometry)


def _named_padding(
    tape: Tape, x: Tensor, padding: str, kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, tuple[int, ...]]:
    if padding == "valid":
        return x, (0,) * len(kernel)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if all(t % 2 == 0 for t in totals):
        return x, tuple(t // 2 for t in totals)
    flat = [side for t in reversed(totals) for side in (t // 2, t - t // 2)]
    return tape.mark(F.pad(x, flat)), (0,) * len(kernel)


def _apply(tape: Tape, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Any:
    n = geometry.spatial
    if tape.slot(x) is not None or x.ndim != n + 2:
        return NotImplemented
    w, b = tape.slot(weight), tape.slot(bias)
    output = torch.convolution(
        x,
        tape.value(weight),
        tape.value(bias),
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding or (0,) * n,
        geometry.groups,
    )

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        g = frame.fold(gradient, n + 1, gradient=True)  # (m, S, C_out, *o)
        out: list[tuple[Slot, Contribution]] = []
        if w is not None:
            out.append((w, weight_gradient(g, frame.fold(x, n + 1), geometry)))
        if b is not None:
            out.append((b, Dense(g.flatten(3).sum((1, 3)))))
        return out

    slots = tuple(s for s in (w, b) if s is not None)
    return tape.tap(output, Use(tape.label(func, slots), slots, output.shape, (0,), emit, hold(x)))


def weight_gradient(g: Tensor, a: Tensor, geometry: Geometry) -> Contribution:
    """g (m, S, C_out, *o), a (m, S, C_in, *i)."""
    coordinates = math.prod(geometry.weight)
    if geometry.patches:
        positions = g.shape[1] * math.prod(g.shape[3:])
        if positions * (sum(geometry.weight[:1]) + coordinates // geometry.weight[0]) < coordinates:
            return Outer(g.flatten(3).mT.flatten(1, 2), _patches(a, geometry))
    return Dense(per_record(g, a, geometry))


def _patches(a: Tensor, geometry: Geometry) -> Tensor:
    """(m, S, C, *i) → (m, S·P, C·k): non-overlapping patches, as the weight's trailing dimensions order them."""
    m, s, c = a.shape[:3]
    kernel = geometry.weight[2:]
    counts = [i // k for i, k in zip(a.shape[3:], kernel, strict=True)]
    for d, (count, k) in enumerate(zip(counts, kernel, strict=True)):
        a = split_dim(a.narrow(3 + 2 * d, 0, count * k), 3 + 2 * d, (count, k))
    n = len(kernel)
    order = (0, 1, *(3 + 2 * d for d in range(n)), 2, *(4 + 2 * d for d in range(n)))
    return a.permute(order).reshape(m, s * math.prod(counts), c * math.prod(kernel))


def per_record(g: Tensor, a: Tensor, geometry: Geometry) -> Tensor:
    """(m, *weight): the weight gradients of m records as one grouped convolution's."""
    m, s = g.shape[:2]
    grouped = [t.transpose(0, 1).reshape(s, m * t.shape[2], *t.shape[3:]) for t in (g, a)]
    weight = g.new_empty(()).expand(m * geometry.weight[0], *geometry.weight[1:])
    gradient = torch.ops.aten.convolution_backward(
        grouped[0],
        grouped[1],
        weight,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding or (0,) * geometry.spatial,
        m * geometry.groups,
        (False, True, False),
    )[1]
    return gradient.reshape(m, *geometry.weight)  # type: ignore[no-any-return]
