"""Empirical lower bounds on ε, which must not exceed the claim of any method.

    audit_plan(plan, model, loss, dataset)    a short training with canaries, and the verdict
    run_audit(…, out=DIR)                     the same, with audit.json; ClaimBroken when the claim is broken
    one_run_epsilon(correct, guesses, …)      the bound of Steinke, Nasr and Jagielski alone
    check_neighbouring(plan, gradient_sum, …) the same step on neighbouring datasets

What is tested and why it is sound: docs/guarantees/audit.md.
"""

from __future__ import annotations

from sordino.audit.bounds import one_run_epsilon, one_run_epsilon_gaussian, one_run_mu
from sordino.audit.neighbouring import Neighbouring, check_neighbouring, neighbouring
from sordino.audit.one_run import AuditResult, audit_plan, run_audit, write_audit

__all__ = [
    "AuditResult",
    "Neighbouring",
    "audit_plan",
    "check_neighbouring",
    "neighbouring",
    "one_run_epsilon",
    "one_run_epsilon_gaussian",
    "one_run_mu",
    "run_audit",
    "write_audit",
]
