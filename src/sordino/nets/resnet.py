"""Residual networks for 32×32 images: CIFAR ResNets (He et al. 2016) in three forms, and Wide-ResNets.

- original: as published, with GroupNorm instead of BatchNorm.
- enhanced: Xiao et al. 2023, section 5.1: ELU, GroupNorm *after* the activation and once more after the sum, weight
  standardisation, a head on 2×2 standardised features.
- batch: as published, with BatchNorm. It mixes the rows of a batch, so it is for BatchClipping only, where a record's
  batch is the record and public companions; every other private training refuses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sordino.errors import InputError, did_you_mean
from sordino.gradients.sums.standardisation import standardised_weight

FORMS = ("original", "enhanced", "batch")
WIDTHS = (16, 32, 64)

Norm = Callable[[int], nn.Module]


class OptionA(nn.Module):
    """The shortcut of CIFAR ResNets without parameters: every second pixel, and zeros for the new channels."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.padding = (channels_out - channels_in) // 2

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.padding, self.padding))


class StandardisedConv2d(nn.Conv2d):
    """A convolution without bias whose filters are standardised before each use: (w − mean)/(std + 1e-6)/√fan_in."""

    def __init__(
        self, channels_in: int, channels_out: int, kernel: int, stride: int = 1, padding: int | None = None
    ) -> None:
        around = kernel // 2 if padding is None else padding
        super().__init__(channels_in, channels_out, kernel, stride=stride, padding=around, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, standardised_weight(self.weight), None, self.stride, self.padding)


def _shortcut(channels_in: int, channels_out: int) -> nn.Module:
    return nn.Identity() if channels_in == channels_out else OptionA(channels_in, channels_out)


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv x)))) + shortcut x)."""

    def __init__(self, channels_in: int, channels_out: int, norm: Norm) -> None:
        super().__init__()
        stride = 1 if channels_in == channels_out else 2
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = norm(channels_out)
        self.shortcut = _shortcut(channels_in, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


class EnhancedBlock(nn.Module):
    """norm(elu(norm(conv(norm(elu(conv x)))) + shortcut x)), with standardised filters."""

    def __init__(self, channels_in: int, channels_out: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = StandardisedConv2d(channels_in, channels_out, 3, 1 if channels_in == channels_out else 2)
        self.norm1 = norm(channels_out)
        self.conv2 = StandardisedConv2d(channels_out, channels_out, 3)
        self.norm2 = norm(channels_out)
        self.norm3 = norm(channels_out)
        self.shortcut = _shortcut(channels_in, channels_out)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(self.norm1(F.elu(self.conv1(x)))))
        summed: Tensor = self.norm3(F.elu(out + self.shortcut(x)))
        return summed


def resnet(
    input_shape: tuple[int, ...], classes: int, *, depth: int = 20, form: str = "original", groups: int = 4
) -> nn.Module:
    """ResNet-`depth` (6k + 2: 8, 14, 20, 32, 44) with option-A shortcuts; `groups` of each GroupNorm.

    Normalisation has a scale and a shift in the original forms and none in the enhanced one.
    """
    channels = _channels(input_shape, "resnet")
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise InputError(f"resnet: depth must be 8, 14, 20, 26, 32, … (6k + 2), not {depth}")
    if form not in FORMS:
        raise InputError(f"resnet: unknown form {form!r}; {did_you_mean(form, FORMS)}")
    if WIDTHS[0] % groups:
        raise InputError(f"resnet: groups must divide {WIDTHS[0]}, not {groups}")
    widths = [WIDTHS[0], *(width for width in WIDTHS for _ in range(blocks))]
    steps = list(itertools.pairwise(widths))
    if form == "enhanced":

        def bare(c: int) -> nn.Module:
            return nn.GroupNorm(groups, c, affine=False)

        return nn.Sequential(
            StandardisedConv2d(channels, WIDTHS[0], 3),
            nn.ELU(),
            bare(WIDTHS[0]),
            *(EnhancedBlock(a, b, bare) for a, b in steps),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.LayerNorm(4 * WIDTHS[-1], elementwise_affine=False),
            nn.Linear(4 * WIDTHS[-1], classes),
        )

    def norm(c: int) -> nn.Module:
        return nn.BatchNorm2d(c) if form == "batch" else nn.GroupNorm(groups, c)

    return nn.Sequential(
        nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False),
        norm(WIDTHS[0]),
        nn.ReLU(),
        *(Block(a, b, norm) for a, b in steps),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTHS[-1], classes),
    )


def resnet20(input_shape: tuple[int, ...], classes: int, *, groups: int = 16) -> nn.Module:
    """The original ResNet-20 with the number of groups that the recipes for Xiao, Wan & Devadas 2022 use."""
    return resnet(input_shape, classes, depth=20, groups=groups)


class WideBlock(nn.Module):
    """x + conv(relu(norm(conv(relu(norm x))))); where the shape changes, the shortcut is a 1×1 convolution of the
    activated input (Zagoruyko and Komodakis 2016)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, channels_in)
        self.conv1 = StandardisedConv2d(channels_in, channels_out, 3, stride)
        self.norm2 = nn.GroupNorm(groups, channels_out)
        self.conv2 = StandardisedConv2d(channels_out, channels_out, 3)
        same = channels_in == channels_out and stride == 1
        self.shortcut = None if same else StandardisedConv2d(channels_in, channels_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        active = torch.relu(self.norm1(x))
        out: Tensor = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


def wide_resnet(
    input_shape: tuple[int, ...], classes: int, *, depth: int = 16, width: int = 4, groups: int = 16
) -> nn.Module:
    """WRN-`depth`-`width` (depth 6k + 4) with GroupNorm and weight standardisation, as De et al. (2022) train it."""
    channels = _channels(input_shape, "wide-resnet")
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise InputError(f"wide-resnet: depth must be 10, 16, 22, 28, … (6k + 4), not {depth}")
    if WIDTHS[0] % groups:
        raise InputError(f"wide-resnet: groups must divide {WIDTHS[0]}, not {groups}")
    body, before = [], WIDTHS[0]
    for stage, base in enumerate(WIDTHS):
        for number in range(blocks):
            body.append(WideBlock(before, base * width, 2 if stage and number == 0 else 1, groups))
            before = base * width
    return nn.Sequential(
        StandardisedConv2d(channels, WIDTHS[0], 3),
        *body,
        nn.GroupNorm(groups, before),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(before, classes),
    )


def _channels(input_shape: tuple[int, ...], name: str) -> int:
    if len(input_shape) != 3:
        raise InputError(f"{name}: takes images (channels, height, width), not inputs of shape {input_shape}")
    return input_shape[0]
