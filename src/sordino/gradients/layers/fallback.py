"""Any other operation on a parameter and data: the vector-Jacobian product of that operation, per record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.labels.flow import flat, replace
from sordino.gradients.labels.lineage import Axis, Lineage
from sordino.gradients.labels.vocabulary import writes
from sordino.gradients.sums.contributions import Contribution, Dense
from sordino.gradients.sums.memory import address
from sordino.gradients.tape.layout import Frame, Whole
from sordino.gradients.tape.slots import Slot, Use, hold
from sordino.gradients.tape.tape import Tape


class Call:
    """One call, as a function of its slots (differentiated) and its data (indexed by rows)."""

    def __init__(self, tape: Tape, func: Any, args: Any, kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        found = flat((args, kwargs))
        self.slots = {id(t): s for t in found if (s := tape.slot(t)) is not None}
        self.data = {id(t): t for t in found if tape.is_data(t)}
        self.labels: dict[int, Lineage | None] = {key: tape.lineage(t) for key, t in self.data.items()}
        self.state = torch.random.get_rng_state()
        self.writes = writes(func) and bool(args) and id(args[0]) in self.data
        self.held = hold(*(t for t in self.data.values() if not self.writes or t is not args[0]))
        if self.writes:
            self.data[id(args[0])] = args[0].detach().clone()

    def run(self, slots: dict[int, Tensor], data: dict[int, Tensor]) -> list[Tensor]:
        swap: Callable[[Tensor], Tensor] = lambda t: slots.get(id(t), data.get(id(t), t))  # noqa: E731
        args = replace(self.args, swap)
        with torch.enable_grad():
            args = (args[0].clone(), *args[1:]) if self.writes else args
            out = self.func(*args, **replace(self.kwargs, swap))
        return [t for t in flat(out) if differentiable(t)]

    def vjp(self, position: int, gradient: Tensor, data: dict[int, Tensor]) -> dict[int, Tensor]:
        """The gradient of each slot, computed with the random numbers of the forward pass."""
        leaves = {key: s.value.detach().requires_grad_() for key, s in self.slots.items()}
        with torch.random.fork_rng(devices=[]):
            torch.random.set_rng_state(self.state)
            out = self.run(leaves, data)[position]
        found: Sequence[Tensor | None] = [None] * len(leaves)
        if out.requires_grad:  # not so if another result is made of the slots (torch.broadcast_tensors(x, w)[0])
            found = torch.autograd.grad(out, list(leaves.values()), gradient, allow_unused=True)
        return {
            k: torch.zeros_like(leaf) if g is None else g for (k, leaf), g in zip(leaves.items(), found, strict=True)
        }


def differentiable(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def general(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    call = Call(tape, func, args, kwargs)
    if (
        call.writes and func is not Tensor.__setitem__
    ):  # the tap is on a copy, which every holder of the tensor also has
        fresh = func(args[0].clone(), *tape.values(args[1:]), **tape.values(kwargs))
        return args[0].copy_(_tapped(tape, call, fresh, 0))
    out = func(*tape.values(args), **tape.values(kwargs))
    if isinstance(out, Tensor):
        return _tapped(tape, call, out, 0)
    position, results = 0, []
    for t in out:
        if isinstance(t, Tensor) and differentiable(t):
            t = _tapped(tape, call, t, position)
            position += 1
        results.append(t)
    rebuilt = type(out)(*results) if hasattr(out, "_fields") else type(out)(results)
    return rebuilt


def _tapped(tape: Tape, call: Call, output: Tensor, position: int) -> Tensor:
    if not differentiable(output) or not output.numel():
        return output
    slots = tuple(call.slots.values())
    place = address(output)
    if place and place in map(address, (*(s.value for s in slots), *call.data.values())):
        output = output.clone()  # a view of a parameter, or of data: a tap counts as a write to it

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        found = per_record(call, position, gradient.detach(), frame)
        return [(call.slots[key], Dense(g)) for key, g in found.items()]

    lead = tuple(range(output.ndim))
    return tape.tap(output, Use(call.func, slots, output.shape, lead, emit, call.held))


Found = dict[int, Tensor]  # by slot
Dims = dict[int, int | None]  # which dimension of an argument contains the rows; None: all rows share it
OUTPUT = 0  # the key of the output among the arguments' ids


def per_record(call: Call, position: int, gradient: Tensor, frame: Frame) -> Found:
    """{slot: (records, *shape)}: over all rows in parallel; otherwise with each record's rows separately, if that gives
    the same sum as the whole call; otherwise the whole call once per record, with the other records' gradients set to
    zero.

    A record that is not finite spoils only its own gradient. In the third case 0 · NaN would spread it, so non-finite
    data is replaced by zero there, and the call is refused if a product inside it overflows: records that
    were dropped together with another one would change the sum by more than one record's bound.
    """
    data = {key: t.detach() for key, t in call.data.items()}
    if isinstance(frame.layout, Whole):
        return {key: g[None] for key, g in call.vjp(position, gradient, data).items()}
    shown, sent = data, gradient
    whole = call.vjp(position, gradient, data)
    if not all(_finite(t) for t in (gradient, *data.values(), *whole.values())):
        shown, sent = {key: _made_up(t) for key, t in data.items()}, _made_up(gradient)
        whole = call.vjp(position, sent, shown)  # NaN would not add up: choose the method on other numbers
    dims = _row_dims(call, frame)
    if dims is not None:
        for attempt in (_vectorised, _alone):
            found = attempt(call, position, sent, frame, shown, dims)
            if found is not None and all(_adds_up(g, whole[key]) for key, g in found.items()):
                again = found if shown is data else attempt(call, position, gradient, frame, data, dims)
                if again is not None:
                    return again
    return _one_by_one(call, position, gradient, frame, data)


def _one_by_one(call: Call, position: int, gradient: Tensor, frame: Frame, data: Found) -> Found:
    owner, clean = frame.owner(gradient.shape).to(gradient.device), {key: _numbers(t) for key, t in data.items()}
    parts = [call.vjp(position, torch.where(owner == i, gradient, 0), clean) for i in range(frame.records)]
    found = {key: torch.stack([p[key] for p in parts]) for key in call.slots}
    own = torch.zeros(frame.records, dtype=torch.bool, device=gradient.device)
    own[owner.expand_as(gradient)[~torch.isfinite(gradient)].clamp_min(0)] = True
    if not all(_finite(g[~own]) for g in found.values()):
        raise Refused(
            f"{getattr(call.func, '__name__', call.func)}: a value overflows in an operation whose rows sordino can't "
            "separate, and would spoil other records; nothing was released. Write the operation so that rows "
            "are one dimension of its inputs, or choose a batch size that equals no dimension of the data"
        )
    return found


def _finite(t: Tensor) -> bool:
    return not differentiable(t) or bool(torch.isfinite(t).all())


def _numbers(t: Tensor) -> Tensor:
    return torch.where(torch.isfinite(t), t, 0) if differentiable(t) else t


def _made_up(t: Tensor) -> Tensor:
    """Other numbers of the same shape; indices are kept."""
    if not differentiable(t):
        return t
    kind = torch.complex64 if t.is_complex() else torch.float32
    source = torch.Generator().manual_seed(t.numel())
    return torch.randn(t.shape, generator=source, dtype=kind).to(t.device, t.dtype)


def _row_dims(call: Call, frame: Frame) -> Dims | None:
    """The dimension of the rows in every argument, by its label; None if the rows are not one dimension."""
    if not isinstance(frame.layout, Axis) or frame.layout != Axis(frame.layout.dim):
        return None
    found: Dims = {OUTPUT: frame.layout.dim}
    for key, label in call.labels.items():
        if not isinstance(label, Axis) or label != Axis(label.dim):
            return None
        found[key] = label.dim
    return found


def _adds_up(found: Tensor, whole: Tensor) -> bool:
    size = float(_numbers(whole).abs().amax()) if whole.numel() else 0.0
    return torch.allclose(found.sum(0), whole, rtol=1e-3, atol=1e-3 * size, equal_nan=True)


def _vectorised(call: Call, position: int, gradient: Tensor, frame: Frame, data: Found, dims: Dims) -> Found | None:
    """vmap over rows; None if the operation does not support it."""
    values = {key: s.value.detach() for key, s in call.slots.items()}

    def one(row: Found) -> Found:
        single = {k: t if (d := dims[k]) is None else t.unsqueeze(d) for k, t in row.items()}
        g = single.pop(OUTPUT)
        pull = torch.func.vjp(lambda leaves: call.run(leaves, single)[position], values)[1]
        return pull(g)[0]  # type: ignore[no-any-return]

    try:
        rows = torch.func.vmap(one, in_dims=(dims,))({OUTPUT: gradient, **data})
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    by_row = Frame(Axis(0), frame.rows, frame.records, frame.slots, frame.ragged)
    return {key: by_row.fold(g, g.ndim - 1, gradient=True).sum(1) for key, g in rows.items()}


def _alone(call: Call, position: int, gradient: Tensor, frame: Frame, data: Found, dims: Dims) -> Found | None:
    """The call on one record's rows after the other; None if it does not run on fewer rows."""
    rows = torch.arange(frame.rows)[:, None] if frame.slots is None else frame.slots
    parts = []
    try:
        for own in rows:
            own = own[own >= 0]
            mine = {
                key: t if (d := dims[key]) is None else t.index_select(d, own)
                for key, t in {OUTPUT: gradient, **data}.items()
            }
            parts.append(call.vjp(position, mine.pop(OUTPUT), mine))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    return {key: torch.stack([p[key] for p in parts]) for key in call.slots}
