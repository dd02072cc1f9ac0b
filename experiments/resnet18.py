"""ResNet-18 (He et al. 2016) as for ImageNet, with GroupNorm instead of BatchNorm; weights drawn at random, as timm's.

On images of 32×32 pixels its first convolution and its pooling leave 8×8 positions, and its last stage has one. So a
record takes a fifteenth of the operations of the variant with a 3×3 convolution and no pooling in front.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

GROUPS, WIDTHS = 16, (64, 128, 256, 512)


class Block(nn.Module):
    """relu(norm(conv(relu(norm(conv x)))) + shortcut x); where the shape changes, the shortcut is a 1×1 convolution."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, channels_out)
        self.shortcut: nn.Module = nn.Identity()
        if (channels_in, stride) != (channels_out, 1):
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
                nn.GroupNorm(GROUPS, channels_out),
            )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(out)) + self.shortcut(x))


def resnet18(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """The network for images of `input_shape` (channels, height, width)."""
    steps = [(WIDTHS[max(stage - 1, 0)], width, 2 if stage else 1) for stage, width in enumerate(WIDTHS)]
    blocks = [Block(*pair) for a, b, stride in steps for pair in ((a, b, stride), (b, b, 1))]
    model = nn.Sequential(
        nn.Conv2d(input_shape[0], WIDTHS[0], 7, stride=2, padding=3, bias=False),
        nn.GroupNorm(GROUPS, WIDTHS[0]),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(WIDTHS[-1], classes),
    )
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(part, Block):
            nn.init.zeros_(part.norm2.weight)  # every block begins as its shortcut; without this SGD diverges
    return model
