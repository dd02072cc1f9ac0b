"""Products of data with a parameter of any number of dimensions: bmm, baddbmm, matmul, mv, einsum of two.

Each is written as an einsum. Dimensions of both factors and of the result are *blocks* (heads, experts); dimensions of
both factors that are absent from the result are summed over; dimensions of the data alone are positions, and rows are
among them. Within each block a record's gradient is Σ_s a_s ⊗ g_s, as for a linear map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.labels.lineage import MANY, Axis, Lineage, Many, covers, owners, simplest
from sordino.gradients.sums.contributions import Contribution, Dense, Outer, outer
from sordino.gradients.sums.memory import gather
from sordino.gradients.tape.layout import Frame
from sordino.gradients.tape.slots import Slot, Use, hold
from sordino.gradients.tape.tape import Tape

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Blocks:
    """Contributions (records · blocks, …), in which each record has one entry per block, to a parameter (blocks, …)."""

    def __init__(self, through: Contribution, blocks: int) -> None:
        self.through, self.blocks = through, blocks
        self.records = through.records // blocks

    def norm2(self) -> Tensor:
        return self.through.norm2().reshape(self.records, self.blocks).sum(1)

    def slack(self) -> Tensor | float:
        found = self.through.slack()
        if isinstance(found, float):
            return found * math.sqrt(self.blocks)
        return found.reshape(self.records, self.blocks).square().sum(1).sqrt()

    def add_to(self, total: Tensor, weight: Tensor) -> None:
        through, each = self.through, total.view(self.blocks, -1)
        if isinstance(through, Dense):
            gather(total.view(-1), through.gradient.reshape(self.records, -1), weight)
            return
        assert isinstance(through, Outer)
        for b in range(self.blocks):
            Outer(through.left[b :: self.blocks], through.right[b :: self.blocks]).add_to(each[b], weight)

    def dense(self, lo: int, hi: int) -> Tensor:
        return self.through.dense(lo * self.blocks, hi * self.blocks).reshape(hi - lo, self.blocks, -1)

    def drop(self, bad: Tensor) -> None:
        self.through.drop(bad.repeat_interleave(self.blocks))


def contract(tape: Tape, func: Any, x: Tensor, weight: Any, names: tuple[str, str, str]) -> Any:
    """einsum of x and a slot, given one letter for each dimension of x, of the slot and of the result."""
    of_x, of_w, of_out = names
    blocks = [c for c in of_w if c in of_x and c in of_out]
    inner = [c for c in of_w if c in of_x and c not in of_out]
    own = [c for c in of_w if c not in of_x]
    lead = [c for c in of_x if c not in of_w]
    single = all(len(set(n)) == len(n) for n in names)
    if not single or not set(own) | set(lead) <= set(of_out) or x.is_complex() or _may_be_rows(tape, x, of_x, lead):
        return NotImplemented
    slot = _ordered(tape, weight, of_w, [*blocks, *inner, *own])
    size = dict(zip((*of_x, *of_w), (*x.shape, *weight.shape), strict=True))
    b, k, p = (math.prod(size[c] for c in cs) for cs in (blocks, inner, own))
    of_a = [of_x.index(c) for c in (*lead, *blocks, *inner)]
    of_g = [of_out.index(c) for c in (*lead, *blocks, *own)]

    def emit(gradient: Tensor, frame: Frame) -> list[tuple[Slot, Contribution]]:
        g = frame.fold(gradient.permute(of_g), len(of_g) - len(lead), gradient=True)
        a = frame.fold(x.detach().permute(of_a), len(of_a) - len(lead))
        m, s = g.shape[:2]
        left, right = a.reshape(m, s, b, k), g.reshape(m, s, b, p)
        if b == 1:
            return [(slot, outer(left[:, :, 0], right[:, :, 0]))]
        left, right = (t.transpose(1, 2).flatten(0, 1) for t in (left, right))  # (m · blocks, S, d)
        return [(slot, Blocks(outer(left, right), b))]

    output = torch.einsum(f"{of_x},{of_w}->{of_out}", x, tape.value(weight))
    shape = torch.Size([output.shape[d] for d in of_g])
    label = f"{getattr(func, '__name__', func)} by blocks"  # the fallback's use orders its dimensions differently
    use = Use(label, (slot,), shape, tuple(range(len(lead))), emit, hold(x), permute=tuple(of_g))
    return tape.tap(output, use, _label(tape, x, of_x, of_out))


def _label(tape: Tape, x: Tensor, of_x: str, of_out: str) -> Lineage:
    """The label of the result: the rows of x, located by their letters."""
    label = tape.lineage(x)
    if tape.rows == 1 or label is None or isinstance(label, Many):
        return MANY
    own = owners(label, x.shape, tape.rows)
    shared = [c for c in of_out if c in of_x]
    order = [of_x.index(c) for c in (*shared, *(c for c in of_x if c not in of_out))]
    sizes = [own.shape[of_x.index(c)] if c in of_x else 1 for c in of_out]
    return simplest(own.permute(order).reshape(sizes), tape.rows)


def _may_be_rows(tape: Tape, x: Tensor, of_x: str, lead: Sequence[str]) -> bool:
    """Could the rows be among the blocks? Then the slot has one part for each row, and this rule does not apply."""
    return tape.rows > 1 and not covers(tape.lineage(x) or MANY, [of_x.index(c) for c in lead])


def _ordered(tape: Tape, weight: Tensor, of_w: str, order: Sequence[str]) -> Slot:
    """A view of the slot with its dimensions in this order."""
    places = [of_w.index(c) for c in order]
    if places != sorted(places):
        weight = tape.derive(torch.permute, (weight, places), {})
    slot = tape.slot(weight)
    assert slot is not None
    return slot


def _two(tape: Tape, func: Any, first: Any, second: Any, names: tuple[str, str, str]) -> Any:
    """True if one of the two is a slot and the other is data."""
    slots = tape.slot(first), tape.slot(second)
    if (slots[0] is None) == (slots[1] is None):
        return NotImplemented
    sizes = [dict(zip(n, t.shape, strict=True)) for n, t in zip(names, (first, second), strict=False)]
    first, of_first = _unrepeated(tape, first, names[0], sizes[1])
    second, of_second = _unrepeated(tape, second, names[1], sizes[0])
    if slots[0] is None:
        return contract(tape, func, first, second, (of_first, of_second, names[2]))
    return contract(tape, func, second, first, (of_second, of_first, names[2]))


def _unrepeated(tape: Tape, t: Tensor, names: str, other: dict[str, int]) -> tuple[Tensor, str]:
    """Removes the dimensions of length one that are broadcast against the other factor."""
    gone = tuple(d for d, c in enumerate(names) if t.shape[d] == 1 and other.get(c, 1) > 1)
    if not gone:
        return t, names
    left = "".join(c for d, c in enumerate(names) if d not in gone)
    if tape.slot(t) is not None:
        return tape.derive(torch.squeeze, (t, gone), {}), left
    out = t.squeeze(gone)
    tape.book.follow(torch.squeeze, (t, gone), {}, out)
    return out, left


def bmm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    second = args[1] if len(args) > 1 else kwargs.get("mat2")
    if kwargs.get("out") is not None or not isinstance(second, Tensor):
        return NotImplemented
    out = _tiled(tape, func, args[0], second)
    return _two(tape, func, args[0], second, ("bsk", "bkp", "bsp")) if out is None else out


def _tiled(tape: Tape, func: Any, x: Tensor, weight: Tensor) -> Any:
    """x (rows · P, s, k) times a slot (P, k, p) that is repeated for every row: one product for each of the P
    blocks."""
    slot, label = tape.slot(weight), tape.lineage(x)
    if slot is None or slot.tiled is None or not isinstance(label, Axis) or label.dim or label.before > 1:
        return None
    blocks = slot.tiled.shape[0]
    if label.after % blocks:
        return None
    with tape:
        parts = x.reshape(-1, blocks, *x.shape[1:])
    out = contract(tape, func, parts, slot.tiled, ("rhsk", "hkp", "rhsp"))
    if out is NotImplemented:
        return None
    with tape:
        return out.reshape(x.shape[0], *out.shape[2:])


def mv(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    second = args[1] if len(args) > 1 else kwargs.get("vec")
    if kwargs.get("out") is not None or not isinstance(second, Tensor):
        return NotImplemented
    return _two(tape, func, args[0], second, ("sk", "k", "s"))


def baddbmm(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """beta · input + alpha · bmm, as two operations that the tape records."""
    call = {**dict(zip(("input", "batch1", "batch2"), args, strict=False)), **kwargs}
    if call.get("out") is not None or len(args) > 3:
        return NotImplemented
    alpha, beta = call.get("alpha", 1), call.get("beta", 1)
    with tape:
        product = torch.bmm(call["batch1"], call["batch2"])
        product = product if alpha == 1 else product * alpha
        return torch.add(product, call["input"], alpha=beta)


def matmul(tape: Tape, func: Any, first: Tensor, second: Tensor) -> Any:
    """Any two factors whose batch dimensions are equal, or absent in one of them."""
    if first.ndim == 0 or second.ndim == 0:
        return NotImplemented
    batch = _LETTERS[: max(first.ndim, second.ndim, 2) - 2]
    of_first = (batch[len(batch) - max(0, first.ndim - 2) :] + "YZ") if first.ndim > 1 else "Z"
    of_second = (batch[len(batch) - max(0, second.ndim - 2) :] + "ZX") if second.ndim > 1 else "Z"
    of_out = batch + ("Y" if first.ndim > 1 else "") + ("X" if second.ndim > 1 else "")
    return _two(tape, func, first, second, (of_first, of_second, of_out))


def einsum(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(args[0], str) or kwargs:
        return NotImplemented
    operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
    names = _spelled(args[0].replace(" ", ""), [t.ndim for t in operands])
    if names is None:
        return NotImplemented
    return _two(tape, func, operands[0], operands[1], names)


def _spelled(equation: str, dims: Sequence[int]) -> tuple[str, str, str] | None:
    """The letters of two operands and of the result, with the ellipsis expanded; None for any other equation."""
    given, arrow, result = equation.partition("->")
    parts = given.split(",")
    if len(parts) != 2 or len(dims) != 2:
        return None
    free = [c for c in _LETTERS if c not in equation]
    spare = [dims[i] - len(parts[i].replace("...", "")) if "..." in parts[i] else 0 for i in range(2)]
    if len(free) < max(spare):
        return None
    dots = "".join(free[: max(spare)])
    full = [part.replace("...", dots[len(dots) - n :]) for part, n in zip(parts, spare, strict=True)]
    if not arrow:
        letters = [c for c in sorted({*given} - {*",."}) if given.count(c) == 1]
        result = ("..." if "..." in given else "") + "".join(letters)
    return full[0], full[1], result.replace("...", dots)
