"""Reads rows from a dataset: a pair of tensors or arrays, or a map-style dataset of (inputs, target) pairs or dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.gradients import Rows
from sordino.gradients.rows import tensors, tree_map
from sordino.records.drawn import ItemReader, refuse_drawn
from sordino.records.items import refuse_dependent_items
from sordino.records.mapped import Mapped
from sordino.records.users import RowsOfUsers, UserRows, owners
from sordino.split import Split

TARGETS = ("labels", "label", "targets", "target")
"""The keys under which a record that is a dict may have its target."""


@dataclass(frozen=True, eq=False)
class Collated:
    """A map-style dataset with its own function that combines records into rows.

    `collate` maps a list of items to (inputs, targets). A record's row must not depend on the others: padding to the
    longest of a batch is refused (`pad_to` pads to a public length). `workers` threads read items.
    """

    dataset: Any
    collate: Callable[[list[Any]], Any] = default_collate
    workers: int = 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def collated(dataset: Any, collate: Callable[[list[Any]], Any] | None, workers: int) -> Collated:
    """The dataset with its collate function and number of threads; InputError for arrays, which have no items."""
    if isinstance(dataset, tuple | list) and _pair(dataset) is not None:
        raise InputError(
            "collate and num_workers are for a map-style dataset, whose items are read one by one; this dataset is a "
            "pair of arrays, whose rows are taken at once: leave them out"
        )
    return Collated(dataset, collate or default_collate, workers)


def pad_to(length: int, value: float = 0) -> Callable[[list[Any]], Any]:
    """A collate function that cuts or pads every tensor's first dimension to a public length.

    Items are (inputs, target), or dicts; a target (a number) is left as it is.

    Args:
        length: The public length.
        value: The value to pad with.

    Returns:
        The collate function.

    Raises:
        InputError: the length is not a whole number, at least 1.
    """
    checks.whole("length", length, minimum=1)

    def padded(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {key: padded(entry) for key, entry in item.items()}
        if isinstance(item, tuple | list) and not all(isinstance(one, int | float) for one in item):
            return tuple(padded(entry) for entry in item)
        entry = torch.as_tensor(item)
        if not entry.ndim:
            return entry
        out = entry.new_full((length, *entry.shape[1:]), value)
        out[: min(length, len(entry))] = entry[:length]
        return out

    return lambda items: default_collate([padded(item) for item in items])


class RowReader(Protocol):
    """Maps record indices to their rows. If a record has more rows than take part, the step determines which do."""

    def __call__(self, indices: Tensor, step: int = 0) -> Rows: ...


def row_reader(dataset: Any) -> RowReader:
    """A function from record indices to rows, which does not copy what can be indexed."""
    if isinstance(dataset, UserRows):
        return dataset.rows
    if isinstance(dataset, Mapped):
        return dataset.rows
    if isinstance(dataset, Rows) and stated_records(dataset):
        return as_records(dataset).rows
    pair = tensors_of(dataset)
    if pair is not None:
        inputs, targets = pair

        def select(indices: Tensor, step: int = 0) -> Rows:
            return Rows(inputs=rows_at(inputs, indices), targets=rows_at(targets, indices))

        return select
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            f"a {type(dataset).__name__} can't be sampled record by record: give a pair (inputs, targets) "
            "or a map-style dataset with __len__ and __getitem__ (an iterable dataset can't be Poisson sampled)"
        )
    collate = dataset.collate if isinstance(dataset, Collated) else default_collate
    items_of = _items_reader(dataset)

    def fetch(indices: Tensor, step: int = 0) -> Rows:
        parts = items_of(indices.tolist(), step)
        if not parts:
            return _paired(collate([]))
        try:
            return _paired(_together(parts))
        except RuntimeError as error:
            if "Sizes of tensors must match" not in str(error):
                raise
            raise InputError(
                "the records have different lengths, so they can't be stacked: give collate=sordino.pad_to(length), "
                "which pads them to a public length (the longest one that occurs is not public)"
            ) from error

    return fetch


def _items_reader(dataset: Any) -> ItemReader:
    """Reads the items of a map-style dataset, each collated by itself."""
    collate = dataset.collate if isinstance(dataset, Collated) else default_collate
    return ItemReader(_Alone(dataset, collate), dataset.workers if isinstance(dataset, Collated) else 0)


def check_items(dataset: Any) -> None:
    """Refused if an item of a map-style dataset depends on other records, or on what was read before it (`items`)."""
    if not isinstance(dataset, UserRows | Mapped | Rows | list) and tensors_of(dataset) is None:
        refuse_dependent_items(dataset, count_records(dataset), lambda some: partial(_items_reader(some), step=0))


class _Alone:
    """A dataset whose items are collated one by one, when they are read: a row can't depend on other records then, not
    by padding to the longest nor by memory that the dataset uses for all items."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self.collate = dataset, collate

    def __getitem__(self, place: int) -> Any:
        return tree_map(torch.clone, self.collate([self.dataset[place]]))


