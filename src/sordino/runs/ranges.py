"""Checks the numbers of a recipe that can be judged alone, before torch, scipy or a dataset is loaded.

The parts check their numbers again: this only says it sooner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sordino import checks
from sordino.data.catalogue import catalogue
from sordino.errors import InputError


def check_numbers(sections: Mapping[str, Any]) -> None:
    """Checks budget, batch, clip norm and steps of the given sections of a recipe, by name.

    Raises:
        InputError: a number is outside of its range.
        Refused: δ guarantees nothing for so many records.
    """
    privacy, train, batch = sections["privacy"], sections["train"], sections["sampling"].expected_batch
    checks.delta_value(privacy.delta)
    if privacy.epsilon is not None:
        checks.positive("epsilon", privacy.epsilon)
    if privacy.noise_multiplier is not None:
        checks.noise_multiplier_value(privacy.noise_multiplier)
    if "clipping" in sections:
        checks.positive("clipping.clip_norm", sections["clipping"].clip_norm)
    checks.count("expected_batch", batch)
    _check_records(sections["data"], privacy.delta, batch)
    _check_train(train)


def _check_records(section: Any, delta: float, batch: int) -> None:
    """δ and the batch, with the public number of records; rows of [public] make it smaller, which others check."""
    known = [one.records[0] for one in catalogue() if one.name == section.name]
    records = section.records if section.records is not None else known[0] if known else None
    if records is None:
        return
    checks.count("data.records", records)
    if known and checks.fewest_records(records) > known[0]:
        raise InputError(f"data.records = {records}, but {section.name} has {known[0]} records")
    if batch > records:
        raise InputError(f"expected_batch ({batch}) exceeds the number of records ({records})")
    checks.refuse_empty_delta(delta, records)


def _check_train(section: Any) -> None:
    if section.steps is not None:
        checks.count("steps", section.steps)
    if section.epochs is not None:
        checks.positive("epochs", section.epochs)
    if section.lr is not None and section.lr <= 0:
        raise InputError(
            f"train.lr = {section.lr:g} would spend the budget and not train the model: give a positive step size"
        )
    checks.whole("chunk", section.chunk, minimum=1)
    if (momentum := section.options.get("momentum")) is not None:
        checks.within("train.momentum", momentum, 0, 1, open_high=True)
