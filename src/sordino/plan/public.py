"""Public rows: declared in the plan, set aside before training, and checked not to contain a private row.

The guarantee of a plan protects the private rows only. Public rows have no protection, and whatever is computed from
them has no privacy cost. So the declaration is part of the plan: where the rows come from, how many there are, and a
digest of their content, so that a run can't continue with other rows. That they *are* public is an assumption that no
program can check; it can check that no private row is among them (`refuse_shared_rows`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InputError
from sordino.split import Split

_NAMED = 5  # public rows that a message names before it says "…"


@dataclass(frozen=True)
class PublicSet:
    """Rows that the guarantee does not protect.

    Args:
        origin: A sentence for the report: where the rows come from.
        records: Their number.
        digest: SHA-256 over their contents.

    Raises:
        InputError: no origin, no rows, or no digest.
    """

    origin: str
    records: int
    digest: str

    def __post_init__(self) -> None:
        if not isinstance(self.origin, str) or not self.origin.strip():
            raise InputError("a public set needs an origin: a sentence that says where its rows come from")
        checks.count("public records", self.records)
        if not (isinstance(self.digest, str) and len(self.digest) == 64):
            raise InputError("the digest of a public set is the SHA-256 of its rows, as 64 hexadecimal digits")

    @classmethod
    def of(cls, split: Split, origin: str) -> PublicSet:
        """The declaration of these rows.

        Args:
            split: The rows.
            origin: A sentence that says where they come from.

        Returns:
            Their number and digest with the origin.
        """
        return cls(origin, len(split), digest_of(split))

    def check(self, split: Split) -> None:
        """Checks that these are the declared rows, in the declared order.

        Args:
            split: The rows that are about to be used.

        Raises:
            InputError: the rows are different.
        """
        self.check_digest(digest_of(split))

    def check_digest(self, digest: str) -> None:
        """Checks a digest that was computed before (shapes are part of it).

        Args:
            digest: The digest of the rows that are about to be used.

        Raises:
            InputError: it is not the declared one.
        """
        if digest != self.digest:
            raise InputError(
                f"the plan declares {self.records} public rows ({self.origin}), and the given rows are different: make "
                "the plan with PublicSet.of(these rows), or give the rows that it declares"
            )

    def to_dict(self) -> dict[str, Any]:
        """The declaration as JSON-serialisable values; from_dict is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PublicSet:
        """The inverse of to_dict.

        Args:
            values: What to_dict returned.

        Returns:
            An equal value.

        Raises:
            InputError: the keys are not those of to_dict.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise InputError(f"a public set must have exactly the keys {', '.join(sorted(known))}, got {values!r}")
        return cls(**values)


def split_public(
    split: Split, *, fraction: float | None = None, records: int | None = None, seed: int = 0
) -> tuple[Split, Split]:
    """(public, private): sets a part of the rows aside, drawn by a public seed; both parts keep the original order.

    Give either `fraction` of the rows or a number of `records`; both parts must have at least one row. With the same
    seed a larger public set contains every smaller one, so a sweep over its size only adds rows.
    """
    checks.exactly_one(fraction=fraction, records=records)
    count = public_records(len(split), fraction=fraction, records=records)
    generator = torch.Generator().manual_seed(checks.count("seed", seed, minimum=0))
    chosen = torch.zeros(len(split), dtype=torch.bool)
    chosen[torch.randperm(len(split), generator=generator)[:count]] = True
    return _rows(split, chosen), _rows(split, ~chosen)


def public_records(total: int, *, fraction: float | None = None, records: int | None = None) -> int:
    """The number of public rows among `total`."""
    if fraction is not None and not 0 < checks.positive("fraction", fraction) < 1:
        raise InputError(f"the fraction of public rows must lie strictly between 0 and 1, got {fraction:g}")
    count = round(total * fraction) if fraction is not None else checks.count("records", records)
    if not 0 < count < total:
        raise InputError(f"{count} of {total} rows would be public: at least one must be public, and one private")
    return count


def shared_rows(public: Split, private: Split) -> tuple[Tensor, Tensor]:
    """(public, private): the positions of rows whose inputs also occur in the other set, bit for bit.

    Only inputs are compared: a private image under another label reveals the image all the same. A row that was
    altered, even slightly, is not found.
    """
    ours, theirs = _contents(public.inputs), _contents(private.inputs)
    common = np.intersect1d(ours, theirs)
    found = [torch.from_numpy(np.flatnonzero(np.isin(side, common))) for side in (ours, theirs)]
    return found[0], found[1]


def different_rows(split: Split) -> int:
    """The number of different inputs."""
    return len(np.unique(_contents(split.inputs)))


def refuse_shared_rows(public: Split, private: Split) -> None:
    """InputError if a private row is in the public set: its content would be used without noise."""
    ours, theirs = shared_rows(public, private)
    if not len(ours):
        return
    named = ", ".join(str(int(i)) for i in ours[:_NAMED]) + (", …" if len(ours) > _NAMED else "")
    raise InputError(
        "some private rows have the same content as public rows: a public "
        "row has no protection, so no private row may be among them. Remove these rows from the public set; or, "
        'if they really are public, from the private one (drop_shared_rows, [public] shared = "drop")',
        private=f"{len(theirs)} private rows, {len(ours)} public ones: {named}",
    )


def drop_shared_rows(public: Split, private: Split) -> Split:
    """The private rows without those whose content is public already.

    Whether a row is kept depends on that row and on the public set only, so neighbouring private sets remain
    neighbours and there is no privacy cost. The number of removed rows is as private as the number of records, which is
    not used under add/remove.
    """
    _, theirs = shared_rows(public, private)
    keep = torch.ones(len(private), dtype=torch.bool)
    keep[theirs] = False
    return _rows(private, keep)


def digest_of(split: Split) -> str:
    """SHA-256 over shapes, types and content of inputs and targets."""
    found = hashlib.sha256()
    for tensor in (split.inputs, split.targets):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def _rows(split: Split, chosen: Tensor) -> Split:
    return Split(split.inputs[chosen], split.targets[chosen])


def _contents(inputs: Tensor) -> Any:
    """A 16-byte digest of each row: rows are equal if their digests are. −0 and 0 are the same number."""
    values = inputs.detach().cpu().contiguous()
    rows = (values + 0 if values.is_floating_point() else values).numpy()
    found = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
    return np.array(found, dtype="S16") if found else np.array([], dtype="S16")
