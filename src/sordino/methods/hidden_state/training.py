"""Noisy gradient descent of which only the last iterate is published: Algorithms 1, 2 and 3 of Ye and Shokri 2022.

Formal guarantee: what `train_hidden` writes or returns, except `not_private`, is a function of the plan's statistics
and of the *last* iterate (and of public data), so `plan.guarantee()` holds for all of it jointly. Earlier iterates
exist in memory only. There is no checkpoint, no metric before the end, and no log line that depends on one.

One step, with η and λ of the plan and b its batch:

    v       = Σ_{i in batch} ∇f_{t_i}(W·x̃_i) ⊗ x̃_i − (b/η)·(1 − ηλ)·W
    W_next  = −(η/b)·release(v)          = W − η·(mean gradient + λ·W) − (η/b)·noise

The next iterate itself is released, in units of summed gradients. So the published weights are a grid value of the
release times a public number, and no rounding of an earlier sum can reveal what the noise hides. The regulariser is not
affected by anything that bounds a record.

A killed run has published nothing: its ledger contains steps that nobody saw. With secure noise it can't be resumed
(that would need the iterate, or the key, on disk: both are secrets); start again, in another directory, with fresh
noise. With an insecure seed it may be repeated from the start in the same directory, bit for bit.

| edge case                                  | result                                                              |
|--------------------------------------------|---------------------------------------------------------------------|
| a record with a non-finite feature         | its features count as zeros; their number goes to `not_private`     |
| features longer than the plan's norm       | scaled down, record by record, in training and in the model         |
| an iterate outside the ball of the plan    | projected back (non-expansive, hence covered by the proof)          |
| other model, optimizer, momentum, average  | not available: the update is the plan's                             |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sordino.clipping import in_unit_ball
from sordino.errors import InputError, Refused, SordinoError
from sordino.files import make_folder
from sordino.methods.hidden_state.losses import Loss
from sordino.plan.core import Plan
from sordino.plan.explained import Explained
from sordino.randomness import RandomSource
from sordino.records.fitting import rows_not_finite
from sordino.records.reading import count_records, refuse_owners, tensors_of
from sordino.release import Entry, release
from sordino.release.ledger import Ledger
from sordino.sampling import LogicalBatch
from sordino.training.announced import extrapolated, header
from sordino.training.callbacks import Callback, checked, told_of_failure
from sordino.training.fit import First
from sordino.training.job import Result
from sordino.training.metrics import MetricsLog
from sordino.training.progress import ProgressBar, say, tell_not_finite
from sordino.training.steps import check_records, plan_batches

if TYPE_CHECKING:
    from sordino.methods.hidden_state.method import HiddenState

PURPOSE = "iterate"
"""The ledger's purpose of a step's release."""

CHUNK = 4096
"""Records processed at once, in double precision."""

HELD = 2**31
"""Features are stored in double precision if they take at most this many bytes; otherwise chunk by chunk."""


class ClippedLinear(nn.Module):
    """The published model: a linear layer on flattened features that are scaled down to the plan's norm."""

    def __init__(self, method: HiddenState) -> None:
        super().__init__()
        outputs = method.loss.outputs
        self.feature_norm, self.unit = method.feature_norm, method.unit
        self.weight = nn.Parameter(torch.zeros(outputs, method.features, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=torch.float64)) if method.bias else None

    def forward(self, inputs: Tensor) -> Tensor:
        rows = bounded(inputs, self.feature_norm, self.unit)
        return nn.functional.linear(rows, self.weight, self.bias)


