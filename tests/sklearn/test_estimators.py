"""The estimators are scikit-learn's in every respect that its own checks know, and their public constants are given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator

from sordino.errors import InputError
from sordino.sklearn import PrivateClassifier, PrivateLogisticRegression, cross_validation_budget

GENERATOR = np.random.default_rng(0)
X = GENERATOR.uniform(-2, 2, size=(400, 3))
Y = np.where(X[:, 0] + X[:, 1] > 0, "yes", "no")
PUBLIC: dict[str, Any] = {"records": 400, "classes": ["no", "yes"], "bounds": (-2, 2), "steps": 10, "lr": 4.0}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        PrivateLogisticRegression(noise_multiplier=0.5, steps=4, lr=8.0),
        PrivateClassifier(noise_multiplier=0.1, steps=12, lr=4.0, hidden=(8,)),
    ],
)
def test_scikit_learns_own_checks_pass_without_exception(estimator: Any) -> None:
    # The checks' data sets have labels, bounds and sizes of their own, which only `public_data` reads off them; they
    # set random_state, so that the result is the same every time.
    estimator = clone(estimator).set_params(expected_batch=150, public_data=True, delta=1e-4)
    found = check_estimator(estimator, on_fail=None, on_skip=None, expected_failed_checks={})
    assert len(found) > 40
    assert [(one["check_name"], one["exception"]) for one in found if one["status"] not in ("passed", "skipped")] == []


@pytest.mark.parametrize("missing", ["records", "classes", "bounds"])
def test_public_constants_are_given_and_never_read_off_the_data(missing: str) -> None:
    with pytest.raises(ValueError, match=f"{missing} is None.*public constant"):
        PrivateLogisticRegression(**{**PUBLIC, missing: None}).fit(X, Y)


def test_classes_may_be_a_set() -> None:
    fitted = PrivateLogisticRegression(**{**PUBLIC, "classes": {"yes", "no"}}).fit(X, Y)
    assert fitted.classes_.tolist() == ["no", "yes"]


def test_a_label_that_is_not_public_is_refused_without_its_name() -> None:
    with pytest.raises(ValueError, match="not in classes") as error:
        PrivateLogisticRegression(**PUBLIC).fit(X, np.where(X[:, 0] > 1.9, "secret", Y))
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("dtype", ["string", "object", "category"])
def test_a_missing_label_is_refused_in_a_sentence(dtype: str) -> None:
    labels = pytest.importorskip("pandas").Series(Y, dtype=dtype)
    labels[0] = None
    with pytest.raises(ValueError, match="missing label"):
        PrivateLogisticRegression(**PUBLIC).fit(X, labels)


def test_it_learns_under_its_guarantee_in_a_pipeline() -> None:
    model = make_pipeline(
        FunctionTransformer(lambda rows: rows[:, :2]), PrivateLogisticRegression(epsilon=8.0, **PUBLIC)
    )
    model.fit(X, Y)
    fitted = model[-1]
    assert model.score(X, Y) > 0.85
    assert 7.9 < fitted.guarantee_.epsilon <= 8
    assert fitted.guarantee_.secure
    assert fitted.coef_.shape == (2, 2)
    assert fitted.intercept_.shape == (2,)
    assert fitted.predict_proba(X[:, :2]).sum(1) == pytest.approx(np.ones(400))


def test_the_scale_is_that_of_the_public_bounds_whatever_the_rows_are() -> None:
    model = PrivateClassifier(**PUBLIC, hidden=(4,), noise_multiplier=1.0, random_state=0).fit(X, Y)
    assert not model.guarantee_.secure
    far = np.array([[50.0, 50.0, 0.0], [2.0, 2.0, 0.0]])
    assert np.array_equal(*model.predict_proba(far))
    again = clone(model).fit(X, Y)
    assert np.array_equal(again.predict_proba(X), model.predict_proba(X))


def test_public_data_has_no_guarantee() -> None:
    model = PrivateLogisticRegression(public_data=True, noise_multiplier=1.0, steps=2).fit(X, Y)
    assert model.guarantee_ is None


def test_cross_validation_states_what_it_costs() -> None:
    model = PrivateLogisticRegression(**{**PUBLIC, "records": 320}, noise_multiplier=2.0)
    scores = cross_validate(model, X, Y, cv=5)["test_score"]
    assert len(scores) == 5
    budget = cross_validation_budget(model, 5)
    assert budget.of_one_fit < budget.epsilon < 4 * budget.of_one_fit
    assert budget.fits == 4
    assert "no guarantee covers them" in str(budget)


def test_a_grid_search_states_what_it_costs_and_does_not_fail_at_its_end_without_advice() -> None:
    model = PrivateLogisticRegression(**{**PUBLIC, "records": 320}, noise_multiplier=3.0)
    found = GridSearchCV(model, {"lr": [0.5, 4.0]}, cv=5, refit=False).fit(X, Y)
    assert found.best_params_["lr"] in (0.5, 4.0)
    one, both = cross_validation_budget(model, folds=5), cross_validation_budget(model, folds=5, candidates=2)
    assert both.fits == 2 * one.fits == 8
    assert both.epsilon > one.epsilon
    assert "all 10 models" in str(both)
    with pytest.raises(InputError, match="refit=False"):
        GridSearchCV(model, {"lr": [4.0]}, cv=5).fit(X, Y)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bounds": "auto"}, "bounds must be"),
        ({"bounds": ([-2, -2], [2, 2])}, "3 numbers, one for each feature"),
        ({"bounds": 2}, "bounds must be"),
        ({"hidden": (0,)}, "hidden"),
        ({"hidden": 32}, "a list of widths"),
        ({"epsilon": 3.0, "noise_multiplier": 1.0}, "give one"),
    ],
)
def test_a_wrong_argument_is_a_sentence(given: dict[str, Any], said: str) -> None:
    """ε = 3 with a noise multiplier of 1 was accepted, and the ε left out."""
    with pytest.raises((ValueError, InputError), match=said):
        PrivateClassifier(**{**PUBLIC, **given}).fit(X, Y)
