"""Losses of linear models with proven convexity, slope and curvature, as a hidden-state guarantee needs them.

A loss is a function f_t of the scores z = W·x of one record with target t. The proofs need it to be convex in z for
every t, with ‖∇f_t(z)‖ ≤ G (`slope`) and 0 ⪯ ∇²f_t(z) ⪯ H (`curvature`) at every z that training can reach. Then the
record's gradient ∇f_t ⊗ x has norm at most G·‖x‖ without any clipping, and its Hessian ∇²f_t ⊗ xxᵀ lies between 0 and
H·‖x‖²: `sordino.methods.hidden_state.certificate`.

| loss      | f_t(z)                                                    | G       | H                             |
|-----------|-----------------------------------------------------------|---------|-------------------------------|
| Softmax   | φ(m), m = z_t − log Σ_{j≠t} e^{z_j}, −φ' = min(σ(−m), g)  | √2·g    | 1/2; 2g(1−g) for a cap g ≤ ½  |
| OneVsRest | Σ_k φ(±z_k) with the same φ                               | g·√K    | 1/4; g(1−g) for a cap g ≤ ½   |
| Huber     | ‖z−t‖²/2 up to distance κ, then linear                    | κ       | 1                             |
| Squared   | ‖z−t‖²/2, with weights in a ball and bounded targets      | ‖z‖+‖t‖ | 1                             |

The capped softmax. Cross-entropy is φ(m) = log(1 + e^{−m}) of the margin m of the true class over the others, and its
gradient is σ(−m)·(q − e_t) with q the softmax among the other classes. Clipping long gradients does not give the
gradient of a convex function for three or more classes: see `clipped_softmax`. Capping φ' does. φ stays convex and
decreasing, m is concave in z, so φ(m) is convex; its gradient min(σ(−m), g)·(q − e_t) has the direction of the
softmax's gradient and norm at most √2·g, for any cap g. With g = 1 it is the softmax itself.
H: where the cap is active, the Hessian is g·(diag q − qqᵀ) ⪯ g/2, since for a unit vector v the variance of v_J, J ~ q,
is at most (max v − min v)²/4 ≤ 1/2. Elsewhere it is diag p − ppᵀ ⪯ 1/2 with p_t = 1 − e, e ≤ g, and
Var_p(v) = e(1−e)(v̄−v_t)² + e·Var_q(v) ≤ e·[(1−e)(v̄−v_t)² + 1 − v_t² − v̄²], v̄ the mean under q and v̄² + v_t² ≤ 1;
the quadratic form in (v̄, v_t) has the largest eigenvalue 2(1−e) − 1, so Var_p(v) ≤ 2e(1−e) for e ≤ 1/2.

One against the rest. Each class has its own logistic loss of its own score; clipping the derivative of a convex
function of one variable leaves it non-decreasing, so it is again the derivative of a convex function (a Huberised
logistic loss). The K scores together have slope g·√K. Clipping all K *jointly* does not give a gradient of a convex
function.

Edge cases: scores of any size give finite residuals; a target that is not a class is an InputError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from sordino import checks
from sordino.errors import InputError, Refused, did_you_mean


class Loss(Protocol):
    """A convex function of the scores (n, K) of records, one value for each."""

    @property
    def name(self) -> str: ...

    @property
    def outputs(self) -> int:
        """K: the number of scores of each record."""

    @property
    def curvature(self) -> float:
        """H: the largest eigenvalue of ∇²f, over all scores and targets."""

    def slope(self, score_norm: float) -> float:
        """G: the largest ‖∇f‖ over all targets and all scores of norm at most `score_norm` (which may be infinite)."""

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        """f of each record: (n, K), (n,) or (n, K) → (n,)."""

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        """∇f of each record: (n, K), (n,) or (n, K) → (n, K)."""

    def reasons(self) -> Mapping[str, str]:
        """The proofs of convexity, slope and curvature: one sentence each."""

    def to_dict(self) -> dict[str, Any]:
        """The loss as JSON-serialisable values, with the key `name`; loss_from_dict is the inverse."""


class _Plain:
    name: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Softmax(_Plain):
    """Cross-entropy of softmax(z), with its derivative in the margin capped at `cap`.

    There is no temperature: it would only change the unit of the weights.

    Args:
        outputs: The number of classes, at least 2.
        cap: The largest derivative, in (0, 1]; 1: the ordinary cross-entropy.
    """

    outputs: int
    cap: float = 1.0
    name: ClassVar[str] = "softmax"

    def __post_init__(self) -> None:
        checks.count("outputs", self.outputs, minimum=2)
        _check_cap(self.cap)

    @property
    def curvature(self) -> float:
        return 2 * self.cap * (1 - self.cap) if self.cap <= 0.5 else 0.5

    def slope(self, score_norm: float) -> float:
        return math.sqrt(2.0) * self.cap

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        _, _, margin = _margins(scores, _labels(targets, self.outputs))
        return _capped_logistic(margin, self.cap)

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        labels = _labels(targets, self.outputs)
        others, total, margin = _margins(scores, labels)
        pull = torch.sigmoid(-margin).clamp(max=self.cap)
        towards_others = (others - total[:, None]).exp() * pull[:, None]  # the true class has q = 0
        return towards_others.scatter(1, labels[:, None], -pull[:, None])

    def reasons(self) -> dict[str, str]:
        capped = self.cap < 1
        return {
            "convexity": "a convex decreasing function of the margin, which is concave in the scores",
            "slope": f"the gradient is a number in [0, {self.cap:g}] times (q − e_t) with ‖q − e_t‖ ≤ √2",
            "curvature": "Var_p(v) ≤ 2e(1−e) for unit v and p_t = 1 − e ≥ 1 − cap"
            if capped and self.cap <= 0.5
            else "Var_p(v) ≤ (max v − min v)²/4 ≤ 1/2 for unit v (Popoviciu)",
        }


@dataclass(frozen=True)
class OneVsRest(_Plain):
    """K logistic losses, one for each class against the rest; the derivative of each is capped at `cap`.

    Args:
        outputs: The number of classes; 1: one score, for the targets 0 and 1.
        cap: The largest derivative, in (0, 1]; 1: the ordinary logistic loss.
    """

    outputs: int
    cap: float = 1.0
    name: ClassVar[str] = "one-vs-rest"

    def __post_init__(self) -> None:
        checks.count("outputs", self.outputs)
        _check_cap(self.cap)

    @property
    def curvature(self) -> float:
        return self.cap * (1 - self.cap) if self.cap <= 0.5 else 0.25

    def slope(self, score_norm: float) -> float:
        return self.cap * math.sqrt(self.outputs)

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        return _capped_logistic(scores * self._signs(scores, targets), self.cap).sum(1)

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        signs = self._signs(scores, targets)
        return -signs * torch.sigmoid(-scores * signs).clamp(max=self.cap)

    def _signs(self, scores: Tensor, targets: Tensor) -> Tensor:
        """+1 for the class of the record, −1 for the others; one output: targets 0 and 1."""
        if self.outputs == 1:
            return (2.0 * _labels(targets, 2) - 1.0).to(scores)[:, None]
        signs = torch.full_like(scores, -1.0)
        return signs.scatter_(1, _labels(targets, self.outputs)[:, None], 1.0)

    def reasons(self) -> dict[str, str]:
        return {
            "convexity": "a sum over the classes of convex functions of one score each (Huberised logistic losses)",
            "slope": f"each of the {self.outputs} derivatives lies in [−{self.cap:g}, {self.cap:g}]",
            "curvature": "each second derivative is σ(1−σ) or, where the cap is active, zero",
        }


@dataclass(frozen=True)
class Huber(_Plain):
    """‖z − t‖²/2 up to distance `bound`, linear beyond. Class labels are encoded as t = length·(e_t − 1/K).

    Args:
        outputs: The number of scores, K.
        bound: The distance from which the loss is linear, which is also the largest norm of its gradient.
        length: The length of the vectors that encode classes.
    """

    outputs: int
    bound: float = 1.0
    length: float = 1.0
    name: ClassVar[str] = "huber"
    curvature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        checks.count("outputs", self.outputs)
        checks.positive("bound", self.bound)
        checks.positive("length", self.length)

    def slope(self, score_norm: float) -> float:
        return self.bound

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        distance: Tensor = torch.linalg.vector_norm(self._offset(scores, targets), dim=1)
        near = distance.clamp(max=self.bound)
        return near * (distance - near / 2)

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        offset = self._offset(scores, targets)
        return _shortened(offset, self.bound)

    def _offset(self, scores: Tensor, targets: Tensor) -> Tensor:
        return scores - target_vectors(targets, self.outputs, self.length).to(scores)

    def reasons(self) -> dict[str, str]:
        return {
            "convexity": "a convex increasing function of the distance ‖z − t‖, which is convex in z",
            "slope": "the gradient is the offset, scaled down to the bound if it is longer",
            "curvature": "a Moreau envelope of a norm: the gradient is a projection, hence non-expansive",
        }


@dataclass(frozen=True)
class Squared(_Plain):
    """‖z − t‖²/2. Its slope is bounded only if weights are kept in a ball; targets are scaled down to `target_norm`.

    Class labels are encoded as t = length·(e_t − 1/K).

    Args:
        outputs: The number of scores, K.
        target_norm: The largest norm of a target.
        length: The length of the vectors that encode classes.
    """

    outputs: int
    target_norm: float = 1.0
    length: float = 1.0
    name: ClassVar[str] = "squared"
    curvature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        checks.count("outputs", self.outputs)
        checks.positive("target_norm", self.target_norm)
        checks.positive("length", self.length)

    def slope(self, score_norm: float) -> float:
        if not math.isfinite(score_norm):
            raise Refused(
                "the squared loss has no bounded gradient over all weights, so one record's effect is not bounded: "
                "keep the weights in a ball (radius = …), or use the huber loss"
            )
        return score_norm + self.target_norm

    def value(self, scores: Tensor, targets: Tensor) -> Tensor:
        return self.residual(scores, targets).square().sum(1) / 2

    def residual(self, scores: Tensor, targets: Tensor) -> Tensor:
        wanted = target_vectors(targets, self.outputs, self.length).to(scores)
        return scores - _shortened(wanted, self.target_norm)

    def reasons(self) -> dict[str, str]:
        return {
            "convexity": "a quadratic",
            "slope": "‖z‖ + ‖t‖, with weights kept in a ball and targets scaled down to their bound",
            "curvature": "its Hessian is the identity",
        }


LOSSES: Mapping[str, type[Softmax] | type[OneVsRest] | type[Huber] | type[Squared]] = {
    kind.name: kind for kind in (Softmax, OneVsRest, Huber, Squared)
}


def loss_from_dict(values: Mapping[str, Any]) -> Loss:
    """The inverse of `Loss.to_dict`.

    Args:
        values: The name and the options of a loss; missing options have their defaults. A softmax with `clip` instead
            of `cap` is made by `clipped_softmax`.

    Returns:
        The loss.

    Raises:
        InputError: the name or an option is unknown, or a value is wrong.
        Refused: a clipped softmax can't be certified.
    """
    options = dict(values)
    name = str(options.pop("name", None))
    if name not in LOSSES:
        raise InputError(f"loss {name!r} has no certificate: {did_you_mean(name, LOSSES)}")
    if name == "softmax" and "clip" in options and "cap" not in options:
        return clipped_softmax(options["outputs"], options["clip"])
    known = [one.name for one in fields(LOSSES[name])]
    for key in options:
        if key not in known:
            raise InputError(f"the loss {name!r} has no option {key!r}: {did_you_mean(key, known)}")
    return LOSSES[name](**options)


def clipped_softmax(outputs: int, clip: float) -> Softmax:
    """The certified loss that is equal to softmax regression with gradients clipped to norm `clip`, if there is one.

    Clipping has no effect for clip ≥ √2. With two classes the gradient has one direction and clipping is a cap. With
    more classes the Jacobian of the clipped gradient is s·(I − uuᵀ)·H where clipping is active: it is not symmetric and
    has negative curvature, so Prop. 6.2 of Ye and Shokri 2022 is false (10 classes, clip 0.75: curvature −0.0085; a
    step of size 1 increases the distance of two weights by 0.9 %).

    Args:
        outputs: The number of classes.
        clip: The bound on the norm of the gradient.

    Returns:
        The loss.

    Raises:
        InputError: `clip` is not positive.
        Refused: there are three or more classes and clip < √2.
    """
    if checks.positive("clip", clip) >= math.sqrt(2.0):
        return Softmax(outputs)
    if outputs == 2:
        return Softmax(outputs, cap=clip / math.sqrt(2.0))
    raise Refused(
        f"softmax regression with {outputs} classes and clipped gradients can't be certified: the clipped gradient is "
        f"not that of a convex function, and a step may drive two weights apart. Use the softmax with a cap, cap = "
        f"{clip / math.sqrt(2.0):.4g}: the same bound on the gradient, and convex; or one-vs-rest, or a clip ≥ √2"
    )


def target_vectors(targets: Tensor, outputs: int, length: float) -> Tensor:
    """(n,) class labels → (n, K) corners of a simplex of that size; real targets (n,) or (n, K) → (n, K) in double.

    A real target that is not finite becomes zero.
    """
    if not targets.dtype.is_floating_point:
        corners = torch.eye(outputs, dtype=torch.float64) - 1.0 / outputs
        return length * corners[_labels(targets, outputs)]
    wanted = targets.double().reshape(len(targets), targets[0].numel() if len(targets) else outputs)
    if wanted.shape[1] != outputs:
        raise InputError(f"the loss has {outputs} outputs, the targets have {wanted.shape[1]}")
    return torch.where(wanted.isfinite().all(1, keepdim=True), wanted, torch.zeros_like(wanted))


def _margins(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scores without the true class, log Σ e^… of them, the margin of the true class over them)."""
    others = scores.scatter(1, labels[:, None], -math.inf)
    total = others.logsumexp(1)
    return others, total, scores.gather(1, labels[:, None]).squeeze(1) - total


