"""Do records interact behind a parameter that is zero? Losses don't show it, and gradients do.

A head, an adapter or a gate often begins with zeros: ``head(h)`` is the same for every h, while the head's gradient is
a multiple of h. A value that is read, or the number of rows, that turned h around for all rows was seen in no loss, and
at the first step a record moved the sum by 18 clip norms. So while some parameters are nearly zero, a batch that has to
be tested is tested once more with other numbers in them. Biases, which are added, hide nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sordino.gradients.checks.interaction import Data, check_some, generator_of, losses_of
from sordino.gradients.checks.neutral import Draw, neutral
from sordino.gradients.passes import Setup

CLOSED = 5e-3
"""Parameters whose typical number is smaller are nearly zero."""
OPENED = 0.05
"""The size of the numbers that are added to them."""
SAMPLED = 256
"""The number of a parameter's coordinates that are looked at."""


def check_behind_gates(
    setup: Setup, data: Data, rows: int, number: int, still: bool, draws: Sequence[Draw] = ()
) -> None:
    """Repeats `check_some` for all rows with other numbers in the parameters that are nearly zero, if there are any.

    number: of the test, which decides the numbers. still: the program draws no random numbers. draws: those that may
    decide which way it goes. The parameters are as before afterwards. A sharded model is not tested: its shards might
    not agree on what is nearly zero.

    Raises:
        Refused: records interact there.
    """
    gates = [] if setup.shards is not None else closed(setup.parameters)
    if not gates:
        return
    with opened(gates, 64 * number + 40), nullcontext() if still else neutral(fixed=draws):
        try:
            base = losses_of(setup, data)
        except (ValueError, RuntimeError, ArithmeticError):  # the model does not run with these numbers
            return
        check_some(setup, data, rows, base, number, every=True)


def closed(parameters: Mapping[str, Tensor]) -> list[Tensor]:
    """Those that are nearly zero and no biases."""
    return [p for name, p in parameters.items() if name.rpartition(".")[2] != "bias" and _is_closed(p.detach())]


def _is_closed(t: Tensor) -> bool:
    some = t.flatten()[:: max(1, t.numel() // SAMPLED)]
    return bool(some.numel()) and float(some.double().square().mean()) < CLOSED**2


@contextmanager
def opened(parameters: Sequence[Tensor], purpose: int) -> Iterator[None]:
    """Within it other numbers, from the run's own randomness, are added to these parameters. Their versions are not
    changed."""
    kept = [p.detach().clone() for p in parameters]
    try:
        with _disable_current_modes():
            source = generator_of(purpose)
            for p in parameters:
                drawn = torch.randn(p.shape, generator=source, dtype=torch.float32)
                p.data.add_((OPENED * (drawn + drawn.sign())).to(p))
        yield
    finally:
        with _disable_current_modes():
            for p, values in zip(parameters, kept, strict=True):
                p.data.copy_(values)
