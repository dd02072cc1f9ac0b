"""Records the calls of the release function, and repeats a run with its releases forced.

A guarantee by adaptive composition states: *given the same earlier releases*, the next release changes by at most the
sensitivity if one record changes, all other arguments of the release (noise, factor, widths, shapes) do not
depend on the records, and every output of the run is a function of the releases. `watched` makes all three testable for
any method: it records each call of `release`, and with `forced` it returns recorded values to the caller,
so that two runs on neighbouring datasets have the same history at every step.

The release function itself has no hook for this, so none could be left active. The function is replaced in the
modules that refer to it, for the duration of a `with` block, by the process that attacks itself.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sordino import sampling
from sordino.randomness import RandomSource
from sordino.release import noise as noise_module
from sordino.release.mechanisms import Gaussian, Noise


@dataclass(frozen=True, eq=False)
class Call:
    """One release: its arguments, the values before noise, and the result (divided by the factor again)."""

    purpose: str
    step: int
    noise: Noise
    sensitivity: float
    relation: str
    fine: bool
    factor: float
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: tuple[str, ...]
    sampling: Mapping[str, Any]
    values: Tensor  # (d,) float64
    widths: Tensor | None  # (d,) float64
    returned: Mapping[str, Tensor]
    entry_first: bool  # the ledger contained the entry before noise was drawn
    earlier: Mapping[int, float] | None = None  # coefficients of the noise of earlier steps

    @property
    def scale(self) -> float:
        """The least allowed standard deviation of the noise (Laplace: its scale)."""
        return self.noise.noise_multiplier * self.sensitivity

    @property
    def allowed(self) -> float:
        """How far neighbouring datasets may change the values: what the accountants assume under this relation."""
        return self.sensitivity * (2.0 if self.relation == "replace-one" else 1.0)

    @property
    def norm_order(self) -> int:
        return 2 if isinstance(self.noise, Gaussian) else 1

    @property
    def observed(self) -> Tensor:
        """The result, in the units of the values."""
        return flat(self.returned) / self.factor

    def public_arguments(self) -> dict[str, Any]:
        """All arguments that must not depend on the records."""
        arguments = {
            name: getattr(self, name)
            for name in ("purpose", "step", "noise", "sensitivity", "relation", "fine", "factor", "shapes", "dtypes")
        }
        return arguments | {"sampling": dict(self.sampling), "earlier": self.earlier}


@dataclass(eq=False)
class Watch:
    """What was recorded. `forced`: returned instead of fresh releases; `stop_after`: Cut is raised after so many."""

    forced: Sequence[Call] | None = None
    stop_after: int | None = None
    calls: list[Call] = field(default_factory=list)
    batches: dict[int, Tensor] = field(default_factory=dict)  # step → the indices that the sampler drew for it


class Cut(BaseException):
    """Ends a run as a kill would: nothing in the library catches it."""


@contextlib.contextmanager
def watched(forced: Sequence[Call] | None = None, stop_after: int | None = None) -> Iterator[Watch]:
    """Records every release, and every batch, of the runs in the block.

    Args:
        forced: Releases of another run, whose results are returned instead of fresh ones.
        stop_after: Raise Cut after this number of releases.

    Yields:
        What was recorded so far.
    """
    watch = Watch(forced, stop_after)
    release, batches = noise_module.release, sampling.batches

    def seen(values: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        return _release(watch, release, values, options)

    def drawn(*arguments: Any, **options: Any) -> Iterator[sampling.LogicalBatch]:
        def kept() -> Iterator[sampling.LogicalBatch]:
            for batch in given:
                watch.batches[batch.step] = batch.indices.clone()
                yield batch

        given = batches(*arguments, **options)
        return kept()

    with _replaced(release, seen), _replaced(batches, drawn):
        yield watch


def _release(
    watch: Watch, release: Callable[..., dict[str, Tensor]], values: Mapping[str, Tensor], options: Mapping[str, Any]
) -> dict[str, Tensor]:
    before = {name: value.detach().clone() for name, value in values.items()}
    ledger, entry, widths = options["ledger"], options["entry"], options.get("widths")
    key = (entry.purpose, entry.step)
    asked: list[bool] = []
    stream = RandomSource.stream

    def noted(self: RandomSource, purpose: str, index: int) -> Any:
        if purpose.startswith("release/"):
            asked.append(key in {(e["purpose"], e["step"]) for e in ledger.entries})
        return stream(self, purpose, index)

    RandomSource.stream = noted  # type: ignore[method-assign]
    try:
        returned = release(values, **options)
    finally:
        RandomSource.stream = stream  # type: ignore[method-assign]
    call = Call(
        purpose=entry.purpose,
        step=entry.step,
        noise=options["noise"],
        sensitivity=float(options["sensitivity"]),
        relation=entry.relation,
        fine=bool(options.get("fine", False)),
        factor=float(options.get("factor", 1.0)),
        shapes={name: tuple(value.shape) for name, value in before.items()},
        dtypes=tuple(str(value.dtype) for value in before.values()),
        sampling=dict(entry.sampling),
        values=flat(before),
        widths=None if widths is None else flat({name: widths[name] for name in before}),
        returned={name: value.detach().clone() for name, value in returned.items()},
        entry_first=bool(asked) and all(asked),
        earlier=options.get("earlier"),
    )
    watch.calls.append(call)
    number = len(watch.calls)
    if watch.stop_after is not None and number >= watch.stop_after:
        raise Cut
    if watch.forced is None or number > len(watch.forced):
        return returned
    wanted = watch.forced[number - 1].returned
    if {n: v.shape for n, v in wanted.items()} != {n: v.shape for n, v in returned.items()}:
        return returned  # the comparison of the releases' arguments shows it
    return {name: value.clone() for name, value in wanted.items()}


@contextlib.contextmanager
def _replaced(original: Any, stand_in: Any) -> Iterator[None]:
    """Replaces the function in every module of the package that refers to it, under any name."""
    _swap(original, stand_in)
    try:
        yield
    finally:
        _swap(stand_in, original)


def _swap(old: Any, new: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "sordino" and module is not None and name != __name__:
            for key, value in list(vars(module).items()):
                if value is old:
                    setattr(module, key, new)


def flat(values: Mapping[str, Tensor]) -> Tensor:
    """All tensors as one vector, in the order of the mapping."""
    return torch.cat([value.detach().reshape(-1).double() for value in values.values()])
