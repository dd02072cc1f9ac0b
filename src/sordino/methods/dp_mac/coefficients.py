"""The coefficients of a batch as one vector of sensitivity 1: what DP-MAC releases, and the inverse scaling.

Each layer k contributes parts: its gradient ∂t, with order 2 also ½∂²t, with `value` also t. A record's part p is
bounded to Θ_p in l2 (Frobenius) norm, then divided by Θ_p·√P, where P is the number of parts of all layers (or, with
another split, multiplied by s_p/Θ_p with Σ s_p² = 1). A record's concatenated parts then have norm at most
√(Σ s_p²) = 1 for every record, so adding or removing one changes the sum by at most 1 (Harder et al. 2018, section 2.3;
docs/guarantees/dp_mac.md, Lemma 1). `polynomials` multiplies by Θ_p/s_p again: post-processing.

How a part is bounded to Θ ("bounding"):
    clip        scaled down if it is longer: min(1, Θ/‖·‖)
    normalise   scaled to length exactly Θ (0 stays 0): only directions count, so layers of any scale learn
    analytic    Θ is the sensitivity of `bounds` at the current weights. The part is clipped to it nevertheless, which
                changes nothing if the bounds are right: the guarantee does not depend on their proof.
A part that is not finite contributes zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sordino import checks
from sordino.clipping import Clipping, FlatClip, NormalisedClip
from sordino.errors import InputError
from sordino.features.moment import from_triangle
from sordino.gradients import ClippedSum, Rows
from sordino.methods.dp_mac.bounds import Radii, sensitivities
from sordino.methods.dp_mac.network import Layer, Network, chain
from sordino.methods.dp_mac.taylor import CURVATURES, Terms, expand
from sordino.methods.dp_mac.zsteps import ZSteps, auxiliary, into_ball
from sordino.plan.contribution import Contribution
from sordino.records.chunks import stable_chunks
from sordino.records.gradients import add_sums
from sordino.sampling import LogicalBatch

BOUNDINGS = ("clip", "normalise", "analytic")
SPLITS = ("equal", "sqrt-dim")
_SHORTEST = 1e-20  # shortest vector that is normalised: below, single precision has no direction
CONCATENATED = FlatClip(1.0)
"""The bound on a record's whole vector: the clipping of every DP-MAC plan."""
Bounds = Mapping[str, float]
"""Θ of each part, by name: "layers.0.gradient", "layers.0.curvature", "layers.0.value"."""


