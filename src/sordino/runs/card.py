"""The model card of a finished run: what a deployment must state, in Markdown for people and YAML for registries.

card.yaml has the fields of OpenDP's registry of deployments, and registry.yaml is a record in the structure of the
registry's own schema (`deployment`). The Markdown has them too, with what NIST SP 800-226 asks an evaluator to check (ε
and its unit first, then what undermines it, then how the data were collected). Everything that is in the run's files is
taken from them; what only the owner can say comes from the recipe's [declaration], and missing fields are listed as
missing. No card is written for a directory that `sordino verify` does not find genuine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sordino import report
from sordino.errors import ClaimBroken
from sordino.files import write_atomically
from sordino.plan.attack import success_rate
from sordino.plan.core import Plan
from sordino.report.page import relation_in_words, unit_in_words
from sordino.report.reading import Run
from sordino.runs.deployment import MISSING, registry_record
from sordino.runs.verify import failed, verify
from sordino.shown import down, up

MARKDOWN, YAML, REGISTRY = "card.md", "card.yaml", "registry.yaml"
_ALARMS = (0.001, 0.01, 0.1)


def write_card(folder: Path) -> dict[str, Any]:
    """Writes card.md, card.yaml and registry.yaml into the run directory.

    Args:
        folder: The run directory.

    Returns:
        The fields of card.yaml.

    Raises:
        InputError: it is not a run directory.
        ClaimBroken: the directory is not genuine.
    """
    verdict = verify(folder)
    if not verdict.genuine:
        wrong = "; ".join(f"{check.name}: {check.why}" for check in failed(verdict))
        raise ClaimBroken(f"{folder} is not genuine, so it gets no card: {wrong}")
    run = report.read_run(folder)
    fields = card_fields(run)
    write_atomically(folder / YAML, as_yaml(fields).encode())
    write_atomically(folder / REGISTRY, as_yaml(registry_record(fields, run.declaration)).encode())
    write_atomically(folder / MARKDOWN, as_markdown(run, fields).encode())
    return fields


def card_fields(run: Run) -> dict[str, Any]:
    """The registry's fields of one run."""
    plan = Plan.from_dict({key: value for key, value in run.header.items() if key != "kind"})
    declared, result = run.declaration, run.result
    guarantee = result.get("guarantee") or {}
    return {
        "name": run.name,
        "description": str(guarantee.get("sentence", "")).partition(" It assumes:")[0],
        "privacy_unit": _unit(plan, declared.get("unit")),
        "variant": "approximate DP (ε, δ)",
        "parameters": {"epsilon": run.epsilon, "epsilon_shown": up(run.epsilon), "delta": plan.delta},
        "adjacency": f"{plan.relation}: {relation_in_words(plan.relation, plan.unit)}",
        "deployment_model": "central: the trainer sees the records",
        "release_type": plan.method.publishes or "the model, and every released gradient",
        "data": {
            "source": _recipe_value(run, "data", "name"),
            "domain": _domain(plan),
            "units": plan.records if plan.examples_per_user is None else None,  # None: rows are counted, not users
            "collection": declared.get("collection", MISSING),
        },
        "unprotected_quantities": _unprotected(run, plan),
        "actors_and_trust": declared.get("trust", MISSING),
        "tuning_cost": declared.get("tuning", MISSING),
        "preprocessing_cost": _statistics(plan),
        "public_sources": declared.get("public_sources", MISSING),
        "mechanisms": _mechanisms(run),
        "sampling": plan.sampling.to_dict(),
        "composition": f"{result.get('accountant')} accountant over {len(run.entries)} releases of this run only",
        "post_processing": "optimizer, averaging and evaluation use released values and public data only",
        "attack_success_at_most": {
            f"false_alarms_{alarms:g}": float(up(success_rate(plan, alarms))) for alarms in _ALARMS
        },
        "floating_point": "noise is added exactly and rounded to a public grid (docs/guarantees/noise.md)",
        "timing": "not protected: the duration of a step depends on the batch",
        "randomness": _randomness(plan),
        "justification": {"theorem": result.get("theorem"), "threat_model": guarantee.get("threat_model")},
        "assumptions": [f"{a['text']} ({a['check']})" for a in guarantee.get("assumptions", ())],
        "audit": _audit(run.audit),
        "utility": {key: result[key] for key in ("test_accuracy", "test_error") if result.get(key) is not None},
        "evidence": {
            "ledger_entries": None if run.head is None else run.head.entries,
            "ledger_sha256": None if run.head is None else run.head.hash,
            "model_sha256": dict(result.get("files") or {}).get("model.safetensors"),
            "adopted_copies": run.adopted,
            "skipped_steps": result.get("skipped_steps"),
        },
        "code": dict(result.get("environment") or {}),
        "contact": declared.get("contact", MISSING),
        **{key: declared.get(key, MISSING) for key in ("intended_use", "curator", "curator_type", "region")},
    }


