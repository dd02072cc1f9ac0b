"""Per-record weight gradients of grouped convolutions, mainly of depthwise ones.

For gradients g (m, S, C_out, *o) and inputs a (m, S, C_in, *i) of m records with S images each, and a kernel of shape
(C_out, C_in/groups, *k), record i's gradient is

    ∂W[c, d, t] = Σ_s Σ_p g[i, s, c, p] · a[i, s, group(c) + d, stride·p + dilation·t − padding]

torch's convolution_backward computes the same with one group for each group of each record, but groups of one channel
leave most lanes of the processor's vectors empty. The compiled loop vectorises over the channels of an image; without
it, the taps of the kernel are computed one after the other. A group of several channels is a matrix product for each
tap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.sums.memory import compact
from sordino.native.kernels import compiled
from sordino.native.parts import Pair

_COMPILED = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Window:
    """The kernel's shape (C_out, C_in/groups, *k), its stride, dilation and padding."""

    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def spatial(self) -> int:
        return len(self.weight) - 2


def grouped_gradients(g: Tensor, a: Tensor, window: Window) -> Tensor:
    """(m, *weight), contiguous: every record's weight gradient, for any number of groups and spatial dimensions."""
    groups = a.shape[2] // window.weight[1]
    if window.weight[1] > 1:
        return _products(g, a, window, groups)
    copies = g.shape[2] // groups  # outputs of each channel
    a = a if copies == 1 else a.repeat_interleave(copies, 2)
    found = _by_loop(g, a, window) if window.spatial in (1, 2) else None
    return _by_taps(g, a, window) if found is None else found


def _by_loop(g: Tensor, a: Tensor, window: Window) -> Tensor | None:
    """Depthwise, by the compiled loop; None if it is absent or does not support the memory layout."""
    kernels = compiled()
    if kernels is None or g.dtype not in _COMPILED or g.dtype != a.dtype or not g.is_cpu:
        return None
    m, kernel = g.shape[0], window.weight[2:]
    stride, dilation, padding = window.stride, window.dilation, window.padding
    if window.spatial == 1:  # treat it as an image of one row
        g, a = g.unsqueeze(3), a.unsqueeze(3)
    moved = _pair(stride, 1), _pair(dilation, 1), _pair(padding, 0)
    out = g.new_empty(m, g.shape[2], *_pair(kernel, 1))
    images, gradients = (compact(t.detach()).numpy() for t in (a, g))
    return out.reshape(m, *window.weight) if kernels.depthwise(images, gradients, moved, out.numpy()) else None


def _pair(values: tuple[int, ...], above: int) -> Pair:
    """Both spatial dimensions; a single one is completed by the settings of an image of one row."""
    return (above, values[0]) if len(values) == 1 else (values[0], values[1])


def _by_taps(g: Tensor, a: Tensor, window: Window) -> Tensor:
    """Depthwise, one tap of the kernel after the other: a product with the inputs under the tap, summed over
    positions."""
    out = g.new_empty(g.shape[0], *window.weight)
    over = (1, *range(3, g.ndim))
    for tap, met in _taps(a, g.shape[3:], window):
        at: Any = (..., 0, *tap)
        out[at] = (g * met).sum(over)
    return out


def _products(g: Tensor, a: Tensor, window: Window, groups: int) -> Tensor:
    """Groups of several channels: a matrix product over the positions for each tap of the kernel."""
    m, s = g.shape[:2]
    wide, deep = window.weight[0] // groups, window.weight[1]
    places = math.prod(g.shape[3:])

    def by_group(t: Tensor, channels: int) -> Tensor:  # (m · groups, S · places, channels)
        t = t.reshape(m, s, groups, channels, places).permute(0, 2, 1, 4, 3)
        return t.reshape(m * groups, s * places, channels)

    out, left = g.new_empty(m, *window.weight), by_group(g, wide).mT
    for tap, met in _taps(a, g.shape[3:], window):
        product = torch.bmm(left, by_group(met, deep))
        at: Any = (..., *tap)
        out[at] = product.reshape(m, groups * wide, deep)
    return out


def _taps(a: Tensor, places: tuple[int, ...], window: Window) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Each tap of the kernel, and the inputs under it at all positions: a view (m, S, C_in, *places)."""
    a = F.pad(a, [side for p in reversed(window.padding) for side in (p, p)]) if any(window.padding) else a
    for tap in itertools.product(*(range(k) for k in window.weight[2:])):
        starts = [t * d for t, d in zip(tap, window.dilation, strict=True)]
        cut = [slice(b, b + s * (n - 1) + 1, s) for b, s, n in zip(starts, window.stride, places, strict=True)]
        met: Any = (..., *cut)
        yield tap, a[met]
