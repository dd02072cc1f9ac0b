"""DP-SGD (Abadi et al. 2016): noisy sums of clipped gradients; the adversary sees all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from sordino.methods.dpsgd.accountant import account_dpsgd, calibrate_dpsgd
    from sordino.methods.dpsgd.method import DPSGD, plan
else:
    __getattr__, _ = lazy_names(
        __name__, {"accountant": ["account_dpsgd", "calibrate_dpsgd"], "method": ["DPSGD", "plan"]}
    )

__all__ = ["DPSGD", "account_dpsgd", "calibrate_dpsgd", "plan"]
