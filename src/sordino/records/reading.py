"""From a dataset to rows: tensors, pairs of tensors, or a map-style torch dataset of (inputs, target) pairs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from sordino.errors import InputError
from sordino.gradients import Rows
from sordino.split import Split


def row_reader(dataset: Any) -> Callable[[Tensor], Rows]:
    """From record indices to rows, without copying what can be indexed."""
    pair = tensors_of(dataset)
    if pair is not None:
        inputs, targets = pair
        return lambda indices: Rows(inputs=select_rows(inputs, indices), targets=select_rows(targets, indices))
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise InputError(
            f"a {type(dataset).__name__} can't be sampled record by record: give a pair (inputs, targets) "
            "or a map-style dataset with __len__ and __getitem__ (an iterable dataset can't be Poisson sampled)"
        )

    def fetch(indices: Tensor) -> Rows:
        collated: Sequence[Any] = default_collate([dataset[i] for i in indices.tolist()])
        if not isinstance(collated, Sequence) or len(collated) != 2:
            raise InputError("each item of the dataset must be a pair (inputs, target)")
        return Rows(inputs=collated[0], targets=collated[1])

    return fetch


def splits(dataset: Any, size: int = 1024) -> Iterator[Split]:
    """The whole dataset, some rows at a time."""
    fetch = row_reader(dataset)
    for indices in torch.split(torch.arange(count_records(dataset)), size):
        rows = fetch(indices)
        yield Split(rows.inputs, rows.targets)


def tensors_of(dataset: Any) -> tuple[Any, Any] | None:
    """(inputs, targets) where the dataset holds them as tensors (or trees of tensors), else None."""
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
    """How many records there are. A record is a row here; records of many rows come with their own reader."""
    pair = tensors_of(dataset)
    return len(pair[1]) if pair is not None else len(dataset)
