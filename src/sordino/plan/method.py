"""The base class of methods: everything that differs between methods, with DP-SGD's behaviour as the default.

A plan has exactly one method. The rest of the package uses it through this class and contains no method's name. So a
further method is one class (in its own folder) and one line in the registry; see `sordino.registry`.

| stage      | members                                                                                                |
|------------|--------------------------------------------------------------------------------------------------------|
| plan       | `check`, `noise_factor`, `releases`, `earlier_noise`, `account`, `epsilons`, `spent`, `calibrated`,    |
|            | `assumptions`                                                                                          |
| training   | `gradient_sum`, `update`, `least_width`; `train` if the guarantee covers one training function only     |
| recipes    | `check_recipe`, `from_recipe`, `work`, `public_use`, `optimizer_options`, `result_entries`             |
| audit      | `audit`, `scorer`, `audited_update`, `contraction`                                                     |
| commands   | `add_flags`                                                                                            |

A method that overrides nothing has these properties: the adversary sees every released value, accounting composes the
releases, and the update is post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sordino.accounting.account import account, checked_releases, composed_epsilon
from sordino.accounting.calibration import calibrate, noise_guess
from sordino.accounting.events import DpEvent, Release
from sordino.accounting.grids import TOLERANCE
from sordino.accounting.schemes import releases_of, theorem
from sordino.accounting.spent import composed_entries, growing_curve
from sordino.errors import InputError, Refused
from sordino.registry import names_with

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from torch import Tensor, nn

    from sordino.audit.one_run import AuditResult
    from sordino.audit.scores import StepScorer
    from sordino.audit.updates import AuditedUpdate
    from sordino.clipping import Clipping
    from sordino.plan.core import Plan, Statistic
    from sordino.records.gradients import GradientSum
    from sordino.records.momentum import PastIterates
    from sordino.runs.recipe import Recipe
    from sordino.runs.work import Work
    from sordino.split import Split
    from sordino.training.job import Result
    from sordino.training.updates import Update


@dataclass(frozen=True)
class Assumption:
    """An assumption of the guarantee.

    Args:
        text: What is assumed.
        check: How it is ensured.
    """

    text: str
    check: str


@dataclass(frozen=True)
class Accounted:
    """ε at δ of a plan; the arguments are those of `Guarantee`.

    Args:
        epsilon: An upper bound on ε.
        delta: δ.
        accountant: How ε was computed.
        theorem: The theorem behind the bound.
        epsilon_rdp: ε by Rényi accounting, if it applies.
        epsilon_lower: A lower bound on the ε of this mechanism, if one is known.
        beside: Further numbers that are always shown with this ε, by name.
    """

    epsilon: float
    delta: float
    accountant: str
    theorem: str
    epsilon_rdp: float | None = None
    epsilon_lower: float | None = None
    beside: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """What a method makes a plan from.

    Args:
        recipe: The recipe.
        clipping: The clipping that [clipping] describes.
        records: The public number of private records.
        statistics: The releases besides the steps.
        shape: The shape of a record's features, for methods with `needs_shape`.
        classes: The number of classes, for methods with `needs_shape`.
    """

    recipe: Recipe
    clipping: Clipping
    records: int
    statistics: tuple[Statistic, ...]
    shape: tuple[int, ...] | None = None
    classes: int | None = None

    def arguments(self) -> dict[str, Any]:
        """The options that every method's plan takes, as keyword arguments."""
        privacy, sampling, train = self.recipe.privacy, self.recipe.sampling, self.recipe.train
        return {
            "epsilon": privacy.epsilon,
            "noise_multiplier": privacy.noise_multiplier,
            "delta": privacy.delta,
            "records": self.records,
            "expected_batch": sampling.expected_batch,
            "steps": train.steps,
            "epochs": train.epochs,
            "clipping": self.clipping,
            "sampling": sampling.name,
            "insecure_seed": privacy.insecure_seed,
            "statistics": self.statistics,
        }


