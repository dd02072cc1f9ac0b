"""Makes the plan of a recipe again without its data, to compare it with the plan in a ledger."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from sordino.plan.core import Plan
from sordino.runs.build import clipping_of, method_of, plan_from, private_records
from sordino.runs.recipe import Recipe


def plan_of_recipe(recipe: Recipe, stated: Plan) -> Plan:
    """The recipe's plan, with the noise of `stated` if the recipe gives a target ε.

    What a plan takes from the form of the data (the number of features and classes, for methods that need them) and
    from public rows is taken from `stated`: it is not part of a recipe.

    Raises:
        InputError, Refused: no plan can be made from the recipe.
    """
    if recipe.privacy.epsilon is not None:
        privacy = replace(recipe.privacy, epsilon=None, noise_multiplier=stated.noise.noise_multiplier)
        recipe = replace(recipe, privacy=privacy)
    method = method_of(recipe)
    shape: dict[str, Any] = {}
    if method.needs_shape:
        form = stated.method.to_dict()
        loss = form.get("loss")
        shape = {"shape": (form.get("features"),), "classes": loss.get("outputs") if isinstance(loss, dict) else None}
    made = plan_from(recipe, clipping_of(recipe), private_records(recipe), **shape)
    return replace(made, public=stated.public)


def differences(recipe: Plan, ledger: Plan) -> str:
    """The keys in which two plans differ, with both values; empty if they are equal."""
    one, other = (json.loads(json.dumps(plan.to_dict())) for plan in (recipe, ledger))
    keys = [key for key in {**one, **other} if one.get(key) != other.get(key)]
    return "; ".join(f"{key} is {one.get(key)!r} in the recipe and {other.get(key)!r} in the ledger" for key in keys)
