"""Mutations of values, of documents and of bytes."""

from __future__ import annotations

import copy
import random
from datetime import date
from typing import Any

NUMBERS = [
    0, 1, -1, 2, 3, 7, 10, 100, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 10**400, 0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -0.5,
    1e-5, 1e-300, 1e-320, 1e300, -1e300, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
OTHERS: list[Any] = [
    "", " ", "x", "none", "None", "nan", "0", "../../evil", "/tmp/evil", "a" * 5000, "\x00", "ε\u202e", "..", ".",
    True, False, [], [1], [0.5, 0.5], [[1]], ["a"], {}, {"name": "x"}, {"kind": "constant"}, date(2026, 11, 17),
]  # fmt: skip
NAMES = [
    "flat", "per-layer", "automatic", "normalised", "l2-linf", "l1", "poisson", "truncated-poisson", "partition",
    "without-replacement", "add-remove", "replace-one", "pld", "rdp", "sgd", "adam", "adamw", "nadam", "rmsprop",
    "adagrad", "averaging-sgd", "cosine", "linear", "constant", "ema", "tail", "mlp", "mnist-cnn", "resnet", "gru",
    "dpsgd", "modelmix", "hidden-state", "dp-mac", "coupling", "scattering", "dp-pca", "minilm", "centre", "channels",
    "test", "public", "train", "drop", "refuse", "fashion-mnist-mini", "adult", "imdb", "cifar10", "autoencoder",
]  # fmt: skip


def value(draw: random.Random, old: Any) -> Any:
    """Another value, mostly of the same type, because such values pass the most checks."""
    if draw.random() < 0.35:
        pools: list[list[Any]] = [list(NUMBERS), list(NAMES), OTHERS]
        return draw.choice(draw.choice(pools))
    near, some = abs(old) < 1e300 if isinstance(old, int | float) else False, list[Any]()
    match old:
        case bool():
            return not old
        case int():
            some = [0, 1, 2, 3, 5, 7, 10, 39, 40, 41, 100, 1000, -1, 2**31, 2**63 - 1]
            return draw.choice([*some, *([old + 1, old - 1, old * 2] if near else [])])
        case float():
            some = [0.0, 1e-12, 1e-5, 0.1, 0.5, 0.99, 1.0, 2.0, 100.0, 1e10, -0.5, 1e-300, 1e300, 3]
            return draw.choice([*some, *([old * 2, old / 2, -old] if near else [])])
        case str():
            return draw.choice(NAMES)
        case list():
            some = [draw.choice(NUMBERS[:12]) for _ in range(draw.randrange(4))]
            return draw.choice([[*old, *old], old[:-1], [value(draw, one) for one in old], some])
        case dict():
            return {key: value(draw, one) for key, one in old.items()}
        case _:
            return draw.choice(NUMBERS)


def document(draw: random.Random, given: dict[str, Any], keys: list[tuple[str, str, Any]]) -> dict[str, Any]:
    """The document with one to three of its keys changed, removed, added or renamed."""
    found = copy.deepcopy(given)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        section = draw.choice(list(found) or ["run"])
        part = found.get(section)
        if not isinstance(part, dict):
            continue
        match draw.randrange(20):
            case 0 if part:
                del part[draw.choice(list(part))]
            case 1:
                found.pop(section)
            case 2:
                found[section] = value(draw, None)
            case 3 | 4 | 6 | 7 | 8 | 9 | 10:
                where, key, usual = draw.choice(keys)
                target = found.setdefault(where, {})
                if isinstance(target, dict):
                    target[key] = value(draw, usual) if draw.random() < 0.8 else usual
            case 5 if part:
                key = draw.choice(list(part))
                part[key + draw.choice("sx_ ")] = part.pop(key)
            case _ if part:
                key = draw.choice(list(part))
                part[key] = value(draw, part[key])
            case _:
                part["x"] = value(draw, None)
    return found


def content(draw: random.Random, given: bytes) -> bytes:
    """The bytes with a few of them changed, cut off, inserted, repeated or swapped."""
    found = bytearray(given)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(found) + 1) if draw.random() < 0.6 else draw.randrange(min(len(found), 64) + 1)
        match draw.randrange(8):
            case 0:
                del found[at:]
            case 1:
                found[at:at] = draw.randbytes(draw.choice([1, 2, 8, 100]))
            case 2:
                del found[at : at + draw.choice([1, 4, 100])]
            case 3:
                found[at:at] = found[at : at + draw.choice([4, 64, 1000])]
            case 4:
                piece = draw.choice(
                    [b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"nan", b"1e999", b"-1", b"\n"]
                )
                found[at : at + len(piece)] = piece
            case 5:
                found[at : at + 1] = draw.choice([b",", b'"', b"\n", b" ", b":", b"?", b"\r", b"\xc3"])
            case _ if at < len(found):
                found[at] ^= 1 << draw.randrange(8)
            case _:
                found.append(draw.randrange(256))
    return bytes(found)
