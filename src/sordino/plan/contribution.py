"""What one record contributes to a sum: one vector, clipped once. This is part of the plan.

| part              | the record's vector                                                                              |
|-------------------|--------------------------------------------------------------------------------------------------|
| (none)            | its gradient                                                                                     |
| `augmentation`    | the mean of its gradients over random views of it                                                |
| `inner`           | the sum of its gradients at the current and at past iterates                                     |
| `record_momentum` | the momentum of its own gradients over all steps                                                 |
| `companions`      | its gradient when it is normalised together with public rows                                     |

None of these changes the accounting (docs/guarantees/clipping_bias.md, docs/guarantees/batch_clipping.md), because the
whole vector is bounded once. They are part of the plan so that the plan describes what is run: a gradient sum states
its contribution, and `private_steps` refuses one that differs from the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from sordino import checks
from sordino.errors import InputError, Refused

if TYPE_CHECKING:
    from sordino.plan.core import Plan


@dataclass(frozen=True)
class Augmentation:
    """How the views of a record are drawn; the recipe's section [augmentation].

    `crop`, `flip`, `erase` and `mixup` are for images (rows, channels, height, width); `word_dropout` is for texts
    (rows, length) of ids.

    Args:
        views: The number of views; the record's vector is the mean over them.
        crop: Pad with that many pixels of zeros, then cut out the original size at a random position.
        flip: Mirror horizontally with probability ½.
        erase: The probability of a rectangle of zeros, whose sides are between an eighth and a half of the image's.
        mixup: Mix a view with a second view *of the same record*, whose share is uniform on [0, mixup].
        word_dropout: The probability that a word becomes `unknown_id`.
        unknown_id: The id that replaces a dropped word.
        padding_id: The id of padding, which is never changed.

    Raises:
        InputError: a value is out of its range, or the views could not differ.
    """

    views: int = 1  # number of views; the record's vector is the mean over them
    crop: int = 0  # pixels of padding before the random crop
    flip: bool = False  # mirror horizontally with probability ½
    erase: float = 0.0  # probability of a rectangle of zeros
    mixup: float = 0.0  # largest share of a second view of the same record
    word_dropout: float = 0.0  # probability that a word becomes unknown_id
    unknown_id: int = 0  # texts: the id that replaces a dropped word
    padding_id: int = 0  # texts: this id is never dropped

    def __post_init__(self) -> None:
        for name, least in (("views", 1), ("crop", 0), ("unknown_id", 0), ("padding_id", 0)):
            checks.whole(f"augmentation: {name}", getattr(self, name), minimum=least)
        for name, most in (("erase", 1.0), ("mixup", 0.5), ("word_dropout", 0.9)):
            checks.within(f"augmentation: {name}", getattr(self, name), 0, most)
        if self.of_images and self.word_dropout:
            raise InputError("augmentation: crop, flip, erase and mixup are for images, word_dropout for texts")
        if self.mixup and not (self.crop or self.flip or self.erase):
            raise InputError(
                "augmentation: mixup mixes two views of a record, so crop, flip or erase must make them differ"
            )
        if self.views > 1 and not self.changes:
            raise InputError(f"augmentation: {self.views} views are all equal: give crop, flip, erase or word_dropout")

    @property
    def of_images(self) -> bool:
        return bool(self.crop or self.flip or self.erase or self.mixup)

    @property
    def changes(self) -> bool:
        """Whether a view can differ from the record."""
        return self.of_images or bool(self.word_dropout)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        rules = {name: value for name, value in asdict(self).items() if value and name not in ("views", "unknown_id")}
        how = ", ".join(name if value is True else f"{name} {value:g}" for name, value in rules.items())
        return f"{self.views} view{'s' * (self.views > 1)} ({how.replace('_', ' ')})"


@dataclass(frozen=True)
class InnerMomentum:
    """Algorithm 2, equation (13): adds the record's gradients at the last `length` iterates to its current gradient.

    Args:
        length: The number of past iterates.
        decay: The factor per iterate of age: the current gradient has weight 1, the previous one decay, then decay².

    Raises:
        InputError: a value is out of its range.
    """

    length: int
    decay: float

    def __post_init__(self) -> None:
        checks.whole("inner_length", self.length, minimum=1)
        checks.within("inner_decay", self.decay, 0, 1, open_low=True)

    def factors(self, past: int) -> list[float]:
        """The weights of `past` iterates, from the oldest to the last (at most `length` of them count)."""
        return [float(self.decay) ** age for age in range(min(past, self.length), 0, -1)]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RecordMomentum:
    """Algorithm 1: the momentum of every record over all steps.

    Args:
        kept: The fraction of the momentum that remains after a step, 1 − γ.

    Raises:
        InputError: `kept` is not strictly between 0 and 1.
    """

    kept: float

    def __post_init__(self) -> None:
        checks.within("record_momentum_kept", self.kept, 0, 1, open_low=True, open_high=True)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Companions:
    """The public rows that each record is normalised with.

    Args:
        rows: Their number.
        digest: The SHA-256 of the public rows that they are drawn from.

    Raises:
        InputError: there are none.
    """

    rows: int
    digest: str

    def __post_init__(self) -> None:
        checks.whole("companions", self.rows, minimum=1)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Contribution:
    """The parts of the one vector of a record; the default is its gradient.

    Args:
        inner: Momentum over past iterates.
        augmentation: Random views.
        record_momentum: Momentum of single records over all steps.
        companions: Public rows that the record is normalised with.

    Example:
        >>> Contribution(inner=InnerMomentum(length=2, decay=0.5)).kinds
        ('inner',)
    """

    inner: InnerMomentum | None = None
    augmentation: Augmentation | None = None
    record_momentum: RecordMomentum | None = None
    companions: Companions | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the parts that are present."""
        return tuple(name for name in KINDS if getattr(self, name) is not None)

    def check(self, plan: Plan) -> None:
        """Refuses a combination that no theorem covers, or that the plan's method does not cover."""
        uncovered = [kind for kind in self.kinds if kind not in plan.method.covers]
        if uncovered:
            raise Refused(
                f"the method {plan.method.name} does not support {', '.join(_WORDS[kind] for kind in uncovered)}: its "
                "vector of a record is computed differently; leave them out, or use another method"
            )
        if self.record_momentum is None:
            return
        if not (plan.sampling.name == "poisson" and plan.sampling.to_dict()["sampling_rate"] == 1.0):
            raise Refused(
                "the momentum of single records over all steps (Algorithm 1) is proven for full batches only: poisson "
                "sampling with expected_batch = records; for sampled batches use inner_length and inner_decay"
            )
        if self.inner is not None:
            raise Refused(
                "a record can have only one kind of momentum: give inner_length or record_momentum_kept, not both"
            )

    def without_companions(self) -> Contribution:
        """The parts that the plan must state; companions may be stated by the model only."""
        return replace(self, companions=None)

    def texts(self) -> tuple[tuple[str, str], ...]:
        """(assumption, how it is ensured) of each part, for the guarantee."""
        found = []
        if self.inner is not None:
            found.append(
                (
                    f"a record's vector is its gradient at the current and at the last {self.inner.length} iterates, "
                    f"with factor {self.inner.decay:g} per iterate of age, summed and then clipped once",
                    "past iterates are weights that depend on released values only",
                )
            )
        if self.record_momentum is not None:
            found.append(
                (
                    f"a record's vector is the momentum of its own gradients, of which a step keeps "
                    f"{self.record_momentum.kept:g}, clipped once",
                    "every step uses all records; the momenta stay in memory and are never written",
                )
            )
        if self.augmentation is not None:
            found.append(
                (
                    f"a record's vector is the mean over {self.augmentation} of it, clipped once",
                    "the views depend on the record's own content and on public values only",
                )
            )
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """The parts that are present. A plan stores them with its method's values."""
        return {kind: getattr(self, kind).to_dict() for kind in self.kinds}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Contribution:
        """The inverse of to_dict."""
        try:
            return cls(**{key: _PARTS[key](**value) for key, value in values.items()})
        except TypeError as error:
            raise InputError(f"the contribution of a record is wrong in the plan's method: {error}") from None


_PARTS: Mapping[str, Any] = {
    "inner": InnerMomentum,
    "augmentation": Augmentation,
    "record_momentum": RecordMomentum,
    "companions": Companions,
}
KINDS = tuple(_PARTS)
_WORDS = {
    "inner": "momentum over past iterates",
    "augmentation": "views",
    "record_momentum": "momentum of single records",
    "companions": "public companions",
}
