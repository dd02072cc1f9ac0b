"""Public rows: declared in the plan, set aside before training, and checked not to hold a private row.

The guarantee of a plan protects the private rows alone. Rows that are declared public have none, and whatever is
computed from them is free. So the declaration is part of the plan: where the rows come from, how many there are, and
a digest of their content, so that a run can't go on with others. That they *are* public is an assumption that no
program can check; what can be checked is that no private row sits among them (`refuse_shared_rows`).
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

_NAMED = 5  # public rows that a sentence names before it says "…"


@dataclass(frozen=True)
class PublicSet:
    """Rows that the guarantee does not protect.

    Args:
        origin: A sentence for the report: where the rows come from.
        records: How many there are.
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
            InputError: they are others.
        """
        self.check_digest(digest_of(split))

    def check_digest(self, digest: str) -> None:
        """Checks a digest that was computed before (shapes are part of it).

        Args:
            digest: Of the rows that are about to be used.

        Raises:
            InputError: it is not the declared one.
        """
        if digest != self.digest:
            raise InputError(
                f"the plan declares {self.records} public rows ({self.origin}), and those given are others: make the "
                "plan with PublicSet.of(these rows), or give the rows that it declares"
            )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; from_dict gives back an equal value."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PublicSet:
        """The inverse of to_dict.

        Args:
            values: What to_dict gave.

        Returns:
            An equal value.

        Raises:
            InputError: other keys than those of to_dict.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != known:
            raise InputError(f"a public set has exactly the keys {', '.join(sorted(known))}, got {values!r}")
        return cls(**values)


def split_public(
    split: Split, *, fraction: float | None = None, records: int | None = None, seed: int = 0
) -> tuple[Split, Split]:
    """(public, private): a part of the rows set aside, drawn by a public seed, both in the order they had.

    Either `fraction` of the rows or a number of `records`; both parts must hold at least one row. The same seed gives
    a larger set that holds the smaller one, so that a sweep over the number of public rows adds rows and swaps none.
    """
    if (fraction is None) == (records is None):
        raise InputError("say how many rows are public: either fraction or records, not both and not neither")
    count = public_records(len(split), fraction=fraction, records=records)
    generator = torch.Generator().manual_seed(checks.count("seed", seed, minimum=0))
    chosen = torch.zeros(len(split), dtype=torch.bool)
    chosen[torch.randperm(len(split), generator=generator)[:count]] = True
    return _rows(split, chosen), _rows(split, ~chosen)


def public_records(total: int, *, fraction: float | None = None, records: int | None = None) -> int:
    """How many of `total` rows are public."""
    if fraction is not None and not 0 < checks.positive("fraction", fraction) < 1:
        raise InputError(f"the fraction of public rows must lie strictly between 0 and 1, got {fraction:g}")
    count = round(total * fraction) if fraction is not None else checks.count("records", records)
    if not 0 < count < total:
        raise InputError(f"{count} of {total} rows would be public: at least one must be, and one must stay private")
    return count


def shared_rows(public: Split, private: Split) -> tuple[Tensor, Tensor]:
    """(public, private): the positions of the rows whose inputs stand in the other set too, bit for bit.

    Inputs alone are compared: a private image under another label gives away the image all the same. A row that was
    altered, however little, is not found.
    """
    ours, theirs = _contents(public.inputs), _contents(private.inputs)
    common = np.intersect1d(ours, theirs)
    found = [torch.from_numpy(np.flatnonzero(np.isin(side, common))) for side in (ours, theirs)]
    return found[0], found[1]


def different_rows(split: Split) -> int:
    """How many different inputs there are."""
    return len(np.unique(_contents(split.inputs)))


def refuse_shared_rows(public: Split, private: Split) -> None:
    """InputError where a private row sits in the public set: its content would go out without noise."""
    ours, theirs = shared_rows(public, private)
    if not len(ours):
        return
    named = ", ".join(str(int(i)) for i in ours[:_NAMED]) + (", …" if len(ours) > _NAMED else "")
    raise InputError(
        "some private rows have the same content as public rows: a public "
        "row has no protection, so a private one must not be among them. Take them out of the public set; or, where "
        'the public ones are rightly public, out of the private one (drop_shared_rows, [public] shared = "drop")',
        private=f"{len(theirs)} private rows, {len(ours)} public ones: {named}",
    )


def drop_shared_rows(public: Split, private: Split) -> Split:
    """The private rows without those whose content is public already.

    Whether a row stays depends on that row and on the public set alone, so neighbouring private sets stay neighbours
    and nothing is spent. How many went is as private as the number of records: under add/remove that is nowhere used.
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
    """A 16-byte digest of each row: two rows are the same when theirs are. −0 and 0 are one number."""
    values = inputs.detach().cpu().contiguous()
    rows = (values + 0 if values.is_floating_point() else values).numpy()
    found = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
    return np.array(found, dtype="S16") if found else np.array([], dtype="S16")
