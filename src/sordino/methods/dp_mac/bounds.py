"""Analytic sensitivities: the largest coefficients of any one record, from the weights and public radii.

Setting: ‖z_{k−1}‖ ≤ r and ‖z_k‖ (or ‖y‖) ≤ ρ, both enforced by projection, y in [0, 1] for sigmoid outputs. With
ũ = (z, 1) the input norm is R = √(r² + 1) (r without bias), and a_h lies in [b_h − ‖w_h‖r, b_h + ‖w_h‖r] by
Cauchy–Schwarz. Let V_h, F_h, G_h, X_h be the largest |f|, |f′|, |f″| and |a| on that interval. For ½T (docs/guarantees/
dp_mac.md has the proofs, and the errors in the printed ones of appendices E–H):

    |t|        ≤ ½μ(ρ + ‖V‖)²
    ‖∂t‖_F     ≤ μR(‖V⊙F‖ + ρ·max F)
    ‖½∂²t‖_F   ≤ ½μR²(‖F² + V⊙G‖ + ρ·max G)
    ‖b‖_F      ≤ μR(‖V⊙F‖ + ρ·max F + ‖X⊙(F² + V⊙G)‖ + ρ·max(X⊙G))            b = ∂t − ∂²t·ŵ, as in the paper
    |a|        ≤ ½μ(ρ + ‖V‖)² + μ(⟨V⊙F, X⟩ + ρ‖F⊙X‖) + ½μ(⟨F² + V⊙G, X²⟩ + ρ‖G⊙X²‖)

All vector norms are l2 over the units h. Add/remove: a sum over records changes by at most one record's coefficients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from sordino.methods.dp_mac.network import Layer


@dataclass(frozen=True)
class Radii:
    """Public bounds on the norms of a layer's inputs and of its targets."""

    inputs: float
    targets: float


@dataclass(frozen=True)
class Sensitivities:
    """The largest norm of each coefficient of one record; `a` and `b` as in Harder et al. 2018, for comparison."""

    value: float
    gradient: float
    curvature: float  # Frobenius, full matrices
    diagonal: float  # the diagonals only
    a: float
    b: float


@dataclass(frozen=True, eq=False)
class _Reach:
    """The ranges of a layer's activations, unit by unit."""

    low: Tensor
    high: Tensor
    value: Tensor  # V
    first: Tensor  # F
    second: Tensor  # G

    @property
    def pre(self) -> Tensor:
        return torch.maximum(self.low.abs(), self.high.abs())  # X


def sensitivities(layer: Layer, radii: Radii, mu: float = 1.0) -> Sensitivities:
    """The bounds of the table above at the layer's current weights (which are released, hence public)."""
    reach = _reach(layer, radii.inputs)
    long = math.hypot(radii.inputs, 1.0) if layer.bias is not None else radii.inputs
    fourth = math.hypot(radii.inputs**2, 1.0) if layer.bias is not None else radii.inputs**2
    if layer.output == "sigmoid":
        return _sigmoid(reach, long, fourth)
    weight = mu if layer.output is None else 1.0
    v, f, g, x, rho = reach.value, reach.first, reach.second, reach.pre, radii.targets
    bend = f.square() + v * g
    value = 0.5 * (rho + _norm(v)) ** 2
    slope = _norm(v * f) + rho * float(f.max())
    curve = _norm(bend) + rho * float(g.max())
    a = value + float((v * f * x).sum()) + rho * _norm(f * x)
    a += 0.5 * (float((bend * x.square()).sum()) + rho * _norm(g * x.square()))
    b = long * (slope + _norm(x * bend) + rho * float((x * g).max()))
    found = (value, long * slope, 0.5 * long**2 * curve, 0.5 * fourth * curve, a, b)
    return Sensitivities(*(weight * number for number in found))


def _sigmoid(reach: _Reach, long: float, fourth: float) -> Sensitivities:
    """t = softplus(a) − y·a with y in [0, 1]: s = sigmoid(a) − y, c = sigmoid′(a); Harder et al.'s a has no y in it."""
    x, g = reach.pre, reach.second
    slope = torch.maximum(torch.sigmoid(reach.high), torch.sigmoid(-reach.low))
    value = torch.maximum(softplus(reach.high), softplus(-reach.low))
    a = float((softplus(reach.high) + torch.sigmoid(reach.high) * x + 0.5 * g * x.square()).sum())
    return Sensitivities(
        value=float(value.sum()),
        gradient=long * _norm(slope),
        curvature=0.5 * long**2 * _norm(g),
        diagonal=0.5 * fourth * _norm(g),
        a=a,
        b=long * (_norm(slope) + _norm(g * x)),
    )


def _reach(layer: Layer, radius: float) -> _Reach:
    weight = layer.weight.double()
    spread = weight.norm(dim=1) * radius
    centre = torch.zeros_like(spread) if layer.bias is None else layer.bias.double()
    low, high = centre - spread, centre + spread
    if layer.output == "sigmoid" or layer.activation.name == "softplus":
        nearest = torch.where(low > 0, low, torch.where(high < 0, high, torch.zeros_like(low)))
        p = torch.sigmoid(nearest)
        return _Reach(low, high, softplus(high), torch.sigmoid(high), p * (1 - p))
    zeros = torch.zeros_like(low)
    if layer.activation.name == "relu":
        return _Reach(low, high, torch.relu(high), (high > 0).double(), zeros)
    return _Reach(low, high, torch.maximum(low.abs(), high.abs()), torch.ones_like(low), zeros)


def _norm(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector))
