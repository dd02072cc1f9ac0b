"""What the engine's tests share: a loss with one value per row, comparison with the oracle, small modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sordino.clipping import Clipping, FlatClip
from sordino.gradients import ClippedSum, Rows, brute_force, clipped_sum

ROWS = 5
RECORD = torch.tensor([0, 1, 1, 3, 0])  # record 2 has no rows; the others one or two


class Fn(nn.Module):
    """A module out of a function and its own parameters or children."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


def squared(outputs: Any, targets: Tensor) -> Tensor:
    """(a fixed random projection of the row's outputs − target)²; outputs may be a tuple, whose first counts."""
    out = outputs if isinstance(outputs, Tensor) else outputs[0]
    flat = out.flatten(1)
    weights = torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return (flat @ weights.to(flat.dtype) - targets) ** 2


def agree(engine: ClippedSum, oracle: ClippedSum, tolerance: float = 1e-9) -> None:
    scale = max(float(s.abs().max()) for s in oracle.sums.values() if s.numel())
    assert scale > 0
    assert set(engine.sums) == set(oracle.sums)
    for name, want in oracle.sums.items():
        assert bool(((engine.sums[name] - want).abs() <= tolerance * scale).all()), name
    assert torch.allclose(engine.norms, oracle.norms, rtol=tolerance, atol=tolerance * float(oracle.norms.max()))
    assert torch.allclose(engine.losses, oracle.losses.to(engine.losses.dtype), rtol=1e-5, atol=1e-5)
    assert engine.dropped == oracle.dropped


def matches(
    model: nn.Module, inputs: Any, *, clipping: Clipping | None = None, rows: int = ROWS, **options: Any
) -> None:
    """Norms and sums equal brute force in float64: with a record per row, and with records of several rows."""
    model = model.double()
    targets = torch.randn(rows, dtype=torch.float64)
    record = RECORD if rows == ROWS else torch.arange(rows) // 2
    for data in (Rows(inputs, targets), Rows(inputs, targets, record)):
        for clip in (clipping,) if clipping else (FlatClip(1.0),):
            engine = clipped_sum(model, squared, data, clip, **options)
            options_of_oracle = {k: v for k, v in options.items() if k != "chunk"}
            agree(engine, brute_force(model, squared, data, clip, **options_of_oracle))


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)