def _together(parts: Sequence[Any]) -> Any:
    """Trees of one row each as one tree of all rows.

    Raises:
        Refused: a row contains something that is not a tensor, or values that belong to no row.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if first.ndim:
            return torch.cat(list(parts))
        if all(torch.equal(first, part) for part in parts):
            return first
        raise Refused("collate makes a number without rows that differs from record to record; give each record a row")
    if isinstance(first, Mapping):
        return {key: _together([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple | list):
        joined = [_together(entries) for entries in zip(*parts, strict=True)]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    if all(part is first for part in parts) or first is None:
        return first
    raise Refused(
        f"the dataset's items contain a {type(first).__name__}, which the model would see for all records at once; "
        "give numbers (a text as its tokens)"
    )


def _paired(collated: Any) -> Rows:
    """(inputs, targets) of collated items: a pair, or a dict with its target under one of TARGETS."""
    if isinstance(collated, Mapping):
        keys = [key for key in TARGETS if key in collated]
        if len(keys) != 1:
            raise InputError(f"a record that is a dict must have its target under one of {', '.join(TARGETS)}")
        inputs = {key: value for key, value in collated.items() if key != keys[0]}
        return Rows(inputs=inputs, targets=collated[keys[0]])
    if not isinstance(collated, Sequence) or isinstance(collated, str) or len(collated) != 2:
        raise InputError("each item of the dataset must be a pair (inputs, target), or a dict")
    return Rows(inputs=collated[0], targets=collated[1])


def refuse_dependent_rows(dataset: Any, indices: Tensor) -> None:
    """Refuses records whose rows would depend on other records of the batch.

    Items are collated one by one, so they do not; but then the function does not do what its author means. Rows depend
    on other records if a collate function pads to the longest record of a batch, or if several threads draw
    items at random from one generator, so that the order of the threads determines an item's random numbers.

    Raises:
        Refused: a row depends on other records.
    """
    if not isinstance(dataset, Collated) or len(indices) < 2:
        return
    if dataset.workers:
        refuse_drawn(dataset, indices.tolist())
    items = ItemReader(dataset)(indices.tolist(), 0)
    together = _paired(dataset.collate(items))
    for place, item in enumerate(items):
        alone = _paired(dataset.collate([item]))
        for one, many in zip(tensors((alone.inputs, alone.targets)), tensors((together.inputs, together.targets)),
                             strict=True):  # fmt: skip
            if not one.ndim or one.shape[1:] != many.shape[1:] or not torch.equal(one[0], many[place]):
                raise Refused(
                    "collate makes a record's row depend on the other records of its batch (padding to the longest, or "
                    "statistics of the batch), so one record changes the rows of others. Pad to a public length, "
                    "collate=sordino.pad_to(length), and process each record separately"
                )


def splits(dataset: Any, size: int = 1024) -> Iterator[Split]:
    """The whole dataset, some rows at a time; for users all their rows, whether or not they take part in a step."""
    if isinstance(dataset, Rows) and stated_records(dataset):
        dataset = as_records(dataset)
    fetch = dataset.fetch if isinstance(dataset, UserRows) else row_reader(dataset)
    count = dataset.count if isinstance(dataset, UserRows) else count_records(dataset)
    for indices in torch.split(torch.arange(count), size):
        rows = fetch(indices)
        yield Split(rows.inputs, rows.targets)


def tensors_of(dataset: Any) -> tuple[Any, Any] | None:
    """(inputs, targets) if the dataset consists of tensors or arrays (or trees of them), else None.

    Raises:
        InputError: inputs and targets have different lengths, or are not numbers.
        Refused: the dataset is a DataLoader.
    """
    if isinstance(dataset, DataLoader):
        raise Refused(
            "a DataLoader draws its own batches, but the guarantee holds for batches that the plan draws: give the "
            "dataset itself (loader.dataset; its collate_fn as collate=…, its workers as num_workers=…). The batch "
            "size is the plan's expected_batch"
        )
    if isinstance(dataset, UserRows | Mapped) or (isinstance(dataset, Rows) and stated_records(dataset)):
        return None
    pair = _pair(dataset)
    if pair is None:
        return None
    inputs, targets = _as_tensors(pair[0]), _as_tensors(pair[1])
    lengths = {len(t) for t in tensors((inputs, targets)) if t.ndim}
    if len(lengths) > 1:
        raise InputError("inputs and targets must have one entry per record each, and their lengths differ")
    if not lengths:
        raise InputError("the dataset must be (inputs, targets), with one entry per record in the first dimension")
    return inputs, targets


def _pair(dataset: Any) -> tuple[Any, Any] | None:
    if hasattr(dataset, "inputs") and hasattr(dataset, "targets"):
        return dataset.inputs, dataset.targets
    if isinstance(dataset, torch.utils.data.TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    if isinstance(dataset, tuple | list) and len(dataset) == 2:
        as_list = isinstance(dataset, list) and not _is_array(dataset[1])  # two records of a map-style dataset
        return None if as_list else (dataset[0], dataset[1])
    return None


def _is_array(values: Any) -> bool:
    return isinstance(values, Tensor | np.ndarray) or hasattr(values, "to_numpy")


def _as_tensors(values: Any) -> Any:
    """Converts arrays, data frames and lists of numbers, anywhere in a tree, to tensors."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        return {key: _as_tensors(entry) for key, entry in values.items()}
    if isinstance(values, tuple | list) and any(isinstance(one, Tensor | np.ndarray) for one in values):
        return type(values)(_as_tensors(entry) for entry in values)
    array = values.to_numpy() if hasattr(values, "to_numpy") else np.asarray(values)
    if array.dtype.kind not in "fiub":
        columns = " in every column, frame.astype('float32')" if hasattr(values, "columns") else ""
        kind = f"{type(values).__name__} of type {array.dtype}"
        raise InputError(f"a {kind} can't become a tensor: give numbers{columns}")
    if isinstance(values, np.ma.MaskedArray):
        raise InputError("a masked array has values that are hidden, not missing: fill them with a public value")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(array if array.flags.writeable and array.flags.c_contiguous else array.copy())


