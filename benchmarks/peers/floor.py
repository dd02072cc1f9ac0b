"""Steps written by hand for one network each: a lower bound on the time of an engine.

Forward and backward pass, norms, weights and sums are straight-line code, without autograd, checks or a ledger; sums
are in single precision, in memory that is reused in every step. The noise is sordino's: exact, from the cryptographic
generator, on every coordinate. The difference to an engine is the cost of supporting any model. If the step by hand
misses a goal, no engine with this noise can reach it on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heldout import BagOfWords
from peers import CLIP_NORM, LEARNING_RATE, NOISE_MULTIPLIER, Step
from peers.hooks import by_hooks
from sordino.gradients.layers.linear import _with_squares
from sordino.gradients.sums.memory import keep_freed_memory, scaled, squares
from sordino.randomness import RandomSource
from sordino.release import Gaussian
from sordino.release.mechanisms import release_grid
from workloads import RowLoss

Sums = Callable[[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor], None]


def by_hand(model: nn.Module, inputs: Tensor, targets: Tensor, loss: RowLoss) -> Step:
    """The step of an MLP with one hidden layer, a mean of word vectors under a linear map, or a logistic regression;
    of any other model with hooks (`peers.hooks`)."""
    if not isinstance(model, (nn.Linear, nn.Sequential, BagOfWords)):
        return by_hooks(model, inputs, targets, loss)
    parameters = [p.detach() for p in model.parameters()]
    sums = sums_of(model)
    flat = torch.zeros(sum(p.numel() for p in parameters))
    sizes = [p.numel() for p in parameters]
    totals = [part.view(p.shape) for part, p in zip(torch.split_with_sizes(flat, sizes), parameters, strict=True)]
    grid = release_grid(Gaussian(NOISE_MULTIPLIER), CLIP_NORM, len(flat))
    source, taken = RandomSource.from_os(), 0
    keep_freed_memory()

    def step() -> Mapping[str, float]:
        nonlocal taken
        sums(parameters, totals, inputs, targets)
        source.stream("floor", taken).rounded_sum(flat, grid.scale, grid.spacing)
        for parameter, total in zip(parameters, totals, strict=True):
            parameter.sub_(total, alpha=LEARNING_RATE / len(targets))
        taken += 1
        return {}

    return step


def sums_of(model: nn.Module) -> Sums:
    """The function that computes the clipped sums of this model's batch."""
    return _one_output if isinstance(model, nn.Linear) else _mlp if isinstance(model, nn.Sequential) else _words


def _weights(norm2: Tensor) -> Tensor:
    return (CLIP_NORM / norm2.sqrt()).clamp(max=1)


def _surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of cross-entropy."""
    top = torch.softmax(logits, 1)
    top[torch.arange(len(targets)), targets] -= 1
    return top


def _mlp(parameters: Sequence[Tensor], totals: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> None:
    first, second, out, last = parameters
    hidden = torch.relu(F.linear(inputs, first, second))
    top = _surprise(F.linear(hidden, out, last), targets)
    below = torch.ops.aten.threshold_backward(top @ out, hidden, 0)
    weight = _weights(squares(below) * (squares(inputs) + 1) + squares(top) * (squares(hidden) + 1))
    (low, low_sum), (high, high_sum) = scaled(below, weight), scaled(top, weight)
    torch.mm(low.mT, inputs, out=totals[0])
    torch.mm(high.mT, hidden, out=totals[2])
    totals[1].copy_(low_sum)
    totals[3].copy_(high_sum)


def _words(parameters: Sequence[Tensor], totals: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> None:
    table, out, last = parameters
    length = inputs.shape[1]
    mean = F.embedding(inputs, table).mean(1)
    top = _surprise(F.linear(mean, out, last), targets)
    below = (top @ out) / length  # the gradient of each word of a text
    ordered = inputs.sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]).sum(1) * 2 + length  # Σ of squared counts up to two
    weight = _weights(squares(below) * again + squares(top) * (squares(mean) + 1))
    rows, shares = scaled(below, weight)[0], scaled(top, weight)
    totals[0].zero_().index_add_(0, inputs.flatten(), rows.repeat_interleave(length, 0))
    torch.mm(shares[0].mT, mean, out=totals[1])
    totals[2].copy_(shares[1])


def _one_output(parameters: Sequence[Tensor], totals: Sequence[Tensor], inputs: Tensor, targets: Tensor) -> None:
    logits, norm2 = _with_squares(inputs, *parameters)
    top = logits.sigmoid_().sub_(targets[:, None])
    rows, shift = scaled(top, _weights(squares(top) * (norm2 + 1)))
    torch.mm(rows.mT, inputs, out=totals[0])
    totals[1].copy_(shift)
