"""Small networks and records for the tests of DP-MAC."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sordino.methods.dp_mac.network import Layer, Network, chain


def network(
    widths: Sequence[int] = (6, 5, 4, 3), activation: str = "softplus", output: str = "sigmoid", seed: int = 0,
    bias: bool = True,
) -> Network:  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Network(list(widths), activation, output, bias).double()
        for parameter in made.parameters():  # biases too
            torch.nn.init.normal_(parameter, std=0.7)
    return made


def records(net: Network, count: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, net.widths[0], generator=generator, dtype=torch.float64)
    y = torch.rand(count, net.widths[-1], generator=generator, dtype=torch.float64)
    return x, y


def layer(activation: str = "softplus", output: str | None = None, bias: bool = True, seed: int = 0) -> Layer:
    """One layer of 4 units on 3 inputs."""
    net = network((3, 4), activation, output or "squared", seed, bias)
    found = chain(net)[0]
    from sordino.methods.dp_mac.network import ACTIVATIONS

    return Layer(found.weight, found.bias, ACTIVATIONS[activation], output)
