"""What no run of this version can have written, however well its hashes agree.

Used by `sordino.runs.verify`. Each function returns what is wrong, or None. A forger who recomputes all hashes is left
with values that a run could have had: those only a signature protects.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sordino.plan.core import Plan
from sordino.release.mechanisms import ENTRY_KEYS
from sordino.runs.alike import number
from sordino.runs.closing import MODEL, NOT_BOUND
from sordino.runs.stated import KEPT, SINGLE, written_by

DESCRIBED = ("run", "model", "train", "plan", "declaration")
"""The sections of the description that `sordino.train` writes in place of a recipe."""
_LOGGED = "seconds"  # in the rows that a run logs of itself, always with ε; not in those of instruments
_MODEL_KEYS = {*KEPT, "guarantee", "sordino", "inputs", "ledger", "result", "format"}
_RESULT_KEYS = {
    "name", "method", "epsilon", "delta", "relation", "sampler", "accountant", "theorem", "secure", "guarantee",
    "test_accuracy", "noise_free_accuracy", "seconds", "seed", "insecure_seed", "steps", "skipped_steps", "records",
    "public", "expected_batch", "noise_multiplier", "parameters", "environment", "ledger", "files", "stopped_at",
    "batch_clipping", SINGLE,
}  # fmt: skip


def result(plan: Plan, stated: Mapping[str, Any], last: Mapping[str, Any], *, by_recipe: bool) -> str | None:
    """What is impossible in result.json.

    Args:
        plan: The ledger's plan.
        stated: The content of result.json.
        last: The last row of the metrics, of which a method may repeat entries.
        by_recipe: A recipe was run, which no callback stops.
    """
    stopped, skipped = stated.get("stopped_at"), stated.get("skipped_steps")
    if stopped is not None and (by_recipe or not _whole(stopped, 1, plan.steps - 1)):
        return f"stopped_at = {stopped!r}, which a run of {plan.steps} steps {'by a recipe ' * by_recipe}can't have"
    if not _whole(skipped, 0, plan.steps):
        return f"skipped_steps = {skipped!r} of {plan.steps}"
    seconds = number(stated.get("seconds"))
    if seconds is None or seconds < 0:
        return f"seconds = {stated.get('seconds')!r}"
    if written_by(stated) is not None or SINGLE in stated:
        return None
    guarantee = plan.guarantee()
    known = {*_RESULT_KEYS, *guarantee.beside, *plan.method.result_entries(last, last)}
    if unknown := sorted(stated.keys() - known):
        return f"{', '.join(map(repr, unknown))}, which this version does not write"
    if unknown := sorted(dict(stated["guarantee"]).keys() - {"sentence", *guarantee.to_dict()}):
        return f"a guarantee with {', '.join(map(repr, unknown))}, which this version does not write"
    return None


def last_row(metrics: Path) -> Mapping[str, Any]:
    """The last row of metrics.jsonl; empty if it can't be read, which another check tells."""
    try:
        found = json.loads(metrics.read_text(encoding="utf8").splitlines()[-1])
    except (OSError, ValueError, IndexError, RecursionError):
        return {}
    return found if isinstance(found, Mapping) else {}


def described(recipe: Path) -> bool:
    """Whether recipe.toml is the description that `sordino.train` writes."""
    written = tomllib.loads(recipe.read_text(encoding="utf8"))
    return dict(written.get("run") or {}).get("made_by") == "sordino.train"


def unknown_key(entries: Iterable[Mapping[str, Any]], stated: Mapping[str, Any]) -> str | None:
    """A release of the ledger with a key that no release of this version writes."""
    for entry in entries if written_by(stated) is None else ():
        if unknown := sorted(entry.keys() - ENTRY_KEYS):
            return f"has {', '.join(map(repr, unknown))} at step {entry['step']}, which no release writes"
    return None


def lengths(plan: Plan, entries: Iterable[Mapping[str, Any]]) -> set[Any]:
    """The lengths of the vectors that were released in the plan's steps."""
    return {entry.get("coordinates") for entry in entries if entry["purpose"] == plan.method.purpose}


def listed(files: Mapping[str, Any]) -> str | None:
    """A name that the list of hashes can't have: a file that is made after it, or in another folder."""
    wrong = (name for name in files if name != MODEL and (name in NOT_BOUND or "/" in name or "\\" in name))
    return next((f"{name}, which no run lists: it is made later, or elsewhere" for name in wrong), None)


def metrics(rows: Sequence[Any], *, selected: bool) -> str | None:
    """What is impossible in metrics.jsonl; selected: the run is that of a paid sweep, whose rows state no ε."""
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return "is empty, or has a line that is not a JSON object"
    places = [(row.get("step"), _LOGGED in row) for row in rows]  # what instruments read comes before the step's row
    if not all(_whole(step, 0, 2**63) for step, _ in places) or any(a >= b for a, b in pairwise(places)):
        return "has steps that are not whole numbers in ascending order"
    if _LOGGED not in rows[-1]:
        return f"has a last row without {_LOGGED}"
    for row in rows:
        if ("epsilon" in row) is not (_LOGGED in row and not selected):
            return f"has a row {'with' if 'epsilon' in row else 'without'} epsilon at step {row['step']}"
        for key, value in row.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                return f"has {key} = {value!r} at step {row['step']}, which is not a number"
    return None


def model(
    tensors: Mapping[str, Any],
    about: Mapping[str, Any],
    stated: Mapping[str, Any],
    plan: Plan | None,
    entries: Iterable[Mapping[str, Any]],
) -> str | None:
    """What is impossible in model.safetensors, with its document, the result, the plan (if known) and the ledger."""
    if written_by(stated) is None and (unknown := sorted(about.keys() - _MODEL_KEYS)):
        return f"states {', '.join(map(repr, unknown))}, which this version does not write"
    held = sum(tensor.numel() for tensor in tensors.values())
    trained = stated.get("parameters")
    if not _whole(trained, 1, held):
        return f"has {held} values, but {trained!r} parameters were trained"
    if plan is not None and lengths(plan, entries) != {trained}:
        return f"has {trained} trained parameters, but the ledger's steps released another number of coordinates"
    return None


def not_covered(folder: Path, known: set[str], listed: Any) -> Iterator[str]:
    """Files and folders (hf/) that a reader could take for a part of the run and that nothing in it vouches for.

    Args:
        folder: The run directory.
        known: The names of the files that `verify` compares.
        listed: What the result gives as its list of hashes.
    """
    known = known | set(listed if isinstance(listed, Mapping) else ())
    found = (path.name if path.is_file() else f"{path.name}/" for path in sorted(folder.iterdir()))
    return (name for name in found if name not in known)


def _whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
