"""The privacy cost of cross-validation: every row is in the training set of all folds but one."""

from __future__ import annotations

from dataclasses import dataclass

from sordino import checks
from sordino.accounting.selection import composed_cost
from sordino.shown import up
from sordino.sklearn.estimators import PrivateClassifier, PrivateLogisticRegression


@dataclass(frozen=True)
class Budget:
    """The joint (ε, δ) of all models of a cross-validation. str() is a sentence.

    Args:
        epsilon: ε of publishing all models.
        delta: δ of publishing all models.
        relation: The neighbouring relation.
        folds: The number of folds.
        fits: The number of fits that one row takes part in.
        of_one_fit: ε of one fit.
    """

    epsilon: float
    delta: float
    relation: str
    folds: int
    fits: int
    of_one_fit: float

    def __str__(self) -> str:
        models = self.folds * self.fits // (self.folds - 1)
        return (
            f"{self.folds} folds: a row takes part in {self.fits} fits of ε = {up(self.of_one_fit)} each. Publishing "
            f"all {models} models is (ε = {up(self.epsilon)}, δ = {up(self.delta)})-differentially private under "
            f"{self.relation}. The scores are computed on left-out rows, without noise: no guarantee covers them, nor "
            "a choice based on them; publish neither, or score on public rows."
        )


def cross_validation_budget(
    estimator: PrivateClassifier | PrivateLogisticRegression, folds: int = 5, candidates: int = 1
) -> Budget:
    """The cost of `cross_validate(estimator, X, y, cv=folds)`, from the estimator's public arguments.

    Args:
        estimator: The estimator; its `records` is the number of rows in one fit, (folds − 1)/folds of all rows.
        folds: The number of folds, at least 2.
        candidates: The settings that `GridSearchCV(…, refit=False)` compares. They may differ in what costs nothing:
            lr, momentum, clip_norm, hidden.

    Returns:
        The joint ε and δ.
    """
    checks.whole("folds", folds, minimum=2)
    plan = estimator.plan()
    fits, epsilon = checks.whole("candidates", candidates, minimum=1) * (folds - 1), plan.guarantee().epsilon
    cost = composed_cost([(plan.releases(), epsilon, plan.delta, plan.relation)] * fits)
    return Budget(cost.epsilon, cost.delta, plan.relation, folds, fits, epsilon)
