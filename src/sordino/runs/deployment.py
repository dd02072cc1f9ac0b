"""The record of a run for OpenDP's registry of deployments, in the structure of the registry's own schema.

The schema (github.com/opendp/deployments-registry-data, schemas/deployments-schema.yaml at 057e5d8) admits
no further keys. What only the owner can say is taken from [declaration]; a required field that is missing there says
so (`MISSING`) and is never guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sordino.shown import up

MISSING = "NOT DECLARED"
DECLARED = ("curator", "curator_type", "intended_use", "region", "trust", "tuning")
"""The keys of [declaration] that the registry asks for, besides those of the card."""


def registry_record(fields: Mapping[str, Any], declared: Mapping[str, str]) -> dict[str, Any]:
    """The registry's record of one run.

    Args:
        fields: The fields of the card.
        declared: The owner's declaration.

    Returns:
        A nested document, to be written as YAML.
    """
    known = {key: declared.get(key, MISSING) for key in DECLARED}
    parameters, justification = fields["parameters"], fields["justification"]
    return {
        "url_slug": re.sub(r"[^a-z0-9]+", "-", str(fields["name"]).lower()).strip("-") or "run",
        "deployment": {
            "basic": {
                "name": fields["name"],
                "data_curators": [
                    {"data_curator_name": known["curator"], "data_curator_type": known["curator_type"]}
                ],
                "description": fields["description"],
                "intended_use": known["intended_use"],
                "data_product_type": "Machine learning model",
                "data_product_region": known["region"],
                **({"data_product_sector": declared["sector"]} if "sector" in declared else {}),
                "publication_date": str(fields["code"].get("finished", "1900-01-01"))[:10],
            },
            "dp_variant": {
                "variant_name": "Approximate DP",
                "data_domain": f"{fields['data']['domain']}; source: {fields['data']['source']}; "
                f"collection: {fields['data']['collection']}",
                "unprotected_quantities": _list(fields["unprotected_quantities"]),
            },
            "privacy_loss": {
                "privacy_unit": fields["privacy_unit"],
                "privacy_unit_details": fields["adjacency"],
                **({} if fields["data"]["units"] is None else {"number_of_privacy_units": fields["data"]["units"]}),
                "privacy_parameters": {"epsilon": float(parameters["epsilon_shown"]), "delta": parameters["delta"]},
                "privacy_parameters_details": "ε is rounded up. Any attack on one unit succeeds at most this often: "
                + "; ".join(
                    f"{up(100 * rate)} % at {100 * float(name.removeprefix('false_alarms_')):g} % false alarms"
                    for name, rate in fields["attack_success_at_most"].items()
                ),
            },
            "deployment_model": {
                "model_name": "Central",
                "model_name_details": fields["deployment_model"],
                "trust_assumptions": known["trust"],
                "release_type": "One release",
                "release_type_details": fields["release_type"],
                "data_source_type": "Static",
                "access_type": "Non-interactive",
            },
            "implementation": {
                "preprocessing_and_hyperparameter_tuning": f"tuning: {known['tuning']}; statistics with noise besides "
                f"the steps: {'; '.join(fields['preprocessing_cost']) or 'none'}; public sources: "
                f"{fields['public_sources']}",
                "mechanisms": _list(
                    [
                        *fields["mechanisms"],
                        f"sampling: {fields['sampling']['name']}",
                        f"library: sordino {fields['code'].get('sordino', '')}",
                        f"floating point: {fields['floating_point']}",
                        f"timing: {fields['timing']}",
                        f"randomness: {fields['randomness']['key']}",
                    ]
                ),
                "composition": fields["composition"],
                "post_processing": fields["post_processing"],
                "justification": _list(
                    [f"theorem: {justification['theorem']}", f"adversary: {justification['threat_model']}",
                     *fields["assumptions"], f"audit: {fields['audit']}"]
                ),
                "utility": "; ".join(f"{key}: {value:.6g}" for key, value in fields["utility"].items())
                or "not measured",
                "additional_information": f"ledger SHA-256 {fields['evidence']['ledger_sha256']}, model SHA-256 "
                f"{fields['evidence']['model_sha256']}; `sordino verify` recomputes ε from them",
            },
            "administrative": {"status": "Draft", "registry_authors": [fields["contact"]], "tier": 3},
        },
    }  # fmt: skip


def _list(items: list[str]) -> str:
    """A Markdown list, as the registry shows texts."""
    return "\n".join(f"- {item}" for item in items)
