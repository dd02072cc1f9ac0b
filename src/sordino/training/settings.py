"""Maps a recipe's [train] to settings: schedulers by name, averaging, checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from sordino.errors import InputError, did_you_mean
from sordino.training.loop import Settings
from sordino.training.updates import Averaging

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

SCHEDULERS: Mapping[str, Callable[..., Any] | None] = {
    "constant": None,
    "cosine": lambda optimizer, steps: CosineAnnealingLR(optimizer, T_max=steps),
    "linear": lambda optimizer, steps: LinearLR(optimizer, 1.0, 1e-3, total_iters=steps),
}


def recipe_settings(
    recipe: Recipe, steps: int, progress: bool | None, optimizer_options: Mapping[str, Any] | None = None
) -> Settings:
    """The settings of a recipe's run. `optimizer_options`: the options of the optimizer."""
    section = recipe.train
    if section.scheduler not in SCHEDULERS:
        known = did_you_mean(section.scheduler, SCHEDULERS)
        raise InputError(f"train.scheduler = {section.scheduler!r} is unknown: {known}")
    schedule = SCHEDULERS[section.scheduler]
    return Settings(
        optimizer_options=dict(optimizer_options or {}),
        scheduler=partial(schedule, steps=steps) if schedule else None,
        averaging=Averaging(section.average, decay=section.average_decay, tail=section.average_tail),  # type: ignore[arg-type]
        chunk=section.chunk,
        eval_every=section.eval_every,
        checkpoint_every=section.checkpoint_every,
        checkpoint_minutes=section.checkpoint_minutes,
        seed=recipe.run.seed,
        progress=progress,
    )
