"""What the points share: how one is named, and how a model is tried with whichever package is imported.

They use names alone that the package of 2026-11-16 has too: Plan, train, record_gradients, private_steps, clipped_sum,
Rows, FlatClip, verify, Ledger, LogicalBatch. What a record contributes is told by a loop of plain autograd (`loop`).
"""

from __future__ import annotations

import copy
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import sordino
from sordino.sampling import LogicalBatch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

MOST = 1 + 2**-10
"""What one record may move a sum by, in clip norms: the bound, and the rounding that the noise covers."""
RECORDS = 32


@dataclass(frozen=True)
class Seen:
    """Whether the package is at fault, and what was seen."""

    wrong: bool
    text: str


@dataclass(frozen=True)
class Point:
    """One example of the issue: its line, its words there, the program, and today's tests of exactly this."""

    line: str
    example: str
    run: Callable[[], Seen]
    tests: tuple[str, ...]


POINTS: dict[str, Point] = {}


def point(line: str, example: str, *tests: str) -> Callable[[Callable[[], Seen]], Callable[[], Seen]]:
    def add(function: Callable[[], Seen]) -> Callable[[], Seen]:
        name = function.__name__
        assert name not in POINTS, name
        POINTS[name] = Point(line, example, function, tests)
        return function

    return add


def tried(name: str) -> Seen:
    """One point. An error of Python or torch that reaches the caller is a fault; so is what the point says."""
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return POINTS[name].run()
        except Exception as error:
            return Seen(True, f"{type(error).__name__}: {_short(error)}")


def _short(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0] if lines else ""
    return text if len(text) <= 140 else text[:137] + "..."


