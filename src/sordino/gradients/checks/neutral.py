"""Replaces random numbers, so that two runs of a model can be compared whatever the grouping of their rows.

A dispatch mode intercepts every random operation below autograd, also inside attention and recurrent layers, and
returns a fixed value instead: a given quantile of a uniform or normal distribution, 1 or 0 for a Bernoulli variable,
the largest weights of a multinomial draw, a shift by one for a permutation (so that moved rows are detected).

Equal numbers hide effects that unequal ones have (``torch.randn(n).argsort()`` would move no row). So there is a second
kind: each draw gets its own numbers, which are the same in every run and do not depend on earlier draws.

A program may decide by a few numbers which way it goes (``if torch.randint(5, ()) == 3``), and equal numbers may never
go there. So where values are read, draws that have few numbers, and the same shape for fewer rows, are those of the
pass that is tested (`recorded`).

Both replace numbers that an adversary does not know: the run's own, which are secret, so that a record may be assumed
to keep its mask if another record is removed. Numbers of a generator that the model itself makes or seeds are known.
They belong to a position in the batch, and removing a record shifts those of all later ones. So these are not replaced,
and are detected as an interaction if rows have numbers of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sordino.errors import Refused

aten = torch.ops.aten


Act = Callable[[Any, Any, Any, float], Any]


def _filled(value: Callable[[float, Any, Any], Any]) -> Act:
    """value: maps (level, the call's arguments, its keywords) to the replacement of the draws."""

    def run(func: Any, args: Any, kwargs: Any, level: float) -> Any:
        numbers = [a for a in args if isinstance(a, (int, float)) and not isinstance(a, bool)]
        return func(*args, **kwargs).fill_(value(level, numbers, kwargs))

    return run


def _bernoulli(level: float, numbers: Any, kwargs: Any) -> int:
    return int(level >= 0.5)


def _uniform(level: float, numbers: Any, kwargs: Any) -> float:
    low = numbers[0] if numbers else kwargs.get("from", 0.0)
    high = numbers[1] if len(numbers) > 1 else kwargs.get("to", 1.0)
    return float(low + (high - low) * level)


def _normal(level: float, numbers: Any, kwargs: Any) -> float:
    mean = numbers[0] if numbers else kwargs.get("mean", 0.0)
    std = numbers[1] if len(numbers) > 1 else kwargs.get("std", 1.0)
    return float(mean + std * (2 * level - 0.5))


def _normal_of_tensors(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    mean, std = args[0], args[1] if len(args) > 1 and not isinstance(args[1], (list, tuple)) else 1.0
    out = mean + std * (2 * level - 0.5)
    return out if isinstance(out, Tensor) else func(*args, **kwargs).fill_(out)


def _integers(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    out = func(*args, **kwargs)
    numbers = [a for a in args if isinstance(a, int)]
    low, high = (numbers[0], numbers[1]) if len(numbers) > 1 else (0, numbers[0] if numbers else 2)
    return out.fill_(min(max(low, high - 1), low + int((high - low) * level)))


def _permutation(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    out = func(*args, **kwargs)
    return out.copy_(torch.arange(out.numel(), device=out.device).roll(-1))


def _multinomial(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    out, weights = func(*args, **kwargs), args[0]
    count = out.shape[-1]
    if count > weights.shape[-1]:
        return out.copy_(weights.argmax(-1, keepdim=True).expand_as(out))
    return out.copy_(weights.topk(count, -1).indices)


def _native_dropout(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)


def _rrelu(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    """Slopes between a lower and an upper bound: the same slope for all."""
    names = {a.name: a.default_value for a in func._schema.arguments}
    given = {**names, **dict(zip(names, args, strict=False)), **kwargs}
    slope = given["lower"] + (given["upper"] - given["lower"]) * level
    return func(**{**given, "lower": slope, "upper": slope})


def _attention(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    """dropout_p is an argument of the fused kernels."""
    names = [a.name for a in func._schema.arguments]
    if "dropout_p" in names:
        place = names.index("dropout_p")
        if place < len(args):
            args = (*args[:place], 0.0, *args[place + 1 :])
        kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
    return func(*args, **kwargs)


def _drops(func: Any, args: Any, kwargs: Any) -> bool:
    """May this attention drop anything? Not if its dropout_p is zero, given or by default."""
    for place, one in enumerate(func._schema.arguments):
        if one.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", one.default_value)
            return not (isinstance(given, (int, float)) and given == 0)
    return True


def _same_weights(func: Any, args: Any, kwargs: Any, level: float) -> Any:
    """A draw whose parameters are tensors (gamma, poisson, binomial): the parameter itself."""
    out = func(*args, **kwargs)
    return out.copy_(args[0].to(out.dtype).expand_as(out))


_NEUTRAL: dict[str, Act] = {
    "aten::bernoulli": _filled(_bernoulli),
    "aten::bernoulli_": _filled(_bernoulli),
    "aten::uniform_": _filled(_uniform),
    "aten::uniform": _filled(_uniform),
    "aten::rand": _filled(lambda level, *_: level),
    "aten::rand_like": _filled(lambda level, *_: level),
    "aten::normal_": _filled(_normal),
    "aten::normal": _normal_of_tensors,
    "aten::randn": _filled(lambda level, *_: level),
    "aten::randn_like": _filled(lambda level, *_: level),
    "aten::exponential_": _filled(lambda level, *_: 2 * level),
    "aten::exponential": _filled(lambda level, *_: 2 * level),
    "aten::geometric_": _filled(lambda *_: 1),
    "aten::cauchy_": _filled(lambda level, *_: level),
    "aten::log_normal_": _filled(lambda level, *_: 2 * level),
    "aten::random_": _integers,
    "aten::random": _integers,
    "aten::rrelu_with_noise": _rrelu,
    "aten::rrelu_with_noise_": _rrelu,
    "aten::rrelu_with_noise_functional": _rrelu,
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


@functools.lru_cache(1 << 12)
def _may_draw(func: Any) -> bool:
    name = func._schema.name
    return name in _NEUTRAL or "attention" in name


def _drawn(func: Any, args: Any, kwargs: Any, number: int) -> Any:
    """The draw, from a generator that is seeded with the number of the draw only."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        return func(*args, **kwargs)


Draw = tuple[str, Tensor] | None
"""The name of an operation that drew numbers, and its result; None for one that is not repeated."""
MOST = 64
"""Draws with more numbers are not repeated."""


class Neutral(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While this mode is active no operation draws random numbers. level, between 0 and 1: which values replace them;
    None: each draw has its own random numbers, which are the same in every run. fixed: the results of the first draws,
    in order, as far as they are known. made: if it is a list, it receives all draws, and nothing is replaced."""

    def __init__(self, level: float | None = 0.5, fixed: Sequence[Draw] = (), made: list[Draw] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.level, self.fixed, self.made = level, fixed, made
        self.asked = False  # whether any value depended on the level
        self.drew = False  # whether anything would have been drawn, also inside attention
        self.draws = 0
        self.foreign = False  # whether numbers were drawn that are not the run's
        self._seed = torch.initial_seed()

    def __enter__(self) -> Neutral:
        self._seed = torch.initial_seed()
        super().__enter__()  # type: ignore[no-untyped-call]
        _active.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        _active.remove(self)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tape must not intercept torch's internal calls: torch recreates a view's node in the graph under a lock, and
        # a query about that view would wait for this lock forever.
        with torch._C.DisableTorchFunction():
            if _may_draw(func):
                return self._acted(func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)

    def _acted(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name
        if name not in _NEUTRAL and not _drops(func, args, kwargs):
            return func(*args, **kwargs)
        if self._is_foreign((*args, *kwargs.values())):
            self.foreign = self.drew = True
            return func(*args, **kwargs)
        self.drew = True
        self.draws += 1
        if self.made is not None:
            out = func(*args, **kwargs)
            few = isinstance(out, Tensor) and out.numel() <= MOST
            self.made.append((name, out.detach().clone()) if few else None)
            return out
        known = self.fixed[self.draws - 1] if self.draws <= len(self.fixed) else None
        if known is not None and known[0] == name:
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) and out.shape == known[1].shape:
                return out.copy_(known[1])
        if self.level is None:
            return _drawn(func, args, kwargs, self.draws)
        if name in _NEUTRAL:
            self.asked = True
            return _NEUTRAL[name](func, args, kwargs, self.level)
        return _attention(func, args, kwargs, self.level)

    def _is_foreign(self, args: tuple[Any, ...]) -> bool:
        """Is it drawn from a generator that the model made, or from torch's after the model seeded it?"""
        own = (a for a in args if isinstance(a, torch.Generator))
        return any(a is not torch.default_generator for a in own) or torch.initial_seed() != self._seed


def recorded(run: Callable[[bool], object], state: Tensor | None) -> list[Draw]:
    """The draws of a pass that do not depend on its number of rows. run: makes the pass, with all of its rows or with
    fewer. state: that of torch's generator when the pass began; None if it is not known."""
    found: list[list[Draw]] = []
    for whole in (True, False) if state is not None else ():
        torch.set_rng_state(state)  # type: ignore[arg-type]
        made: list[Draw] = []
        try:
            with Neutral(made=made):
                run(whole)
        except (ValueError, RuntimeError, IndexError, ArithmeticError):
            return []
        found.append(made)
    pairs = zip(*found, strict=False) if found else ()
    return [a if a and b and a[0] == b[0] and a[1].shape == b[1].shape else None for a, b in pairs]


def restart() -> None:
    """Called before a pass: its draws are counted from the first one."""
    for mode in _active:
        mode.draws = 0


_active: list[Neutral] = []


@contextmanager
def neutral(level: float | None = 0.5, fixed: Sequence[Draw] = ()) -> Iterator[Neutral]:
    """Runs a comparison under fixed numbers; if it fails and the model has its own generator, the message says so."""
    with Neutral(level, fixed) as mode:
        try:
            yield mode
        except Refused as error:
            if not mode.foreign:
                raise
            raise Refused(
                f"{error}. The model draws random numbers from a generator that it has made or seeded itself "
                "(generator=, torch.manual_seed): if rows have numbers of their own, that may be the only reason. "
                "Anyone who knows the seed knows these numbers, and removing a record shifts those of all later "
                "ones; remove the generator, so that the run's secret randomness is used",
                private=error.private,
            ) from error
