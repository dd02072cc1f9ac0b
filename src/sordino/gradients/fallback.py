"""Any other operation of a parameter with data: the vector-Jacobian product of that operation alone, per record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.contributions import Contribution, Dense
from sordino.gradients.layout import Axis, Frame, Whole
from sordino.gradients.tape import Slot, Tape, Use, _flat, hold, replace


class Call:
    """One call, as a function of its slots (differentiated) and its data (cut by rows)."""

    def __init__(self, tape: Tape, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        flat = list(_flat((args, kwargs)))
        self.slots = {id(t): s for t in flat if (s := tape.slot(t)) is not None}
        self.data = {id(t): t for t in flat if tape.is_data(t)}
        self.state = torch.random.get_rng_state()
        self.held = hold(*self.data.values())

    def run(self, slots: dict[int, Tensor], data: dict[int, Tensor]) -> list[Tensor]:
        swap: Callable[[Tensor], Tensor] = lambda t: slots.get(id(t), data.get(id(t), t))  # noqa: E731
        with torch.enable_grad():
            out = self.func(*replace(self.args, swap), **replace(self.kwargs, swap))
        return [t for t in _flat((out,)) if t.is_floating_point()]

    def vjp(self, position: int, gradient: Tensor, data: dict[int, Tensor]) -> dict[int, Tensor]:
        """The gradient of each slot, with the random numbers of the forward pass."""
        leaves = {key: s.value.detach().requires_grad_() for key, s in self.slots.items()}
        with torch.random.fork_rng(devices=[]):
            torch.random.set_rng_state(self.state)
            out = self.run(leaves, data)[position]
        found = torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True)
        return {
            k: torch.zeros_like(leaf) if g is None else g for (k, leaf), g in zip(leaves.items(), found, strict=True)
        }


def general(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = Call(tape, func, args, kwargs)
    out = func(*tape.values(args), **tape.values(kwargs))
    if isinstance(out, Tensor):
        return _tapped(tape, call, out, 0)
    position, results = 0, []
    for t in out:
        if isinstance(t, Tensor) and t.is_floating_point():
            t = _tapped(tape, call, t, position)
            position += 1
        results.append(t)
    tape.mark(results)
    rebuilt = type(out)(*results) if hasattr(out, "_fields") else type(out)(results)
    return rebuilt


def _tapped(tape: Tape, call: Call, output: Tensor, position: int) -> Tensor:
    if not output.is_floating_point():
        return tape.mark(output)  # type: ignore[no-any-return]
    slots = tuple(call.slots.values())

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        found = per_record(call, position, gradient.detach(), frame)
        return [(call.slots[key], Dense(g)) for key, g in found.items()]

    lead = tuple(range(output.ndim))
    return tape.tap(output, Use(call.func, slots, output.shape, lead, emit, call.held))


def per_record(call: Call, position: int, gradient: Tensor, frame: Frame) -> dict[int, Tensor]:
    """{slot: (records, *shape)}, rows in parallel where the operation allows it, else record by record."""
    data = {key: t.detach() for key, t in call.data.items()}
    if isinstance(frame.layout, Whole):
        return {key: g[None] for key, g in call.vjp(position, gradient, data).items()}
    fast = _vectorised(call, position, gradient, frame, data)
    if fast is not None:
        return fast
    owner = frame.owner(gradient.shape)
    parts = [call.vjp(position, torch.where(owner == i, gradient, 0), data) for i in range(frame.records)]
    return {key: torch.stack([p[key] for p in parts]) for key in call.slots}


def _vectorised(
    call: Call, position: int, gradient: Tensor, frame: Frame, data: dict[int, Tensor]
) -> dict[int, Tensor] | None:
    """vmap over rows; None when rows can't be told in some argument, or when the sum over rows is not the whole."""
    layout = frame.layout
    if not isinstance(layout, Axis) or layout.block != 1 or frame.rows == 1:
        return None
    dims: dict[int, int | None] = {}
    for key, t in data.items():
        hits = [d for d in range(t.ndim) if t.shape[d] == frame.rows]
        if len(hits) > 1:
            return None
        dims[key] = hits[0] if hits else None
    values = {key: s.value.detach() for key, s in call.slots.items()}

    def one(row: dict[int, Tensor], g: Tensor) -> dict[int, Tensor]:
        single = {k: t if (d := dims[k]) is None else t.unsqueeze(d) for k, t in row.items()}
        pull = torch.func.vjp(lambda leaves: call.run(leaves, single)[position], values)[1]
        return pull(g.unsqueeze(layout.dim))[0]  # type: ignore[no-any-return]

    try:
        rows = torch.func.vmap(one, in_dims=(dims, layout.dim))(data, gradient)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    whole = call.vjp(position, gradient, data)
    for key, g in rows.items():
        size = float(whole[key].nan_to_num(0, 0, 0).abs().amax()) if g.numel() else 0.0
        if not torch.allclose(g.sum(0), whole[key], rtol=1e-3, atol=1e-3 * size, equal_nan=True):
            return None
    by_row = Frame(Axis(0), frame.rows, frame.records, frame.slots, frame.ragged)
    return {key: by_row.fold(g, g.ndim - 1, gradient=True).sum(1) for key, g in rows.items()}
