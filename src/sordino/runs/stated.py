"""What a run states in several places: each must be what its plan gives, or what its result says.

Used by `sordino.runs.verify`. A statement that no other file contradicts can be forged by anyone who can compute the
hashes: so whatever the plan determines is computed again, and the model file, which is copied to other places, must
state what result.json states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sordino import __version__
from sordino.plan.core import Plan
from sordino.plan.spent import epsilon_curve
from sordino.runs.alike import alike, number

KEPT = ("name", "method", "epsilon", "delta", "relation", "secure", "records", "steps")
"""Keys of result.json that the model file repeats."""
SINGLE = "epsilon_of_a_single_run"
"""The key of a run that a paid sweep selected: the ledger's ε, while `epsilon` is that of the whole selection."""
SELECTED = (
    "epsilon", "accountant", "theorem", "sentence", "threat_model", "assumptions", "epsilon_rdp", "epsilon_lower",
    "beside",
)  # fmt: skip
_TEXTS = ("theorem", "threat_model", "assumptions", "sentence")
_KNOTS = 6  # steps whose ε is computed again
_SLACK = 1e-3  # relative; the curve of a run is computed on coarser grids than its last point


def stated_in_model(result: Mapping[str, Any], version: str) -> dict[str, Any]:
    """What the model file says about itself, wherever it is copied to."""
    return {
        **{key: result.get(key) for key in KEPT},
        "guarantee": dict(result.get("guarantee") or {}).get("sentence"),
        "sordino": version,
    }


def model_differs(about: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """The first key of the model's document that states something else than result.json, or None."""
    wanted = stated_in_model(result, dict(result.get("environment") or {}).get("sordino", ""))
    return next((key for key, value in wanted.items() if not alike(about.get(key), value)), None)


def written_by(result: Mapping[str, Any]) -> str | None:
    """The other version of sordino that wrote the result, whose words may differ; None: this one."""
    version = dict(result.get("environment") or {}).get("sordino")
    return None if version == __version__ else str(version)


def _not_compared(result: Mapping[str, Any]) -> set[str]:
    """Keys of a guarantee that the plan does not determine: words of other versions, a stopped run, a selection."""
    stopped = ("beside", "sentence", "assumptions")  # they describe the steps that were made
    return {
        *(() if written_by(result) is None else _TEXTS),
        *(() if result.get("stopped_at") is None else stopped),
        *(SELECTED if SINGLE in result else ()),
    }


def wanted_result(plan: Plan, result: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of result.json that the plan determines."""
    guarantee, left_out = plan.guarantee(), _not_compared(result)
    wanted = {
        "delta": plan.delta, "relation": plan.relation, "records": plan.records, "steps": plan.steps,
        "method": plan.method.name, "sampler": plan.sampling.name, "insecure_seed": plan.insecure_seed,
        "noise_multiplier": plan.noise.noise_multiplier, "secure": plan.insecure_seed is None,
        "public": None if plan.public is None else plan.public.to_dict(), "expected_batch": plan.expected_batch,
        "accountant": guarantee.accountant, "theorem": guarantee.theorem,
    }  # fmt: skip
    beside = {} if "beside" in left_out else guarantee.beside
    found = {key: value for key, value in {**wanted, **beside}.items() if key not in left_out}
    return dict(json.loads(json.dumps(found)))


def wanted_guarantee(plan: Plan, result: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the result's guarantee that the plan determines."""
    claim = json.loads(json.dumps(plan.guarantee().to_dict()))
    return {key: value for key, value in claim.items() if key not in _not_compared(result)}


def understated_row(plan: Plan, rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The step of a row of metrics whose ε is below that of the plan's steps until then, or None.

    ε does not decrease, so every row must state at least the ε of the last knot before it.
    """
    stated = [(row["step"], number(row["epsilon"])) for row in rows if "epsilon" in row]
    if not stated:
        return None
    stride = -(-len(stated) // _KNOTS)
    knots = sorted({step for step, _ in stated[::-1][::stride] if 0 < step <= plan.steps})
    known = dict(zip(knots, epsilon_curve(plan, knots), strict=True))
    for step, value in stated:
        least = max((known[knot] for knot in knots if knot <= step), default=0.0)
        if value is None or value < least * (1 - _SLACK):
            return int(step)
    return None
