"""The sensitivities of appendices E to H of Harder et al. 2018 as printed: for comparison only, not used.

They are for T (twice our t), softplus hidden layers without biases, ‖z‖ ≤ T_z for inputs and targets, sums without the
factor 1/2S (which appendix H still has: it is left out here). docs/guarantees/dp_mac.md lists what is wrong with
them; tests/methods/dp_mac/test_mac_bounds.py finds records that exceed three of them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import softplus


def _alpha_beta(weight: Tensor, radius: float) -> tuple[Tensor, Tensor, Tensor]:
    """α, β and ‖w_h‖ of appendix E."""
    sizes = weight.norm(dim=1)
    return softplus(sizes * radius), torch.sigmoid(sizes * radius), sizes


def hidden_value(weight: Tensor, radius: float) -> float:
    """Δa_{k1}: T_z² + 2T_z‖α‖² + ‖β‖² (α and β are confused; ‖α‖ should have no square)."""
    alpha, beta, _ = _alpha_beta(weight, radius)
    return float(radius**2 + 2 * radius * alpha.square().sum() + beta.square().sum())


def hidden_gradient(weight: Tensor, radius: float) -> float:
    """√Δb_{k1}: the bound on ‖∂T‖_F (2² became 2)."""
    alpha, beta, _ = _alpha_beta(weight, radius)
    cross = min(float(alpha.sum()), math.sqrt(len(alpha)) * float((alpha * beta.square()).max()))
    inside = float((alpha * beta).square().sum()) + 2 * radius * cross + radius**2
    return math.sqrt(2 * radius**2 * inside)


def hidden_b(weight: Tensor, radius: float) -> float:
    """Δb_k = √(Δb_{k1} + Δb_{k2}) (‖x − y‖² ≤ ‖x‖² + ‖y‖² is used; Δb_{k2} has T_z⁴/8 for T_z⁴/2)."""
    alpha, beta, sizes = _alpha_beta(weight, radius)
    bend = (4 * beta.square() + alpha) * sizes
    second = radius**4 / 8 * (radius**2 * float(sizes.square().sum()) + float(bend.square().sum()))
    return math.sqrt(hidden_gradient(weight, radius) ** 2 + second)


def hidden_curvature(weight: Tensor, radius: float) -> float:
    """ΔC_k for C = ½∂²T (a missing ½ and a missing cross term cancel: valid, and loose)."""
    alpha, beta, _ = _alpha_beta(weight, radius)
    return radius**2 / 2 * math.sqrt(radius**2 + float((4 * beta.square() + alpha).square().sum()))


def output_b(weight: Tensor, radius: float) -> float:
    """Δb_o of the sigmoid cross-entropy output, without 1/2S; of the loss itself, not of twice it."""
    _, beta, sizes = _alpha_beta(weight, radius)
    inside = len(sizes) + 2 * radius * float((beta * sizes).sum()) + radius**2 / 16 * float(sizes.square().sum())
    return radius * math.sqrt(inside)


def output_curvature(weight: Tensor, radius: float) -> float:
    """ΔC_o, without 1/2S."""
    return math.sqrt(weight.shape[0]) * radius**2 / 8
