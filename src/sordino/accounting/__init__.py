"""Accounting: what releases cost. Events in, ε out; always an upper bound, always with its accountant's name.

epsilon(event, delta, relation, accountant)      ε
account(event, delta, relation, accountant)      ε with what stands beside it
calibrate(make_event, target, delta, …)          the smallest noise multiplier for a target ε
from_ledger(header, entries, delta)              ε of what a ledger records
epsilon_curve(plan, steps)                       ε after t steps
account_dpsgd, calibrate_dpsgd                   the same for DP-SGD from plain numbers (the command line)
"""

from __future__ import annotations

from sordino.accounting.account import Account, account, epsilon
from sordino.accounting.calibration import calibrate
from sordino.accounting.dpsgd import account_dpsgd, calibrate_dpsgd
from sordino.accounting.spent import epsilon_curve, from_ledger

__all__ = [
    "Account",
    "account",
    "account_dpsgd",
    "calibrate",
    "calibrate_dpsgd",
    "epsilon",
    "epsilon_curve",
    "from_ledger",
]
