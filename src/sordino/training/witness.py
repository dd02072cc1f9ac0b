"""What a run stores next to its checkpoints: the name of its ledger, and a keyed digest of its data.

`checkpoint/run.json` is written before the first release, readable by its owner only, and deleted with the checkpoints
when the run is complete. On resume

- a ledger of another name means that this run's ledger was lost or replaced: refused, also without a checkpoint;
- other records than those that the run started with are refused. Under add/remove two different datasets of equal size
  are not even neighbours, and the ledger would count the steps on one of them for the other.

The digest's key is in the same file: `sordino.records.digest` says what others could learn from it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sordino.errors import InputError, SordinoError
from sordino.files import json_bytes, make_folder, write_atomically
from sordino.records.digest import KEY_BYTES, keyed_digest
from sordino.release.ledger import Ledger
from sordino.release.ledger_lines import Chain
from sordino.training.progress import working
from sordino.training.sealed import read_sealed

NAME = "run.json"
_WARNING = "for the owner of the data only: with this key one can test a guess of the whole dataset"


def stored_key(checkpoints: Path | None) -> str | None:
    """The key of an earlier part of this run; None if there is none that can be used."""
    if checkpoints is None or not (checkpoints / NAME).exists():
        return None
    key = _read(checkpoints / NAME).get("key")
    return key if isinstance(key, str) and len(key) == 2 * KEY_BYTES and set(key) <= set("0123456789abcdef") else None


def bind(
    checkpoints: Path,
    ledger: Ledger,
    dataset: Any,
    *,
    progress: bool | None = None,
    known: tuple[str, str | None] | None = None,
) -> None:
    """Writes, or on resume compares, the ledger's name and the digest of the dataset.

    known: a key and the digest of the records under it, if that has been computed.

    Raises:
        InputError: the ledger or the records are not those that the run started with; nothing was changed.
    """
    path = checkpoints / NAME

    def found(document: dict[str, Any]) -> str | None:
        if known is not None and known[0] == document.get("key"):
            return known[1]
        return _digest(dataset, document, path, progress)

    if path.exists():
        earlier = _read(path)
        if earlier.get("run") != ledger.run:
            raise InputError(
                f"{ledger.path} is not the ledger that this run started with: it was lost, emptied or replaced, so the "
                "number of releases can't be certified. Restore it from a copy; if there is none, count this run's "
                "whole plan as spent and start again in another directory"
            )
        if earlier.get("digest") is not None and earlier["digest"] != found(earlier):
            raise InputError(
                f"these are not the records that the run in {checkpoints.parent} started with (the number is the same, "
                "content or order differ): resume with the same data, or start again in another directory"
            )
        return
    if ledger.entries or ledger.run is None:
        return  # started by a version that wrote no such file
    document = {
        "warning": _WARNING,
        "run": ledger.run,
        "key": os.urandom(KEY_BYTES).hex() if known is None else known[0],
    }
    content = json_bytes({**document, "digest": found(document)})
    make_folder(checkpoints, private=True)
    write_atomically(path, content, private=True)


def require_own(checkpoints: Path, chain: Chain) -> None:
    """Refuses a ledger that is not this run's, or that lacks releases which its newest checkpoint includes.

    Raises:
        SordinoError: it was lost, replaced, truncated or rolled back.
    """
    path = checkpoints / NAME
    if path.exists() and _read(path).get("run") != chain.run:
        raise SordinoError(f"the ledger is not the one that the run in {checkpoints.parent} began with")
    for newest in sorted(checkpoints.glob("step-*.safetensors"), reverse=True)[:1]:
        head = read_sealed(newest)[1].get("ledger")
        at = {digest.hex(): count for digest, count in zip(chain.hashes, chain.counts, strict=True)}
        if isinstance(head, dict) and at.get(str(head.get("hash"))) != head.get("entries"):
            raise SordinoError(f"the ledger lacks releases that {newest} includes")


def _digest(dataset: Any, document: dict[str, Any], path: Path, progress: bool | None) -> str | None:
    try:
        key = bytes.fromhex(document["key"])
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, "its key") from error
    with working("computing the digest of the records", progress):
        return keyed_digest(dataset, key)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(found, dict):
        raise _damaged(path, "not a JSON object")
    return found


def _damaged(path: Path, why: str) -> SordinoError:
    return SordinoError(f"{path} can't be read ({why}): restore it, or start again in another directory")
