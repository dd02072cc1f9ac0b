"""Z-steps: the auxiliary coordinates of a batch; those of a record depend on that record and the weights only.

minimise over z_1, …, z_K:   loss(y, W_{K+1}·z_K) + (μ/2)·Σ_k ‖z_k − f_k(z_{k−1})‖²,   z_0 = x   (Harder et al., (2))

Nothing here is released and nothing is noisy. The guarantee requires that a record's coordinates depend on no other
record. They do not: the objective is a sum over records, and Adam works coordinate by coordinate (this is tested).

Start:         "forward"   z_k = f_k(z_{k−1}): Harder et al.'s choice; every residual except the output's is then 0.
               "backward"  z_k = f_k(z_{k−1}) − rate·∂loss/∂z_k, the derivative of the whole network: at the minimum
                           the residuals r_k = z_k − f_k(z_{k−1}) satisfy r_k = J_{k+1}ᵀ·r_{k+1}, which is
                           back-propagation's recursion, so the Z-steps lead there (docs/dp_mac.md).
Order:         "joint"     all layers at once (Harder et al.).
               "sweep"     from the last hidden layer to the first, `steps` for each: a residual reaches the first
                           layer in one sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InputError
from sordino.methods.dp_mac.network import Layer

STARTS = ("forward", "backward")
ORDERS = ("joint", "sweep")
_DECAY, _SQUARED, _TINY = 0.9, 0.999, 1e-8  # Adam's defaults


@dataclass(frozen=True)
class ZSteps:
    """How the auxiliary coordinates are computed. `radius`: each z_k, and x, is projected into that ball."""

    steps: int = 30
    lr: float = 0.003
    start: str = "forward"
    order: str = "joint"
    rate: float = 1.0  # for the start "backward"
    mu: float = 1.0
    radius: float | None = None

    def __post_init__(self) -> None:
        checks.count("z_steps", self.steps, minimum=0)
        checks.choice("z_start", self.start, STARTS)
        checks.choice("z_order", self.order, ORDERS)
        for name in ("lr", "rate", "mu"):
            checks.positive(name, getattr(self, name))
        if self.radius is not None:
            checks.positive("radius", self.radius)
        if self.start == "forward" and self.steps == 0:
            raise InputError("z_steps = 0 with a forward start leaves every residual at 0: no hidden layer learns")


def auxiliary(layers: Sequence[Layer], x: Tensor, y: Tensor, settings: ZSteps) -> list[Tensor]:
    """[z_0, z_1, …, z_K] of the records x (n, in) with targets y (n, out)."""
    z = [into_ball(x, settings.radius)]
    for layer in layers[:-1]:
        z.append(into_ball(layer(z[-1]), settings.radius))
    if len(layers) == 1:
        return z
    if settings.start == "backward":
        z = _started_backward(layers, z, y, settings)
    if settings.order == "joint":
        return _descend(layers, z, y, settings, range(1, len(layers)))
    for k in range(len(layers) - 1, 0, -1):
        z = _descend(layers, z, y, settings, range(k, k + 1))
    return z


def _started_backward(layers: Sequence[Layer], forward: Sequence[Tensor], y: Tensor, settings: ZSteps) -> list[Tensor]:
    """Residuals z_k − f_k(z_{k−1}) of −rate·∂loss/∂z_k, exactly.

    Each z_k is set relative to the prediction from the z_{k−1} that was already moved. Moving all from the forward
    values would leave (I − W·Wᵀ)·∂loss/∂z_k for linear layers, which has the wrong sign where W has norm above 1.
    """
    z = [forward[0]]
    for layer, pulled in zip(layers, backward(layers, forward, y), strict=False):
        z.append(into_ball(layer(z[-1]) - settings.rate * pulled, settings.radius))
    return z


def backward(layers: Sequence[Layer], z: Sequence[Tensor], y: Tensor) -> list[Tensor]:
    """∂loss/∂z_k for k = 1, …, K by back-propagation along the values z."""
    pulled = [_output_slope(layers[-1], z[-1], y) @ layers[-1].weight]
    for layer, value in zip(reversed(layers[1:-1]), reversed(z[1:-1]), strict=True):
        pulled.append((pulled[-1] * layer.activation.first(layer.pre(value))) @ layer.weight)
    return pulled[::-1]


def residual_gradient(layers: Sequence[Layer], z: Sequence[Tensor], y: Tensor, k: int, mu: float) -> Tensor:
    """∂E/∂z_k = μ·(z_k − f_k(z_{k−1})) − W_{k+1}ᵀ·(f′·μ(z_{k+1} − f_{k+1}(z_k))), or the loss's slope at the end."""
    own = mu * (z[k] - layers[k - 1](z[k - 1]))
    return own + _pull(layers, z, y, k, mu)


def into_ball(z: Tensor, radius: float | None) -> Tensor:
    """Each row scaled down to norm `radius` if it is longer."""
    if radius is None:
        return z
    norms = z.square().sum(1, keepdim=True).sqrt()
    return z * norms.clamp_min(radius).reciprocal().mul(radius)


def _pull(layers: Sequence[Layer], z: Sequence[Tensor], y: Tensor, k: int, mu: float) -> Tensor:
    """The gradient at z_k from the layer above."""
    above = layers[k]
    if above.output is not None:
        return _output_slope(above, z[k], y) @ above.weight
    a = above.pre(z[k])
    return (mu * (above.activation.value(a) - z[k + 1]) * above.activation.first(a)) @ above.weight


def _output_slope(layer: Layer, z: Tensor, y: Tensor) -> Tensor:
    a = layer.pre(z)
    return (torch.sigmoid(a) if layer.output == "sigmoid" else a) - y


def _descend(
    layers: Sequence[Layer], start: Sequence[Tensor], y: Tensor, settings: ZSteps, moving: range
) -> list[Tensor]:
    """`settings.steps` steps of Adam on the coordinates z_k, k in `moving`; the others are fixed."""
    z = list(start)
    first = {k: torch.zeros_like(z[k]) for k in moving}
    second = {k: torch.zeros_like(z[k]) for k in moving}
    below = layers[moving[0] - 1](z[moving[0] - 1])  # the lowest prediction is constant
    for step in range(1, settings.steps + 1):
        gradients = {}
        for k in moving:
            predicted = below if k == moving[0] else layers[k - 1](z[k - 1])
            gradients[k] = settings.mu * (z[k] - predicted) + _pull(layers, z, y, k, settings.mu)
        for k, g in gradients.items():
            first[k].mul_(_DECAY).add_(g, alpha=1 - _DECAY)
            second[k].mul_(_SQUARED).addcmul_(g, g, value=1 - _SQUARED)
            size = (second[k] / (1 - _SQUARED**step)).sqrt_().add_(_TINY)
            z[k] = into_ball(z[k] - settings.lr / (1 - _DECAY**step) * first[k] / size, settings.radius)
    return z
