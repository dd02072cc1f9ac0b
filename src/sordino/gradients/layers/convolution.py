"""Convolutions. A record's weight gradient is one convolution_backward with a group per record, all at once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.layers.depthwise import Window, grouped_gradients
from sordino.gradients.sums.contributions import KEEP_RATIO, Contribution, Dense, Outer, outer, products
from sordino.gradients.sums.memory import blocks, by_record, compact, squares
from sordino.gradients.tape.layout import Frame
from sordino.gradients.tape.slots import Slot, Use, hold
from sordino.gradients.tape.tape import Tape
from sordino.native.kernels import compiled

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

_COMPILED = (torch.float32, torch.float64)
_WIDE_GROUP = 8  # channels per group from which torch's own grouped kernel is faster: 1.4 ms against 8.7 (ResNeXt)
GROUP_BYTES = 5 << 20  # products of one grouped convolution; smaller ones are slower, and so are 9 MB


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
        """Kernel and stride are equal and windows do not overlap (1×1 kernels, patch embeddings): a linear map."""
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
    return F.pad(x, flat), (0,) * len(kernel)


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
    label = tape.leading(x, n + 1) if w is not None and (bias is None or b is not None) else None
    return tape.tap(output, Use(func, slots, output.shape, (0,), emit, hold(x)), label)


def weight_gradient(g: Tensor, a: Tensor, geometry: Geometry) -> Contribution:
    """g (m, S, C_out, *o), a (m, S, C_in, *i). Chooses by cost: store the positions, multiply unfolded patches, or
    compute a grouped convolution's gradient (fastest if channels fill vectors and positions outnumber them)."""
    m, c_out, c_in = g.shape[0], geometry.weight[0], geometry.weight[1]
    positions, coordinates = g.shape[1] * math.prod(g.shape[3:]), math.prod(geometry.weight)
    if geometry.groups > 1 and not geometry.transposed and c_in < _WIDE_GROUP:
        window = Window(geometry.weight, geometry.stride, geometry.padding, geometry.dilation)
        return Dense(grouped_gradients(g, a, window), owned=True)
    if geometry.transposed or geometry.groups > 1:
        return Dense(per_record(g, a, geometry), owned=True)
    if coordinates > 4 * KEEP_RATIO * (g[0].numel() + a[0].numel()):
        return Convolved(g, a, geometry)
    if geometry.patches and math.prod(geometry.weight[2:]) == 1:
        left, right = (t.flatten(3).transpose(2, 3).flatten(1, 2) for t in (g, a))  # (m, positions, C)
        return outer(left, right)
    if c_in < 4 or positions < c_out or geometry.patches:
        left = g.flatten(3).transpose(2, 3).flatten(1, 2)  # (m, positions, C_out)
        width, a = coordinates // c_out, pad(a, geometry)

        room: Tensor | None = None  # memory for the patches of a block; the first block is the largest

        def factors(lo: int, hi: int) -> tuple[Tensor, Tensor]:
            nonlocal room
            room = g.new_empty((hi - lo, positions, width)) if room is None else room
            return left[lo:hi], columns(a[lo:hi], geometry, room[: hi - lo])

        return products(m, (c_out, width), g, factors, working=2 * positions * width)
    return grouped(g, a, geometry)


def grouped(g: Tensor, a: Tensor, geometry: Geometry) -> Dense:
    """Large products are computed for some records at a time: the convolution needs twice the memory of its result,
    which the process would keep, and a result that has left the cache must be read again for the norms."""
    m, coordinates = g.shape[0], math.prod(geometry.weight)
    parts = blocks(m, coordinates, g.element_size(), GROUP_BYTES)
    if len(parts) == 1:
        return Dense(per_record(g, a, geometry), owned=True)
    product, norm2 = g.new_empty((m, *geometry.weight)), g.new_empty(m, dtype=torch.float64)
    for lo, hi in parts:
        product[lo:hi] = per_record(g[lo:hi], a[lo:hi], geometry)
        norm2[lo:hi] = squares(by_record(product[lo:hi]))
    return Dense(product, norm2, owned=True)


def pad(a: Tensor, geometry: Geometry) -> Tensor:
    return F.pad(a, [side for p in reversed(geometry.padding) for side in (p, p)]) if any(geometry.padding) else a


def columns(a: Tensor, geometry: Geometry, room: Tensor | None = None) -> Tensor:
    """Padded (m, S, C, *i) → (m, S·P, C·k): the patch under the kernel at each output position.

    room: memory of that shape, into which the result may be written."""
    n, kernel = geometry.spatial, geometry.weight[2:]
    if room is not None and n == 2 and _by_kernel(a, geometry, room):
        return room
    for d, dilation in enumerate(geometry.dilation):
        a = a.unfold(3 + d, dilation * (kernel[d] - 1) + 1, geometry.stride[d])
        a = a[..., ::dilation] if dilation > 1 else a
    m, s, c = a.shape[:3]
    places, inside = tuple(range(3, 3 + n)), tuple(range(3 + n, 3 + 2 * n))
    width = c * math.prod(kernel)
    if n and (kernel[-1] >= 8 or kernel[-1] > a.shape[2 + n]):  # copy along the longer runs
        return compact(a.permute(0, 1, *places, 2, *inside)).view(m, -1, width)
    if s == 1:
        return compact(a.permute(0, 1, 2, *inside, *places)).view(m, width, -1).mT
    return compact(a.permute(0, 1, 2, *inside, *places)).view(m, s, width, -1).mT.flatten(1, 2)


