"""An Ed25519 signature under a finished run, by a key that the data's owner keeps.

Hashes tell a file that was edited. Whoever rewrites ledger, model, result and report together leaves nothing that
disagrees; only a secret that the forger does not have tells that. The signature is over the SHA-256 of result.json,
which binds the recipe, the model, the ledger's head and every other published file.

    openssl genpkey -algorithm ed25519 -out owner.pem          the owner keeps this
    openssl pkey -in owner.pem -pubout -out owner.pub          reviewers get this, by another way than the run
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
        InputError: it can't be read, or is no Ed25519 key.
    """
    loaders: tuple[Any, ...] = (serialization.load_pem_private_key, serialization.load_ssh_private_key)
    key = _loaded(path, "private", [lambda content, load=load: load(content, None) for load in loaders])
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"{path} holds no Ed25519 key: make one with `openssl genpkey -algorithm ed25519`")
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """The key in a PEM or OpenSSH file; InputError where there is none."""
    key = _loaded(path, "public", [serialization.load_pem_public_key, serialization.load_ssh_public_key])
    if not isinstance(key, Ed25519PublicKey):
        raise InputError(f"{path} holds no Ed25519 key")
    return key


def sign(out: Path, key: Ed25519PrivateKey) -> Path:
    """Writes signature.json over the run's result.json."""
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
    """None where signature.json is that key's signature under this result.json; else what is wrong."""
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
        return f"{SIGNATURE} is no signature of this result.json by this key: one of the three was exchanged or edited"
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
    raise InputError(f"{path} holds no {kind} key that can be read: give a PEM or OpenSSH file without a password")
