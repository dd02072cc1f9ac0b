"""The Taylor coefficients of a layer's objective in its own weights, per record and in closed form.

With ũ = (z, 1) (or z without bias), a = W̃·ũ and t = Σ_h t_h(a_h), the objective of one record is a sum of functions of
one inner product each, so all its derivatives are outer products with ũ (Harder et al. 2018, (4), for ½T instead of T):

    ∂t/∂w̃_h = s_h·ũ            hidden, squared:  s = μ(f − z)·f′          sigmoid:  s = sigmoid(a) − y
    ∂²t/∂w̃_h² = c_h·ũũᵀ        c = μ(f′² + (f − z)·f″)                     c = sigmoid(a)·(1 − sigmoid(a))
    ∂²t/∂w̃_h∂w̃_g = 0  for h ≠ g

So a layer needs (n, out) slopes and curvatures, never an (n, out, in, in) tensor. The expansion is in d = w − ŵ:
t ≈ t(ŵ) + ⟨∂t, d⟩ + ⟨d, ½∂²t·d⟩. a, b, C of Harder et al. are functions of these three (`paper_form`), but have a
larger sensitivity: b = ∂t − ∂²t·ŵ contains the curvature a second time.

A symmetric matrix is released as its upper triangle with off-diagonal entries times √2 (`features.moment.triangle`):
an isometry from the Frobenius norm to l2, so the sensitivity is the same; the noise is that of independent noise on all
entries, made symmetric, with half the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from sordino.errors import SordinoError
from sordino.features.moment import triangle_of
from sordino.methods.dp_mac.network import Layer

CURVATURES = ("full", "diagonal")
_OUTER = 256  # records whose outer products are in memory at once


@dataclass(frozen=True, eq=False)
class Terms:
    """A layer's objective on each of n records, expanded at the layer's current weights."""

    inputs: Tensor  # (n, in), or (n, in + 1) with a last column of ones if the layer has a bias
    pre: Tensor  # (n, out)
    value: Tensor  # (n,)
    slope: Tensor  # (n, out)
    curvature: Tensor  # (n, out)

    def gradient_norms(self) -> Tensor:
        """‖∂t‖_F of each record: the norm of an outer product."""
        return _row_norms(self.slope) * _row_norms(self.inputs)

    def curvature_norms(self, kind: str) -> Tensor:
        """‖½∂²t‖_F of each record, or of the diagonals only."""
        spread = _row_norms(self.inputs).square() if kind == "full" else _row_norms(self.inputs.double().square())
        return 0.5 * _row_norms(self.curvature) * spread

    def gradient_sum(self, factors: Tensor) -> Tensor:
        """Σ_n factor_n·∂t_n, (out, in), in double precision."""
        return _weighted(self.slope, factors).T @ self.inputs.double()

    def curvature_sum(self, factors: Tensor, kind: str) -> Tensor:
        """Σ_n factor_n·½∂²t_n: (out, in·(in+1)/2) in the triangle's form, or the diagonals, (out, in); in double
        precision."""
        weighted = 0.5 * _weighted(self.curvature, factors).T
        if kind == "diagonal":
            return weighted @ self.inputs.double().square()
        row, column, scale = triangle_of(self.inputs.shape[1], weighted)
        total = weighted.new_zeros(len(weighted), len(row))
        for part, some in zip(torch.split(self.inputs, _OUTER), torch.split(weighted, _OUTER, dim=1), strict=True):
            rows = part.double()
            total += some @ (rows[:, row] * rows[:, column] * scale)
        return total

    def finite(self) -> tuple[Terms, Tensor]:
        """The same with all records that are not finite replaced by zeros, and which records those were."""
        good = torch.isfinite(self.gradient_norms() + self.curvature_norms("full") + self.value)
        good &= torch.isfinite(self.inputs.square().sum(1))  # products of inputs stay within the dtype
        if bool(good.all()):
            return self, ~good

        def keep(part: Tensor) -> Tensor:
            return torch.where(good.view(-1, *[1] * (part.dim() - 1)), part, torch.zeros_like(part))

        return Terms(*(keep(p) for p in (self.inputs, self.pre, self.value, self.slope, self.curvature))), ~good


def expand(layer: Layer, z: Tensor, target: Tensor, mu: float = 1.0) -> Terms:
    """The terms of a layer with inputs z (n, in) and targets (n, out): auxiliary coordinates, or y for the last."""
    a = layer.pre(z)
    inputs = z if layer.bias is None else torch.cat([z, z.new_ones(len(z), 1)], dim=1)
    if layer.output == "sigmoid":
        p = torch.sigmoid(a)
        return Terms(inputs, a, (softplus(a) - target * a).sum(1), p - target, p * (1 - p))
    weight = mu if layer.output is None else 1.0
    miss, first = layer.activation.value(a) - target, layer.activation.first(a)
    curvature = weight * (first.square() + miss * layer.activation.second(a))
    return Terms(inputs, a, 0.5 * weight * miss.square().sum(1), weight * miss * first, curvature)


def paper_form(terms: Terms, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """a (n,), b (n, out, in) and C (n, out, in, in) of Harder et al. 2018 of each record, for ½T. For tests: large."""
    value = terms.value - (terms.slope * terms.pre).sum(1) + 0.5 * (terms.curvature * terms.pre.square()).sum(1)
    slope = terms.slope - terms.curvature * terms.pre
    b = slope[:, :, None] * terms.inputs[:, None, :]
    outer = terms.inputs[:, :, None] * terms.inputs[:, None, :]
    if weight.shape != b.shape[1:]:
        raise SordinoError("the coefficients belong to another layer than the weights")
    return value, b, 0.5 * terms.curvature[:, :, None, None] * outer[:, None]


def _row_norms(rows: Tensor) -> Tensor:
    """In double precision: the squares of small single-precision numbers would underflow, and a record whose norm is
    underestimated would be scaled up too far."""
    return rows.double().square().sum(1).sqrt()


def _weighted(rows: Tensor, factors: Tensor) -> Tensor:
    """rows·factor in double precision, zero where that is not finite."""
    scaled = rows.double() * factors[:, None].double()
    return torch.where(torch.isfinite(scaled), scaled, torch.zeros_like(scaled))