DECLARED_AS = {"privacy_unit": "unit", "actors_and_trust": "trust", "tuning_cost": "tuning", "collection": "collection"}
"""The keys of [declaration] whose fields have another name here."""


def undeclared(fields: Mapping[str, Any]) -> list[str]:
    """The keys of [declaration] that only the owner can fill in, and has not."""
    inner = {key: value for part in fields.values() if isinstance(part, Mapping) for key, value in part.items()}
    missing = [key for key, value in {**fields, **inner}.items() if isinstance(value, str) and value.endswith(MISSING)]
    return [DECLARED_AS.get(key, key) for key in missing]


def as_yaml(value: Any, depth: int = 0) -> str:
    """Block YAML; strings are quoted as in JSON, which is also YAML."""
    pad, lines = "  " * depth, []
    items: Sequence[tuple[str, Any]] = (
        [(f"{key}:", entry) for key, entry in value.items()]
        if isinstance(value, Mapping)
        else [("-", entry) for entry in value]
    )
    for head, entry in items:
        if isinstance(entry, Mapping | list | tuple) and entry:
            lines.append(f"{pad}{head}\n{as_yaml(entry, depth + 1)}")
        else:
            lines.append(f"{pad}{head} {_scalar(entry)}\n")
    return "".join(lines)


def _scalar(value: Any) -> str:
    """JSON, with 1e-05 as 1.0e-05: YAML 1.1 reads a number without a point as a string."""
    text = json.dumps(value, ensure_ascii=False)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}.0e{exponent}" if isinstance(value, float) and e and "." not in mantissa else text


def as_markdown(run: Run, fields: Mapping[str, Any]) -> str:
    """The card for people: the statement first, then what undermines it, then the rest."""
    secure = fields["randomness"]["secure"]
    delta = up(fields["parameters"]["delta"])
    top = [
        f"# {fields['name']}: privacy card",
        f"**ε = {fields['parameters']['epsilon_shown']} at δ = {delta}**, {fields['adjacency']}. "
        f"Unit: {fields['privacy_unit']}.",
    ]
    if not secure:
        top.append("**The noise came from an insecure seed: there is no guarantee against anyone who knows it.**")
    alarms = [
        f"| {100 * float(name.removeprefix('false_alarms_')):g} % | {up(100 * rate)} % |"
        for name, rate in fields["attack_success_at_most"].items()
    ]
    sections = {
        "What it means": "An attacker who knows everything except whether one unit took part, and sees all that was "
        "published, recognises it at most this often:\n\n| false alarms | recognised, at most |\n|---|---|\n"
        + "\n".join(alarms)
        + "\n\nFor someone who contributed k units, ε is up to k times as large, and δ grows as well.",
        "What undermines it (NIST SP 800-226)": _bullets(
            {
                "trust": fields["actors_and_trust"],
                "not protected": "; ".join(fields["unprotected_quantities"]),
                "side channels": f"timing: {fields['timing']}; floating point: {fields['floating_point']}",
                "randomness": fields["randomness"]["key"],
                "tuning": fields["tuning_cost"],
                "other releases on the same records": "they add to ε; `sordino budget` adds them up if it is used",
                "adopted copies": fields["evidence"]["adopted_copies"],
            }
        ),
        "The data": _bullets({**fields["data"], "public sources": fields["public_sources"]}),
        "The model": _bullets({key: fields[key] for key in ("intended_use", "curator", "curator_type", "region")}),
        "Where the guarantee comes from": _bullets(
            {
                "mechanisms": "; ".join(fields["mechanisms"]),
                "sampling": _sampling(fields["sampling"]),
                "composition": fields["composition"],
                "theorem": fields["justification"]["theorem"],
                "the adversary": fields["justification"]["threat_model"],
                "statistics besides the steps": "; ".join(fields["preprocessing_cost"]) or "none",
                "post-processing": fields["post_processing"],
            }
        ),
        "Assumptions, and how each was checked": "\n".join(f"- {text}" for text in fields["assumptions"]),
        "Evidence": _bullets({**fields["evidence"], "audit": fields["audit"], **fields["utility"]}),
        "Code": _bullets(fields["code"]),
        "Contact": str(fields["contact"]),
    }
    if missing := undeclared(fields):
        sections["Not declared"] = (
            "Only the owner can say this; give it in the recipe's [declaration]: " + ", ".join(missing) + "."
        )
    body = [f"## {heading}\n\n{text}" for heading, text in sections.items()]
    return "\n\n".join([*top, *body]) + "\n"


