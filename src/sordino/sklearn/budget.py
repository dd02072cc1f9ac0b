"""What cross-validation costs: every row is in the training set of all folds but one."""

from __future__ import annotations

from dataclasses import dataclass

from sordino import checks
from sordino.accounting.selection import composed_cost
from sordino.shown import up
from sordino.sklearn.estimators import PrivateClassifier, PrivateLogisticRegression


@dataclass(frozen=True)
class Budget:
    """(ε, δ) of all models of a cross-validation together. str() is a sentence."""

    epsilon: float
    delta: float
    relation: str
    folds: int
    fits: int  # that one row takes part in
    of_one_fit: float

    def __str__(self) -> str:
        return (
            f"{self.folds} folds: a row takes part in {self.fits} fits of ε = {up(self.of_one_fit)} each. Whoever sees "
            f"all {self.folds} models has seen a release of (ε = {up(self.epsilon)}, δ = {up(self.delta)}) under "
            f"{self.relation}. The scores are of the rows that were left out, without noise: no guarantee covers "
            "them, nor a choice made by them; publish neither, or score on public rows."
        )


def cross_validation_budget(estimator: PrivateClassifier | PrivateLogisticRegression, folds: int = 5) -> Budget:
    """What `cross_validate(estimator, X, y, cv=folds)` costs, from the estimator's public arguments.

    `records` of the estimator is the number of rows that one fit is given: (folds − 1)/folds of all.
    """
    checks.whole("folds", folds, minimum=2)
    plan = estimator.plan()
    fits, epsilon = folds - 1, plan.guarantee().epsilon
    cost = composed_cost([(plan.releases(), epsilon, plan.delta, plan.relation)] * fits)
    return Budget(cost.epsilon, cost.delta, plan.relation, folds, fits, epsilon)
