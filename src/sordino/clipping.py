"""How much one record may change a sum: the clippings, and the bound that each enforces.

A clipping maps a record's gradient g (all trainable parameters together) to a vector whose norm is at most
``clip_norm`` for every g. ``sensitivity`` returns that bound; nothing is measured.

| clipping       | result                                            | norm | g = 0 | non-finite g     |
|----------------|---------------------------------------------------|------|-------|------------------|
| FlatClip       | g · min(1, C/‖g‖₂)                                | l2   | 0     | 0, and counted   |
| AutomaticClip  | g · C/(‖g‖₂ + γ)                                  | l2   | 0     | 0, and counted   |
| NormalisedClip | g · C/‖g‖₂ (0 for ‖g‖₂ ≤ 10⁻¹²)                   | l2   | 0     | 0, and counted   |
| PerLayerClip   | each layer's g_l · min(1, c_l/‖g_l‖₂), Σ c_l² = C²| l2   | 0     | 0, and counted   |
| L1Clip         | g · min(1, C/‖g‖₁)                                | l1   | 0     | 0, and counted   |
| L2LinfClip     | clamp(g · min(1, C/‖g‖₂), ± C/√p)                 | l2   | 0     | 0, and counted   |

A *layer* is a module that owns trainable parameters directly (weight and bias belong together).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InputError, Refused, did_you_mean

Floats = npt.NDArray[np.floating[Any]]
Norm = Literal["l1", "l2"]
_SHORTEST = 1e-12  # shortest vector that is normalised: below, squares underflow in single precision


def _positive(owner: object, **values: object) -> None:
    for name, value in values.items():
        checks.positive(f"{type(owner).__name__}: {name}", value)


@dataclass(frozen=True)
class _Clip:
    clip_norm: float
    name: ClassVar[str]
    norm: ClassVar[Norm] = "l2"

    def __post_init__(self) -> None:
        _positive(self, clip_norm=self.clip_norm)

    def sensitivity(self, relation: str) -> float:
        """The largest change of a sum of clipped records, in ``norm``.

        Args:
            relation: "add-remove" (one record is added or removed: C) or "replace-one" (one is replaced: 2C).

        Returns:
            The bound.

        Raises:
            InputError: the relation is unknown.
        """
        if relation not in ("add-remove", "replace-one"):
            raise InputError(f"unknown relation {relation!r}: use 'add-remove' or 'replace-one'")
        return self.clip_norm * (1.0 if relation == "add-remove" else 2.0)

    def to_dict(self) -> dict[str, Any]:
        """The clipping as JSON-serialisable values; ``clipping_from_dict`` is the inverse."""
        fields = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"name": self.name, **fields}

    def factors(self, norms: Tensor) -> Tensor:
        """The factor of each record; 0 where the norm is not finite. Never divides by zero.

        Args:
            norms: (records,) the norms before clipping.

        Returns:
            (records,) factors; a gradient times its factor has norm at most ``clip_norm``.
        """
        return _from_norms(norms, lambda n: np.minimum(self.clip_norm / np.maximum(n, np.finfo(n.dtype).tiny), 1.0))


def _from_norms(norms: Tensor, factors: Callable[[Floats], Floats]) -> Tensor:
    """Computed by NumPy, as in memory.squares: torch's comparisons load a megabyte of code for five short vectors."""
    values = norms.detach().cpu().numpy()
    with np.errstate(invalid="ignore", over="ignore"):
        found = factors(values).astype(values.dtype, copy=False)
    found[~np.isfinite(values)] = 0
    return torch.from_numpy(found).to(norms.device)


@dataclass(frozen=True)
class FlatClip(_Clip):
    """g · min(1, C/‖g‖₂): Abadi et al. 2016, Algorithm 1.

    Args:
        clip_norm: C, the largest norm of one record's clipped gradient.

    Example:
        >>> FlatClip(2.0).factors(torch.tensor([1.0, 4.0])).tolist()
        [1.0, 0.5]
    """

    name: ClassVar[str] = "flat"


