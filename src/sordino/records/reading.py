"""From a dataset to rows: tensors, pairs of tensors, or a map-style torch dataset of (inputs, target) pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.gradients.rows import tensors
from sordino.records.users import UserRows, owners
from sordino.split import Split


class RowReader(Protocol):
    """From record indices to their rows. Where a record has more rows than take part, the step says which do."""

    def __call__(self, indices: Tensor, step: int = 0) -> Rows: ...


def row_reader(dataset: Any) -> RowReader:
    """From record indices to rows, without copying what can be indexed."""
    if isinstance(dataset, UserRows):
        return dataset.rows
    if isinstance(dataset, Rows) and stated_records(dataset):
        return as_records(dataset).rows
    pair = tensors_of(dataset)
    if pair is not None:
        inputs, targets = pair

        def select(indices: Tensor, step: int = 0) -> Rows:
            return Rows(inputs=select_rows(inputs, indices), targets=select_rows(targets, indices))

        return select
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            f"a {type(dataset).__name__} can't be sampled record by record: give a pair (inputs, targets) "
            "or a map-style dataset with __len__ and __getitem__ (an iterable dataset can't be Poisson sampled)"
        )

    def fetch(indices: Tensor, step: int = 0) -> Rows:
        collated: Sequence[Any] = default_collate([dataset[i] for i in indices.tolist()])
        if not isinstance(collated, Sequence) or len(collated) != 2:
            raise InputError("each item of the dataset must be a pair (inputs, target)")
        return Rows(inputs=collated[0], targets=collated[1])

    return fetch


def splits(dataset: Any, size: int = 1024) -> Iterator[Split]:
    """The whole dataset, some rows at a time; of users all rows, whichever take part in a step."""
    if isinstance(dataset, Rows) and stated_records(dataset):
        dataset = as_records(dataset)
    fetch = dataset.fetch if isinstance(dataset, UserRows) else row_reader(dataset)
    count = dataset.count if isinstance(dataset, UserRows) else count_records(dataset)
    for indices in torch.split(torch.arange(count), size):
        rows = fetch(indices)
        yield Split(rows.inputs, rows.targets)


def tensors_of(dataset: Any) -> tuple[Any, Any] | None:
    """(inputs, targets) where the dataset holds them as tensors (or trees of them), one row per record, else None."""
    if isinstance(dataset, Rows) and stated_records(dataset):
        return None
    if hasattr(dataset, "inputs") and hasattr(dataset, "targets"):
        return dataset.inputs, dataset.targets
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, tuple | list) and len(dataset) == 2 and isinstance(dataset[1], Tensor):
        return dataset[0], dataset[1]
    return None


def select_rows(values: Any, indices: Tensor) -> Any:
    """The rows `indices` of a tensor, or of every tensor in a mapping or sequence."""
    if isinstance(values, Tensor):
        return values[indices]
    if isinstance(values, Mapping):
        return {key: select_rows(value, indices) for key, value in values.items()}
    return type(values)(select_rows(value, indices) for value in values)


def count_records(dataset: Any) -> int:
    """How many records there are: rows, or users where the dataset says which user a row belongs to."""
    if isinstance(dataset, Rows) and stated_records(dataset):
        return len(as_records(dataset))
    pair = tensors_of(dataset)
    return len(pair[1]) if pair is not None else len(dataset)


def stated_records(rows: Rows) -> bool:
    """Do these rows say more than inputs and targets: whose they are, or their weights?"""
    return rows.record is not None or rows.records is not None or rows.coefficient is not None


def as_records(rows: Rows) -> UserRows:
    """Rows with their owners as a dataset: a record is the weighted sum over the rows of one owner."""
    count = _rows_of(rows)
    owner = np.arange(count) if rows.record is None else rows.record.detach().cpu().numpy().astype(np.int64)
    return UserRows(
        row_reader((rows.inputs, rows.targets)), count, owner, records=rows.records, mean=False,
        coefficient=None if rows.coefficient is None else rows.coefficient.detach().cpu().double(),
    )  # fmt: skip


def users_of(dataset: Any, users: Any, rows_per_user: int | None) -> UserRows:
    """The dataset with one id per row as a dataset of users: a record is the mean over the chosen rows of one user."""
    if isinstance(dataset, UserRows) or (isinstance(dataset, Rows) and stated_records(dataset)):
        raise InputError("the dataset says whose its rows are already: leave out users, or give plain rows")
    count = count_records(dataset)
    owner, number = owners(users, count)
    return UserRows(row_reader(dataset), count, owner, records=number, rows_per_user=rows_per_user)


def _rows_of(rows: Rows) -> int:
    lengths = {t.shape[0] for t in tensors((rows.inputs, rows.targets)) if t.ndim}
    if len(lengths) != 1:
        raise InputError(f"inputs and targets must have the same number of rows, got {sorted(lengths)}")
    return int(lengths.pop())


def refuse_owners(dataset: Any, method: str) -> None:
    """Refused where the dataset's records have several rows, for a method that takes a row for a record."""
    if isinstance(dataset, UserRows) or (isinstance(dataset, Rows) and stated_records(dataset)):
        raise Refused(
            f"the method {method} takes a row for a record, and these rows say whose they are, or their weights, which "
            "it would ignore: give plain inputs and targets"
        )
