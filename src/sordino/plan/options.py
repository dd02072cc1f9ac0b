"""How a method's plan maker takes the options that all methods share: written once, in `make_plan`.

    @with_options(make_plan, "delta", "records", "epsilon")
    def plan(*, lr: float, **shared: Unpack[PlanOptions]) -> Plan: ...

The maker's signature and documentation then name the shared options after its own, and any other keyword is a
TypeError. Type checkers read `PlanOptions`; a test compares it with the signature of `make_plan`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, Required, TypedDict

from sordino.errors import did_you_mean

if TYPE_CHECKING:
    from sordino.clipping import Clipping
    from sordino.plan.contribution import Augmentation, InnerMomentum, RecordMomentum
    from sordino.plan.core import Plan, Statistic
    from sordino.plan.public import PublicSet

P = ParamSpec("P")


class SharedOptions(TypedDict, total=False):
    """The keyword arguments of `make_plan` but `relation` and `public`, which some makers declare themselves."""

    delta: Required[float]
    records: Required[int]
    expected_batch: Required[float]
    epsilon: float | None
    noise_multiplier: float | None
    epochs: float | None
    steps: int | None
    clip_norm: float | None
    clipping: Clipping | None
    sampling: str
    cap: int | None
    accountant: str
    divisor: float | None
    insecure_seed: int | None
    statistics: Sequence[Statistic]
    inner: InnerMomentum | None
    augmentation: Augmentation | None
    record_momentum: RecordMomentum | None
    unit: str
    rows_per_user: int | None
    examples_per_user: int | None


class PlanOptions(SharedOptions, total=False):
    """All keyword arguments of `make_plan`; their meaning and defaults are documented there."""

    relation: str | None
    public: PublicSet | None


def with_options(base: Callable[..., Plan], *names: str) -> Callable[[Callable[P, Plan]], Callable[P, Plan]]:
    """A decorator that gives a plan maker with `**shared` the named keyword arguments of `base`.

    Args:
        base: The function that documents the shared options (`make_plan`).
        names: The options that the method supports; none: all of them. Those that the maker declares itself are its
            own.

    Returns:
        The decorator. The decorated function checks its keywords, and shows all of them in its signature and Args.
    """
    keywords = inspect.signature(base).parameters
    chosen = [key for key, value in keywords.items() if value.kind is value.KEYWORD_ONLY and key in (names or keywords)]
    unknown = set(names) - set(chosen)
    if unknown:
        raise TypeError(f"{base.__name__} has no option {', '.join(sorted(unknown))}")
    described = _entries(base)

    def decorate(function: Callable[P, Plan]) -> Callable[P, Plan]:
        signature = inspect.signature(function)
        own = [value for value in signature.parameters.values() if value.kind is not value.VAR_KEYWORD]
        shared = [key for key in chosen if key not in signature.parameters]
        complete = signature.replace(parameters=[*own, *(keywords[key] for key in shared)])

        @functools.wraps(function)
        def maker(*args: P.args, **options: P.kwargs) -> Plan:
            for key in options:
                if key not in complete.parameters:
                    known = did_you_mean(key, complete.parameters)
                    raise TypeError(f"got an unexpected keyword argument {key!r}: {known}")
            complete.bind(*args, **options)  # TypeError for a keyword that is missing
            return function(*args, **options)

        maker.__signature__ = complete  # type: ignore[attr-defined]
        # python -OO leaves no docstrings, hence no entries
        maker.__doc__ = _documented(function, [described[key] for key in shared if key in described])
        return maker

    return decorate


def _entries(function: Callable[..., Any]) -> dict[str, str]:
    """The entries of a docstring's Args section, by parameter."""
    args = inspect.cleandoc(function.__doc__ or "").partition("Args:\n")[2].partition("\n\n")[0]
    parts = re.split(r"^    (\w+): ", args, flags=re.M)
    return {name: f"    {name}: {text.rstrip()}" for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def _documented(function: Callable[..., Any], entries: Sequence[str]) -> str:
    """The function's docstring with further entries at the end of its Args section."""
    text = inspect.cleandoc(function.__doc__ or "")
    head, found, rest = text.partition("Args:\n")
    if not found:
        head, _, rest = text.partition("\n\nReturns:\n")
        return "\n".join([f"{head}\n\nArgs:", *entries]) + f"\n\nReturns:\n{rest}"
    own, blank, after = rest.partition("\n\n")
    return f"{head}Args:\n" + "\n".join([own, *entries]) + blank + after
