"""Models that nobody here wrote: built from their configurations without weights, offline, in float64."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.gradients import ClippedSum, Rows, brute_force, clipped_sum

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

Loss = Callable[[Any, Tensor], Tensor]


def _declare_torchvision_operators() -> torch.library.Library | None:
    """timm imports torchvision, whose compiled operators do not load on a CPU build of torch.

    Declaring the two operators that its import looks up is enough for timm's models, which use none of them.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library
    return None


_OPERATORS = _declare_torchvision_operators()  # the declaration lives as long as this object


@pytest.fixture(autouse=True)
def _one_seed_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def awaken(model: nn.Module) -> nn.Module:
    """Double precision, training mode, and no parameter at a value that hides its gradient.

    LayerScale starts near 0, LoRA's B at 0: an engine that forgot what stands behind them would still agree
    with the loop.
    """
    model = model.double().train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


def assert_agree(model: nn.Module, loss: Loss, rows: Rows, *, tolerance: float = 1e-8) -> ClippedSum:
    """The engine equals the loop over records: norms, clipped sums, losses, names; and it leaves no trace.

    The clip norm is the middle record's norm: one record is scaled down, another is not.
    """
    norms = clipped_sum(model, loss, rows, FlatClip(1.0)).norms
    assert norms.isfinite().all()
    assert (norms > 0).all()
    clipping = FlatClip(float(norms.median()))
    oracle = brute_force(model, loss, rows, clipping)
    ours = clipped_sum(model, loss, rows, clipping)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(ours.sums) == trainable == set(oracle.sums)
    scale = max(float(v.abs().max()) for v in oracle.sums.values())
    off = {n: float((ours.sums[n] - v).abs().max()) / scale for n, v in oracle.sums.items()}
    wrong = {n: f"{d:.1e}" for n, d in off.items() if not d <= tolerance}
    assert not wrong, f"sums differ from the loop: {wrong}"
    torch.testing.assert_close(ours.norms, oracle.norms, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours.losses, oracle.losses, rtol=tolerance, atol=tolerance)
    assert ours.dropped == 0
    assert_untouched(model)
    return ours


def assert_untouched(model: nn.Module) -> None:
    """No hook, no gradient and no attribute stays behind."""
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert not getattr(module, kind), f"{kind} left on {name}"
    for name, parameter in model.named_parameters():
        assert parameter.grad is None, f"{name} has a gradient"
        assert not vars(parameter), f"attributes left on {name}: {vars(parameter)}"


@pytest.fixture
def agree() -> Callable[..., ClippedSum]:
    return assert_agree


@pytest.fixture(name="awaken")
def _awaken() -> Callable[[nn.Module], nn.Module]:
    return awaken


@pytest.fixture
def untouched() -> Callable[[nn.Module], None]:
    return assert_untouched
