"""Labels through layers: products, attention, embeddings, losses, recurrences. Rules have the form of ``flow.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sordino.gradients.labels.flow import (
    Labelled,
    Labels,
    Rule,
    argument,
    contracted_over,
    first,
    flat,
)
from sordino.gradients.labels.lineage import MANY, Axis, Lineage, Many, Owners, aligned, covers, merged, owners, reduced


def linear(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    if any(tape.lineage(t) is not None for t in (*flat(args[1:]), *flat(kwargs)) if t is not x):
        return MANY
    label = tape.lineage(x)
    if label is None or isinstance(label, Many):
        return label
    return contracted_over(label, (x.ndim - 1,)) if flat(out)[0].ndim == x.ndim else MANY


def product(tape: Labelled, a: Tensor, b: Tensor, out: Tensor) -> Labels:
    """a @ b: batch dimensions are broadcast, the last dimension of a is summed with the last but one of b."""
    found: list[tuple[Tensor, Lineage]] = []
    for t, other, contracted in ((a, b, a.ndim - 1), (b, a, max(b.ndim - 2, 0))):
        label = tape.lineage(t)
        if label is None:
            continue
        if not isinstance(label, Many):
            label = contracted_over(label, (contracted,))
        if not isinstance(label, Many) and (t.ndim == 1 or other.ndim == 1):  # the result has no such dimension
            label = reduced(label, (contracted,), False)
        if not isinstance(label, Many):
            shape = [0] * (label.own.ndim if isinstance(label, Owners) else _rank(t, other))
            if t is b and isinstance(label, Axis) and t.ndim == 1:
                return MANY
            label = aligned(label, shape, out.shape, tape.rows)
        found.append((t, label))
    return agreed(tape, found, out.shape)


def _rank(t: Tensor, other: Tensor) -> int:
    return t.ndim if other.ndim > 1 else t.ndim - 1


def agreed(tape: Labelled, found: Sequence[tuple[Tensor, Lineage]], shape: Sequence[int]) -> Labels:
    """The label of a result whose arguments have these labels, already in the dimensions of the result."""
    if not found:
        return None
    graded = [label for t, label in found if t.requires_grad]
    label = merged([label for _, label in found], shape, tape.rows)
    if isinstance(label, Many) and graded and len(graded) < len(found):
        tape.suspect()  # the others carry no gradient, but the result depends on them
        return merged(graded, shape, tape.rows)
    return label


def matmul(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    a, b = first(args, kwargs), argument(args, kwargs, 1, "other", "mat2", "vec", "tensor")
    return product(tape, a, b, out) if isinstance(a, Tensor) and isinstance(b, Tensor) else MANY


def reflected_matmul(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    return product(tape, args[1], args[0], out)


def added_product(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """input + a @ b: addmm, baddbmm, addmv."""
    start = first(args, kwargs)
    a = argument(args, kwargs, 1, "mat1", "batch1", "mat")
    b = argument(args, kwargs, 2, "mat2", "batch2", "vec")
    if not all(isinstance(t, Tensor) for t in (start, a, b)):
        return MANY
    label, own = product(tape, a, b, out), tape.lineage(start)
    assert not isinstance(label, list)
    if own is None:
        return label
    if not isinstance(own, Many):
        own = aligned(own, start.shape, out.shape, tape.rows)
    return own if label is None else agreed(tape, [(a if a.requires_grad else b, label), (start, own)], out.shape)


def einsum(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """The rows must have the same letter in every operand that contains data and in the result."""
    equation, operands = args[0], flat(args[1:])
    if not isinstance(equation, str) or "..." in equation or "->" not in equation:
        return MANY
    left, right = equation.replace(" ", "").split("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        return MANY
    found: set[tuple[str, int, int]] = set()
    for term, t in zip(terms, operands, strict=True):
        label = tape.lineage(t)
        if label is None:
            continue
        if not isinstance(label, Axis) or len(set(term)) != len(term):
            return MANY
        found.add((term[label.dim], label.before, label.after))
    if len(found) != 1:
        return MANY if found else None
    letter, before, after = found.pop()
    return Axis(right.index(letter), before, after) if right.count(letter) == 1 else MANY


GROUPED = ("_grouped_mm", "grouped_mm_fallback")  # torch's, and transformers' replacement if torch's does not run


def grouped_call(args: Any, kwargs: Any) -> tuple[Any, Any, Any, bool]:
    """(rows, weights, the end of each group, whether there are further options) of a grouped product."""
    call = {**dict(zip(("mat_a", "mat_b", "offs"), args, strict=False)), **kwargs}
    x = call.pop("mat_a") if "mat_a" in call else call.pop("input")
    weights = call.pop("weight") if "weight" in call else call.pop("mat_b")
    return x, weights, call.pop("offs", None), any(option is not None for option in call.values())


def grouped(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Frozen experts: each row has the weights of the group that it is in. Which one that is must be proven."""
    if tape.granted():
        return tape.lineage(grouped_call(args, kwargs)[0])
    tape.suspect()
    return MANY