@dataclass(frozen=True)
class Expansion:
    """Which coefficients are released, and how those of a record are bounded."""

    order: int = 1
    curvature: str = "diagonal"  # of order 2: "full" matrices per unit, or their diagonals
    value: bool = False  # also release the constant; no optimizer here needs it
    bounding: str = "clip"
    split: str = "equal"  # how the joint norm 1 is divided among the parts

    def __post_init__(self) -> None:
        if self.order not in (1, 2):
            raise InputError(f"order = {self.order!r}: the expansion is of first or second order")
        checks.choice("curvature", self.curvature, CURVATURES)
        checks.choice("bounding", self.bounding, BOUNDINGS)
        checks.choice("split", self.split, SPLITS)

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts that each layer contributes."""
        return ("gradient", *(("curvature",) if self.order == 2 else ()), *(("value",) if self.value else ()))


def fixed_bounds(layers: int, expansion: Expansion, thresholds: Mapping[str, float | Sequence[float]]) -> Bounds:
    """Public thresholds as bounds: `thresholds[part]` is one number for all layers or one for each."""
    bounds: dict[str, float] = {}
    for part in expansion.parts:
        given = thresholds.get(part, 1.0)
        each = list(given) if isinstance(given, Sequence) else [given] * layers
        if len(each) != layers:
            raise InputError(f"{len(each)} bounds on the {part} of {layers} layers: give one number, or one per layer")
        bounds |= {f"layers.{k}.{part}": checks.positive(f"the bound on {part}", b) for k, b in enumerate(each)}
    return bounds


def analytic_bounds(layers: Sequence[Layer], expansion: Expansion, z: ZSteps) -> Bounds:
    """The sensitivities at the current weights; needs the radius that the Z-steps enforce."""
    if z.radius is None:
        raise InputError("analytic bounds need a radius: the bound on inputs and auxiliary coordinates")
    found: dict[str, float] = {}
    for k, layer in enumerate(layers):
        bound = sensitivities(layer, Radii(z.radius, z.radius), z.mu)
        curvature = bound.curvature if expansion.curvature == "full" else bound.diagonal
        sizes = {"gradient": bound.gradient, "curvature": curvature, "value": bound.value}
        # a unit that is off everywhere has sensitivity 0; a bound must be positive, and any positive one is valid then
        found |= {f"layers.{k}.{part}": max(sizes[part], 1e-12) for part in expansion.parts}
    return found


def layer_terms(layers: Sequence[Layer], x: Tensor, y: Tensor, z: ZSteps) -> list[Terms]:
    """The expanded objective of every layer for the records x (n, in), y (n, out)."""
    if layers[-1].output == "sigmoid":
        y = y.clamp(0.0, 1.0)
    elif z.radius is not None:
        y = into_ball(y, z.radius)
    values = auxiliary(layers, x, y, z)
    return [
        expand(layer, below, above, z.mu) for layer, below, above in zip(layers, values, [*values[1:], y], strict=True)
    ]


def scaled_sums(terms: Sequence[Terms], expansion: Expansion, bounds: Bounds) -> ClippedSum:
    """Σ over records of the bounded, scaled coefficients, by name: sensitivity 1 under add/remove.

    Products of records and their sums are in double precision (docs/guarantees/noise.md, section 6).
    `norms` is the norm of each record's whole contribution, at most 1 up to rounding; private like the rest.
    """
    share = shares(part_sizes(terms, expansion), expansion)
    sums: dict[str, Tensor] = {}
    records = len(terms[0].value)
    squares, dropped = torch.zeros(records, dtype=torch.float64), torch.zeros(records, dtype=torch.bool)
    for k, raw in enumerate(terms):
        finite, bad = raw.finite()
        dropped |= bad
        for part in expansion.parts:
            name = f"layers.{k}.{part}"
            norms = part_norms(finite, part, expansion)
            factors = _factors(expansion, bounds[name], norms) * (share[name] / bounds[name])
            sums[name] = _part_sum(finite, part, expansion, factors)
            squares = squares + (norms * factors).square()
    return ClippedSum(sums, squares.sqrt(), int(dropped.sum()), terms[-1].value)


def part_sizes(terms: Sequence[Terms], expansion: Expansion) -> dict[str, int]:
    """The number of coordinates of each part."""
    found = {}
    for k, term in enumerate(terms):
        units, wide = term.slope.shape[1], term.inputs.shape[1]
        for part in expansion.parts:
            found[f"layers.{k}.{part}"] = _size(units, wide, part, expansion)
    return found


def _size(units: int, wide: int, part: str, expansion: Expansion) -> int:
    triangle = part == "curvature" and expansion.curvature == "full"
    return 1 if part == "value" else units * (wide * (wide + 1) // 2 if triangle else wide)


def shares(sizes: Mapping[str, int], expansion: Expansion) -> dict[str, float]:
    """How the joint norm 1 is divided: Σ share² = 1. "equal" is 1/√P each (Harder et al. 2018); "sqrt-dim" is
    proportional to the root of a part's coordinates, so that large and small layers have similar signal to noise."""
    weights = {name: 1.0 if expansion.split == "equal" else math.sqrt(size) for name, size in sizes.items()}
    total = math.sqrt(math.fsum(w * w for w in weights.values()))
    return {name: w / total for name, w in weights.items()}


def part_norms(terms: Terms, part: str, expansion: Expansion) -> Tensor:
    """The l2 norm of each record's part, before bounding."""
    if part == "gradient":
        return terms.gradient_norms()
    return terms.value.abs().double() if part == "value" else terms.curvature_norms(expansion.curvature)


