"""Checks, before anything is released, that every rank of a run was given the same plan, records, model and code.

The guarantee needs this. A batch is a set of positions in the dataset, and each rank reads its share of them from its
own copy. If the copies differ in their order, a record at position 3 of one and at position 8 of another may take part
twice in one batch, with twice the sensitivity. The same could happen if ranks cut the batch into different chunks.

Records are compared by a digest under a random key that the leader draws (`records.digest`). A dataset whose records
differ from one reading to the next (random transforms) can't be compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from sordino.errors import InputError
from sordino.ranks import Ended, Lost, Rank
from sordino.ranks.run import Failure, Stopped, heard
from sordino.records.digest import KEY_BYTES, keyed_digest
from sordino.training.progress import working
from sordino.training.witness import stored_key

_WHAT = {
    "code": "runs another version of sordino or torch: install the same ones at every rank",
    "plan": "was given another plan or other settings: give every rank the same recipe or arguments",
    "model": "has another model (its parameters' or buffers' names, shapes or types): make the same one at every rank",
    "records": (
        "was given other records (their content or their order differs), and a record that two ranks have at different "
        "places would count twice: read the same data in the same order at every rank"
    ),
}


class Seen(NamedTuple):
    """The digest of the records, and its key as text; None: their content changes from one reading to the next."""

    key: str
    digest: str | None


@contextmanager
def reporting(rank: Rank | None) -> Iterator[None]:
    """Sends an error that a follower raises in this block to the leader, which waits in `agree`."""
    try:
        yield
    except Exception as error:
        if rank is None or rank.leads or isinstance(error, Lost | Stopped):
            raise
        if not isinstance(rank.tell(), Ended):  # else the leader has found an error too
            _report(rank, Failure.of(error, rank, "could not begin"))
        raise


def agree(
    rank: Rank | None, plan: str, model: nn.Module, dataset: Any, checkpoints: Path | None, progress: bool | None
) -> Seen | None:
    """Compares what the ranks were given; all ranks call this together.

    Args:
        rank: This process's rank; None: there is only one, and nothing to compare.
        plan: Identifies the plan and the settings.
        model: The model.
        dataset: The records.
        checkpoints: Where the leader's run may have stored its key.
        progress: Show that the digest is being computed; None: on a terminal.

    Returns:
        The digest of this rank's records; None if there is only one rank.

    Raises:
        InputError: raised at the leader if a rank was given something else; the other ranks stop.
    """
    if rank is None:
        return None
    key = heard(rank, (stored_key(checkpoints) or os.urandom(KEY_BYTES).hex()) if rank.leads else None)
    try:
        with working("computing the digest of the records", progress if rank.leads else False):
            seen = Seen(key, keyed_digest(dataset, bytes.fromhex(key)))
        mine: Any = {"code": _code(), "plan": plan, "model": _described(model), "records": seen.digest}
    except Exception as error:  # any error must be reported, or the other ranks would wait forever
        if rank.leads:
            raise
        _report(rank, Failure.of(error, rank, "could not read its records"))
        raise
    _compare(rank, rank.collect(mine))
    heard(rank, True)
    return seen


def _report(rank: Rank, failure: Failure) -> None:
    """Sends a follower's failure to the leader, and receives the end of the run, so that the ranks stay in step."""
    rank.collect(failure)
    rank.tell()


def _compare(rank: Rank, found: list[Any]) -> None:
    """At the leader: raises if another rank has failed or differs."""
    for number, one in enumerate(found):
        if isinstance(one, Failure):
            raise one.error
        differs = next((name for name, value in _given(found[0]).items() if _given(one).get(name) != value), None)
        if differs is not None:
            raise InputError(f"rank {number} of {rank.size} {_WHAT[differs]}")


def _given(found: Any) -> Mapping[str, Any]:
    return found if isinstance(found, dict) else {}


def _described(model: nn.Module) -> list[tuple[Any, ...]]:
    held = [*model.named_parameters(), *model.named_buffers()]
    return [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in held]


@cache
def _code() -> str:
    """torch's version, and a digest of this package's files."""
    found, root = hashlib.sha256(torch.__version__.encode()), Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        found.update(f"{path.relative_to(root)}".encode() + b"\0" + path.read_bytes())
    return found.hexdigest()
