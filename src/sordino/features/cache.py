"""Caches features on disk, so that the second run starts at once.

A cache file holds features of private records: it has mode 0600 and must not leave the machine. Its name is a hash of
the specification and of the inputs, keyed by a secret in the same folder: a folder that others can list does not let
them test a guess of the records. Its content has its own SHA-256. A file that is incomplete or does not match is built
again; if the folder can't be written, the run only takes longer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

VERSION = 1  # increase when the numbers of an extractor change
SECRET = ".key"  # the file with the key of the names


def default_folder() -> Path:
    """The folder for cached features.

    Returns:
        $SORDINO_CACHE, else sordino/features in the user's cache folder.
    """
    named = os.environ.get("SORDINO_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "sordino" / "features"


def cached(extract: Callable[[Tensor], Tensor], spec: Mapping[str, Any], inputs: Tensor, folder: Path | None) -> Tensor:
    """extract(inputs), read from the cache if an undamaged file is there; without a folder nothing is cached."""
    secret = None if folder is None else _secret(folder)
    if folder is None or secret is None:
        return extract(inputs)
    key = hmac.new(secret, _key(spec, inputs).encode(), "sha256").hexdigest()
    path = folder / f"{key[:32]}.safetensors"
    found = _read(path, key)
    if found is not None:
        return found
    features = extract(inputs)
    _write(path, key, features)
    return features


def _key(spec: Mapping[str, Any], inputs: Tensor) -> str:
    head = {"version": VERSION, "spec": dict(spec), "shape": list(inputs.shape), "dtype": str(inputs.dtype)}
    digest = hashlib.sha256(json.dumps(head, sort_keys=True).encode())
    digest.update(_bytes(inputs))
    return digest.hexdigest()


def _secret(folder: Path) -> bytes | None:
    """The key of the folder's names, made on first use; None if the folder can't be used."""
    path, temporary = folder / SECRET, None
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")  # mode 0600
            with open(handle, "wb") as file:
                file.write(os.urandom(32))
            with suppress(FileExistsError):  # another process was faster: its key counts
                os.link(temporary, path)
        return path.read_bytes()
    except OSError:
        return None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data


def _read(path: Path, key: str) -> Tensor | None:
    try:
        with safe_open(str(path), framework="pt") as file:
            about = file.metadata() or {}
            features: Tensor = file.get_tensor("features")
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    if about.get("key") != key or about.get("sha256") != hashlib.sha256(_bytes(features)).hexdigest():
        return None
    return features


def _write(path: Path, key: str, features: Tensor) -> None:
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".part")  # mode 0600
        os.close(handle)
        about = {"key": key, "sha256": hashlib.sha256(_bytes(features)).hexdigest()}
        save_file({"features": features.contiguous()}, temporary, metadata=about)
        os.chmod(temporary, 0o600)
        os.replace(temporary, path)
    except (OSError, SafetensorError):
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
