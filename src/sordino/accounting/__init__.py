"""Privacy accounting: the ε of composed releases, always an upper bound, with the name of the accountant that gave it.

epsilon(event, delta, relation, accountant)      ε
account(event, delta, relation, accountant)      ε, and the Rényi bound for comparison
calibrate(make_event, target, delta, …)          the smallest noise multiplier for a target ε

ε of a ledger and along a plan's steps: `sordino.plan.from_ledger`, `sordino.plan.epsilon_curve`.
"""

from __future__ import annotations

from sordino.accounting.account import Account, account, epsilon
from sordino.accounting.calibration import calibrate

__all__ = ["Account", "account", "calibrate", "epsilon"]
