"""An Ed25519 signature of a finished run, by a key that the data's owner keeps.

Hashes detect an edited file. A forger who rewrites ledger, model, result and report together leaves no disagreement;
only a secret that the forger does not have can detect that. The signature is over the SHA-256 of result.json, which
commits to the recipe, the model, the ledger's head and every other published file.

    openssl genpkey -algorithm ed25519 -out owner.pem          the owner keeps this
    openssl pkey -in owner.pem -pubout -out owner.pub          reviewers get this, by a separate channel
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from sordino.errors import InputError
from sordino.files import json_bytes, write_atomically
from sordino.runs.closing import RESULT, SIGNATURE, file_digest


def private_key(path: Path) -> Ed25519PrivateKey:
    """The key in a PEM or OpenSSH file without a password.

    Raises:
        InputError: it can't be read, or is not an Ed25519 key.
    """
    loaders: tuple[Any, ...] = (serialization.load_pem_private_key, serialization.load_ssh_private_key)
    key = _loaded(path, "private", [lambda content, load=load: load(content, None) for load in loaders])
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} is not an Ed25519 key: make one with `openssl genpkey -algorithm ed25519`")
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """The key in a PEM or OpenSSH file; InputError if there is none."""
    key = _loaded(path, "public", [serialization.load_pem_public_key, serialization.load_ssh_public_key])
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{path} is not an Ed25519 key")
    return key


def sign(out: Path, key: Ed25519PrivateKey) -> Path:
    """Writes signature.json for the run's result.json."""
    digest = file_digest(out / RESULT)
    document = {
        "algorithm": "Ed25519",
        "public_key": _raw(key.public_key()),
        "result_sha256": digest,
        "signature": key.sign(_message(digest)).hex(),
    }
    write_atomically(out / SIGNATURE, json_bytes(document))
    return out / SIGNATURE


def why_not_signed(out: Path, key: Ed25519PublicKey) -> str | None:
    """None if signature.json is that key's signature of this result.json; else what is wrong."""
    try:
        document = json.loads((out / SIGNATURE).read_text(encoding="utf8"))
        signature = bytes.fromhex(document["signature"])
    except FileNotFoundError:
        return f"there is no {SIGNATURE}: the run was not signed, or the signature was removed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{SIGNATURE} can't be read: {error}"
    try:
        key.verify(signature, _message(file_digest(out / RESULT)))
    except (InvalidSignature, OSError):
        return f"{SIGNATURE} is not a signature of this result.json by this key: one of the three was changed"
    return None


def _message(digest: str) -> bytes:
    return f"sordino run, result.json {digest}".encode()


def _raw(key: Ed25519PublicKey) -> str:
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex()


def _loaded(path: Path, kind: str, loaders: list[Any]) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the {kind} key {path} can't be read: {error.strerror or error}") from error
    for load in loaders:
        try:
            return load(content)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
    raise InputError(f"{path} is not a {kind} key that can be read: give a PEM or OpenSSH file without a password")
