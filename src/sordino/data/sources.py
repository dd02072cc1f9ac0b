"""What a recipe's [data] stands for: a dataset of the catalogue, a source of one's own, or a function of one's code."""

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
    """What is public of a dataset before it is read. `shape` and `classes`: None where only reading tells them."""

    records: int
    shape: tuple[int, ...] | None
    classes: int | None


def is_own(section: Section) -> bool:
    """Data that the catalogue does not know: nothing about it is published."""
    return section.name in SOURCES or is_code(section.name)


def source_of(section: Section) -> Source | None:
    """The source that the section describes, checked; None for the catalogue's sets and for code."""
    if section.name in SOURCES:
        return made(SOURCES, section.name, section.options)
    if is_code(section.name):
        return None
    known = [*(one.name for one in catalogue()), *SOURCES]
    if section.name not in known:
        raise InputError(f"unknown dataset {section.name!r}: {did_you_mean(section.name, known)}, or module:function")
    for key in section.options:
        raise InputError(f"unknown key in [data]: {key!r}: {section.name} is read by its name; known are name, records")
    return None


def published(section: Section) -> Published:
    """What is public of the section's dataset; InputError where the recipe must say it and does not."""
    source = source_of(section)
    if not is_own(section):
        known = entry(section.name)
        return Published(section.records or known.records[0], known.shape, known.classes)
    if section.records is None:
        raise InputError(
            "[data] needs records: the number of records that you would publish (say, rounded). It is a public "
            "constant of the guarantee, so sordino never counts them for you"
        )
    if source is None:
        return Published(section.records, None, None)
    return Published(section.records, source.shape, len(source.labels))


def read(section: Section, data_dir: Path | None = None, *, normalise: bool = True) -> Dataset:
    """The dataset in memory. Reading `module:function` runs it: recipes with such a name exist only where allowed."""
    source = source_of(section)
    if source is not None:
        return _apart(source.read(data_dir))
    if is_code(section.name):
        return _apart(dataset_of(section.name, section.options))
    return load(section.name, data_dir, normalise=normalise)


def _apart(dataset: Dataset) -> Dataset:
    """The dataset; refused where its test rows are rows that it trains on: test metrics leave without noise.

    Single rows that occur in both are chance, and so are many in a table that has few different rows. That most of many
    different test rows are trained on is none.
    """
    if not len(dataset.test):
        return dataset
    shared, _ = shared_rows(dataset.test, dataset.train)
    if 2 * len(shared) <= len(dataset.test) or 2 * different_rows(dataset.test) <= len(dataset.test):
        return dataset
    raise Refused(
        "[data]: most test rows are rows that are trained on, and the test metrics of private rows would leave without "
        "noise and without an entry in the ledger: give rows that were held out in test_path, or take some out of "
        "protection by test_fraction and say why in test_public"
    )
