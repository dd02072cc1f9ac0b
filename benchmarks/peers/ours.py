"""sordino's step: the engine, the release with its cryptographic generator and a ledger in memory, SGD."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger
from workloads import RowLoss


def sordino(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """The same calls as a training run, phase by phase: gradients, release, update."""
    step = stepping(model, loss, len(targets), Assurance())
    return lambda: step(inputs, targets)


def stepping(
    model: nn.Module, loss: RowLoss, expected: int, assurance: Assurance | None, ledger: Ledger | None = None
) -> Callable[[Tensor, Tensor], Mapping[str, float]]:
    """A step from any batch. expected: the public divisor. ledger: one in memory if None."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(parameters.values(), lr=LEARNING_RATE)
    clipping, noise, source = FlatClip(CLIP_NORM), Gaussian(NOISE_MULTIPLIER), RandomSource.from_os()
    ledger = ledger or Ledger.open(None, {"kind": "plan"})
    taken, factor = 0, 1.0 / expected

    def step(inputs: Tensor, targets: Tensor) -> Mapping[str, float]:
        nonlocal taken
        start = time.perf_counter()
        rows, keys = Rows(inputs, targets), torch.arange(len(targets))
        total = clipped_sum(model, loss, rows, clipping, keys=keys, assurance=assurance, narrow=True)
        summed = time.perf_counter()
        sampling = {"name": "poisson", "sampling_rate": 0.01}
        entry = Entry(purpose="gradient", step=taken, sampling=sampling, relation="add-remove")
        noisy = release(
            total.sums,
            sensitivity=clipping.sensitivity("add-remove"),
            norm="l2",
            noise=noise,
            source=source,
            ledger=ledger,
            entry=entry,
            factor=factor,
            in_place=True,
            dtype=total.dtype,
        )
        total.sums.clear()
        released = time.perf_counter()
        for name, value in noisy.items():
            parameters[name].grad = value.to(parameters[name].dtype)
        optimizer.step()
        optimizer.zero_grad()
        taken += 1
        updated = time.perf_counter()
        return {"gradients": summed - start, "release": released - summed, "update": updated - released}

    return step
