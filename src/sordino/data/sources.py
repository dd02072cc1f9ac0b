"""The dataset of a recipe's [data]: one of the catalogue, the user's own files, or a function of the user's code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from sordino.data.arrays import ImagesSource, NpzSource
from sordino.data.catalogue import catalogue, entry
from sordino.data.code import dataset_of, is_code
from sordino.data.loading import load
from sordino.data.own import CsvSource, HfSource, ParquetSource, Source, made
from sordino.data.types import Dataset
from sordino.errors import InputError, Refused, did_you_mean
from sordino.plan.public import different_rows, shared_rows

SOURCES: Mapping[str, type[Source]] = {
    "csv": CsvSource,
    "parquet": ParquetSource,
    "hf": HfSource,
    "npz": NpzSource,
    "images": ImagesSource,
}
"""Names of [data] that are not in the catalogue, and the keys that each takes."""


class Section(Protocol):
    """A recipe's [data]."""

    @property
    def name(self) -> str: ...

    @property
    def records(self) -> int | None: ...

    @property
    def options(self) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Published:
    """What is public about a dataset before it is read. `shape` and `classes`: None if only reading shows them."""

    records: int
    shape: tuple[int, ...] | None
    classes: int | None


def is_own(section: Section) -> bool:
    """Whether the data are the user's own, so that nothing about them is public.

    Args:
        section: A recipe's [data].

    Returns:
        False for a dataset of the catalogue.
    """
    return section.name in SOURCES or is_code(section.name)


def source_of(section: Section) -> Source | None:
    """The checked description of the user's own files.

    Args:
        section: A recipe's [data].

    Returns:
        The source; None for a dataset of the catalogue and for module:function.

    Raises:
        InputError: the name is unknown, or a key is unknown, missing or wrong.
    """
    if section.name in SOURCES:
        return made(SOURCES, section.name, section.options)
    if is_code(section.name):
        return None
    known = [*(one.name for one in catalogue()), *SOURCES]
    if section.name not in known:
        raise InputError(f"unknown dataset {section.name!r}: {did_you_mean(section.name, known)}, or module:function")
    for key in section.options:
        raise InputError(f"unknown key in [data]: {key!r}: a dataset of the catalogue takes only name and records")
    return None


def published(section: Section) -> Published:
    """What is public about a dataset before it is read.

    Args:
        section: A recipe's [data].

    Returns:
        The number of records, and the shape and classes as far as they are known.

    Raises:
        InputError: a key is wrong, or `records` of the user's own data is missing.
    """
    source = source_of(section)
    if not is_own(section):
        known = entry(section.name)
        return Published(section.records or known.records[0], known.shape, known.classes)
    if section.records is None:
        raise InputError(
            "[data] needs records: the number of records that you would publish (for example, rounded). It is a public "
            "constant of the guarantee, so sordino never counts them"
        )
    if source is None:
        return Published(section.records, None, None)
    return Published(section.records, source.shape, len(source.labels))


def read(section: Section, data_dir: Path | None = None, *, normalise: bool = True) -> Dataset:
    """Reads the dataset of a recipe into memory. `module:function` is run: the recipe was read with allow_code.

    Args:
        section: A recipe's [data].
        data_dir: The folder with the datasets; None: $SORDINO_DATA, else ./data.
        normalise: As for `load`.

    Returns:
        The dataset.

    Raises:
        InputError: the section, a file or a record is wrong; nothing was spent.
        Refused: most test rows are training rows.
    """
    source = source_of(section)
    if source is not None:
        return _apart(source.read(data_dir))
    if is_code(section.name):
        return _apart(dataset_of(section.name, section.options))
    return load(section.name, data_dir, normalise=normalise)


def _apart(dataset: Dataset) -> Dataset:
    """The dataset; refused if its test rows are training rows, because test metrics are published without noise.

    Single rows that occur in both may be chance, and so may many in a table with few different rows. It can't be chance
    if most of many different test rows are training rows.
    """
    if not len(dataset.test):
        return dataset
    shared, _ = shared_rows(dataset.test, dataset.train)
    if 2 * len(shared) <= len(dataset.test) or 2 * different_rows(dataset.test) <= len(dataset.test):
        return dataset
    raise Refused(
        "[data]: most test rows are training rows, and the test metrics of private rows would be published without "
        "noise and without an entry in the ledger: give held-out rows in test_path, or declare some rows public with "
        "test_fraction and say why in test_public"
    )
