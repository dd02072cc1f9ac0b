"""Users as the unit of privacy: all rows of one user form one record, clipped once.

Formal guarantee. A user's vector is the weighted sum of the gradients of at most `rows_per_user` of their rows. Which
rows, and their weights, depend on the number and the order of *that user's own* rows and on public values (the step).
So adding or removing a user with all their rows does not change other users' vectors, and moves the sum by at most the
clip norm. Sampling draws users. Accounting is that of DP-SGD with `records` = the public number of users
(docs/guarantees/users.md).

It assumes that every row of a user has the same id. Sordino can't know that two ids belong to one person.

Edge cases: a user without rows contributes nothing; missing ids, and a number of ids other than that of the rows, are
errors.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sordino import checks
from sordino.errors import InputError
from sordino.gradients import Rows
from sordino.records.content import sequence, start

Indices = npt.NDArray[np.int64]
_MISSING = frozenset({"", "nan", "none", "null", "<na>", "nat"})


class UserRows:
    """A dataset whose records are users: `rows(indices, step)` returns the rows of these users, `len` their number."""

    def __init__(
        self,
        fetch: Callable[[Tensor], Rows],
        count: int,
        owner: Indices,
        *,
        records: int | None = None,
        rows_per_user: int | None = None,
        mean: bool = True,
        coefficient: Tensor | None = None,
    ) -> None:
        """`fetch` reads rows by their index, 0 to `count` − 1; `owner[i]` in [0, records) is the user of row i."""
        if len(owner) != count:
            raise InputError(f"there are {len(owner)} user ids for {count} rows: give one for each row")
        if coefficient is not None and len(coefficient) != count:
            raise InputError(f"there are {len(coefficient)} coefficients for {count} rows: give one for each row")
        self.fetch, self.count = fetch, count
        self.rows_per_user = None if rows_per_user is None else checks.whole("rows_per_user", rows_per_user, minimum=1)
        self.mean, self.coefficient = mean, coefficient
        largest = int(owner.max()) + 1 if len(owner) else 0
        self._records = largest if records is None else records
        if largest > self._records or (len(owner) and owner.min() < 0):
            raise InputError(
                "owners must be numbered from 0 to records − 1",
                private=f"records = {self._records}, got {owner.min()} to {largest - 1}",
            )
        self._order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
        self._ends = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=self._records))])

    def __len__(self) -> int:
        return self._records

    def rows(self, indices: Tensor, step: int = 0) -> Rows:
        """The rows of these users at this step, each with the position of its user in `indices`."""
        chosen = [self.chosen(user, step) for user in indices.tolist()]
        places = np.repeat(np.arange(len(chosen)), [len(rows) for rows in chosen])
        taken = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *chosen]))
        found = self.fetch(taken)
        weight = torch.ones(len(taken), dtype=torch.float64)
        if self.coefficient is not None:
            weight *= self.coefficient[taken]
        if self.mean:
            sizes = np.array([max(len(rows), 1) for rows in chosen])
            weight /= torch.from_numpy(sizes[places])
        plain = self.coefficient is None and not self.mean
        return Rows(
            found.inputs, found.targets, record=torch.from_numpy(places.astype(np.int64)), records=len(chosen),
            coefficient=None if plain else weight,
        )  # fmt: skip

    def chosen(self, user: int, step: int) -> Indices:
        """The user's rows, or the `rows_per_user` of them whose positions among the user's rows hash smallest."""
        own = self._order[self._ends[user] : self._ends[user + 1]]
        if self.rows_per_user is None or len(own) <= self.rows_per_user:
            return own
        begin = start(np.zeros(1, dtype=np.uint64), "rows of a user", 0, step)
        keys = sequence(begin, len(own))[0]
        picked: Indices = own[np.sort(np.argsort(keys, kind="stable")[: self.rows_per_user])]
        return picked


class RowsOfUsers(UserRows):
    """A dataset whose records are rows, at most `examples_per_user` of each user; further rows are never used.

    Which of a user's rows are kept depends on their number and order among the user's own rows: adding or removing a
    user with all rows adds or removes at most that many records and does not change the others.
    """

    def __init__(self, whole: UserRows, examples_per_user: int) -> None:
        self.examples_per_user = examples_per_user
        parts = [whole.chosen(user, 0) for user in range(len(whole))]
        kept = np.sort(np.concatenate([np.zeros(0, dtype=np.int64), *parts]))
        places = torch.from_numpy(kept)
        super().__init__(
            lambda taken: whole.fetch(places[taken]), len(kept), np.arange(len(kept)), records=len(kept), mean=False
        )


Protects = tuple[str, int | None]
"""What the records of a dataset are: ("record", None), ("user", None), or ("row", the largest number per user)."""


def protects(dataset: Any) -> Protects:
    """What one record of the dataset is: ("record", None) unless the dataset states another unit."""
    if isinstance(dataset, RowsOfUsers):
        return "row", dataset.examples_per_user
    whole = isinstance(dataset, UserRows) or (isinstance(dataset, Rows) and dataset.record is not None)
    return ("user" if whole else "record"), None


def owners(users: Any, rows: int) -> tuple[Indices, int]:
    """(the number of each row's user, the number of users) from one id per row: numbers or texts.

    Two users must never get one number: their rows would be clipped as one record, and removing one of them could move
    the sum by two clip norms. So ids that NumPy can't keep apart (large floats, whole numbers beyond 64 bits) are
    errors, and so are texts that stand for a missing id. Nor must one user get two numbers: texts that look the same
    (other Unicode forms, invisible characters, surrounding blanks) are errors.

    Raises:
        InputError: the ids are not one per row, one is missing, or they do not identify the users.
    """
    if isinstance(users, Tensor):
        users = _array(users)
    if isinstance(users, np.ma.MaskedArray) and np.ma.is_masked(users):
        raise InputError("users must be ids: whole numbers or texts, without missing values; got masked ones")
    # an array of objects is what a column of texts of a data frame becomes
    ids = users if isinstance(users, np.ndarray) and users.dtype.kind != "O" else _plain(users)
    if ids.ndim != 1 or len(ids) != rows:
        raise InputError(
            "users must have one id for each row: give as many ids as rows, in the same order",
            private=f"users has the shape {tuple(ids.shape)}, and there are {rows} rows",
        )
    if ids.dtype.kind not in "iufUSb":
        raise InputError(f"users must be ids: whole numbers or texts, without missing values; got {ids.dtype}")
    if ids.dtype.kind == "f":
        _check_floats(ids)
    names, number = np.unique(ids, return_inverse=True)
    if ids.dtype.kind in "US":
        _check_texts(names)
    return number.astype(np.int64), len(names)


def _array(users: Tensor) -> npt.NDArray[Any]:
    """The ids as an array; NumPy has no bfloat16, which tells whole numbers up to 256 apart, nor other layouts."""
    if users.dtype == torch.bfloat16 or users.layout != torch.strided or users.is_quantized or users.is_meta:
        kind = ", ".join(str(one).removeprefix("torch.") for one in (users.dtype, users.layout, users.device.type))
        raise InputError(f"users must be ids: whole numbers or texts; give a dense tensor of integers, not {kind}")
    found: npt.NDArray[Any] = users.detach().cpu().numpy()
    return found


def _plain(users: Any) -> Any:
    """A list of numbers or a list of texts: NumPy would turn a mixture, or None, into texts or objects."""
    if isinstance(users, str | bytes | Set | Mapping) or not isinstance(users, Iterable):
        raise InputError(
            f"users must be a list or an array of ids, one for each row in order; got a {type(users).__name__}"
        )
    values = list(users)
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1 or object in kinds:
        raise InputError("users must be ids: all whole numbers or all texts, without missing values")
    if str in kinds and any(value.endswith("\0") for value in values):  # NumPy drops these characters
        raise InputError("users must be ids: a text ends with a null character; remove it")
    found = np.asarray(values)
    if int in kinds and found.dtype.kind not in "iu":  # NumPy makes floats of whole numbers beyond 64 bits
        raise InputError("users must be ids of at most 64 bits: give larger numbers as texts")
    return found


def _kind(value: Any) -> type:
    """bool, int, str, or object for what is no id; True and 1 would be one user."""
    if isinstance(value, bool | np.bool_):
        return bool
    return str if isinstance(value, str) else int if isinstance(value, int | np.integer) else object


def _check_floats(ids: npt.NDArray[Any]) -> None:
    """Refuses floats that are no whole numbers, or so large that different whole numbers are the same float."""
    if not np.array_equal(ids, np.round(ids)):  # also refuses NaN
        raise InputError("users must be ids: whole numbers or texts, without missing values; got fractions or NaN")
    largest = float(np.abs(ids).max()) if len(ids) else 0.0
    if not largest < 2.0 ** (np.finfo(ids.dtype).nmant + 1):
        raise InputError(
            f"users must be ids: {ids.dtype} can't tell whole numbers as large as these apart; give integers or texts"
        )
    if may_have_been_single(ids):
        raise InputError(
            "users must be ids: these floats are as if they had been single precision once, which can't tell whole "
            "numbers as large as these apart; give integers or texts"
        )


def may_have_been_single(ids: npt.NDArray[Any]) -> bool:
    """Whether some floats are so large, and all so round, that a float32 may have merged the ids of different users.

    From 2²⁴ on single precision has even numbers only, from 2²⁵ on multiples of four, and so on.
    """
    large = ids[np.abs(ids) >= 2.0**24]
    return len(large) > 0 and bool((large.astype(np.float32) == large).all())


def _check_texts(names: npt.NDArray[Any]) -> None:
    """Refuses texts that stand for a missing id, and different texts that look the same."""
    texts = [name.decode("utf8", "surrogateescape") if isinstance(name, bytes) else str(name) for name in names]
    plain = [_looks(text) for text in texts]
    if any(text.lower() in _MISSING for text in plain):
        raise InputError(
            "users must be ids without missing values: a text is empty or a word for a missing value, and all rows "
            "with it would count as one user; remove these rows, or give each its own id"
        )
    if len(set(plain)) < len(plain):
        raise InputError(
            "users must be ids: two texts differ only in blanks around them, in invisible characters or in their "
            "Unicode form, so one user would count as two; strip and normalise them (unicodedata.normalize)"
        )


def _looks(text: str) -> str:
    """The text without what can't be seen: wide and composed forms are one, and so are blanks of all kinds."""
    shown = "".join(c for c in unicodedata.normalize("NFKC", text) if unicodedata.category(c) != "Cf")
    return shown.strip()
