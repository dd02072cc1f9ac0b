"""Models that call autograd themselves: gradient penalties and forces, implicit layers, reversible functions.

Each would have a gradient that never arrives at a use, or arrives twice. `early` and `one_pass` check the gradients
that arrive, `Aside` what is left in .grad. A hook or a custom backward that differentiates something other than the
uses (the solver of an implicit layer, with the parameters as constants) is allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from sordino.errors import Refused
from sordino.gradients.tape.slots import Use


def early(use: Use, gradient: Tensor) -> None:
    """Replaces ``arrived`` during the forward pass."""
    raise Refused(
        f"{use.label}: the forward pass itself calls autograd here (torch.autograd.grad or .backward(): a gradient "
        "penalty, forces, an implicit layer), and a record's part of such a derivative can't be determined; compute "
        "it with torch.func instead, of a function of one row: torch.vmap(torch.func.grad(function))(rows)"
    )


def one_pass(arrived: Callable[[Use, Tensor], None]) -> Callable[[Use, Tensor], None]:
    """Wraps ``arrived``; raises Refused if another backward pass than the engine's own delivers a gradient to a use."""
    seen: list[int] = []

    def watched(use: Use, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if not seen:
            seen.append(task)
        elif task != seen[0]:
            raise Refused(
                f"{use.label}: a hook or a custom autograd.Function calls autograd during the backward pass (an "
                "implicit layer, a reversible function), through operations of the forward pass; build what it "
                "differentiates inside the hook, with the parameters detached, or write the layer in plain PyTorch"
            )
        arrived(use, gradient)

    return watched


def trained_in_a_pass(name: str) -> Refused:
    return Refused(
        f"{name}: the forward pass freezes or unfreezes this parameter (requires_grad), so which parameters are "
        "trained could depend on the records; do it before training"
    )


class Aside:
    """Sets the parameters' .grad aside for a pass and restores it afterwards.

    Refused if the pass left a gradient there: a custom autograd.Function called .backward() (a reversible function).
    That gradient has no noise; it is removed.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.kept: list[tuple[nn.Parameter, Tensor]] = []

    def __enter__(self) -> None:
        self.kept = [(p, p.grad) for p in self.parameters.values() if p.grad is not None]
        for parameter, _ in self.kept:
            parameter.grad = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = [name for name, p in self.parameters.items() if p.grad is not None]
        for name in left:
            self.parameters[name].grad = None
        for parameter, gradient in self.kept:
            parameter.grad = gradient
        if left and error is None:
            raise Refused(
                f"{', '.join(left)}: the model calls .backward() inside a custom autograd.Function (a reversible "
                "function, a checkpoint of its own), which leaves gradients without noise in .grad; they were removed. "
                "Write that function in plain PyTorch, or freeze these parameters"
            )
