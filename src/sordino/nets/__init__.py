"""The networks of the papers and of the benchmarks, by name.

build("linear", (81, 7, 7), 10)
build("mlp", (1, 28, 28), 10, hidden=(300,))
build("resnet", (3, 32, 32), 10, depth=8, form="enhanced")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sordino.errors import InputError, did_you_mean
from sordino.nets import images, resnet, text
from sordino.nets.text import GruClassifier, LstmClassifier, TransformerClassifier

__all__ = ["GruClassifier", "LstmClassifier", "TransformerClassifier", "build", "names"]

_NETS: dict[str, Callable[..., nn.Module]] = {
    "linear": images.linear,
    "mlp": images.mlp,
    "scatter-cnn": images.scatter_cnn,
    "scatter-cnn-cifar": images.scatter_cnn_cifar,
    "mnist-cnn": images.mnist_cnn,
    "resnet": resnet.resnet,
    "resnet20": resnet.resnet20,
    "wide-resnet": resnet.wide_resnet,
    "gru": text.gru,
    "lstm": text.lstm,
    "transformer": text.transformer,
}


def names() -> tuple[str, ...]:
    return tuple(_NETS)


def build(
    name: str, input_shape: tuple[int, ...], classes: int, vectors: Tensor | None = None, /, **options: Any
) -> nn.Module:
    """A network for inputs of one record's shape. An option that the network does not have is an error.

    vectors: the public word vectors of a dataset of token ids, for the networks that read them.
    """
    if name not in _NETS:
        raise InputError(f"unknown model {name!r}; {did_you_mean(name, _NETS)}")
    if classes < 2:
        raise InputError(f"model {name!r}: classes must be at least 2, not {classes}")
    parameters = inspect.signature(_NETS[name]).parameters.values()
    known = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    given = {"vectors": vectors} if "vectors" in known else {}
    known.pop("vectors", None)
    for key, value in options.items():
        if key not in known:
            raise InputError(f"model {name!r}: unknown option {key!r}; {did_you_mean(key, known)}")
        _check(name, key, value, known[key])
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return _NETS[name](tuple(input_shape), classes, **given, **plain)


def _check(name: str, key: str, value: Any, default: Any) -> None:
    """An option has the type of its default; whole numbers, alone or in a list, are at least 1."""
    if isinstance(default, tuple):
        fine = isinstance(value, (list, tuple)) and all(type(one) is int and one >= 1 for one in value)
    else:
        fine = type(value) is type(default) and (type(value) is not int or value >= 1)
    if not fine:
        raise InputError(f"model {name!r}: option {key!r} can't be {value!r}; the default is {default!r}")
