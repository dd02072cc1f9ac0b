"""Self-augmentation: a record takes part as the average of K random views of itself, clipped once.

Formal guarantee. A record's views are a function of that record's own content and of public values (the plan's
augmentation, the seed, the step) alone: not of its place in the dataset, nor of any other record. The record's vector

    (1/K) Σ_v ∇loss(view_v(record))

is clipped as one, so adding or removing a record moves the sum by at most `clip_norm`, even for an adversary who
knows the seed, and the plan's accountant is that of plain DP-SGD (docs/guarantees/clipping_bias.md).

Randomness is addressed by content: a record's digest and (seed, step) start a SplitMix64 sequence (Steele, Lea and
Flood 2014), from which its views are drawn. Two equal records have equal views. Were it addressed by the record's
place, taking one record out would give all later ones new views, and move the sum by more than one record's share.

Edge cases: a record that is not finite keeps its bad values (the engine drops it); no rows give no rows.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.errors import InputError
from sordino.gradients.rows import Rows, count, tensors, tree_map

_Words = npt.NDArray[np.uint64]
_STEP = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment
_HEIGHT, _WIDTH, _FLIP, _ERASE, _TOP, _LEFT, _TALL, _WIDE = range(8)
_SHARE, _DRAWS = 16, 17  # two views for mixup take eight draws each, and the share one


@dataclass(frozen=True)
class Augmentation:
    """How the views of a record are drawn; the recipe's section [augmentation].

    Images (rows, channels, height, width): `crop` pads by so many pixels (zeros) and cuts the old size out at a random
    place; `flip` mirrors left and right with probability ½; `erase` is the probability of a rectangle of zeros, its
    sides between an eighth and a half of the image's; `mixup` mixes a view with a second one *of the same record*,
    whose share is uniform on [0, mixup].
    Texts (rows, length) of ids: `word_dropout` is the probability that a word becomes `unknown_id`; `padding_id` stays.
    """

    views: int = 1
    crop: int = 0
    flip: bool = False
    erase: float = 0.0
    mixup: float = 0.0
    word_dropout: float = 0.0
    unknown_id: int = 0
    padding_id: int = 0

    def __post_init__(self) -> None:
        for name, least in (("views", 1), ("crop", 0), ("unknown_id", 0), ("padding_id", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InputError(f"augmentation: {name} = {value!r} must be a whole number, at least {least}")
        for name, most in (("erase", 1.0), ("mixup", 0.5), ("word_dropout", 0.9)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise InputError(f"augmentation: {name} = {value!r} must lie between 0 and {most:g}")
        if self.of_images and self.word_dropout:
            raise InputError("augmentation: crop, flip, erase and mixup are for images, word_dropout for texts")
        if self.mixup and not (self.crop or self.flip or self.erase):
            raise InputError(
                "augmentation: mixup mixes two views of a record, which differ by crop, flip or erase only"
            )
        if self.views > 1 and not self.changes:
            raise InputError(f"augmentation: {self.views} views are all equal: give crop, flip, erase or word_dropout")

    @property
    def of_images(self) -> bool:
        return bool(self.crop or self.flip or self.erase or self.mixup)

    @property
    def changes(self) -> bool:
        """Does a view ever differ from the record?"""
        return self.of_images or bool(self.word_dropout)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rules = {name: value for name, value in asdict(self).items() if value and name not in ("views", "unknown_id")}
        how = ", ".join(name if value is True else f"{name} {value:g}" for name, value in rules.items())
        return f"{self.views} view{'s' * (self.views > 1)} ({how.replace('_', ' ')})"


def with_views(rows: Rows, augmentation: Augmentation, *, seed: int, step: int) -> Rows:
    """The rows with `views` random views in the place of each, weighted so that a record's gradient is their mean.

    Rows of a record that has several are averaged over their own views and then summed as before.
    """
    if not augmentation.changes:
        return rows
    n, k = count(rows), augmentation.views
    key = _start(digests(rows.inputs, n), seed, step)
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


def digests(inputs: Any, rows: int) -> _Words:
    """(rows,) a 64-bit number out of each row's content, and of nothing else.

    Equal content gives equal numbers. Different rows may share one: they would share the randomness of their views,
    which bounds nothing, so the hash need not withstand anybody.
    """
    total = np.zeros(rows, dtype=np.uint64)
    for number, t in enumerate(tensors(inputs)):
        if t.ndim and t.shape[0] == rows and t.numel():
            raw = t.detach().contiguous().cpu().numpy().reshape(rows, -1).view(np.uint8)
            wide = raw.shape[1] % 4 == 0
            words = raw.view(np.uint32) if wide else raw
            odd = _mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _STEP + np.uint64(number)) | np.uint64(1)
            total = _mix(total + (words * odd).sum(1, dtype=np.uint64))
    return total


def _mix(z: _Words) -> _Words:
    """SplitMix64's finaliser: a bijection of 64-bit words whose output passes for random."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: _Words = z ^ (z >> np.uint64(31))
    return mixed


def _start(digest: _Words, seed: int, step: int) -> _Words:
    name = hashlib.blake2b(f"sordino/views/{seed}/{step}".encode(), digest_size=8).digest()
    return _mix(digest + np.frombuffer(name, dtype="<u8")[0])


def _uniforms(start: _Words, views: int, draws: int) -> npt.NDArray[np.float64]:
    """(rows, views, draws) numbers uniform on [0, 1): the row's sequence, cut into views."""
    place = np.arange(1, views * draws + 1, dtype=np.uint64) * _STEP
    words = _mix(start[:, None] + place)
    return ((words >> np.uint64(11)).astype(np.float64) * 2.0**-53).reshape(len(start), views, draws)


def _images(inputs: Any, augmentation: Augmentation, start: _Words) -> Tensor:
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.is_floating_point():
        raise InputError(
            "augmentation: crop, flip, erase and mixup take images (records, channels, height, width) of real numbers, "
            f"not {_said(inputs)}; leave [augmentation] out, or train on the images themselves"
        )
    u = _uniforms(start, augmentation.views, _DRAWS).reshape(-1, _DRAWS)
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


def _texts(rows: Rows, augmentation: Augmentation, start: _Words) -> Tensor:
    ids = rows.inputs
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InputError(
            f"augmentation: word_dropout takes texts (records, length) of word ids, not {_said(ids)}; leave it out"
        )
    u = torch.from_numpy(_uniforms(start, augmentation.views, ids.shape[1])).flatten(0, 1)
    words = ids.repeat_interleave(augmentation.views, 0)
    dropped = (u < augmentation.word_dropout) & (words != augmentation.padding_id)
    return words.masked_fill(dropped, augmentation.unknown_id)


def _said(inputs: Any) -> str:
    if isinstance(inputs, Tensor):
        return f"{str(inputs.dtype).removeprefix('torch.')} of shape {tuple(inputs.shape)}"
    return f"a {type(inputs).__name__}"