def attention(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Scaled dot products: (…, L, d) with (…, S, d): leading dimensions are kept and broadcast, positions are
    combined."""
    query, key, value = (argument(args, kwargs, k, name) for k, name in enumerate(("query", "key", "value")))
    mask = argument(args, kwargs, 3, "attn_mask")
    found = []
    for t in (query, key, value, mask):
        label = tape.lineage(t) if isinstance(t, Tensor) else None
        if label is None:
            continue
        if not isinstance(label, Many):
            label = contracted_over(label, (t.ndim - 2, t.ndim - 1))
        if not isinstance(label, Many) and t.shape[:-2] != out.shape[:-2] and kwargs.get("enable_gqa"):
            label = contracted_over(label, (t.ndim - 3,))  # heads are repeated: rows among them are not known
        if not isinstance(label, Many):
            label = aligned(label, t.shape, out.shape, tape.rows)
        found.append((t, label))
    return agreed(tape, found, out.shape)


def embedding(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """ids → ids with one more dimension; for a table that contains data the rows are not known. (torch.embedding, which
    takes the table first, is not F.embedding.)"""
    ids, table = first(args, kwargs), argument(args, kwargs, 1, "weight", "num_classes")
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
        return MANY
    if isinstance(table, Tensor) and (
        tape.lineage(table) is not None or table.ndim != 2 or out.shape[:-1] != ids.shape
    ):
        return MANY
    if table is None or (
        isinstance(table, int) and table < 0
    ):  # one_hot: the largest of all rows' ids decides the number of classes
        tape.suspect()
    label = tape.lineage(first(args, kwargs))
    return Owners(label.own.unsqueeze(-1)) if isinstance(label, Owners) else label


def bag(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """embedding_bag of a matrix of ids: one bag for each of its rows."""
    ids, table = first(args, kwargs), argument(args, kwargs, 1, "weight")
    labels = {tape.lineage(t) for t in (ids, *flat(args[1:]), *flat(kwargs))} - {None}
    alone = ids.ndim == 2 and not ids.is_floating_point() and tape.lineage(table) is None
    return Axis(0) if alone and labels == {Axis(0)} else MANY


def bilinear(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Two tensors with the same leading dimensions."""
    given = [argument(args, kwargs, k, name) for k, name in enumerate(("input1", "input2", "weight", "bias"))]
    labels = {found for t in given[:2] if (found := tape.lineage(t)) is not None}
    if not labels or any(tape.lineage(t) is not None for t in given[2:]):
        return MANY
    label = labels.pop()
    return label if not labels and isinstance(label, Axis) and label.dim < out.ndim - 1 else MANY


def by_class(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Losses of (N, C, …) against (N, …): dimension 1 is reduced. A mean over the batch is not a loss of rows."""
    x, target = first(args, kwargs), argument(args, kwargs, 1, "target")
    if not isinstance(out, Tensor) or x.ndim < 2 or out.ndim != x.ndim - 1 or out.shape[0] != x.shape[0]:
        return MANY
    if any(tape.lineage(t) is not None for t in (*flat(args), *flat(kwargs)) if t is not x and t is not target):
        return MANY  # class weights that contain data
    found = []
    for t in (x, target):
        label = tape.lineage(t)
        if label is None:
            continue
        if t.ndim == x.ndim and not isinstance(label, Many):
            label = reduced(label, (1,), False)
            label = MANY if isinstance(label, Many) else label  # nll_loss selects one of the classes
        found.append((t, label))
    return agreed(tape, found, out.shape)


def by_row(target: int | None = None) -> Rule:
    """Losses of (N, d) tensors that return one value per row. target: the position of a (N,) argument, if any."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        short = None if target is None else argument(args, kwargs, target, "target")
        tensors = [t for t in (*flat(args), *flat(kwargs)) if tape.lineage(t) is not None]
        if not isinstance(out, Tensor) or out.ndim != 1 or any(tape.lineage(t) != Axis(0) for t in tensors):
            return MANY
        return Axis(0) if all(t.ndim == 2 or (t is short and t.ndim == 1) for t in tensors) else MANY

    return rule


def halved(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """glu: the two halves of ``dim`` are combined position by position."""
    x = first(args, kwargs)
    label, dim = tape.lineage(x), argument(args, kwargs, 1, "dim", default=-1)
    if not isinstance(label, (Axis, Owners)):
        return label
    own = owners(label, x.shape, tape.rows)
    return merged([Owners(half) for half in own.chunk(2, dim)], out.shape, tape.rows)


def recurrent(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """torch.lstm and similar calls with frozen weights, on padded batches."""
    if len(args) != 9 or kwargs or isinstance(args[3], (list, tuple)):
        return MANY
    batch_first, x = args[-1], args[0]
    rows = 0 if batch_first else 1
    label = tape.lineage(x)
    if label is None or isinstance(label, Many) or x.ndim != 3 or not covers(label, (rows,)):
        return MANY
    own = label.own.reshape(1, -1, 1) if isinstance(label, Owners) else None
    state = Axis(1, label.before, label.after) if isinstance(label, Axis) else Owners(own)  # type: ignore[arg-type]
    for t in flat(args[1]):
        theirs = tape.lineage(t)
        if theirs is not None and isinstance(merged([theirs, state], t.shape, tape.rows), Many):
            return MANY
    if any(tape.lineage(t) is not None for t in flat(args[2])):
        return MANY
    return [label, *(state for _ in flat(out)[1:])]


def batch_norm(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """With statistics that are given; those of the batch combine rows (refused for F.batch_norm, not for aten's)."""
    x, training = first(args, kwargs), argument(args, kwargs, 5, "training", default=False)
    given = [argument(args, kwargs, k, name) for k, name in ((1, "running_mean"), (2, "running_var"))]
    if training is not False or not all(isinstance(t, Tensor) for t in given):
        return MANY
    others = (t for t in (*flat(args), *flat(kwargs)) if t is not x)
    return MANY if any(tape.lineage(t) is not None for t in others) else tape.lineage(x)


def prelu(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Slopes belong to dimension 1; for slopes that contain data the rows are not known."""
    weight = argument(args, kwargs, 1, "weight")
    return MANY if tape.lineage(weight) is not None else tape.lineage(first(args, kwargs))


def triangle(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """tril and triu: what is left of a matrix depends on the place in its last two dimensions."""
    x = first(args, kwargs)
    label = tape.lineage(x)
    if isinstance(label, (Axis, Owners)) and any(s > 1 for s in owners(label, x.shape, tape.rows).shape[-2:]):
        tape.by_place()
    return label


def companions(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """companion_norm: statistics over a record's own rows, ordered as (rows_per_record, records) in dimension 0."""
    x, label = args[0], tape.lineage(args[0])
    return label if label == Axis(0, before=args[3]) and x.shape == out.shape else MANY


def standardised_gru(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    frozen = all(tape.lineage(t) is None for t in flat(args[1:]))
    return [Axis(0), Axis(0)] if frozen and tape.lineage(args[0]) == Axis(0) else MANY
