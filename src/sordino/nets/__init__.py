"""The networks of the papers and of the benchmarks, by name.

build("linear", (81, 7, 7), 10)
build("mlp", (1, 28, 28), 10, hidden=(300,))
build("resnet", (3, 32, 32), 10, depth=8, form="enhanced")
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sordino.errors import InputError, did_you_mean
from sordino.lazy import lazy_names

if TYPE_CHECKING:
    from torch import Tensor, nn

    from sordino.nets.text import GruClassifier, LstmClassifier, TransformerClassifier
else:  # imported on first use: the names of networks and their options are needed before torch is loaded
    __getattr__, _ = lazy_names(__name__, {"text": ["GruClassifier", "LstmClassifier", "TransformerClassifier"]})

__all__ = ["GruClassifier", "LstmClassifier", "TransformerClassifier", "build", "names", "options_of"]

_NETS: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("images:linear", ("bias", "zero")),
    "mlp": ("images:mlp", ("hidden", "act")),
    "scatter-cnn": ("images:scatter_cnn", ()),
    "scatter-cnn-cifar": ("images:scatter_cnn_cifar", ()),
    "mnist-cnn": ("images:mnist_cnn", ("form",)),
    "resnet": ("resnet:resnet", ("depth", "form", "groups")),
    "resnet20": ("resnet:resnet20", ("groups",)),
    "wide-resnet": ("resnet:wide_resnet", ("depth", "width", "groups")),
    "gru": ("text:gru", ("hidden", "form", "readout")),
    "lstm": ("text:lstm", ("vocabulary", "embedding", "hidden")),
    "transformer": ("text:transformer", ("vocabulary", "width", "layers", "heads", "ffn")),
}
"""The function that makes each network, and the options that it takes."""


def names() -> tuple[str, ...]:
    """The networks that `build` makes.

    Returns:
        Their names.
    """
    return tuple(_NETS)


def options_of(name: str) -> tuple[str, ...]:
    """The options of a network.

    Args:
        name: The network.

    Returns:
        The names of its options.

    Raises:
        InputError: there is no network of that name.
    """
    if name not in _NETS:
        raise InputError(f"unknown model {name!r}; {did_you_mean(name, _NETS)}")
    return _NETS[name][1]


def build(
    name: str, input_shape: tuple[int, ...], classes: int, vectors: Tensor | None = None, /, **options: Any
) -> nn.Module:
    """A network with initial weights.

    Args:
        name: The network, one of `names()`.
        input_shape: The shape of one record.
        classes: The number of classes.
        vectors: The public word vectors of a dataset of token ids, for networks that use them.
        options: Options of the network.

    Returns:
        The network.

    Raises:
        InputError: the name or an option is unknown, a value is wrong, or the shape does not fit.
    """
    known = options_of(name)
    if classes < 2:
        raise InputError(f"model {name!r}: classes must be at least 2, not {classes}")
    make = _function(name)
    parameters = inspect.signature(make).parameters
    given = {"vectors": vectors} if "vectors" in parameters else {}
    for key, value in options.items():
        if key not in known:
            raise InputError(f"model {name!r}: unknown option {key!r}; {did_you_mean(key, known)}")
        _check(name, key, value, parameters[key].default)
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    made: nn.Module = make(tuple(input_shape), classes, **given, **plain)
    return made


def _function(name: str) -> Any:
    module, _, function = _NETS[name][0].partition(":")
    return getattr(import_module(f"{__name__}.{module}"), function)


def _check(name: str, key: str, value: Any, default: Any) -> None:
    """An option has the type of its default; whole numbers, alone or in a list, are at least 1."""
    if isinstance(default, tuple):
        fine = isinstance(value, (list, tuple)) and all(type(one) is int and one >= 1 for one in value)
    else:
        fine = type(value) is type(default) and (type(value) is not int or value >= 1)
    if not fine:
        raise InputError(f"model {name!r}: option {key!r} can't be {value!r}; the default is {default!r}")
