"""What a method is to a plan: the part of the guarantee that depends on how released values become weights.

A plan holds exactly one method. It checks the plan when that is made (and refuses what its proof does not cover),
accounts for it, and says what its theorem assumes. Training asks it for the noise of a step and for the update.

| method       | the adversary sees      | the update                              | accounted by                     |
|--------------|-------------------------|-----------------------------------------|----------------------------------|
| dpsgd        | every released gradient | anything: it is post-processing         | composition (PLD, RDP)           |
| modelmix     | every iterate           | mixing of the last two iterates         | Rényi divergence of the mixture  |
| dp-mac       | every noisy coefficient | anything: it is post-processing         | composition (PLD, RDP)           |
| hidden-state | the last iterate only   | gradient descent on a certified loss    | shifted interpolation (hull)     |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sordino.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from sordino.plan import Plan
    from sordino.schedule import Schedule


@dataclass(frozen=True)
class Assumption:
    """Something the guarantee rests on, and how it is made sure of."""

    text: str
    check: str


@dataclass(frozen=True)
class Accounted:
    """ε at δ of a plan, and what goes with it. `beside`: further figures that are always shown with this ε."""

    epsilon: float
    delta: float
    accountant: str
    theorem: str
    epsilon_rdp: float | None = None
    epsilon_lower: float | None = None
    beside: Mapping[str, float] = field(default_factory=dict)


class Method(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def threat_model(self) -> str:
        """What the adversary is taken to see."""

    def check(self, plan: Plan) -> None:
        """Refused or InputError for a plan that the method's theorem does not cover."""

    def noise_factor(self, step: int, steps: int) -> float:
        """The factor on the plan's noise multiplier at this step."""

    def account(self, plan: Plan, delta: float) -> Accounted:
        """ε of the whole plan, statistics included; an upper bound."""

    def epsilons(self, plan: Plan, steps: Sequence[int]) -> list[float]:
        """ε at the plan's δ after each of these numbers of steps, each an upper bound."""

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        """ε of what a ledger of this plan records; InputError for an entry that the plan does not explain."""

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        """The plan with the smallest noise multiplier whose ε does not exceed the target."""

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        """What the method's theorem assumes beyond sampling, clipping and secret noise."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able, with the key `name`; method_from_dict gives back an equal method."""


@runtime_checkable
class HoldsStepSizes(Protocol):
    """A method whose guarantee depends on the update: step sizes come from the plan, and the optimizer is its own."""

    @property
    def lr(self) -> Schedule: ...


@runtime_checkable
class AddsUniformNoise(Protocol):
    """A method whose guarantee counts on uniform noise on every coordinate of every release."""

    def least_width(self, plan: Plan, step: int) -> float:
        """The narrowest that is allowed at this step, in units of the summed gradient."""


@runtime_checkable
class HasItsOwnTraining(Protocol):
    """A method whose guarantee is that of one training function: no other one may run its plans."""

    @property
    def trained_by(self) -> str:
        """Where that function is."""


@runtime_checkable
class HidesIterates(Protocol):
    """A method whose guarantee is void once an earlier iterate, or a released gradient, is handed out."""

    @property
    def publishes(self) -> str:
        """What alone may leave."""


_REGISTER: dict[str, Callable[[Mapping[str, Any]], Method]] = {}


def register(name: str, read: Callable[[Mapping[str, Any]], Method]) -> None:
    """Called once by the module of each method: `read` makes it from its to_dict() without `name`."""
    _REGISTER[name] = read


def method_from_dict(values: Any) -> Method:
    """The inverse of Method.to_dict."""
    if not isinstance(values, Mapping) or "name" not in values:
        raise InputError(f"a plan's method is {{name, …}}, got {values!r}")
    name = values["name"]
    if name not in _REGISTER:
        raise InputError(f"unknown method {name!r}: {did_you_mean(str(name), _REGISTER)}")
    return _REGISTER[name]({key: value for key, value in values.items() if key != "name"})