class Fn(nn.Module):
    """A module out of a function and its own parameters or children."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *args: Any) -> Any:
        return self._forward(self, *args)


_DECLARED: list[torch.library.Library] = []


def declare_torchvision() -> None:
    """transformers and timm import torchvision, whose compiled operators do not load on a CPU build of torch; none of
    the models here uses them, so it is enough to declare the two that the import looks up."""
    try:
        import_module("torchvision")
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        if not _DECLARED:
            _DECLARED.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
            for operator in ("nms", "qnms"):
                _DECLARED[0].define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")  # type: ignore[no-untyped-call]


ce = nn.functional.cross_entropy


def squared(outputs: Any, targets: Tensor) -> Tensor:
    """(a fixed projection of a row's outputs − its target)²."""
    flat = outputs.flatten(1)
    weights = torch.randn(flat.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found: Tensor = (flat @ weights.to(flat.dtype) - targets) ** 2
    return found


def layers(inputs: int = 8, hidden: int = 16, outputs: int = 3) -> dict[str, nn.Module]:
    return {"a": nn.Linear(inputs, hidden), "b": nn.Linear(hidden, outputs)}


def plain(s: Any, x: Tensor) -> Tensor:
    found: Tensor = s.b(torch.tanh(s.a(x)))
    return found


def data(*shape: int, records: int = RECORDS) -> tuple[Tensor, Tensor]:
    return torch.randn(records, *(shape or (8,))), torch.arange(records) % 3


def chosen(rows: Any, indices: Tensor) -> Any:
    if isinstance(rows, Tensor):
        return rows[indices]
    if isinstance(rows, dict):
        return {key: value[indices] for key, value in rows.items()}
    return tuple(chosen(value, indices) for value in rows)


def called(model: nn.Module, inputs: Any) -> Any:
    return (
        model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    )


def loop(model: nn.Module, loss: Any, inputs: Any, targets: Tensor, clip: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Each record alone, with plain autograd: the norms of its gradients, and the sum of the clipped ones."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(p) for name, p in named.items()}
    norms = []
    for i in range(len(targets)):
        one = torch.tensor([i])
        value = loss(called(model, chosen(inputs, one)), targets[one]).sum()
        found = torch.autograd.grad(value, list(named.values()), allow_unused=True)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in found if g is not None))
        norms.append(norm)
        for name, g in zip(named, found, strict=True):
            if g is not None:
                sums[name] += g * min(1.0, clip / max(norm, 1e-300))
    return torch.tensor(norms, dtype=torch.float64), sums


def flat(sums: dict[str, Tensor]) -> Tensor:
    return torch.cat([sums[name].detach().double().flatten() for name in sorted(sums)])


def against_loop(
    model: nn.Module, loss: Any, inputs: Any, targets: Tensor, *, tolerance: float = 1e-6, clip: float = 1.0
) -> Seen:
    """Norms and clipped sums against the loop; a refusal is no fault here (`accepted_and_right` says otherwise)."""
    truth, wanted = loop(copy.deepcopy(model), loss, inputs, targets, clip)
    try:
        found = sordino.clipped_sum(model, loss, sordino.Rows(inputs, targets), sordino.FlatClip(clip))
    except sordino.Refused as refusal:
        return Seen(False, f"refused: {_short(refusal)}")
    norms = float(((found.norms.double() - truth).abs() / truth.clamp(min=1e-12)).max())
    ours, theirs = flat(found.sums), flat(wanted)
    sums = float((ours - theirs).norm() / theirs.norm())
    nothing = [name for name in wanted if bool(wanted[name].any()) and not bool(found.sums[name].any())]
    wrong = not (norms <= tolerance and sums <= tolerance)
    zero = f"; nothing reaches {len(nothing)} of {len(wanted)} parameters" if nothing else ""
    return Seen(wrong, f"norms differ from a loop by {_share(norms)}, the sum by {_share(sums)}{zero}")


def _share(value: float) -> str:
    if value > 100:
        return "more than a hundredfold"
    return f"{100 * value:.0f} %" if value >= 0.01 else f"{value:.0e} of their size"


def accepted_and_right(model: nn.Module, loss: Any, inputs: Any, targets: Tensor, *, tolerance: float = 1e-6) -> Seen:
    """A sound model: it must be taken, by the check that training makes too, and have the loop's gradients."""
    try:
        sordino.verify(model, loss, sordino.Rows(inputs, targets), sordino.FlatClip(1.0))
    except sordino.Refused as refusal:
        return Seen(True, f"refused: {_short(refusal)}")
    seen = against_loop(model, loss, inputs, targets, tolerance=tolerance)
    return Seen(True, seen.text) if seen.text.startswith("refused") else seen


def plan(records: int = RECORDS, steps: int = 2, clip: float = 0.5, **options: Any) -> Any:
    given = {"noise_multiplier": 1.0, "delta": 1e-3, "expected_batch": records, "insecure_seed": 1, **options}
    return sordino.Plan.dpsgd(records=records, steps=steps, clip_norm=clip, **given)


def refusal(model: nn.Module, loss: Any, given: tuple[Any, Tensor], of: Any = None) -> str | None:
    """What `train` says when it refuses the model; None if it trains it."""
    try:
        sordino.train(model, loss, given, of or plan(len(given[1])), lr=0.1)
    except sordino.Refused as said:
        return _short(said)
    return None


def accepted(model: nn.Module, loss: Any, given: tuple[Any, Tensor], times: int = 1) -> Seen:
    """A sound model, by `train`: it must be trained."""
    said = [refusal(copy.deepcopy(model), loss, given) for _ in range(times)]
    words = [text for text in said if text is not None]
    often = f" {len(words)} of {times} times" if times > 1 else ""
    return Seen(bool(words), f"refused{often}: {words[0]}" if words else "trained")


def summed(model: nn.Module, loss: Any, given: tuple[Any, Tensor], indices: Tensor, clip: float) -> Tensor:
    torch.manual_seed(1)
    sums = sordino.record_gradients(copy.deepcopy(model), loss, given, sordino.FlatClip(clip))
    return flat(sums(LogicalBatch(0, indices, 4096)).sums)


def moved(
    model: nn.Module, loss: Any, given: tuple[Any, Tensor], clip: float = 0.5, which: Iterable[int] | None = None
) -> float:
    """The most that the sum moves, in clip norms, when one of the records (or one of `which`) is removed."""
    n = len(given[1])
    whole = summed(model, loss, given, torch.arange(n), clip)
    left = ([k for k in range(n) if k != i] for i in (range(n) if which is None else which))
    rest = (summed(model, loss, given, torch.tensor(indices), clip) for indices in left)
    return max(float((whole - other).norm()) / clip for other in rest)


def replaced(model: nn.Module, loss: Any, given: tuple[Any, Tensor], other: Tensor, clip: float = 0.5) -> float:
    """The same, half, when the last record is another and all random numbers are the same."""
    n = len(given[1])
    inputs = given[0].clone()
    inputs[-1] = other
    both = [summed(model, loss, (x, given[1]), torch.arange(n), clip) for x in (given[0], inputs)]
    return float((both[0] - both[1]).norm()) / clip / 2


def interacting(
    model: nn.Module, loss: Any, given: tuple[Any, Tensor], clip: float = 0.5, *, by: Callable[[], float] | None = None
) -> Seen:
    """Records that interact: `train` must refuse them, and so must an own loop over `record_gradients`."""
    said = refusal(copy.deepcopy(model), loss, given, plan(len(given[1]), clip=clip))
    try:
        most = by() if by is not None else moved(model, loss, given, clip)
    except sordino.Refused as other:
        return Seen(said is None, f"refused: {_short(other)}" + ("" if said else "; train takes it"))
    taken = "train takes it" if said is None else f"train refuses it ({said})"
    return Seen(most > MOST, f"{taken}; one record moves the sum by {most:.2f} clip norms")
