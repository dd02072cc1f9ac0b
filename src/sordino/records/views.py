"""Self-augmentation: a record contributes the average gradient of K random views of itself, clipped once.

Formal guarantee. A record's views are a function of that record's own content and of public values (the plan's
augmentation, the seed, the step) only: not of its position in the dataset, nor of any other record. The vector

    (1/K) Σ_v ∇loss(view_v(record))

is clipped as a whole, so adding or removing a record moves the sum by at most `clip_norm`, even for an adversary who
knows the seed, and the plan is accounted as plain DP-SGD (docs/guarantees/clipping_bias.md).

Randomness is addressed by content (`records.content`), so two equal records have equal views.

Edge cases: a record that is not finite keeps its values (the engine drops it); no rows give no rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.errors import InputError
from sordino.gradients.rows import Rows, count, tree_map
from sordino.plan.contribution import Augmentation
from sordino.records.content import Words, digests, start, uniforms

_HEIGHT, _WIDTH, _FLIP, _ERASE, _TOP, _LEFT, _TALL, _WIDE = range(8)
_SHARE, _DRAWS = 16, 17  # mixup uses two views with eight draws each, and one draw for the share


def with_views(rows: Rows, augmentation: Augmentation, *, seed: int, step: int) -> Rows:
    """`views` random views in place of each row, weighted so that a record's gradient is their mean.

    If a record has several rows, each is averaged over its own views, and then they are summed as before.
    """
    if not augmentation.changes:
        return rows
    n, k = count(rows), augmentation.views
    key = start(digests(rows.inputs, n), "views", seed, step)
    inputs = _images(rows.inputs, augmentation, key) if augmentation.of_images else _texts(rows, augmentation, key)
    owner = torch.arange(n) if rows.record is None else rows.record
    weight = torch.ones(n, dtype=torch.float64) if rows.coefficient is None else rows.coefficient
    return Rows(
        inputs=inputs,
        targets=tree_map(lambda t: t.repeat_interleave(k, 0) if t.ndim and t.shape[0] == n else t, rows.targets),
        record=owner.repeat_interleave(k),
        records=n if rows.record is None else rows.records,
        coefficient=(weight / k).repeat_interleave(k),
    )


def _images(inputs: Any, augmentation: Augmentation, key: Words) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
        raise InputError(
            "augmentation: crop, flip, erase and mixup need images (records, channels, height, width) of real numbers, "
            f"not {_described(inputs)}; leave out [augmentation], or train on images"
        )
    u = uniforms(key, augmentation.views, _DRAWS).reshape(-1, _DRAWS)
    first = _one_view(inputs, augmentation, u)
    if not augmentation.mixup:
        return first
    second = _one_view(inputs, augmentation, u[:, 8:])
    share = torch.from_numpy(u[:, _SHARE] * augmentation.mixup).to(inputs.dtype)[:, None, None, None]
    return torch.lerp(first, second, share)


def _one_view(images: Tensor, augmentation: Augmentation, u: npt.NDArray[np.float64]) -> Tensor:
    """(rows · views, C, H, W): each view crops, flips and erases by its own row of `u`."""
    height, width, room = *images.shape[2:], 2 * augmentation.crop + 1
    row = torch.from_numpy((u[:, _HEIGHT] * room).astype(np.int64))[:, None] + torch.arange(height)
    column = torch.arange(width).expand(len(u), width)
    if augmentation.flip:
        column = torch.where(torch.from_numpy(u[:, _FLIP] < 0.5)[:, None], width - 1 - column, column)
    column = column + torch.from_numpy((u[:, _WIDTH] * room).astype(np.int64))[:, None]
    view = _gathered(F.pad(images, [augmentation.crop] * 4), row, column, augmentation)
    return _erased(view, augmentation.erase, u) if augmentation.erase else view


def _gathered(padded: Tensor, row: Tensor, column: Tensor, augmentation: Augmentation) -> Tensor:
    """view[i, c, y, x] = padded[i // views, c, row[i, y], column[i, x]]."""
    (n, height), width, (_, channels, tall, wide) = row.shape, column.shape[1], padded.shape
    if not (augmentation.crop or augmentation.flip):
        return padded.repeat_interleave(augmentation.views, 0)
    plane = (row[:, :, None] * wide + column[:, None, :]).reshape(n, 1, height * width)
    flat = padded.reshape(-1, 1, channels, tall * wide).expand(-1, augmentation.views, -1, -1)
    return flat.reshape(n, channels, -1).gather(2, plane.expand(-1, channels, -1)).view(n, channels, height, width)


def _erased(view: Tensor, probability: float, u: npt.NDArray[np.float64]) -> Tensor:
    def inside(size: int, place: int, extent: int) -> Tensor:
        long = np.maximum(1, np.rint(size * (0.125 + 0.375 * u[:, extent]))).astype(np.int64)
        first = np.floor(u[:, place] * (size - long + 1)).astype(np.int64)
        at, begin, length = torch.arange(size), torch.from_numpy(first)[:, None], torch.from_numpy(long)[:, None]
        return (at >= begin) & (at < begin + length)

    down, across = inside(view.shape[2], _TOP, _TALL), inside(view.shape[3], _LEFT, _WIDE)
    gone = down[:, :, None] & across[:, None, :] & torch.from_numpy(u[:, _ERASE] < probability)[:, None, None]
    return view.masked_fill(gone[:, None], 0)


def _texts(rows: Rows, augmentation: Augmentation, key: Words) -> Tensor:
    ids = rows.inputs
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InputError(
            f"augmentation: word_dropout needs texts (records, length) of word ids, not {_described(ids)}; leave it out"
        )
    u = torch.from_numpy(uniforms(key, augmentation.views, ids.shape[1])).flatten(0, 1)
    words = ids.repeat_interleave(augmentation.views, 0)
    dropped = (u < augmentation.word_dropout) & (words != augmentation.padding_id)
    return words.masked_fill(dropped, augmentation.unknown_id)


def _described(inputs: Any) -> str:
    """The dtype and shape of a tensor, or the type of anything else, for a message."""
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} of shape (records, {', '.join(map(str, inputs.shape[1:]))})"
    return f"a {type(inputs).__name__}"
