"""Random numbers made neutral, so that two runs of a model can be compared however their rows are grouped.

A dispatch mode sees every random operation below autograd, inside attention and recurrent layers too, and gives a fixed
value in its place: the middle of a uniform range, the mean and half a deviation of a normal one, 1 for a Bernoulli
variable, the largest weight of a multinomial draw, the identity for a permutation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _filled(value: Any) -> Callable[..., Any]:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        return out.fill_(value(*args, **kwargs) if callable(value) else value)

    return run


def _bernoulli(self: Any, p: Any = 0.5, **_: Any) -> int:
    return 1


def _uniform(self: Any, low: float = 0.0, high: float = 1.0, **_: Any) -> float:
    return (low + high) / 2


def _normal(self: Any, mean: float = 0.0, std: float = 1.0, **_: Any) -> float:
    return mean + std / 2


def _normal_of_tensors(func: Any, args: Any, kwargs: Any) -> Any:
    mean, std = args[0], args[1] if len(args) > 1 else 1.0
    out = mean + std * 0.5
    return out if isinstance(out, Tensor) else func(*args, **kwargs).fill_(out)


def _integers(func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    numbers = [a for a in args if isinstance(a, int)]
    low, high = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0] if numbers else 2)
    return out.fill_((low + high) // 2 if high > low else low)


def _permutation(func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    return out.copy_(torch.arange(out.numel(), device=out.device))


def _multinomial(func: Any, args: Any, kwargs: Any) -> Any:
    out, weights = func(*args, **kwargs), args[0]
    count = out.shape[-1]
    if count > weights.shape[-1]:
        return out.copy_(weights.argmax(-1, keepdim=True).expand_as(out))
    return out.copy_(weights.topk(count, -1).indices)


def _native_dropout(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


def _attention(func: Any, args: Any, kwargs: Any) -> Any:
    """dropout_p is an argument of the fused kernels."""
    names = [a.name for a in func._schema.arguments]
    if "dropout_p" in names:
        place = names.index("dropout_p")
        if place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
    return func(*args, **kwargs)


def _same_weights(func: Any, args: Any, kwargs: Any) -> Any:
    """A draw whose parameters are tensors (gamma, poisson, binomial): the parameter itself."""
    out = func(*args, **kwargs)
    return out.copy_(args[0].to(out.dtype).expand_as(out))


_NEUTRAL: dict[str, Callable[..., Any]] = {
    "aten::bernoulli": _filled(_bernoulli),
    "aten::bernoulli_": _filled(_bernoulli),
    "aten::uniform_": _filled(_uniform),
    "aten::uniform": _filled(_uniform),
    "aten::rand": _filled(0.5),
    "aten::rand_like": _filled(0.5),
    "aten::normal_": _filled(_normal),
    "aten::normal": _normal_of_tensors,
    "aten::randn": _filled(0.5),
    "aten::randn_like": _filled(0.5),
    "aten::exponential_": _filled(1.0),
    "aten::exponential": _filled(1.0),
    "aten::geometric_": _filled(1),
    "aten::cauchy_": _filled(0.5),
    "aten::log_normal_": _filled(1.0),
    "aten::random_": _filled(1),
    "aten::random": _filled(1),
    "aten::randint": _integers,
    "aten::randint_like": _integers,
    "aten::randperm": _permutation,
    "aten::multinomial": _multinomial,
    "aten::native_dropout": _native_dropout,
    "aten::_standard_gamma": _same_weights,
    "aten::_sample_dirichlet": _same_weights,
    "aten::poisson": _same_weights,
    "aten::binomial": _same_weights,
}


class Neutral(TorchDispatchMode):
    """While it is active no operation draws random numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name in _NEUTRAL:
            return _NEUTRAL[name](func, args, kwargs)
        if "attention" in name:
            return _attention(func, args, kwargs)
        return func(*args, **kwargs)