def _part_sum(terms: Terms, part: str, expansion: Expansion, factors: Tensor) -> Tensor:
    if part == "gradient":
        return terms.gradient_sum(factors)
    if part == "value":
        return (terms.value.double() * factors).sum(0, keepdim=True)
    return terms.curvature_sum(factors, expansion.curvature)


def _factors(expansion: Expansion, bound: float, norms: Tensor) -> Tensor:
    """The factor that bounds each record's part; 0 if it is not finite, or too short to have a direction."""
    if expansion.bounding == "normalise":
        return torch.where(norms > _SHORTEST, NormalisedClip(bound).factors(norms), torch.zeros_like(norms))
    return FlatClip(bound).factors(norms)


@dataclass(frozen=True, eq=False)
class Coefficients:
    """A gradient sum for `private_steps` (and the audit): maps a batch to its scaled coefficients.

    It uses the network's current weights. `thresholds` are the bounds; None: analytic, from the weights.
    """

    network: Network
    fetch: Callable[[Tensor], Rows]
    z: ZSteps
    expansion: Expansion
    thresholds: Bounds | None = None
    clipping: Clipping = CONCATENATED
    contribution: Contribution = field(default_factory=Contribution)

    def bounds(self) -> Bounds:
        """Θ of each part at the current weights: a function of released values only."""
        if self.thresholds is not None:
            return self.thresholds
        return analytic_bounds(chain(self.network), self.expansion, self.z)

    def terms(self, indices: Tensor) -> list[Terms]:
        rows = self.fetch(indices)
        dtype = next(self.network.parameters()).dtype
        return layer_terms(chain(self.network), rows.inputs.flatten(1).to(dtype), rows.targets.to(dtype), self.z)

    def __call__(self, batch: LogicalBatch) -> ClippedSum:
        bounds = self.bounds()
        total = self._empty()
        with torch.no_grad():
            for indices in stable_chunks(batch):
                total = add_sums(total, scaled_sums(self.terms(indices), self.expansion, bounds))
        return total

    def _empty(self) -> ClippedSum:
        """The sum over no records: zeros in the shape of every part."""
        sums: dict[str, Tensor] = {}
        for k, layer in enumerate(chain(self.network)):
            units, inputs = layer.weight.shape
            wide = inputs + (layer.bias is not None)
            triangle = wide * (wide + 1) // 2 if self.expansion.curvature == "full" else wide
            shapes = {"gradient": (units, wide), "curvature": (units, triangle), "value": (1,)}
            for part in self.expansion.parts:
                sums[f"layers.{k}.{part}"] = layer.weight.new_zeros(shapes[part], dtype=torch.float64)
        return ClippedSum(sums, torch.zeros(0), 0, torch.zeros(0))


@dataclass(frozen=True, eq=False)
class Polynomial:
    """A layer's noisy mean objective in d = w − ŵ:  ⟨gradient, d⟩ + Σ_h ⟨d_h, curvature_h·d_h⟩ + value."""

    gradient: Tensor  # (units, inputs); the last column belongs to the bias
    curvature: Tensor | None = None  # (units, inputs, inputs) symmetric, or (units, inputs): its diagonals
    value: Tensor | None = None
    noise: float = 0.0  # the standard deviation of the noise on a diagonal entry of the curvature


def polynomials(
    released: Mapping[str, Tensor], expansion: Expansion, bounds: Bounds, layers: int, noise: float
) -> list[Polynomial]:
    """Released coefficients in their original units: post-processing.

    `released` is a sum divided by the public divisor; `noise` is the standard deviation of the added noise.
    """
    share = shares({name: value.numel() for name, value in released.items()}, expansion)
    found = []
    for k in range(layers):
        names = {part: f"layers.{k}.{part}" for part in expansion.parts}
        scale = {part: bounds[name] / share[name] for part, name in names.items()}
        part = {name: released[f"layers.{k}.{name}"] * scale[name] for name in expansion.parts}
        curvature = part.get("curvature")
        if curvature is not None and expansion.curvature == "full":
            curvature = from_triangle(curvature)
        level = noise * scale.get("curvature", 0.0)
        found.append(Polynomial(part["gradient"], curvature, part.get("value"), level))
    return found
