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
from sordino.errors import InputError, did_you_mean

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
        return source.read(data_dir)
    if is_code(section.name):
        return dataset_of(section.name, section.options)
    return load(section.name, data_dir, normalise=normalise)
