"""Validation of values given by users. A wrong value is an InputError that names it and says what it must be."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from sordino.errors import InputError, Refused, did_you_mean

RELATIONS = ("add-remove", "replace-one")
ACCOUNTANTS = ("pld", "rdp")
SAMPLERS = ("poisson", "truncated-poisson", "partition", "without-replacement", "allocation", "cyclic")
SHAPES = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}  # laws of the number of runs of a paid sweep


def real(name: str, value: object) -> float:
    """`value` as a finite float; bool, text, NaN and infinity are refused."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise InputError(f"{name} must be a number, got {brief(value)}")
    try:
        number = float(value)
    except (OverflowError, ValueError, TypeError) as error:  # an integer of 400 digits, a tensor of several elements
        raise InputError(f"{name} must be one number that a float can hold") from error
    if not math.isfinite(number):
        raise InputError(f"{name} must be a finite number, got {number}")
    return number


def brief(value: object, length: int = 60) -> str:
    """The repr of a value for use in a message, truncated if it is long.

    Of tensors, tables and containers only the type: they may hold records, where the arguments were interchanged.
    """
    if not isinstance(value, str | bytes | int | float | complex | None) and not callable(value):
        return f"a {type(value).__name__}"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits, a list in itself
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= length else f"{text[:length]}…"


def positive(name: str, value: object) -> float:
    number = real(name, value)
    if number <= 0:
        raise InputError(f"{name} must be greater than 0, got {number}")
    return number


def probability(name: str, value: object, *, allow_one: bool) -> float:
    """A number in (0, 1] or (0, 1)."""
    number = real(name, value)
    if not 0 < number <= 1 or (number == 1 and not allow_one):
        raise InputError(f"{name} must lie in (0, 1{']' if allow_one else ')'}, got {number}")
    return number


def delta_value(value: object) -> float:
    """δ in (0, 1). Gaussian noise has no finite ε at δ = 0, and δ = 1 guarantees nothing."""
    return probability("delta", value, allow_one=False)


def refuse_empty_delta(delta: float, records: int) -> None:
    """Refuses a meaningless δ: publishing one of n records, drawn at random, is (0, 1/n)-differentially private."""
    if delta * records >= 1:
        raise Refused(
            f"δ = {delta!r} is not below 1/{records}, one over the plan's number of records: a program that publishes "
            f"a complete record, drawn at random, would satisfy it; choose a smaller δ, such as {0.1 / records:.0e}"
        )


def count(name: str, value: object, *, minimum: int = 1) -> int:
    """An integer of at least `minimum`; 10.0 is accepted as 10, 10.5 is not."""
    number = real(name, value)
    if not number.is_integer():
        raise InputError(f"{name} must be a whole number, got {number}")
    whole = int(value) if isinstance(value, int) else int(number)
    if whole < minimum:
        raise InputError(f"{name} must be at least {minimum}, got {whole}")
    return whole


def fewest_records(records: int) -> int:
    """The smallest dataset that a plan for `records` records may run on: ten percent fewer, rounded up.

    Where a sampler's privacy cost depends on the number of records, all sizes from this one on are accounted for.
    """
    return records - records // 10


def whole(name: str, value: object, *, minimum: int = 0) -> int:
    """An int of at least `minimum`; bool and 10.0 are refused."""
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise InputError(f"{name} = {brief(value)} must be a whole number, at least {minimum} and below 2**63")
    return value


def within(
    name: str, value: object, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> float:
    """A number between `low` and `high`; each end is included unless it is open."""
    number = real(name, value)
    inside = (low < number if open_low else low <= number) and (number < high if open_high else number <= high)
    if not inside:
        left, right = "(" if open_low else "[", ")" if open_high else "]"
        raise InputError(f"{name} = {value!r} must lie in {left}{low:g}, {high:g}{right}")
    return number


def exactly_one(**values: object) -> None:
    """InputError unless exactly one of the values is given (is not None)."""
    if sum(value is not None for value in values.values()) != 1:
        raise InputError(f"give exactly one of {' and '.join(values)}")


def function(name: str, value: object, what: str) -> None:
    """InputError unless the value is None or can be called; `what` says of what it is a function."""
    if value is not None and not callable(value):
        raise InputError(f"{name} is a {type(value).__name__}: give a function {what}")


def known_keys(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """InputError for the first given key that is not known; `where` names the section in the message."""
    allowed = list(known)
    for key in given:
        if key not in allowed:
            raise InputError(f"unknown key in {where}: {key!r}: {did_you_mean(key, allowed)}")


def choice(name: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise InputError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
    return value


def noise_multiplier_value(value: object) -> float:
    """A noise multiplier in the range that the accountants support."""
    number = positive("noise_multiplier", value)
    if not 1e-3 <= number <= 1e12:
        raise InputError(f"noise_multiplier must lie between 0.001 and 1e12, got {number}")
    return number
