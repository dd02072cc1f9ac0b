"""Makes the plan of a recipe with `[method] name = "hidden-state"`.

    [method]
    name = "hidden-state"
    loss = "softmax"            # softmax, one-vs-rest, huber, squared; their options are further keys (cap, bound, …)
    cap = 0.1
    regularisation = 1e-6       # λ, required
    feature_norm = 1.0          # features are scaled down to this norm, record by record
    unit = true                 # and also scaled up to it
    bias = 0.3                  # the constant feature; 0: none
    lr = 10.0                   # a number or a schedule; default: the certificate's 2/(m + M)
    noise_factors = 1.0         # a number or a schedule, or {kind = "closing", first = 2.0, rise = 12.0}
    radius = 100.0              # default: one that is never reached

The model is linear; [train] has only steps or epochs, and [clipping] has no effect: the certificate bounds gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sordino.errors import InputError, Refused, did_you_mean
from sordino.methods.hidden_state.losses import LOSSES, loss_from_dict
from sordino.methods.hidden_state.schedules import closing
from sordino.plan.method import Request
from sordino.schedule import Schedule

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

_OWN = ("loss", "regularisation", "feature_norm", "unit", "bias", "lr", "noise_factors", "radius")


def arguments(request: Request) -> dict[str, Any]:
    """The arguments of `plan` for a recipe and data of that shape; refuses everything that the proof does not cover."""
    recipe = request.recipe
    check_recipe(recipe)
    if request.shape is None or request.classes is None:
        raise InputError("the plan of a hidden-state recipe depends on the number of features: read the data first")
    options = dict(recipe.method.options)
    own = {key: options.pop(key) for key in _OWN if key in options}
    name = own.pop("loss", "softmax")
    for key in ("lr", "noise_factors"):
        if key in own:
            own[key] = _schedule(own[key], recipe, request.records)
    common = request.arguments()
    return {
        "loss": loss_from_dict({"name": name, "outputs": request.classes, **options}),
        "features": math.prod(request.shape),
        "batch": common.pop("expected_batch"),
        **{key: value for key, value in common.items() if key != "clipping"},
        **own,
    }


def _schedule(value: Any, recipe: Recipe, records: int) -> Schedule:
    """A number, a schedule, or {kind = "closing", first, rise}: see `schedules.closing`."""
    if not isinstance(value, Mapping) or value.get("kind") != "closing":
        return Schedule.from_dict(value)
    options = {key: number for key, number in value.items() if key != "kind"}
    if set(options) - {"first", "rise"}:
        raise InputError(f"a closing schedule takes first and rise, got {', '.join(options)}")
    per_epoch = records // recipe.sampling.expected_batch
    return closing(recipe.train.steps or math.ceil((recipe.train.epochs or 1) * per_epoch - 1e-9), **options)


def check_recipe(recipe: Recipe) -> None:
    """Checks that need no data: keys, and combinations without a proof."""
    _check_method(recipe)
    if recipe.model.name != "linear" or recipe.model.options:
        raise Refused(
            f"hidden state is proven for convex losses of a linear model, not for {recipe.model.name!r} with its "
            'options; use [model] name = "linear", or the method dpsgd'
        )
    if recipe.privacy.relation not in (None, "replace-one"):
        raise Refused("hidden state is proven for replace-one")
    if recipe.clipping != type(recipe.clipping)():
        raise Refused(
            "[clipping] is not for hidden-state: clipped gradients are not those of a convex function; bound the "
            "gradient by the loss (cap = …, bound = …), and features by feature_norm"
        )
    if recipe.run.noise_free or recipe.privacy.norm_histogram is not None:
        raise Refused("noise_free and norm_histogram are not available in a hidden-state run")
    plain = type(recipe.train)(steps=recipe.train.steps, epochs=recipe.train.epochs, chunk=recipe.train.chunk)
    if recipe.train != plain:
        raise Refused(
            "[train] of a hidden-state recipe takes only steps or epochs (and chunk): the step size is in [method]; "
            "there is no momentum, Adam, average or checkpoint, and nothing is measured before the end"
        )


def _check_method(recipe: Recipe) -> None:
    options = recipe.method.options
    name = str(options.get("loss", "softmax"))
    if name not in LOSSES:
        raise InputError(f"method.loss = {name!r} has no certificate: {did_you_mean(name, LOSSES)}")
    known = [*(one.name for one in fields(LOSSES[name]) if one.name != "outputs"), "clip", *_OWN]
    for key in options:
        if key not in known:
            raise InputError(f"unknown key in [method]: {key!r}: {did_you_mean(key, known)}")
    if "regularisation" not in options:
        raise InputError("[method] needs regularisation: without it the objective is not strongly convex")