@dataclass(frozen=True)
class AutomaticClip(_Clip):
    """g · C/(‖g‖₂ + γ): Bu et al. 2023, "Automatic clipping", equation (4.1) (AUTO-S). Norm below C for every g.

    Args:
        clip_norm: C, the largest norm of one record's clipped gradient.
        gamma: γ, which keeps short gradients short.
    """

    clip_norm: float = 1.0
    gamma: float = 0.01
    name: ClassVar[str] = "automatic"

    def __post_init__(self) -> None:
        _positive(self, clip_norm=self.clip_norm, gamma=self.gamma)

    def factors(self, norms: Tensor) -> Tensor:
        """The factor of each record from its norm; 0 where the norm is not finite.

        Args:
            norms: (records,) the norms before clipping.

        Returns:
            (records,) factors.
        """
        return _from_norms(norms, lambda n: self.clip_norm / (n + self.gamma))


@dataclass(frozen=True)
class NormalisedClip(_Clip):
    """g · C/‖g‖₂; zero for a gradient that is zero or too short to have a direction.

    Args:
        clip_norm: C, the largest norm of one record's clipped gradient.
    """

    name: ClassVar[str] = "normalised"

    def factors(self, norms: Tensor) -> Tensor:
        """The factor of each record from its norm; 0 where the norm is not finite.

        Args:
            norms: (records,) the norms before clipping.

        Returns:
            (records,) factors.
        """
        return _from_norms(norms, lambda n: np.where(n > _SHORTEST, self.clip_norm / np.maximum(n, _SHORTEST), 0.0))


@dataclass(frozen=True)
class PerLayerClip(_Clip):
    """Clips each layer to its own bound c_l with √(Σ c_l²) = C, so that the whole record is bounded by C.

    Args:
        clip_norm: C, the largest norm of one record's clipped gradient.
        split: "equal" (the same c_l), "sqrt-dim" (c_l ∝ √(number of coordinates)), or the proportions themselves, one
            per layer in the order of ``named_modules``; they are scaled so that the bound holds.
    """

    split: Literal["equal", "sqrt-dim"] | tuple[float, ...] = "equal"
    name: ClassVar[str] = "per-layer"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.split, str):
            if self.split not in ("equal", "sqrt-dim"):
                raise InputError(f"PerLayerClip: split {self.split!r} is not 'equal', 'sqrt-dim' or a tuple of numbers")
            return
        object.__setattr__(self, "split", tuple(float(s) for s in self.split))
        if not self.split:
            raise InputError("PerLayerClip: split is empty; give one proportion per layer")
        for s in self.split:
            _positive(self, split=float(s))

    def bounds(self, sizes: Sequence[int]) -> list[float]:
        """The bound c_l of each layer.

        Args:
            sizes: The number of coordinates of each layer.

        Returns:
            One bound per layer; their squares sum to C².

        Raises:
            InputError: ``split`` has another number of proportions.
        """
        if isinstance(self.split, tuple):
            if len(self.split) != len(sizes):
                raise InputError(
                    f"PerLayerClip: split has {len(self.split)} proportions, "
                    f"but the model has {len(sizes)} trainable layers"
                )
            shares = list(self.split)
        else:
            shares = [1.0 if self.split == "equal" else math.sqrt(size) for size in sizes]
        if not 1e-100 < max(shares) < 1e100:  # squares would underflow or overflow
            shares = [s / max(shares) for s in shares]
        total = math.sqrt(math.fsum(s * s for s in shares))
        return [self.clip_norm * s / total for s in shares]


@dataclass(frozen=True)
class L1Clip(_Clip):
    """g · min(1, C/‖g‖₁), for Laplace noise. Needs every coordinate of every record: slower than l2.

    Args:
        clip_norm: C, the largest norm of one record's clipped gradient.
    """

    name: ClassVar[str] = "l1"
    norm: ClassVar[Norm] = "l1"