def train_hidden(
    plan: Plan,
    dataset: Any,
    *,
    evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    first: First | None = None,
    chunk: int = CHUNK,
    progress: bool | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Trains under the plan, from zero weights, and returns the last iterate with its guarantee.

    Args:
        plan: A plan of the method hidden-state.
        dataset: A pair of tensors (features, targets).
        evaluate: Called once, with the published model; it must use public data only.
        out: A directory for ledger.jsonl and metrics.jsonl.
        resume: Continue in `out`: repeats the run from the start with an insecure seed, is refused with secure noise.
        first: Called with (dataset, source, ledger) before the first step; releases the plan's statistics and returns
            the dataset to train on.
        chunk: The number of records processed at once.
        progress: Show a progress bar; None: if standard error is a terminal. False also prints no header.
        callbacks: Called with the row of the published model. A callback that may stop the run is refused.

    Returns:
        The published model, the guarantee and the metrics.

    Raises:
        InputError: the plan, the dataset or the directory does not fit.
        Refused: the run can't be resumed, or rows have owners.
        SordinoError: a gradient differs from the certified loss, or the ledger can't be written.
    """
    method = _method(plan)
    watching = checked(callbacks, plan, 0)
    refuse_owners(dataset, plan.method.name)
    check_records(plan, count_records(dataset))
    tell_not_finite(rows_not_finite(dataset))
    folder = Path(out) if out is not None else None
    guarantee, source = plan.guarantee(), plan.source()
    if folder is not None:
        make_folder(folder)
    started = time.monotonic()
    with Ledger.open(folder / "ledger.jsonl" if folder else None, plan.to_dict()) as ledger:
        _check_resume(ledger, source, resume, folder)
        ledger.guard(Explained(plan, ledger.entries))
        seen = first(dataset, source, ledger) if first is not None else dataset
        records = Records.of(seen, method)
        check_gradients(method.loss, records)
        seconds = None if progress is False else _seconds(plan, records, chunk)
        say(header(plan, guarantee, seconds), progress)
        with told_of_failure(watching):
            for callback in watching:
                callback.begin(plan, guarantee)
            iterate = descend(plan, records, source=source, ledger=ledger, chunk=chunk, progress=progress)
    model = published_model(method, iterate)
    log = MetricsLog(folder / "metrics.jsonl" if folder else None)
    log.cut(0)
    row: dict[str, float] = {"step": plan.steps, "epsilon": guarantee.epsilon}
    if evaluate is not None:
        with torch.no_grad():
            row |= {name: float(value) for name, value in evaluate(model).items()}
    seconds = time.monotonic() - started
    log.append(row | {"seconds": round(seconds, 3)})
    for callback in watching:
        callback.told(log.rows[-1])
        callback.end(log.rows)
    return Result(model, guarantee, log.rows, seconds, 0, {"dropped_records": records.dropped})


@dataclass(frozen=True, eq=False)
class Records:
    """Features (any float type) and targets; makes bounded rows with the constant feature."""

    inputs: Tensor
    targets: Tensor
    feature_norm: float
    bias: float
    unit: bool
    held: Tensor | None  # the bounded rows of all records, if they fit in memory
    dropped: int

    @classmethod
    def of(cls, dataset: Any, method: HiddenState) -> Records:
        pair = tensors_of(dataset)
        if pair is None or not isinstance(pair[0], Tensor):
            raise InputError("hidden-state training needs a pair of tensors (features, targets)")
        inputs, targets = pair[0].flatten(1), pair[1]
        if inputs.shape[1] != method.features:
            raise InputError(f"the plan is for {method.features} features, the dataset has {inputs.shape[1]}")
        dropped = int((~inputs.isfinite().all(1)).sum())
        made = cls(inputs, targets, method.feature_norm, method.bias, method.unit, None, dropped)
        if inputs.numel() * 8 > HELD:
            return made
        held = torch.cat([made.rows(indices)[0] for indices in torch.split(torch.arange(len(inputs)), CHUNK)])
        return replace(made, held=held)

    def rows(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """(x̃, targets) of the records: double precision, ‖x‖ ≤ feature_norm, the constant feature last."""
        targets = self.targets[indices]
        if self.held is not None:
            return self.held[indices], targets
        rows = bounded(self.inputs[indices], self.feature_norm, self.unit)
        if self.bias:
            rows = torch.cat([rows, torch.full((len(rows), 1), self.bias, dtype=torch.float64)], dim=1)
        return rows, targets


def bounded(inputs: Tensor, bound: float, unit: bool = False) -> Tensor:
    """Flattened rows in double precision, scaled down to norm `bound` (`unit`: up as well); non-finite: zero."""
    return bound * in_unit_ball(inputs, None if unit else bound)


def gradient_sum(loss: Loss, records: Records, weights: Tensor, batch: LogicalBatch) -> Tensor:
    """Σ ∇ℓ_i over the batch: (K, features + constant), in double precision, chunk by chunk."""
    total = torch.zeros_like(weights)
    for indices in batch.chunks():
        rows, targets = records.rows(indices)
        total += loss.residual(rows @ weights.T, targets).T @ rows  # this order reads the rows contiguously
    return total


def descend(
    plan: Plan,
    records: Records,
    *,
    source: RandomSource,
    ledger: Ledger,
    chunk: int = CHUNK,
    progress: bool | None = False,
) -> Tensor:
    """The last iterate. Earlier iterates exist only in this loop."""
    method = _method(plan)
    ball, sizes = method.ball(plan), method.lr.over(plan.steps)
    weights = torch.zeros(method.loss.outputs, method.coordinates // method.loss.outputs, dtype=torch.float64)
    count = len(records.targets)
    with ProgressBar(plan.steps, 0, progress, "training") as bar:
        for batch in plan_batches(plan, records=count, source=source, chunk=chunk):
            size = float(sizes[batch.step])
            summed = gradient_sum(method.loss, records, weights, batch)
            summed -= (plan.divisor / size) * (1.0 - size * method.regularisation) * weights
            weights = _released(plan, summed, batch.step, source, ledger).mul_(-size / plan.divisor)
            norm = float(torch.linalg.vector_norm(weights))
            if norm > ball:
                weights *= ball / norm
            bar.advance(batch.step + 1, None)
    return weights


def _seconds(plan: Plan, records: Records, chunk: int) -> float:
    """The expected seconds of a step: sums of few and more records, and releases of zeros."""
    method, source = _method(plan), plan.source()
    weights = torch.zeros(method.loss.outputs, method.coordinates // method.loss.outputs, dtype=torch.float64)
    batch = next(plan_batches(plan, records=len(records.targets), source=source, chunk=chunk))

    def step(most: int) -> int:
        some = replace(batch, indices=batch.indices[:most])
        gradient_sum(method.loss, records, weights, some)
        with Ledger.open(None, plan.to_dict()) as ledger:
            _released(plan, torch.zeros_like(weights), 0, source, ledger)
        return len(some)

    return extrapolated(step, plan.expected_batch, plan.steps)


def _released(plan: Plan, summed: Tensor, step: int, source: RandomSource, ledger: Ledger) -> Tensor:
    """The sum with the plan's noise, in units of summed gradients."""
    return release(
        {PURPOSE: summed},
        sensitivity=plan.sensitivity,
        norm="l2",
        noise=plan.noise_at(step),
        source=source,
        ledger=ledger,
        entry=Entry(PURPOSE, step, plan.sampling.to_dict(), plan.relation),
        fine=True,
    )[PURPOSE]


def published_model(method: HiddenState, iterate: Tensor) -> ClippedLinear:
    """The last iterate as a model; the weight of the constant feature becomes the bias."""
    model = ClippedLinear(method)
    with torch.no_grad():
        model.weight.copy_(iterate[:, : method.features])
        if model.bias is not None:
            model.bias.copy_(method.bias * iterate[:, method.features])
    return model


def check_gradients(loss: Loss, records: Records, count: int = 32) -> None:
    """Compares the closed form with autograd, and each record's norm with the slope, at public random weights."""
    rows, targets = records.rows(torch.arange(min(count, len(records.targets))))
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(loss.outputs, rows.shape[1], generator=generator, dtype=torch.float64).requires_grad_()
    with torch.enable_grad():
        (expected,) = torch.autograd.grad(loss.value(rows @ weights.T, targets).sum(), weights)
    residual = loss.residual(rows @ weights.detach().T, targets)
    scores = float(torch.linalg.vector_norm(rows @ weights.detach().T, dim=1).max())
    if not torch.allclose(residual.T @ rows, expected, rtol=1e-9, atol=1e-9):
        raise SordinoError(f"the gradient of the loss {loss.name!r} is not that of its value; nothing was released")
    if float(torch.linalg.vector_norm(residual, dim=1).max()) > loss.slope(scores) * (1 + 1e-9):
        raise SordinoError(f"a gradient of the loss {loss.name!r} is longer than certified; nothing was released")


def _method(plan: Plan) -> HiddenState:
    if plan.method.name != "hidden-state":
        raise InputError(f"train_hidden is for hidden-state plans; this plan's method is {plan.method.name!r}")
    return plan.method  # type: ignore[return-value]


def _check_resume(ledger: Ledger, source: RandomSource, resume: bool, folder: Path | None) -> None:
    if ledger.last_step(PURPOSE) < 0 and not ledger.entries:
        return
    if not resume:
        raise InputError(f"{folder} already contains a run: give another directory")
    if source.secure:
        raise Refused(
            f"{folder}: a hidden-state run can't be resumed: its iterate was in memory only, by design. It has "
            "published nothing, so nothing was spent; start again in another directory"
        )
