"""PrivateClassifier (a small network) and PrivateLogisticRegression (a linear softmax layer).

Formal guarantee: `guarantee_` is that of the plan under which `fit` trained; it covers the fitted attributes. It does
not cover `score` on private rows, nor anything that other parts of a pipeline learned from them. With `public_data`
there is none (`guarantee_` is None); with a `random_state` it does not hold against anyone who knows the seed.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn

from sordino import checks
from sordino.errors import InputError
from sordino.plan.core import Plan
from sordino.registry import default, method_class
from sordino.split import Split
from sordino.training.fit import train
from sordino.training.loop import Settings
from sordino.training.steps import check_records
from sordino.training.updates import Averaging

Array = npt.NDArray[Any]
_MISSING = (
    "{name} is None: give {what}. It is a public constant of the guarantee and is never measured from the data (if the "
    "data are public and you need no guarantee, use public_data=True)"
)


_OTHER_NUMBER = (
    "in cross-validation records is the size of one fold's training set, and GridSearchCV needs refit=False, because "
    "its last fit has all rows"
)
EPSILON = 1.0
"""The ε of a fit for which neither ε nor the noise is given."""


class _PrivateLinear(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Shared by both estimators: a softmax layer on scaled features, and hidden layers if `_widths` has any."""

    def __init__(
        self,
        *,
        epsilon: float | None = EPSILON,
        delta: float = 1e-5,
        records: int | None = None,
        classes: Sequence[Any] | None = None,
        bounds: tuple[Any, Any] | None = None,
        expected_batch: int | None = None,
        steps: int = 100,
        clip_norm: float = 1.0,
        lr: float = 1.0,
        momentum: float = 0.0,
        noise_multiplier: float | None = None,
        random_state: Any = None,
        public_data: bool = False,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.records = records
        self.classes = classes
        self.bounds = bounds
        self.expected_batch = expected_batch
        self.steps = steps
        self.clip_norm = clip_norm
        self.lr = lr
        self.momentum = momentum
        self.noise_multiplier = noise_multiplier
        self.random_state = random_state
        self.public_data = public_data

    def plan(self, records: int | None = None, insecure_seed: int | None = None) -> Plan:
        """The plan of one fit, from the public arguments only."""
        public = self.records if records is None else records
        if public is None:
            raise ValueError(_MISSING.format(name="records", what="the number of rows that you would publish"))
        batch = max(1, public // 10) if self.expected_batch is None else min(self.expected_batch, public)
        if self.noise_multiplier is not None and self.epsilon not in (None, EPSILON):
            raise ValueError("epsilon and noise_multiplier are both given, and each determines the other: give one")
        target = {"epsilon": self.epsilon} if self.noise_multiplier is None else {}
        return method_class(default()).plan(
            **target, noise_multiplier=self.noise_multiplier, delta=self.delta, records=public, expected_batch=batch,
            steps=self.steps, clip_norm=self.clip_norm, insecure_seed=insecure_seed,
        )  # fmt: skip

    def fit(self, X: Any, y: Any) -> Self:
        """Trains on all rows under the plan.

        Raises:
            ValueError: a public argument is missing, or the rows do not agree with it.
        """
        if hasattr(y, "isna") and np.any(y.isna()):  # pandas; scikit-learn fails on its missing texts
            raise ValueError("y contains NaN or another missing label: remove those rows")
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = self._classes(y)
        low, high = self._bounds(X)
        places = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not (self.classes_[places] == y).all():
            raise ValueError("y has labels that are not in classes: list all labels that may occur, or remove rows")
        seed = None if self.random_state is None else int(check_random_state(self.random_state).randint(2**31))
        self.plan_ = self.plan(len(y) if self.public_data and self.records is None else None, seed)
        self._scale = (low, high)
        try:
            check_records(self.plan_, len(y))
        except InputError as error:
            raise InputError(f"{error}; {_OTHER_NUMBER}", private=error.private) from None
        model = self._module(X.shape[1], seed)
        rows = Split(torch.from_numpy(self._scaled(X)).float(), torch.from_numpy(places.astype(np.int64)))
        settings = Settings(
            optimizer_options={"momentum": self.momentum}, averaging=Averaging("tail", tail=0.5), progress=False,
            checkpoint_every=0,
        )  # fmt: skip
        result = train(model, nn.functional.cross_entropy, rows, self.plan_, lr=self.lr, settings=settings)
        self.model_ = model.double().eval()
        self.guarantee_ = None if self.public_data else result.guarantee
        self.n_iter_ = self.plan_.steps
        return self

    def predict_proba(self, X: Any) -> Array:
        """(rows, classes): probabilities, in the order of `classes_`."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.no_grad():
            outputs = self.model_(torch.from_numpy(self._scaled(X)))
        found: Array = outputs.softmax(1).numpy()
        return found

    def predict(self, X: Any) -> Array:
        """The most probable class of each row."""
        shares = self.predict_proba(X)
        found: Array = self.classes_[shares.argmax(1)]
        return found

    def _widths(self) -> Sequence[int]:
        """The widths of the hidden layers."""
        return ()

    def _module(self, features: int, seed: int | None) -> nn.Sequential:
        """The network, from a public seed."""
        widths = [features, *self._widths(), len(self.classes_)]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed or 0)
            layers: list[nn.Module] = []
            for before, after in pairwise(widths):
                layers += [nn.Linear(before, after), nn.Tanh()]
        if len(widths) == 2:
            for parameter in layers[0].parameters():
                nn.init.zeros_(parameter)
        return nn.Sequential(*layers[:-1])

    def _classes(self, y: Array) -> Array:
        if self.classes is None and not self.public_data:
            raise ValueError(_MISSING.format(name="classes", what="the list of labels"))
        given = list(self.classes) if isinstance(self.classes, Set) else self.classes
        found = np.unique(y if given is None else np.asarray(given))
        if len(found) < 2:
            raise ValueError(f"{type(self).__name__} needs at least two classes, and there is 1 class")
        return found

    def _bounds(self, X: Array) -> tuple[Array, Array]:
        if self.bounds is None and not self.public_data:
            raise ValueError(_MISSING.format(name="bounds", what="(low, high), between which every value lies"))
        try:
            low, high = (X.min(0), X.max(0)) if self.bounds is None else self.bounds
            low, high = (np.broadcast_to(np.asarray(one, dtype=np.float64), (X.shape[1],)) for one in (low, high))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"bounds must be (low, high), each a number or {X.shape[1]} numbers, one for each feature"
            ) from error
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise ValueError("bounds must be finite numbers")
        if self.bounds is not None and not (low < high).all():
            raise ValueError("bounds must be (low, high) with low below high for every feature")
        return low, np.maximum(high, low + 1e-12)

    def _scaled(self, X: Array) -> Array:
        low, high = self._scale
        found: Array = 2 * (np.clip(X, low, high) - low) / (high - low) - 1
        return found


class PrivateLogisticRegression(_PrivateLinear):
    """Multinomial logistic regression trained with differential privacy.

    Args:
        epsilon: The target ε of one `fit`; or give `noise_multiplier`.
        delta: δ, well below 1/records.
        records: Public: the number of rows given to `fit`, as you would publish it.
        classes: Public: the list of labels.
        bounds: Public: (low, high), each a number or one per feature; values are truncated and scaled to [−1, 1].
        expected_batch: Rows in a step (default: a tenth of `records`, at least 1).
        steps: The number of private steps.
        clip_norm: The bound on the norm of a row's gradient.
        lr: The step size.
        momentum: The momentum of SGD.
        noise_multiplier: Instead of `epsilon`.
        random_state: None draws noise and batches from a cryptographic generator; a number makes the fit reproducible,
            without a guarantee against anyone who knows it.
        public_data: The rows are public: records, classes and bounds that are None are measured from them, and there is
            no guarantee (`guarantee_` is None).

    Attributes:
        guarantee_: The guarantee of the fit; None with `public_data`.
        classes_: The classes, sorted.
        plan_: The plan of the fit.
        coef_: (classes, features), for features scaled to [−1, 1] by `bounds`.
        intercept_: (classes,).
    """

    @property
    def coef_(self) -> Array:
        check_is_fitted(self, "model_")
        found: Array = next(self.model_.parameters()).detach().numpy()
        return found

    @property
    def intercept_(self) -> Array:
        check_is_fitted(self, "model_")
        found: Array = list(self.model_.parameters())[1].detach().numpy()
        return found


class PrivateClassifier(_PrivateLinear):
    """A network of a few hidden layers trained with differential privacy.

    Args:
        hidden: Widths of the hidden layers; the other arguments are those of PrivateLogisticRegression.

    Attributes:
        guarantee_: The guarantee of the fit; None with `public_data`.
        classes_: The classes, sorted.
        plan_: The plan of the fit.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = EPSILON,
        delta: float = 1e-5,
        records: int | None = None,
        classes: Sequence[Any] | None = None,
        bounds: tuple[Any, Any] | None = None,
        hidden: Sequence[int] = (32,),
        expected_batch: int | None = None,
        steps: int = 100,
        clip_norm: float = 1.0,
        lr: float = 1.0,
        momentum: float = 0.0,
        noise_multiplier: float | None = None,
        random_state: Any = None,
        public_data: bool = False,
    ) -> None:
        super().__init__(
            epsilon=epsilon, delta=delta, records=records, classes=classes, bounds=bounds,
            expected_batch=expected_batch, steps=steps, clip_norm=clip_norm, lr=lr, momentum=momentum,
            noise_multiplier=noise_multiplier, random_state=random_state, public_data=public_data,
        )  # fmt: skip
        self.hidden = hidden

    def _widths(self) -> Sequence[int]:
        given: Any = self.hidden  # scikit-learn's clones and searches set any value
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise InputError(f"hidden must be a list of widths, such as (32,), got {checks.brief(given)}")
        return [checks.whole("hidden", width, minimum=1) for width in given]