@dataclass(frozen=True)
class L2LinfClip(_Clip):
    """l2 clipping to C, then every coordinate truncated at ± C/√p (the l2 norm can only shrink).

    Xiao, Wan & Devadas 2022, Algorithm 2. Needs every coordinate of every record: slower than l2.

    Args:
        clip_norm: C, the largest norm of one record's clipped gradient.
        p: Sets the bound C/√p of a coordinate.
    """

    p: float = 1.0
    name: ClassVar[str] = "l2-linf"

    def __post_init__(self) -> None:
        _positive(self, clip_norm=self.clip_norm, p=self.p)

    @property
    def coordinate_bound(self) -> float:
        """The largest magnitude of one coordinate, C/√p."""
        return self.clip_norm / math.sqrt(self.p)


def in_unit_ball(inputs: Tensor, radius: float | None) -> Tensor:
    """Flattened rows x / max(‖x‖₂, radius) in double precision; if `radius` is None, x / ‖x‖₂, and 0 for a zero row.

    The norm of every result is at most 1 + (d + 4)·10⁻¹⁵ for d coordinates, for all floats: a row is divided by its
    largest magnitude before it is squared, so the sum of squares lies in [1, d]. Rows that are not finite become zero.
    So do rows below the smallest normal number, because the platform may flush them to zero in one operation and not in
    the next.
    """
    rows = inputs.flatten(1).double()
    if not rows.shape[1]:
        return rows
    nothing = torch.zeros_like(rows)
    rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, nothing)
    largest = rows.abs().amax(1, keepdim=True)
    scaled = rows / torch.where(largest == 0, 1.0, largest)
    norms: Tensor = torch.linalg.vector_norm(scaled, dim=1, keepdim=True)
    directions = scaled / norms
    if radius is not None:
        # ‖x‖ > radius, with both sides divided by the largest magnitude: ‖x‖ itself may overflow
        directions = torch.where(norms > radius / largest, directions, rows / radius)
    return torch.where(largest >= torch.finfo(torch.float64).tiny, directions, nothing)


Clipping = FlatClip | AutomaticClip | NormalisedClip | PerLayerClip | L1Clip | L2LinfClip

_BY_NAME: dict[str, type[Clipping]] = {
    c.name: c for c in (FlatClip, AutomaticClip, NormalisedClip, PerLayerClip, L1Clip, L2LinfClip)
}


P_AVERAGED = ("p-averaged", "p_averaged", "microbatch")
P_AVERAGED_REFUSED = (
    "clipping the means of groups of p records is not private at per-record noise: one record moves the clipped mean "
    "of its group by up to 2c, and a batch of B records has only B/p groups, so the noise per unit of gradient would "
    "have to be 2p times as large (p times under replace-one), which the smaller sampling noise τ/√p does not make up "
    "for; use flat clipping with views of each record or inner momentum, and diagnostics.instruments.p_averaged to "
    "study it"
)


def clipping_from_dict(values: Mapping[str, Any]) -> Clipping:
    """The inverse of ``to_dict``. Raises InputError for an unknown name or option."""
    fields = dict(values)
    name = fields.pop("name", None)
    if name in P_AVERAGED:
        raise Refused(P_AVERAGED_REFUSED)
    if name not in _BY_NAME:
        raise InputError(f"unknown clipping {name!r}: {did_you_mean(name, _BY_NAME)}")
    if isinstance(fields.get("split"), list):
        fields["split"] = tuple(fields["split"])
    known = [field for field in _BY_NAME[name].__dataclass_fields__ if field not in ("name", "norm")]
    for key in fields:
        if key not in known:
            raise InputError(f"clipping {name!r}: unknown option {key!r}: {did_you_mean(key, known)}")
    try:
        return _BY_NAME[name](**fields)
    except TypeError as error:
        raise InputError(f"clipping {name!r}: {error}") from None
