"""`[method] name = "coupling"` in a recipe: the use of public rows after gradients are released."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sordino.errors import InputError
from sordino.methods.coupling.use import PublicUse, WarmUp
from sordino.methods.coupling.weights import rule_from_dict
from sordino.split import Split

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

BEFORE_NOISE = ("centring", "adaptive_clipping")
WARM_UP = {"warm_up": "steps", "warm_up_lr": "lr", "warm_up_momentum": "momentum"}


def public_use(recipe: Recipe, rows: Split | None) -> PublicUse:
    """The use of the public rows after gradients are released, from [method]. Their use before that is in the plan.

    Args:
        recipe: The recipe.
        rows: The public rows; None: the options are only checked.

    Returns:
        The use of the public rows.

    Raises:
        InputError: a rule or an option is unknown, or a value is missing or wrong.
    """
    options = {key: value for key, value in recipe.method.options.items() if key not in BEFORE_NOISE}
    warm_up = {name: options.pop(key) for key, name in WARM_UP.items() if key in options}
    projection = options.pop("projection", None)
    if warm_up and not {"steps", "lr"} <= set(warm_up):
        raise InputError("a warm-up on public rows needs warm_up (its steps) and warm_up_lr in [method]")
    return PublicUse(
        rows=Split(torch.zeros(1), torch.zeros(1)) if rows is None else rows,
        rule=rule_from_dict(options),
        expected_batch=recipe.public.expected_batch,
        warm_up=WarmUp(**warm_up) if warm_up else None,
        projection=projection,
        seed=recipe.public.seed,
    )
