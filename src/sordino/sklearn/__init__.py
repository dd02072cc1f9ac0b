"""scikit-learn estimators that train with differential privacy.

    model = PrivateLogisticRegression(epsilon=2.0, records=5000, classes=["no", "yes"], bounds=(0, 110))
    model.fit(X, y)
    print(model.guarantee_)

`records`, `classes` and `bounds` are public constants that you give: measured from the data, each would be a release
without noise. The estimators work in a Pipeline and in cross_validate; earlier steps of a pipeline must not learn from
the private rows (a StandardScaler does); `cross_validation_budget` gives the joint cost of the folds.
"""

from __future__ import annotations

from sordino.sklearn.budget import Budget, cross_validation_budget
from sordino.sklearn.estimators import PrivateClassifier, PrivateLogisticRegression

__all__ = ["Budget", "PrivateClassifier", "PrivateLogisticRegression", "cross_validation_budget"]