def _bullets(values: Mapping[str, Any]) -> str:
    """A list; hashes are code, which a narrow page may break anywhere."""
    shown = {key: "–" if v is None else f"`{v}`" if key.endswith("_sha256") else v for key, v in values.items()}
    return "\n".join(f"- {key.replace('_', ' ')}: {v}" for key, v in shown.items())


def _sampling(fields: Mapping[str, Any]) -> str:
    """The sampler and its numbers, rounded: the YAML has all digits."""
    numbers = [
        f"{key.replace('_', ' ')} {value:.6g}" for key, value in fields.items() if isinstance(value, int | float)
    ]
    return ", ".join([str(fields["name"]), *numbers])


def _unit(plan: Plan, declared: str | None) -> str:
    """The unit that the plan protects; what a record is in the world only the owner can say."""
    known = unit_in_words(plan.to_dict())
    if declared:
        return f"{known}; declared: {declared}"
    return known if plan.unit == "user" else f"{known}; what that is: {MISSING}"


def _domain(plan: Plan) -> str:
    return f"{plan.records} {plan.counted}s (a public constant of the plan)"


def _unprotected(run: Run, plan: Plan) -> list[str]:
    found = [
        f"the number of {plan.counted}s, {plan.records}, and the divisor {plan.divisor:g}: public constants",
        "the test data, on which the metrics were measured",
        "the duration of the run",
    ]
    if plan.public is not None:
        found.append(f"{plan.public.records} rows that are declared public: {plan.public.origin}")
    if _recipe_value(run, "instruments", "not_private") is True:
        found.append("readings of the private records in not_private.json, which must not be published")
    return found


def _statistics(plan: Plan) -> list[str]:
    return [
        f"{s.purpose}: {s.count} × {s.mechanism} noise, multiplier {s.noise_multiplier:g}, at rate {s.sampling_rate:g}"
        for s in plan.statistics
    ]


def _mechanisms(run: Run) -> list[str]:
    """Equal releases counted together."""
    counts: dict[tuple[str, str, str], int] = {}
    for entry in run.entries:
        key = (str(entry.get("purpose")), str(entry.get("mechanism")), f"{entry.get('noise_multiplier'):g}")
        counts[key] = counts.get(key, 0) + 1
    return [f"{purpose}: {n} × {noise} noise, multiplier {m}" for (purpose, noise, m), n in counts.items()]


def _randomness(plan: Plan) -> dict[str, Any]:
    if plan.insecure_seed is None:
        return {"secure": True, "key": "AES-256 in counter mode; the key was kept in memory only"}
    return {"secure": False, "key": f"an insecure seed, {plan.insecure_seed}, given in the recipe"}


def _audit(audit: Mapping[str, Any] | None) -> str:
    lower = (audit or {}).get("epsilon_lower")
    if not isinstance(lower, int | float):
        return "not audited"
    return f"ε ≥ {down(lower)} at {100 * float((audit or {}).get('confidence', 0)):g} % confidence (a lower bound)"


def _recipe_value(run: Run, section: str, key: str) -> Any:
    return report.reading.recipe_section(run.recipe, section).get(key)
