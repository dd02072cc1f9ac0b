"""Correlated noise: each step cancels a part of the noise of earlier steps (matrix mechanisms)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.methods.correlated.accountant import account_correlated, calibrate_correlated
    from sordino.methods.correlated.method import Correlated, plan
    from sordino.methods.correlated.strategies import Strategy
    from sordino.methods.correlated.workloads import Workload
else:
    __getattr__, _ = lazy_names(
        __name__,
        {
            "accountant": ["account_correlated", "calibrate_correlated"],
            "method": ["Correlated", "plan"],
            "strategies": ["Strategy"],
            "workloads": ["Workload"],
        },
    )

__all__ = ["Correlated", "Strategy", "Workload", "account_correlated", "calibrate_correlated", "plan"]
