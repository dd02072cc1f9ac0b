"""Fully connected networks for MAC: a chain of layers, each with its own objective.

A layer maps z to f(a), a = W·z + b. The objective of a hidden layer is (μ/2)·‖z_k − f(a)‖², its distance from the
auxiliary coordinate; that of the output layer is ½·‖y − a‖² ("squared") or Σ_h log(1 + e^{a_h}) − y_h·a_h ("sigmoid":
cross-entropy, y in [0, 1]). Everything here is a function of one record at a time: no normalisation across a batch, no
dropout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from sordino.errors import InputError, did_you_mean

Function = Callable[[Tensor], Tensor]
OUTPUTS = ("squared", "sigmoid")


@dataclass(frozen=True)
class Activation:
    """f, f′ and f″. At a kink the left derivatives are used; f″ of a piecewise linear f is 0."""

    name: str
    value: Function
    first: Function
    second: Function


def _sigmoid_bend(a: Tensor) -> Tensor:
    s = torch.sigmoid(a)
    return s * (1 - s)


ACTIVATIONS = {
    "linear": Activation("linear", lambda a: a, torch.ones_like, torch.zeros_like),
    "relu": Activation("relu", torch.relu, lambda a: (a > 0).to(a.dtype), torch.zeros_like),
    "softplus": Activation("softplus", softplus, torch.sigmoid, _sigmoid_bend),
}


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer at its current weights. `output`: its objective if it is the last layer, else None."""

    weight: Tensor  # (out, in)
    bias: Tensor | None  # (out,)
    activation: Activation
    output: str | None = None

    def pre(self, z: Tensor) -> Tensor:
        """(n, in) → (n, out): the input of the activation."""
        return torch.nn.functional.linear(z, self.weight, self.bias)

    def __call__(self, z: Tensor) -> Tensor:
        return self.activation.value(self.pre(z))


class Network(nn.Module):
    """A plain torch module, so that DP-SGD and back-propagation can train the same network.

    The output layer is linear: its value is the reconstruction ("squared") or the logits ("sigmoid").

    Args:
        widths: The widths of the input, of each hidden layer, and of the output.
        activation: One name for all hidden layers, or one for each.
        output: The objective of the output layer, "sigmoid" or "squared".
        bias: Whether layers have a bias.

    Raises:
        InputError: a width or a name is wrong.
    """

    def __init__(
        self,
        widths: Sequence[int],
        activation: str | Sequence[str] = "relu",
        output: str = "sigmoid",
        bias: bool = True,
    ) -> None:
        super().__init__()
        if len(widths) < 2 or any(type(w) is not int or w < 1 for w in widths):
            raise InputError(f"widths = {list(widths)!r}: at least an input and an output width, each at least 1")
        if not isinstance(output, str) or output not in OUTPUTS:
            raise InputError(f"output {output!r} is unknown: {did_you_mean(output, OUTPUTS)}")
        hidden = len(widths) - 2
        if not isinstance(activation, str | list | tuple) or not all(isinstance(name, str) for name in activation):
            raise InputError(f"activation {activation!r} is unknown: give one of {', '.join(ACTIVATIONS)}, or a list")
        names = [activation] * hidden if isinstance(activation, str) else list(activation)
        if len(names) != hidden:
            raise InputError(f"{len(names)} activations for {hidden} hidden layers: give one for each, or one name")
        for name in names:
            if name not in ACTIVATIONS:
                raise InputError(f"activation {name!r} is unknown: {did_you_mean(name, ACTIVATIONS)}")
        self.activations, self.output = (*names, "linear"), output
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths))
        self._initialise()

    def _initialise(self) -> None:
        """Variance 2/in before a ReLU (He et al. 2015), 1/in elsewhere; biases 0."""
        for layer, name in zip(self.layers, self.activations, strict=True):
            assert isinstance(layer, nn.Linear)
            gain = math.sqrt(2.0) if name == "relu" else 1.0
            nn.init.normal_(layer.weight, std=gain / math.sqrt(layer.in_features))
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(1)
        for layer, name in zip(self.layers, self.activations, strict=True):
            z = ACTIVATIONS[name].value(layer(z))
        return z

    @property
    def widths(self) -> tuple[int, ...]:
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        return (linear[0].in_features, *(layer.out_features for layer in linear))


def chain(network: Network) -> list[Layer]:
    """The layers at the network's current weights, detached, so that they can't change the module."""
    found = []
    for index, (layer, name) in enumerate(zip(network.layers, network.activations, strict=True)):
        assert isinstance(layer, nn.Linear)
        bias = None if layer.bias is None else layer.bias.detach()
        last = network.output if index == len(network.activations) - 1 else None
        found.append(Layer(layer.weight.detach(), bias, ACTIVATIONS[name], last))
    return found


def loss(output: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The output objective of each record, (n, out), (n, out) → (n,), as back-propagation and DP-SGD minimise it."""
    if output == "squared":
        return lambda a, y: 0.5 * (y - a).square().sum(1)
    return lambda a, y: (softplus(a) - y * a).sum(1)
