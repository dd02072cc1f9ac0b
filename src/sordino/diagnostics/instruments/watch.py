"""The instruments during training: a reading at regular steps, on public rows, without changing the run.

A `Watch` reads the weights and changes nothing: it uses neither the run's random streams nor torch's global generator,
so the run ends with the same bits as without it.

Readings of public rows at released weights are covered by the run's guarantee (post-processing). Readings of private
records are covered by nothing: they are stored separately (`not_private`) and never enter the metrics or the report. If
the guarantee hides the iterates, no reading may be published at all (`check_watched`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from sordino import checks
from sordino.clipping import Clipping
from sordino.diagnostics.instruments.reading import NothingToMeasure, measure, whose
from sordino.diagnostics.instruments.window import noise_vectors, windowed_noise
from sordino.errors import InputError, Refused
from sordino.plan.contribution import Augmentation
from sordino.plan.method import Method
from sordino.registry import method_class, names_with

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

WINDOW_RECORDS = 16


@dataclass(frozen=True)
class ReadingSteps:
    """When to read: before the first step, then at regular steps, and after the last.

    Args:
        every: The number of steps between two readings.
        window: Also measure the sampling noise averaged over that many iterations (Fig. 5a), on the first few rows;
            0: do not.

    Raises:
        InputError: a number is out of its range, or the window is longer than `every`.
    """

    every: int
    window: int = 0

    def __post_init__(self) -> None:
        checks.count("instruments every", self.every)
        checks.count("instruments window", self.window, minimum=0)
        if self.window > self.every:
            raise InputError(
                f"a window of {self.window} iterations is longer than the {self.every} steps between two readings"
            )

    def due(self, done: int, steps: int) -> bool:
        return done % self.every == 0 or done == steps

    def within_window(self, done: int, steps: int) -> bool:
        return any(self.due(later, steps) for later in range(done, min(done + self.window, steps + 1)))


class Watch:
    """Reads the instruments during training; `train` calls it with the model after each step.

    Args:
        schedule: The steps at which to read.
        loss: A loss of outputs and targets, one number per row.
        rows: Returns the rows to measure on; called once, at the first reading.
        clipping: The clipping to measure.
        public: Where the rows come from, if they are public.
        not_private: Measure although the rows are not declared public; the readings are then stored separately.
        views: If given, a row's gradient is the mean over random views of it.
        seed: The seed of views and dropout.

    Raises:
        InputError: not exactly one of `public` and `not_private` is given.
    """

    def __init__(
        self,
        schedule: ReadingSteps,
        loss: Callable[..., Tensor],
        rows: Callable[[], Any],
        clipping: Clipping,
        *,
        public: str | None = None,
        not_private: bool = False,
        views: Augmentation | None = None,
        seed: int = 0,
    ) -> None:
        self.schedule, self.not_private = schedule, not_private
        self._origin: dict[str, Any] = {"public": public, "not_private": not_private, "seed": seed}
        whose(public, not_private)
        self._loss, self._ask, self._clipping, self._views = loss, rows, clipping, views
        self._rows: Any = None
        self._recent: deque[tuple[int, Tensor]] = deque(maxlen=max(1, schedule.window))

    def __call__(self, model: nn.Module, done: int, steps: int) -> dict[str, float] | None:
        """The numbers after `done` of `steps` steps, if a reading is due and the gradients are finite."""
        due, window = self.schedule.due(done, steps), self.schedule.window
        near = window > 0 and self.schedule.within_window(done, steps)
        if not (due or near):
            return None
        self._rows = self._ask() if self._rows is None else self._rows
        if near:
            some = min(WINDOW_RECORDS, len(self._rows))
            self._recent.append((done, noise_vectors(model, self._loss, self._rows, some, **self._origin)))
        if not due:
            return None
        try:
            found = measure(model, self._loss, self._rows, self._clipping, views=self._views, **self._origin)
        except NothingToMeasure:  # a diverging run is not ended by its instruments
            return None
        row: dict[str, float] = {"step": done, **found.metrics()}
        if window and [step for step, _ in self._recent] == list(range(done - window + 1, done + 1)):
            vectors = [vector for _, vector in self._recent]
            row |= {f"noise_window_{length}": windowed_noise(vectors, length) for length in (1, window)}
        return row | ({"not_private": True} if self.not_private else {})


def check_watched(recipe: Recipe) -> None:
    """Refuses readings that would reveal iterates that the guarantee hides, or that the training does not support."""
    if recipe.instruments.given and not _watched(method_class(recipe.method.name, "method.name")):
        raise Refused(
            f"[instruments] reads the weights during training, and the method {recipe.method.name} does not "
            f"publish them (or has its own training function): leave the section out, or use one of "
            f"{', '.join(names_with(_watched))}"
        )


def _watched(method: type[Method]) -> bool:
    """Whether all iterates are published, so that readings of public rows are post-processing."""
    return method.publishes is None and method.trained_by is None


def source_of_rows(recipe: Recipe) -> str:
    """ "public", "test" or "train": the rows that the section reads."""
    section = recipe.instruments
    if section.not_private and section.split is not None:
        raise InputError("[instruments] not_private = true reads the private training rows: leave out split")
    if section.split not in (None, "public", "test"):
        raise InputError(f'[instruments] split = {section.split!r} is unknown: use "public" or "test"')
    if section.not_private:
        return "train"
    if section.split == "test":
        return "test"
    if not recipe.public.given:
        raise Refused(
            "[instruments] measures single records' gradients without noise, and the recipe declares no public rows: "
            'declare some in [public]; or give split = "test" if the test rows are public; or not_private = true, '
            "which writes the readings to not_private.json, for the data's owner only"
        )
    return "public"