def _capped_logistic(margin: Tensor, cap: float) -> Tensor:
    """φ with −φ' = min(σ(−m), cap) and φ(∞) = 0: the logistic loss, continued as a line left of σ(−m) = cap."""
    if cap >= 1:
        return -functional.logsigmoid(margin)
    corner = math.log(1 / cap - 1)
    return -functional.logsigmoid(margin.clamp(min=corner)) + cap * (corner - margin).clamp(min=0)


def _shortened(vectors: Tensor, bound: float) -> Tensor:
    """Each row scaled down to norm `bound` if it is longer."""
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    return vectors / (norms / bound).clamp(min=1.0)


def _labels(targets: Tensor, classes: int) -> Tensor:
    if targets.dtype.is_floating_point or targets.dim() != 1:
        raise InputError(f"class labels must be whole numbers, one per record; got {targets.dtype}, {targets.dim()}-d")
    if len(targets) and not (int(targets.min()) >= 0 and int(targets.max()) < classes):
        raise InputError(f"a class label is outside 0, …, {classes - 1}")
    return targets.long()


def _check_cap(cap: float) -> None:
    if not checks.positive("cap", cap) <= 1:
        raise InputError(f"cap = {cap}: the derivative of a logistic loss lies between 0 and 1, so its cap must too")
