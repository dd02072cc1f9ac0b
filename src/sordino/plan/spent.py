"""ε during a run: of a ledger's entries, and of a plan after given numbers of steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sordino import checks
from sordino.accounting.spent import composed_entries
from sordino.plan.core import Plan
from sordino.plan.method import Method
from sordino.registry import method_class


def from_ledger(header: Mapping[str, Any], entries: Iterable[Mapping[str, Any]], delta: float) -> dict[str, Any]:
    """ε at δ of a ledger.

    If releases compose, only the entries count: their mechanism, noise multiplier (noise over sensitivity), sampling
    and relation; the header gives only the public number of records. Other methods compute ε of their entries under the
    plan in the header.

    Args:
        header: The ledger's first line, which is the plan's to_dict().
        entries: The other lines.
        delta: δ in (0, 1).

    Returns:
        epsilon, delta, relation, accountant, epsilon_rdp, releases. An empty ledger has ε = 0.

    Raises:
        InputError: an entry is wrong, or the plan does not explain it.
    """
    delta = checks.delta_value(delta)
    stated = header.get("plan", header)
    lines = [entry for entry in entries if entry.get("kind", "release") == "release"]
    named = stated.get("method")
    if named is None or method_class(named["name"]).spent is Method.spent:
        return composed_entries(stated, lines, delta)
    plan = Plan.from_dict({key: value for key, value in stated.items() if key != "kind"})
    found = plan.method.spent(plan, lines, delta)
    return {
        "epsilon": found.epsilon,
        "delta": delta,
        "relation": plan.relation,
        "accountant": found.accountant,
        "epsilon_rdp": found.epsilon_rdp,
        "releases": len(lines),
    }


def epsilon_curve(plan: Plan, steps: Sequence[int]) -> list[float]:
    """ε of the plan's statistics and its first t steps together, for each t of `steps`.

    Args:
        plan: The plan.
        steps: The numbers of steps t.

    Returns:
        An upper bound on ε for each t; the last one is as tight as plan.guarantee().

    Raises:
        InputError: a number of steps is negative.
    """
    wanted = [checks.count("steps", t, minimum=0) for t in steps]
    return plan.method.epsilons(plan, wanted) if wanted else []
