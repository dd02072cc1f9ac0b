"""The end of a run: model and result are written so that each refers to the other, the ledger and all other files.

    model.safetensors   its document: name, ε, δ, relation, the ledger's head, the digest of the result
    result.json         `ledger`: the ledger's head; `files`: the SHA-256 of every published file, including the model

The digest of the result covers everything except the model's hash, which is not known before the model is written. So
an edit of one file is detected by another (`sordino.runs.verify`). The guarantee that is written is the ledger's: if
the ledger's ε exceeds the stated one, that is an error, and nothing is published.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from sordino.errors import SordinoError
from sordino.files import json_bytes, write_atomically
from sordino.plan.core import Plan
from sordino.plan.explained import missing_step
from sordino.plan.spent import from_ledger
from sordino.ranks.layout import whole_of
from sordino.release.ledger import read_chain
from sordino.release.ledger_lines import Chain
from sordino.shown import up
from sordino.training.sealed import sealed, write_sealed

LEDGER, MODEL, RESULT, REPORT = "ledger.jsonl", "model.safetensors", "result.json", "report.html"
SIGNATURE = "signature.json"
_OTHERS = ("audit.json", "membership.json", "not_private.json", "budget.json", "card.md", "card.yaml", "registry.yaml")
NOT_BOUND = (LEDGER, MODEL, RESULT, REPORT, SIGNATURE, *_OTHERS)
"""Files whose hashes are not in result.json: linked in another way, made later, or never published."""
EQUAL = 1e-6
"""Relative difference below which two ε count as equal: the accountant's tolerance, and rounding on other CPUs."""


def write_closed(
    out: Path, result: Mapping[str, Any], tensors: Mapping[str, Tensor], stated: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes model.safetensors and result.json, and returns the content of the latter.

    Args:
        out: The run directory; all other published files have been written.
        result: The content of result.json, with epsilon, delta and relation.
        tensors: The published weights and buffers; shards are gathered, one after the other, by all ranks together.
        stated: What the model file says about it, besides the ledger's head and the digest of the result.

    Raises:
        SordinoError: the ledger lacks steps that were made, or its ε exceeds the result's.
    """
    chain = read_chain(out / LEDGER)
    _require_steps(chain, result.get("stopped_at"), out / LEDGER)
    spent = float(from_ledger(chain.header, chain.entries, result["delta"])["epsilon"])
    if not spent <= result["epsilon"] * (1 + EQUAL):
        raise SordinoError(
            f"the ledger {out / LEDGER} gives ε = {up(spent, 6)}, but the result would state "
            f"{up(result['epsilon'], 6)}: nothing is published. This is a defect of the library or of a method; what "
            "was spent is the ledger's ε"
        )
    bound = {path.name: file_digest(path) for path in sorted(out.iterdir()) if is_bound(path)}
    document = {**result, "ledger": {"format": chain.format, **chain.head.to_dict()}, "files": bound}
    metadata = {**stated, "ledger": chain.head.to_dict(), "result": result_digest(document)}
    if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
        write_sealed(out / MODEL, tensors, metadata, whole_of, private=False)
        document["files"] = {**bound, MODEL: file_digest(out / MODEL)}
    else:
        content = sealed(tensors, metadata)
        write_atomically(out / MODEL, content)
        document["files"] = {**bound, MODEL: hashlib.sha256(content).hexdigest()}
    write_atomically(out / RESULT, json_bytes(document))
    return document


def _require_steps(chain: Chain, stopped_at: int | None, path: Path) -> None:
    """Refuses a ledger that was replaced or truncated during the run."""
    plan = Plan.from_dict({key: value for key, value in chain.header.items() if key != "kind"})
    steps = [entry["step"] for entry in chain.entries if entry["purpose"] == plan.method.purpose]
    missing = missing_step(plan, steps, stopped_at or plan.steps)
    if missing is not None:
        raise SordinoError(
            f"{path} lacks step {missing}, which was released: it was replaced or truncated during the run. "
            "Nothing is published; restore it from a copy and resume, or count the whole plan as spent"
        )


def is_bound(path: Path) -> bool:
    """Whether result.json lists the file's hash."""
    return path.is_file() and path.name not in NOT_BOUND and not path.name.endswith((".partial", ".tmp"))


def result_digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a result without the hash of the model, independent of the order of its keys."""
    files = {name: digest for name, digest in dict(document.get("files") or {}).items() if name != MODEL}
    text = json.dumps({**document, "files": files}, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
