"""The kinds of your own data by name, and the keys of [data] for each."""

from __future__ import annotations

from collections.abc import Mapping

_ALL = ("path", "classes", "test_path", "test_fraction", "test_public", "test_seed")
_TABLES = (*_ALL, "target", "columns", "ignore", "test_column", "user")
SOURCE_KEYS: Mapping[str, tuple[str, ...]] = {
    "csv": (*_TABLES, "delimiter"),
    "parquet": _TABLES,
    "hf": _TABLES,
    "npz": (*_ALL, "inputs", "target", "low", "high", "user"),
    "images": (*_ALL, "size", "channels", "user"),
}
