"""Datasets: a catalogue of well-known ones in their usual file layouts, and readers of your own data.

    load("fashion-mnist-mini")            the embedded subset, always there
    load("cifar10", data_dir=...)         from a folder, else $SORDINO_DATA, else ./data
    catalogue(), fetch(name, ...), verify(name, ...)
    read(section)                         the dataset of a recipe's [data]: the catalogue's, your own file, or your code

No constant is measured from the records: scaling, categories and vocabularies are public.
"""

from typing import TYPE_CHECKING

from sordino.data.catalogue import Entry, catalogue, entry
from sordino.lazy import lazy_names
from sordino.split import Split

if TYPE_CHECKING:
    from sordino.data.checking import Finding, verify
    from sordino.data.code import called, function_of, is_code
    from sordino.data.download import fetch
    from sordino.data.files import data_directory
    from sordino.data.loading import load, load_texts
    from sordino.data.sources import is_own, published, read, source_of
    from sordino.data.tabular import Encoding
    from sordino.data.text import HashingTokenizer
    from sordino.data.types import Dataset, TextSplit
else:  # imported on first use: the names of datasets are needed before torch is loaded
    __getattr__, _ = lazy_names(
        __name__,
        {
            "checking": ["Finding", "verify"],
            "code": ["called", "function_of", "is_code"],
            "download": ["fetch"],
            "files": ["data_directory"],
            "loading": ["load", "load_texts"],
            "sources": ["is_own", "published", "read", "source_of"],
            "tabular": ["Encoding"],
            "text": ["HashingTokenizer"],
            "types": ["Dataset", "TextSplit"],
        },
    )

__all__ = [
    "Dataset",
    "Encoding",
    "Entry",
    "Finding",
    "HashingTokenizer",
    "Split",
    "TextSplit",
    "called",
    "catalogue",
    "data_directory",
    "entry",
    "fetch",
    "function_of",
    "is_code",
    "is_own",
    "load",
    "load_texts",
    "published",
    "read",
    "source_of",
    "verify",
]