def _by_kernel(a: Tensor, geometry: Geometry, room: Tensor) -> bool:
    """`columns` of images by the compiled loop; returns False if it is absent or does not support the memory layout."""
    kernels = compiled()
    if kernels is None or a.device.type != "cpu" or a.dtype != room.dtype or a.dtype not in _COMPILED:
        return False
    (down, across), stride, dilation = geometry.weight[2:], geometry.stride, geometry.dilation
    images = a.detach().flatten(0, 1).numpy()
    sizes = (down, across), (stride[0], stride[1]), (dilation[0], dilation[1])
    return kernels.patches(images, *sizes, room.numpy())


class Convolved:
    """For kernels with many more weights than activations: stores the activations. Norms and sums are those of a linear
    map of the patches, which are unfolded for some records at a time."""

    def __init__(self, g: Tensor, a: Tensor, geometry: Geometry) -> None:
        self.g, self.a, self.geometry = g, a, geometry
        self.records = g.shape[0]
        self.squares: Tensor | None = None
        self.runs: npt.NDArray[np.int64] | None = None  # as in Outer

    def _ranges(self) -> list[tuple[int, int]]:
        """Some records at a time, never of two blocks that are summed in single precision (`runs`)."""
        bounds = [0, self.records] if self.runs is None else self.runs.tolist()
        size, width = self.g[0].numel() // self.geometry.weight[0] * self._inputs, self.g.element_size()
        parts = [(first, blocks(last - first, size, width)) for first, last in itertools.pairwise(bounds)]
        return [(first + lo, first + hi) for first, part in parts for lo, hi in part]

    @property
    def _inputs(self) -> int:
        return math.prod(self.geometry.weight[1:])

    def _map(self, lo: int, hi: int) -> Outer:
        left = self.g[lo:hi].flatten(3).transpose(2, 3).flatten(1, 2)
        room = self.g.new_empty(hi - lo, left.shape[1], self._inputs)
        part = Outer(left, columns(pad(self.a[lo:hi], self.geometry), self.geometry, room))
        part.runs = None if self.runs is None else np.array([0, hi - lo], np.int64)
        return part

    def _maps(self) -> Iterator[tuple[int, int, Outer]]:
        for lo, hi in self._ranges():
            yield lo, hi, self._map(lo, hi)

    def norm2(self) -> Tensor:
        if self.squares is None:
            self.squares = torch.cat([part.norm2() for _, _, part in self._maps()])
        return self.squares

    def slack(self) -> Tensor:
        return torch.cat([torch.as_tensor(part.slack()).expand(hi - lo) for lo, hi, part in self._maps()])

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        for lo, hi, part in self._maps():
            part.add_to(total, weight[lo:hi])

    def narrow_to(self, total: Tensor, weight: Tensor) -> bool:
        """See `narrow.narrow_sum`."""
        ranges = self._ranges()
        return len(ranges) == 1 and self._map(*ranges[0]).narrow_to(total, weight)

    def dense(self, lo: int, hi: int) -> Tensor:
        return per_record(self.g[lo:hi], self.a[lo:hi], self.geometry)

    def drop(self, bad: Tensor) -> None:
        mask = bad.reshape(-1, *([1] * (self.g.ndim - 1)))
        self.g, self.a = self.g.masked_fill(mask, 0), self.a.masked_fill(mask, 0)


def per_record(g: Tensor, a: Tensor, geometry: Geometry) -> Tensor:
    """(m, *weight): the weight gradients of m records as one grouped convolution's."""
    m, s = g.shape[:2]
    left, right = (t.transpose(0, 1).reshape(s, m * t.shape[2], *t.shape[3:]) for t in (g, a))
    return backward(left, right, geometry, m).reshape(m, *geometry.weight)


def backward(g: Tensor, a: Tensor, geometry: Geometry, copies: int) -> Tensor:
    """The weight gradient of ``copies`` independent convolutions, as one grouped convolution."""
    weight = g.new_empty(()).expand(copies * geometry.weight[0], *geometry.weight[1:])
    gradient: Tensor = torch.ops.aten.convolution_backward(
        g,
        a,
        weight,
        None,
        geometry.stride,
        geometry.padding,
        geometry.dilation,
        geometry.transposed,
        geometry.output_padding or (0,) * geometry.spatial,
        copies * geometry.groups,
        (False, True, False),
    )[1]
    return gradient