def rows_at(values: Any, indices: Tensor) -> Any:
    """The rows `indices` of a tensor, or of every tensor in a mapping or sequence."""
    if isinstance(values, Tensor):
        return values[indices]
    if isinstance(values, Mapping):
        return {key: rows_at(value, indices) for key, value in values.items()}
    return type(values)(rows_at(value, indices) for value in values)


def count_records(dataset: Any) -> int:
    """The number of records: of rows, or of users if the dataset states which user each row belongs to.

    Raises:
        InputError: the dataset has no length, or inputs and targets have different lengths.
        Refused: the dataset is a DataLoader.
    """
    if isinstance(dataset, Rows) and stated_records(dataset):
        return len(as_records(dataset))
    pair = tensors_of(dataset)
    if pair is not None:
        return next(len(t) for t in tensors((pair[1], pair[0])) if t.ndim)
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"a {type(dataset).__name__} has no length, so its records can't be sampled: give a pair (inputs, targets) "
            "or a map-style dataset with __len__ and __getitem__"
        )
    return len(dataset)


def stated_records(rows: Rows) -> bool:
    """Whether these rows have owners or weights besides inputs and targets."""
    return rows.record is not None or rows.records is not None or rows.coefficient is not None


def as_records(rows: Rows) -> UserRows:
    """Rows with owners as a dataset: a record is the weighted sum over the rows of one owner."""
    count = _rows_of(rows)
    owner = np.arange(count) if rows.record is None else rows.record.detach().cpu().numpy().astype(np.int64)
    return UserRows(
        row_reader((rows.inputs, rows.targets)), count, owner, records=rows.records, mean=False,
        coefficient=None if rows.coefficient is None else rows.coefficient.detach().cpu().double(),
    )  # fmt: skip


def users_of(dataset: Any, users: Any, rows_per_user: int | None) -> UserRows:
    """A dataset of users: a record is the mean over the chosen rows of one user.

    Args:
        dataset: The rows.
        users: One id per row.
        rows_per_user: The largest number of a user's rows in a step; None: all rows.

    Returns:
        The dataset whose records are users.

    Raises:
        InputError: the rows have owners already, or the ids are not one per row.
    """
    if isinstance(dataset, UserRows) or (isinstance(dataset, Rows) and stated_records(dataset)):
        raise InputError("the rows of this dataset have owners already: leave out users, or give plain rows")
    count = count_records(dataset)
    owner, number = owners(users, count)
    return UserRows(row_reader(dataset), count, owner, records=number, rows_per_user=rows_per_user)


def rows_of_users(dataset: Any, users: Any, examples_per_user: int) -> RowsOfUsers:
    """A dataset of rows, of which each user has at most `examples_per_user`.

    Args:
        dataset: The rows.
        users: One id per row.
        examples_per_user: The largest number of rows of a user; further rows are never used.

    Returns:
        The dataset whose records are rows.

    Raises:
        InputError: the rows have owners already, or the ids are not one per row.
    """
    whole = users_of(dataset, users, examples_per_user)
    return RowsOfUsers(whole, examples_per_user)


def _rows_of(rows: Rows) -> int:
    lengths = {t.shape[0] for t in tensors((rows.inputs, rows.targets)) if t.ndim}
    if len(lengths) != 1:
        raise InputError("inputs and targets must have the same number of rows", private=f"got {sorted(lengths)}")
    return int(lengths.pop())


def refuse_owners(dataset: Any, method: str) -> None:
    """Refuses records of several rows, for a method that treats a row as a record."""
    if isinstance(dataset, UserRows) or (isinstance(dataset, Rows) and stated_records(dataset)):
        raise Refused(
            f"the method {method} treats a row as a record, but these rows have owners or weights, which it would "
            "ignore: give plain inputs and targets"
        )