class Method:
    """The base of all methods. Subclasses are frozen dataclasses; class constants state their capabilities."""

    name: ClassVar[str]
    threat_model: ClassVar[str] = (
        "the adversary sees every noisy sum that was released, hence every iterate and the final model"
    )
    bounded_by: ClassVar[str] = (
        "the engine clips every record; which record an activation belongs to follows from the program of each pass, "
        "or is measured; wherever the program is new, the gradients are compared with plain autograd and the records "
        "are tested for interaction (regrouped, reordered, next to a changed one), and so is every batch in which the "
        "model reads a value that was not tested before, or asks for the number of rows and does not compute the same "
        "as for other numbers: how its code uses these is tested, not proven"
    )

    purpose: ClassVar[str] = "gradient"
    """The ledger's purpose of a step."""
    composes: ClassVar[bool] = True
    """plan.releases() describes the guarantee completely, so runs compose and can be selected privately."""
    holds_update: ClassVar[bool] = False
    """The guarantee depends on the update: the plan contains the step sizes, and `update` returns the optimizer."""
    adds_uniform_noise: ClassVar[bool] = False
    """The guarantee needs uniform noise of at least `least_width` on every coordinate of every release."""
    publishes: ClassVar[str | None] = None
    """The only thing that a run may publish; None: every released value."""
    trained_by: ClassVar[str | None] = None
    """The only training function that the guarantee covers; None: `sordino.train`."""
    covers: ClassVar[frozenset[str]] = frozenset()
    """Parts of `Contribution` that the proof covers."""
    takes_public_rows: ClassVar[bool] = False
    """Rows may be declared public."""
    combines_public: ClassVar[bool] = False
    """Released gradients are combined with gradients of public rows, which training is given (`public`)."""
    needs_shape: ClassVar[bool] = False
    """The plan depends on the shape of the features, so it is made after the data are read."""
    reads_own_data: ClassVar[bool] = False
    """`work` reads the data and makes the model."""
    protects_users: ClassVar[bool] = False
    """A record may be all rows of a user: its gradient is the sum over them, clipped once."""
    rehearsed: ClassVar[bool] = False
    """`sordino doctor` can rehearse its steps: clipped gradients, noise, a torch optimizer."""

    # --- plan

    @classmethod
    def plan(cls, **options: Any) -> Plan:
        """A plan of this method; the options are those of its plan maker."""
        raise Refused(f"the method {cls.name} has no function that makes plans")

    def check(self, plan: Plan) -> None:
        """Refuses a plan that the method's theorem does not cover.

        Raises:
            Refused: the combination has no proof.
            InputError: a value is wrong.
        """
        plan.releases()  # raises for a batch larger than the data

    def noise_factor(self, step: int, steps: int) -> float:
        """The factor on the plan's noise multiplier at this step."""
        return 1.0

    def releases(self, plan: Plan, steps: int) -> list[tuple[Release, int]]:
        """The releases of the first `steps` steps about one record, which compose."""
        noise = plan.noise
        return releases_of(plan.sampled(0), noise.name, noise.noise_multiplier, plan.records, steps)

    def earlier_noise(self, plan: Plan, step: int, first: int) -> Mapping[int, float] | None:
        """The coefficients of the noise of earlier steps that this step adds again; None: noise is used once.

        Args:
            plan: The plan.
            step: The step that is released.
            first: The first step whose noise was drawn under the current key.
        """
        return None

    def account(self, plan: Plan, delta: float) -> Accounted:
        """ε of the whole plan, statistics included; an upper bound."""
        found = account(plan.event(), delta, plan.relation, plan.accountant)
        # An adversary who knows the partition attains the bound; for one who does not, no lower bound is known.
        below = None if plan.sampling.name == "partition" else found.epsilon_lower
        said = theorem(plan.sampling.name, plan.noise.name, plan.relation, found.accountant, plan.examples_per_user)
        return Accounted(found.epsilon, found.delta, found.accountant, said, found.epsilon_rdp, below)

    def epsilons(self, plan: Plan, steps: Sequence[int]) -> list[float]:
        """ε at the plan's δ after each of these numbers of steps, each an upper bound.

        The last is as tight as `account`, the others within ten times the tolerance of it.
        """

        def after(count: int, last: bool) -> float:
            releases = checked_releases(plan.releases(count))
            tolerance = TOLERANCE if last else 10 * TOLERANCE
            return composed_epsilon(releases, plan.delta, plan.relation, plan.accountant, tolerance=tolerance)[0]

        return growing_curve(after, steps)

    def spent(self, plan: Plan, entries: Sequence[Mapping[str, Any]], delta: float) -> Accounted:
        """ε of the entries of a ledger of this plan.

        Raises:
            InputError: the plan does not explain an entry.
        """
        found = composed_entries(plan.to_dict(), entries, delta)
        return Accounted(found["epsilon"], delta, found["accountant"], "composition", found["epsilon_rdp"])

    def calibrated(self, plan: Plan, epsilon: float) -> Plan:
        """The plan with the smallest noise multiplier whose ε does not exceed the target."""
        guess = noise_guess(plan.sampling.to_dict(), plan.steps, plan.records, epsilon, plan.delta)

        def event(noise_multiplier: float) -> DpEvent:
            return plan.with_noise(noise_multiplier).event()

        sigma, _ = calibrate(event, epsilon, plan.delta, plan.relation, plan.accountant, guess=guess)
        return plan.with_noise(sigma)

    def assumptions(self, plan: Plan) -> tuple[Assumption, ...]:
        """The assumptions of the method's theorem besides sampling, clipping and secret noise."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The method as JSON-serialisable values, with the key `name`; `from_dict` takes the rest."""
        return {"name": self.name}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of to_dict, without `name`.

        Raises:
            InputError: a key is missing or not known.
        """
        if values:
            raise InputError(f"the method {cls.name} has no options, got {', '.join(values)}")
        return cls()

    # --- training

    def gradient_sum(
        self,
        plan: Plan,
        model: nn.Module,
        loss: Callable[..., Tensor],
        dataset: Any,
        *,
        past: Callable[[], PastIterates],
        seed: int,
        public: Any = None,
    ) -> GradientSum | None:
        """The function that sums over a batch; None: every record's clipped gradient (`records.plan_gradients`).

        Raises:
            Refused: public rows are given that the method does not use.
        """
        self._refuse_public(public)
        return None

    def update(self, plan: Plan, model: nn.Module, loss: Callable[..., Tensor], public: Any = None) -> Update | None:
        """What is done with released steps: optimizer, rates, widths; None: the optimizer that the caller chose."""
        self._refuse_public(public)
        return None

    def least_width(self, plan: Plan, step: int) -> float:
        """The narrowest uniform noise that the guarantee allows at this step, in units of the summed gradient."""
        return 0.0

    def train(self, plan: Plan, dataset: Any, **options: Any) -> Result:
        """Trains under a plan of a method with `trained_by`.

        The options are evaluate, out, resume, first, settings and callbacks, as for `sordino.train`.
        """
        raise Refused(f"the method {self.name} has no training function of its own: use sordino.train")

    def _refuse_public(self, public: Any) -> None:
        if public is not None:
            users = ", ".join(names_with(lambda method: method.combines_public))
            raise Refused(
                f"public rows are used by plans of the method {users}, and this plan's method is {self.name}: make "
                "the plan with that method, which declares them"
            )

    # --- recipes

    @classmethod
    def check_recipe(cls, recipe: Recipe) -> None:
        """Checks that need no data: unknown keys of [method], and combinations without a proof."""

    @classmethod
    def from_recipe(cls, request: Request) -> Plan:
        """The plan of a recipe of this method.

        Raises:
            InputError: a key is unknown, missing or wrong.
            Refused: no proof covers it.
        """
        raise Refused(f"the method {cls.name} can't be used from a recipe")

    @classmethod
    def optimizer_options(cls, recipe: Recipe, optimizer: Any) -> dict[str, Any]:
        """Options of the optimizer that follow from [method]."""
        return {}

    @classmethod
    def public_use(cls, recipe: Recipe, rows: Split | None) -> Any:
        """The use of the public rows, as training takes it; None: they are not used."""
        return None

    @classmethod
    def work(cls, recipe: Recipe, data_dir: Path | None, progress: bool | None) -> Work:
        """The work of a recipe, for a method that reads its own data (`reads_own_data`)."""
        raise Refused(f"the method {cls.name} does not read its own data")

    def restored(
        self, plan: Plan, recipe: Recipe, folder: Path, shape: tuple[int, ...], classes: int
    ) -> tuple[nn.Module, Callable[[Tensor], Tensor] | None] | None:
        """The module whose weights a run of this method published; None: the one that [model] names.

        Also the function from records to outputs; None: the module, applied to the recipe's features. `shape` and
        `classes` are those of the data; `folder` is the run's directory.
        """
        return None

    def result_entries(self, metrics: Mapping[str, Any], noise_free: Mapping[str, Any] | None) -> dict[str, Any]:
        """Further entries of result.json."""
        return {}

    # --- audit

    def audit(self, plan: Plan, **options: Any) -> AuditResult | None:
        """The method's own audit, from the plan only; None: `audit_plan`, with canaries among the records."""
        return None

    def scorer(self, plan: Plan) -> StepScorer | None:
        """The score that fits the plan's releases; None: that of Gaussian or Laplace noise."""
        return None

    def audited_update(self, plan: Plan, model: nn.Module, width_scale: float) -> tuple[Plan, AuditedUpdate] | None:
        """The plan that an audit runs, and its update; None: SGD, or what `update` returns."""
        return None

    def contraction(self, plan: Plan, step: int) -> float | None:
        """The factor by which a change in the previous release may reach the values of `step`; None: not assumed.

        A factor on the l2 norm, in the units of the releases. An attack searches for a change that grows more.
        """
        return None

    # --- commands

    @classmethod
    def add_flags(cls, account: Any, calibrate: Any) -> None:
        """Adds `sordino account NAME` and `sordino calibrate NAME` to argparse's subparsers."""
