"""nn.LSTM, nn.GRU, nn.RNN and their cells, and the GRU with standardised projections.

The input projection of all steps is one linear map x → (T, B, gates); the recurrence runs in our own autograd function,
whose backward returns the gradient δ of the gates at every step. The weight gradients are then those of two
linear maps over T positions: ∂W_ih = Σ_t δ_t ⊗ x_t and ∂W_hh = Σ_t δ_t ⊗ h_{t−1}.
Packed sequences and projected LSTMs are unrolled into steps that the tape intercepts one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.labels.lineage import MANY, Many, covers, owners, permuted, simplest
from sordino.gradients.layers.gru import GRU
from sordino.gradients.layers.linear import bias_gradient
from sordino.gradients.layers.lstm import LSTM, before
from sordino.gradients.layers.mapped import mapped
from sordino.gradients.sums.contributions import Contribution, outer
from sordino.gradients.tape.layout import Frame
from sordino.gradients.tape.slots import Slot, Use, hold
from sordino.gradients.tape.tape import Tape


class _RNN(torch.autograd.Function):
    """h = tanh or relu of xp_t + h W_hhᵀ."""

    @staticmethod
    def forward(ctx: Any, xp: Tensor, h0: Tensor, w_hh: Tensor, relu: bool) -> tuple[Tensor, Tensor]:
        out, h, w = xp.new_empty(*xp.shape[:2], w_hh.shape[1]), h0, w_hh.t()
        for t in range(xp.shape[0]):
            h = torch.addmm(xp[t], h, w, out=out[t])
            h.relu_() if relu else h.tanh_()
        ctx.save_for_backward(out, w_hh)
        ctx.relu = relu
        return out, out[-1].clone()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_h: Tensor) -> tuple[Tensor, Tensor, None, None]:
        out, w_hh = ctx.saved_tensors
        delta = (out > 0).to(out.dtype) if ctx.relu else 1 - out * out
        dh = d_h + d_out[-1]
        for t in range(out.shape[0] - 1, -1, -1):
            delta[t].mul_(dh)
            dh = torch.addmm(d_out[t - 1], delta[t], w_hh) if t else delta[t] @ w_hh
        return delta, dh, None, None


# one layer, one direction, time first: (tape, x (T, B, d), h0 (B, H), c0, weights) → (out, h, c)
State = tuple[Tensor, ...]
Step = Callable[[Tensor, State, Sequence[Any]], State]
OneWay = Callable[[Tape, Any, Tensor, State, Sequence[Any]], tuple[Tensor, State]]
Layer = Callable[[Tape, Any, Tensor, State, Sequence[Any], bool], tuple[Tensor, State]]  # the last: in reverse


def _emit(x: Tensor | None, previous: Callable[[], Tensor] | None, slots: Sequence[Slot | None]) -> Any:
    """Outer products with the input and with the previous hidden state. slots: w_ih, w_hh, b_ih, b_hh."""

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        g = frame.fold(gradient, 1, gradient=True)
        out: list[tuple[Slot, Contribution]] = []
        if slots[0] is not None and x is not None:
            out.append((slots[0], outer(g, frame.fold(x.detach(), 1))))
        if slots[1] is not None and previous is not None:
            out.append((slots[1], outer(g, frame.fold(previous(), 1))))
        out.extend((s, bias_gradient(g)) for s in slots[2:] if s is not None)
        return out

    return emit


def _project(
    tape: Tape, func: Any, x: Tensor, weights: Sequence[Any], both: bool, hidden: Callable[[], Tensor]
) -> Tensor:
    """x W_ihᵀ + b_ih (+ b_hh), tapped; with ``both`` the same gradient is also used for W_hh and b_hh."""
    label = tape.joined([x], x.shape)
    w_ih, w_hh, *biases = weights
    slots = [tape.slot(w) for w in (w_ih, w_hh, *biases)] + [None] * (2 - len(biases))
    bias = None
    if biases:
        bias = tape.value(biases[0]) + tape.value(biases[1]) if both else tape.value(biases[0])
    output = mapped(x, tape.value(w_ih), bias)
    output = F.linear(x, tape.value(w_ih), bias) if output is None else output
    wanted = slots if both else [slots[0], None, slots[2], None]
    present = tuple(s for s in wanted if s is not None)
    emit = _emit(x, hidden if both else None, wanted)
    return tape.tap(output, Use(func, present, output.shape, (0, 1), emit, hold(x)), label)


def _both_ways(layer: OneWay) -> Layer:
    def run(
        tape: Tape, func: Any, x: Tensor, state: State, weights: Sequence[Any], reverse: bool
    ) -> tuple[Tensor, State]:
        if not reverse:
            return layer(tape, func, x, state, weights)
        out, end = layer(tape, func, tape.mark(x.flip(0), tape.joined([x], x.shape)), state, weights)
        return out.flip(0), end

    return run


def _lstm_layer(
    tape: Tape, func: Any, x: Tensor, state: State, weights: Sequence[Any], reverse: bool
) -> tuple[Tensor, State]:
    h0, c0 = state
    kept: list[Tensor] = []
    xp = _project(tape, func, x, weights, True, lambda: before(kept[0], h0.detach(), reverse))
    out, h, c = LSTM.apply(xp, h0, c0, tape.value(weights[1]), reverse)  # type: ignore[no-untyped-call]
    kept.append(out.detach())
    return out, (h, c)


def _gru_layer(
    tape: Tape, func: Any, x: Tensor, state: State, weights: Sequence[Any], eps: float | None = None
) -> tuple[Tensor, State]:
    """eps: both projections are standardised over their coordinates."""
    (h0,) = state
    kept: list[Tensor] = []
    xp = _project(tape, func, x, weights, False, lambda: x)
    slots = [None, tape.slot(weights[1]), None, tape.slot(weights[3]) if len(weights) > 2 else None]
    present = tuple(s for s in slots if s is not None)
    emit = _emit(None, lambda: torch.cat((h0.detach()[None], kept[0][:-1])), slots)
    use = Use(func, present, xp.shape, (0, 1), emit)
    carrier = tape.carrier(xp, xp.shape, use, tape.joined([x], x.shape))
    bias = tape.value(weights[3]) if len(weights) > 2 else None
    gates = xp if eps is None else F.layer_norm(xp, xp.shape[2:], eps=eps)
    out, h = GRU.apply(gates, carrier, h0, tape.value(weights[1]), bias, eps)  # type: ignore[no-untyped-call]
    kept.append(out.detach())
    return out, (h,)


def _rnn_layer(relu: bool) -> OneWay:
    def layer(tape: Tape, func: Any, x: Tensor, state: State, weights: Sequence[Any]) -> tuple[Tensor, State]:
        (h0,) = state
        kept: list[Tensor] = []
        xp = _project(tape, func, x, weights, True, lambda: torch.cat((h0.detach()[None], kept[0][:-1])))
        out, h = _RNN.apply(xp, h0, tape.value(weights[1]), relu)  # type: ignore[no-untyped-call]
        kept.append(out.detach())
        return out, (h,)

    return layer


def _stack(tape: Tape, func: Any, args: Any, layer: Layer, states: int, step: Any) -> Any:
    """All layers and directions, as torch orders their weights."""
    if isinstance(args[3], (list, tuple)):
        return _unrolled(tape, func, args, states, step)
    x, hx, flat, has_biases, layers, dropout, training, bidirectional, batch_first = args
    start = tuple(hx) if states > 1 else (hx,)
    per = len(flat) // (layers * (2 if bidirectional else 1))
    if tape.slot(x) is not None or any(tape.slot(h) is not None for h in start):
        return NotImplemented
    if per != (4 if has_biases else 2):  # projected LSTM
        return _unrolled(tape, func, args, states, step)
    label = tape.joined([x], x.shape)
    if batch_first:
        x, label = x.transpose(0, 1), label if isinstance(label, Many) else permuted(label, (1, 0, 2))
    x, start = x.to(flat[0].dtype), tuple(s.to(flat[0].dtype) for s in start)
    if tape.rows > 1 and not covers(label, (1,)):
        label = MANY  # rows along time, or in the features
    ends: list[State] = []
    for number in range(layers):
        outs = []
        for direction in range(2 if bidirectional else 1):
            at = number * (2 if bidirectional else 1) + direction
            state = tuple(s[at] for s in start)
            part = flat[at * per : (at + 1) * per]
            out, end = layer(tape, func, tape.mark(x, label), state, part, bool(direction))
            outs.append(out)
            ends.append(end)
        x = torch.cat(outs, -1) if len(outs) > 1 else outs[0]
        if dropout and training and number < layers - 1:
            x = F.dropout(x, dropout, True)
    x = x.transpose(0, 1) if batch_first else x
    return x, *(torch.stack([e[k] for e in ends]) for k in range(states))


def _full(tape: Tape, func: Any, args: Any, kwargs: Any, layer: Layer, states: int, step: Step) -> Any:
    if kwargs:
        return NotImplemented
    with torch.autocast(args[0].device.type, enabled=False):  # the recurrence runs in the weights' precision
        return _stack(tape, func, args, layer, states, step)


def lstm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    return _full(tape, func, args, kwargs, _lstm_layer, 2, _lstm_step)


def gru(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    return _full(tape, func, args, kwargs, _both_ways(_gru_layer), 1, _gru_step)


def standardised(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """standardised_gru: batch first, one layer, one direction, zero initial state."""
    x, *weights, eps = args
    if kwargs or tape.slot(x) is not None:
        return NotImplemented
    with torch.autocast(x.device.type, enabled=False):
        start = x.new_zeros(len(x), weights[1].shape[1], dtype=weights[0].dtype)
        label = tape.joined([x], x.shape)
        label = label if isinstance(label, Many) else permuted(label, (1, 0, 2))
        time_first = tape.mark(x.to(weights[0].dtype).transpose(0, 1), label)
        out, (h,) = _gru_layer(tape, func, time_first, (start,), weights, eps)
        return out.transpose(0, 1), h


def rnn_tanh(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    return _full(tape, func, args, kwargs, _both_ways(_rnn_layer(False)), 1, _rnn_step(torch.tanh))


def rnn_relu(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    return _full(tape, func, args, kwargs, _both_ways(_rnn_layer(True)), 1, _rnn_step(torch.relu))


# step by step, intercepted by the tape


def _lstm_step(xp: Tensor, state: State, weights: Sequence[Any]) -> State:
    h, c = state
    gates = xp + F.linear(h, weights[1], weights[3] if len(weights) > 3 else None)
    i, f, g, o = gates.chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return (F.linear(h, weights[-1]) if len(weights) in (3, 5) else h), c


def _gru_step(xp: Tensor, state: State, weights: Sequence[Any]) -> State:
    (h,) = state
    hp = F.linear(h, weights[1], weights[3] if len(weights) > 3 else None)
    (xr, xz, xn), (hr, hz, hn) = xp.chunk(3, -1), hp.chunk(3, -1)
    z = torch.sigmoid(xz + hz)
    n = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return ((1 - z) * n + z * h,)


def _rnn_step(act: Callable[[Tensor], Tensor]) -> Step:
    def step(xp: Tensor, state: State, weights: Sequence[Any]) -> State:
        return (act(xp + F.linear(state[0], weights[1], weights[3] if len(weights) > 3 else None)),)

    return step


def _unrolled(tape: Tape, func: Any, args: Any, states: int, step: Step) -> Any:
    """Packed sequences (x, batch_sizes, hx, weights, …) and projections, one step at a time."""
    packed = isinstance(args[3], (list, tuple))
    ends: list[State] = []
    with tape:
        if packed:
            x, sizes, hx, flat, _, layers, dropout, training, bidirectional = args
            counts = sizes.tolist()
        else:
            x, hx, flat, _, layers, dropout, training, bidirectional, batch_first = args
            x = x.transpose(0, 1) if batch_first else x
            counts = [x.shape[1]] * x.shape[0]
            x = x.flatten(0, 1)
        start = tuple(hx) if states > 1 else (hx,)
        directions = 2 if bidirectional else 1
        per = len(flat) // (layers * directions)
        _own_states(tape, x, counts[0], start)
        for number in range(layers):
            outs = []
            for direction in range(directions):
                at = number * directions + direction
                out, end = _walk(
                    x, counts, tuple(s[at] for s in start), flat[at * per : (at + 1) * per], step, bool(direction)
                )
                outs.append(out)
                ends.append(end)
            x = torch.cat(outs, -1)
            if dropout and training and number < layers - 1:
                x = F.dropout(x, dropout, True)
        if not packed:
            x = x.unflatten(0, (len(counts), counts[0]))
            x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.stack([e[k] for e in ends]) for k in range(states)))


def _own_states(tape: Tape, x: Tensor, batch: int, start: State) -> None:
    """Constant initial states get the rows of the data that they are used with: those of the first step."""
    label = tape.joined([x], x.shape)
    if isinstance(label, Many):
        return
    own = owners(label, x.shape, tape.rows)
    if own.shape[0] < batch or own[0].numel() != 1:
        return
    rows = simplest(own[:batch].reshape(1, batch, 1), tape.rows)
    for s in start:
        if tape.slot(s) is None and not s.requires_grad:
            tape.mark(s, rows)


def _walk(
    x: Tensor, counts: Sequence[int], start: State, weights: Sequence[Any], step: Step, backwards: bool
) -> tuple[Tensor, State]:
    """One direction of one layer over rows sorted by length: at step t the first counts[t] rows are active."""
    xp = torch.split(F.linear(x, weights[0], weights[2] if len(weights) > 3 else None), list(counts))
    order = range(len(counts) - 1, -1, -1) if backwards else range(len(counts))
    state, outs = start, [x] * len(counts)
    done: list[State] = []
    if backwards:
        state = tuple(s[: counts[-1]] for s in start)
    for t in order:
        alive = state[0].shape[0]
        if counts[t] < alive:
            done.append(tuple(s[counts[t] :] for s in state))
            state = tuple(s[: counts[t]] for s in state)
        elif counts[t] > alive:
            state = tuple(torch.cat((s, s0[alive : counts[t]])) for s, s0 in zip(state, start, strict=True))
        state = step(xp[t], state, weights)
        outs[t] = state[0]
    final = [state, *reversed(done)]
    return torch.cat(outs), tuple(torch.cat([part[k] for part in final]) for k in range(len(start)))


def _cell(tape: Tape, args: Any, step: Step, states: int) -> Any:
    x, hx, w_ih, w_hh, b_ih, b_hh = args
    weights = (w_ih, w_hh) if b_ih is None else (w_ih, w_hh, b_ih, b_hh)
    label = tape.joined([x], x.shape)
    for s in hx if states > 1 else (hx,):
        if tape.slot(s) is None and not tape.is_data(s) and s.ndim == x.ndim:
            tape.mark(s, label)
    with tape:
        xp = F.linear(x, w_ih, b_ih)
        out = step(xp, tuple(hx) if states > 1 else (hx,), weights)
    return out if states > 1 else out[0]


def lstm_cell(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if kwargs else _cell(tape, args, _lstm_step, 2)


def gru_cell(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if kwargs else _cell(tape, args, _gru_step, 1)


def rnn_cell(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    act = torch.tanh if func is torch.rnn_tanh_cell else torch.relu
    return NotImplemented if kwargs else _cell(tape, args, _rnn_step(act), 1)
