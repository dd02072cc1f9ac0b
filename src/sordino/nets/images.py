"""Networks for images and rows: the softmax layer, an MLP, the papers' small CNNs. Plain torch modules.

None has BatchNorm, which mixes records, so that the gradient of a single record is not defined.
"""

from __future__ import annotations

import itertools
import math

from torch import nn

from sordino.errors import InputError
from sordino.nets.resnet import StandardisedConv2d


def linear(input_shape: tuple[int, ...], classes: int, *, bias: bool = True, zero: bool = True) -> nn.Module:
    """One softmax layer on the flattened input. `zero`: all weights start at zero, which suffices for a convex loss."""
    layer = nn.Linear(math.prod(input_shape), classes, bias=bias)
    if zero:
        for parameter in layer.parameters():
            nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), layer)


_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "softplus": nn.Softplus,
    "elu": nn.ELU,
}


def activation(name: str) -> nn.Module:
    if name not in _ACTIVATIONS:
        raise InputError(f"unknown activation {name!r}; known names are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()


def mlp(
    input_shape: tuple[int, ...], classes: int, *, hidden: tuple[int, ...] = (300,), act: str = "relu"
) -> nn.Module:
    """Fully connected layers of the given widths (784-300-10 by default on MNIST: W2 of the benchmarks)."""
    widths = [math.prod(input_shape), *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.Linear(wide, narrow), activation(act)]
    return nn.Sequential(*layers, nn.Linear(widths[-1], classes))


def scatter_cnn(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """CNN on scattering maps of 28×28 images (Xiao, Wan & Devadas 2022; Ye & Shokri 2022):
    conv3×3 stride 2 81→16, tanh, conv3×3 16→32, tanh, fc 512→32, tanh, fc 32→10."""
    channels, height, width = _image(input_shape, "scatter-cnn")
    h, w = -(-height // 2), -(-width // 2)  # padding 1, stride 2: 7 → 4
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * h * w, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def scatter_cnn_cifar(input_shape: tuple[int, ...], classes: int) -> nn.Module:
    """CNN on scattering maps of CIFAR-10 (243×8×8): conv3×3 243→64, tanh, maxpool 2, conv3×3 64→64, tanh,
    fc 1024→10.
    """
    channels, height, width = _image(input_shape, "scatter-cnn-cifar")
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * (height // 2) * (width // 2), classes),
    )


def mnist_cnn(input_shape: tuple[int, ...], classes: int, *, form: str = "original") -> nn.Module:
    """The CNN of Liu et al. 2023, appendix A.1 (also that of TensorFlow Privacy's and Opacus' tutorials).
    26,010 parameters. form "enhanced": with the normalisations of Xiao et al. 2023, as in `resnet`.
    """
    channels, height, width = _image(input_shape, "mnist-cnn")
    h, w = (_mnist_side(side) for side in (height, width))
    if h < 1 or w < 1:
        raise InputError(f"mnist-cnn: images of {height}×{width} are too small; it was designed for 28×28")
    if form not in ("original", "enhanced"):
        raise InputError(f"mnist-cnn: form must be 'original' or 'enhanced', not {form!r}")
    if form == "enhanced":
        return nn.Sequential(
            StandardisedConv2d(channels, 16, 8, 2, padding=3),
            nn.ELU(),
            nn.GroupNorm(4, 16, affine=False),
            nn.MaxPool2d(2, 1),
            StandardisedConv2d(16, 32, 4, 2, padding=0),
            nn.ELU(),
            nn.GroupNorm(4, 32, affine=False),
            nn.MaxPool2d(2, 1),
            nn.Flatten(),
            nn.LayerNorm(32 * h * w, elementwise_affine=False),
            nn.Linear(32 * h * w, 32),
            nn.ELU(),
            nn.LayerNorm(32, elementwise_affine=False),
            nn.Linear(32, classes),
        )
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, 2, padding=3),  # 28 → 14
        nn.ReLU(),
        nn.MaxPool2d(2, 1),  # → 13
        nn.Conv2d(16, 32, 4, 2),  # → 5
        nn.ReLU(),
        nn.MaxPool2d(2, 1),  # → 4
        nn.Flatten(),
        nn.Linear(32 * h * w, 32),
        nn.ReLU(),
        nn.Linear(32, classes),
    )


def _mnist_side(side: int) -> int:
    return ((side - 2) // 2 + 1 - 1 - 4) // 2 + 1 - 1


def _image(input_shape: tuple[int, ...], name: str) -> tuple[int, int, int]:
    if len(input_shape) != 3:
        raise InputError(f"{name}: takes images (channels, height, width), not inputs of shape {input_shape}")
    return input_shape[0], input_shape[1], input_shape[2]
