"""A run before it starts (`Job`) and after it has ended (`Result`)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sordino.plan.core import Plan
from sordino.plan.guarantee import Guarantee
from sordino.ranks.store import Store
from sordino.training.agreement import Seen
from sordino.training.callbacks import Callback
from sordino.training.histogram import NormHistogram
from sordino.training.loop import Evaluate, Loop, Reader, Settings
from sordino.training.sharded import ShardedLoop
from sordino.training.updates import Update


@dataclass(frozen=True)
class Result:
    """A trained model with its guarantee and metrics.

    Args:
        model: The trained model.
        guarantee: Its guarantee; None if nothing was released.
        metrics: What `evaluate` returned, row by row.
        seconds: Wall time of the training.
        skipped_steps: Steps whose release was lost in an interruption: they count for ε but changed no weights.
        not_private: For the data's owner only: no guarantee covers it.
        histogram: The released histogram of norms, if the plan has one.
        stopped_at: The number of steps made, if a callback ended the run.
    """

    model: nn.Module
    guarantee: Guarantee | None
    metrics: tuple[Mapping[str, float], ...]
    seconds: float
    skipped_steps: int
    not_private: Mapping[str, Any]
    histogram: NormHistogram | None = None
    stopped_at: int | None = None  # the number of steps made, if a callback ended the run


@dataclass(frozen=True, eq=False)
class Job:
    """A run before it starts: model, dataset, plan, update and settings."""

    model: nn.Module
    dataset: Any
    plan: Plan
    update: Update
    settings: Settings
    evaluate: Evaluate | None = None
    folder: Path | None = None
    fingerprint: str = ""
    label: str = "training"
    watch: Reader | None = None
    callbacks: tuple[Callback, ...] = ()
    said: str = ""  # printed on the terminal before the first step
    store: Store | None = None  # for a sharded model
    seen: Seen | None = None  # the digest of the records, if ranks have compared theirs

    def loop(self) -> Loop:
        if self.store is not None:
            return ShardedLoop(
                self.store, self.folder, self.model, self.update, self.settings, self.plan, self.evaluate,
                self.fingerprint, self.label, self.watch, self.callbacks,
            )  # fmt: skip
        return Loop(
            self.model, self.update, self.settings, self.plan, self.evaluate, self.folder, self.fingerprint,
            self.label, self.watch, self.callbacks,
        )  # fmt: skip


def fingerprint_of(plan: Plan, settings: Settings, update: Update, public: Any) -> str:
    """Identifies the run that a checkpoint belongs to (chunk, progress and checkpoint times may differ)."""
    return digest(
        {
            "plan": plan.to_dict(),
            "lr": update.lr,
            "update": getattr(update.optimizer, "__qualname__", type(update.optimizer).__qualname__),
            "optimizer": {name: repr(value) for name, value in settings.optimizer_options.items()},
            "averaging": repr(settings.averaging),
            "seed": settings.seed,
            **({} if public is None else {"public": public.to_dict()}),
        }
    )


def digest(document: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON-serialisable document."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
