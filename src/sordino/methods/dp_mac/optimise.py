"""W-steps: map a layer's noisy polynomial to a change of its weights. All of this is post-processing.

| optimizer | order  | what it does                                                                              |
|-----------|--------|-------------------------------------------------------------------------------------------|
| sgd, adam | 1 or 2 | `steps` steps down the polynomial from ŵ; the torch optimizer's state lasts over batches  |
| cg        | 2      | at most `steps` steps of conjugate gradients to the polynomial's minimum, times `lr`      |

Noise can make the curvature indefinite, so that the polynomial has no minimum. `convex` raises every eigenvalue of
every unit's curvature (every entry of a diagonal one) to at least `floor` times the spectral radius of the noise alone
(√(2d)·s for d×d matrices whose triangle has noise of standard deviation s; 3·s for diagonals), a public number.
Directions in which the noise dominates are then treated as being as steep as the noise, so steps along them are short:
the quadratic is strictly convex, hence bounded below. Minimising it needs no constant term.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InputError
from sordino.methods.dp_mac.coefficients import Polynomial
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.words import WORDS


@dataclass(frozen=True)
class WSteps:
    """How the noisy polynomial is minimised."""

    optimizer: str = "adam"
    lr: float = 0.01
    steps: int = 1
    floor: float = 1.0
    momentum: float = 0.0  # for sgd

    def __post_init__(self) -> None:
        checks.choice("optimizer", self.optimizer, WORDS.optimizers)
        checks.positive("lr", self.lr)
        checks.positive("floor", self.floor)
        checks.count("w_steps", self.steps)
        checks.within("momentum", self.momentum, 0, 1, open_high=True)
        if self.momentum and self.optimizer != "sgd":
            raise InputError(f"momentum is an option of sgd, not of {self.optimizer}")

    def make(self, network: Network) -> Optimizer:
        """The torch optimizer whose state is saved with a run; for cg plain SGD, which has no state."""
        parameters = list(network.parameters())
        if self.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=self.lr)
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum)


def w_step(network: Network, layers: Sequence[Polynomial], settings: WSteps, optimizer: Optimizer) -> None:
    """Updates the network's weights along the polynomials (which are expanded at its current weights)."""
    start = [_matrix(layer).clone() for layer in _linear(network)]
    shaped = [convex(p, settings.floor) for p in layers]
    if settings.optimizer == "cg":
        for layer, polynomial in zip(_linear(network), shaped, strict=True):
            _assign(layer, -minimiser(polynomial, settings.steps))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return
    for _ in range(settings.steps):
        for layer, at, polynomial in zip(_linear(network), start, shaped, strict=True):
            _assign(layer, slope(polynomial, _matrix(layer) - at))
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def slope(polynomial: Polynomial, d: Tensor) -> Tensor:
    """The polynomial's gradient at the displacement d (units, inputs)."""
    return polynomial.gradient + _curve(polynomial, d)


def convex(polynomial: Polynomial, floor: float = 1.0) -> Polynomial:
    """The polynomial with its curvature raised to at least `floor` noise levels; unchanged without curvature."""
    curvature = polynomial.curvature
    if curvature is None:
        return polynomial
    if curvature.dim() == 2:
        level = max(3.0 * floor * polynomial.noise, torch.finfo(curvature.dtype).eps)
        return Polynomial(polynomial.gradient, curvature.clamp_min(level), polynomial.value, polynomial.noise)
    level = max(math.sqrt(2 * curvature.shape[-1]) * floor * polynomial.noise, torch.finfo(curvature.dtype).eps)
    values, vectors = torch.linalg.eigh(curvature)
    raised = (vectors * values.clamp_min(level)[:, None, :]) @ vectors.mT
    return Polynomial(polynomial.gradient, raised, polynomial.value, polynomial.noise)


def minimiser(polynomial: Polynomial, iterations: int) -> Tensor:
    """Conjugate gradients from d = 0 on a convex polynomial, for all units at once: (units, inputs)."""
    if polynomial.curvature is None:
        raise InputError("conjugate gradients need a second-order expansion: a linear one has no minimum")
    d = torch.zeros_like(polynomial.gradient)
    residual = -polynomial.gradient
    direction = residual.clone()
    size = residual.square().sum(1, keepdim=True)
    for _ in range(iterations):
        if float(size.max()) == 0.0:
            break
        pushed = _curve(polynomial, direction)
        bend = (direction * pushed).sum(1, keepdim=True)
        length = torch.where(bend > 0, size / bend.clamp_min(torch.finfo(bend.dtype).tiny), torch.zeros_like(bend))
        d = d + length * direction
        residual = residual - length * pushed
        new = residual.square().sum(1, keepdim=True)
        ratio = torch.where(size > 0, new / size.clamp_min(torch.finfo(size.dtype).tiny), torch.zeros_like(size))
        direction, size = residual + ratio * direction, new
    return d


def _curve(polynomial: Polynomial, d: Tensor) -> Tensor:
    """2·C·d, unit by unit; 0 without curvature."""
    curvature = polynomial.curvature
    if curvature is None:
        return torch.zeros_like(d)
    if curvature.dim() == 2:
        return 2 * curvature * d
    return 2 * (curvature @ d[:, :, None]).squeeze(2)


def _linear(network: Network) -> list[nn.Linear]:
    return [layer for layer in network.layers if isinstance(layer, nn.Linear)]


def _matrix(layer: nn.Linear) -> Tensor:
    """The weights with the bias as the last column."""
    weight = layer.weight.detach()
    return weight if layer.bias is None else torch.cat([weight, layer.bias.detach()[:, None]], dim=1)


def _assign(layer: nn.Linear, gradient: Tensor) -> None:
    inputs = layer.in_features
    layer.weight.grad = gradient[:, :inputs].to(layer.weight.dtype).contiguous()
    if layer.bias is not None:
        layer.bias.grad = gradient[:, inputs].to(layer.bias.dtype).contiguous()
