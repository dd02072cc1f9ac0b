"""How labels (``lineage.py``) pass through torch's operations.

Each rule takes the call, its result and the tape, which knows the labels of the arguments, and returns the label of the
result (or one for each result). None: the result holds no data (``zeros_like``). An operation that is not listed gives
MANY, and its rows are measured: it costs time, never truth. tests/gradients/test_flow.py runs every rule on random
data and moves one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from sordino.gradients.lineage import MANY, Axis, Lineage, Many, Owners, aligned, covers, merged, owners, reduced

Labels = Lineage | None | list[Lineage | None]


class Labelled(Protocol):
    """What a rule may ask of the tape."""

    rows: int

    def lineage(self, t: Any) -> Lineage | None:
        """The label of a tensor that holds data, else None."""

    def join(self, tensors: Sequence[Any], shape: Sequence[int], combines: bool = True) -> Lineage | None:
        """The common label of tensors that are broadcast to ``shape``. combines: their values become numbers."""

    def suspect(self) -> None:
        """Note that rows take part in the choice of what others get."""


Rule = Callable[[Labelled, Any, Any, Any], Labels]


def argument(args: Any, kwargs: Any, place: int, *names: str, default: Any = None) -> Any:
    if len(args) > place:
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), default)


def first(args: Any, kwargs: Any) -> Any:
    return args[0] if args else kwargs.get("input", kwargs.get("self"))


def dims_of(value: Any, ndim: int) -> tuple[int, ...] | None:
    """Dimensions as non-negative numbers; None where they are not given as numbers."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        return (value % max(ndim, 1),)
    if isinstance(value, (tuple, list)) and value and all(isinstance(v, int) for v in value):
        return tuple(v % max(ndim, 1) for v in value)
    return None


def flat(tree: Any) -> list[Tensor]:
    """The tensors in it, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    found: list[Tensor] = []
    for item in tree:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, (list, tuple, dict)):
            found += flat(item)
    return found


def constant(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """The result has the shape of its argument, and nothing of its content."""
    return None if all(tape.lineage(t) is None for t in (*flat(args[1:]), *flat(kwargs))) else MANY


def only_first(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Each position is the same position of the first argument; the others give a type or a shape."""
    return tape.lineage(first(args, kwargs))


def cosine(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """cosine_similarity: two tensors are broadcast, and ``dim`` is summed."""
    a, b = first(args, kwargs), argument(args, kwargs, 1, "x2")
    a = kwargs["x1"] if a is None else a
    ndim = max(a.ndim, b.ndim)
    dims = dims_of(argument(args, kwargs, 2, "dim", default=1), ndim)
    shape = [max(x, y) for x, y in _pairs([1] * (ndim - a.ndim) + list(a.shape), [1] * (ndim - b.ndim) + list(b.shape))]
    label = tape.join([a, b], shape[::-1])
    if label is None or isinstance(label, Many) or dims is None:
        return label if dims is not None else MANY
    return reduced(label, dims, False)


def pointwise(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Each position of the result depends on the same position of the arguments, which are broadcast."""
    results = flat(out)
    if not results:
        return MANY
    shape, tensors = results[0].shape, [*flat(args), *flat(kwargs)]
    combines = results[0].is_floating_point() or results[0].is_complex()
    for t in tensors:
        if t.shape != shape and (t.ndim > len(shape) or any(a not in (1, b) for a, b in _pairs(t.shape, shape))):
            return MANY
    return tape.join(tensors, shape, combines)


def _pairs(shape: Sequence[int], result: Sequence[int]) -> zip[tuple[int, int]]:
    return zip(reversed(shape), reversed(result), strict=False)


def same_rank(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """As pointwise, but a tensor with fewer dimensions is not aligned from the right (gaussian_nll_loss's variance)."""
    ranks = {t.ndim for t in (*flat(args), *flat(kwargs)) if t.ndim}
    return MANY if len(ranks) > 1 else pointwise(tape, args, kwargs, out)


def choice(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """where: of three arguments it works by position; of one it lists places, whose number all rows decide."""
    if isinstance(out, Tensor):
        return pointwise(tape, args, kwargs, out)
    tape.suspect()
    return MANY


def copied(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """copy_: what was there before is gone."""
    source = argument(args, kwargs, 1, "src", "other")
    label = tape.lineage(source)
    return aligned(label, source.shape, out.shape, tape.rows) if isinstance(label, (Axis, Owners)) else label


def like_first(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Each position depends on the same position of the first argument; other arguments hold no data, or agree."""
    x, others = first(args, kwargs), [*flat(args[1:]), *flat(kwargs)]
    if any(tape.lineage(t) is not None for t in others if t is not x):
        return pointwise(tape, args, kwargs, out)
    return tape.lineage(x)


def uncertain(inner: Rule) -> Rule:
    """The same where it is not certain that several rows count: a term may be zero, a length may leave rows out."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        found, before = inner(tape, args, kwargs, out), tape.lineage(first(args, kwargs))
        return MANY if isinstance(found, Many) and not isinstance(before, Many) else found

    return rule


def reduction(place: int = 1, default: Any = None) -> Rule:
    """The result depends on all positions along ``dim``, the argument at ``place``."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        x = first(args, kwargs)
        if any(isinstance(a, Tensor) for a in args[1:]) or "other" in kwargs or "out" in kwargs:
            return pointwise(tape, args, kwargs, out)
        given = argument(args, kwargs, place, "dim", "axis", default=default)
        if len(args) > place + 1 and all(isinstance(a, int) and not isinstance(a, bool) for a in args[place:]):
            given = tuple(args[place:])  # x.sum(0, 1)
        return reduce_over(tape, x, dims_of(given, x.ndim), out)

    return rule


def quantile(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """A vector of quantiles adds a dimension in front, which reductions do not have."""
    q = argument(args, kwargs, 1, "q")
    if isinstance(q, Tensor):
        if q.ndim or tape.lineage(q) is not None:
            return MANY
        args, kwargs = (args[0], 0.5, *args[2:]), {name: value for name, value in kwargs.items() if name != "q"}
    return reduction(2)(tape, args, kwargs, out)


def reduce_over(tape: Labelled, x: Tensor, dims: tuple[int, ...] | None, out: Any) -> Labels:
    label, results = tape.lineage(x), flat(out)
    if label is None or isinstance(label, Many) or not results:
        return label
    if dims is None:
        return reduced(label, range(x.ndim), False) if results[0].ndim == 0 else MANY
    keep = results[0].ndim == x.ndim
    if not keep and results[0].ndim != x.ndim - len(set(dims)):
        return MANY
    return reduced(label, dims, keep)


def mixing(place: int = 1, default: Any = None) -> Rule:
    """As a reduction, but every position along ``dim`` stays: softmax, cumsum, sort, fft."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        x, results = first(args, kwargs), flat(out)
        dims = dims_of(argument(args, kwargs, place, "dim", "axis", default=default), x.ndim)
        if dims is None or not results or results[0].ndim != x.ndim:
            return MANY
        if any(tape.lineage(t) is not None for t in (*flat(args[1:]), *flat(kwargs)) if t is not x):
            return MANY
        return reduce_over(tape, x, dims, out)

    return rule


def trailing(count: int | Callable[[Tensor], int], also: int = 0) -> Rule:
    """Mixes the last ``count`` dimensions of the first argument and keeps the others as they are.

    also: the number of further arguments (masks, grids) that may hold data, with the same leading dimensions.
    """

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        x, results = first(args, kwargs), flat(out)
        kept = x.ndim - (count if isinstance(count, int) else count(x))
        label, others = tape.lineage(x), [t for t in (*flat(args[1:]), *flat(kwargs)) if t is not x]
        labels = [found for t in others if (found := tape.lineage(t)) is not None]
        if len(labels) > also or any(found != label for found in labels):
            return MANY
        if any(r.ndim < kept or r.shape[:kept] != x.shape[:kept] for r in results):
            return MANY
        if isinstance(label, Axis):
            return label if label.dim < kept else MANY
        return label if label is None or isinstance(label, Many) else _kept(label, kept, results)

    return rule


def _kept(label: Owners, kept: int, results: Sequence[Tensor]) -> Labels:
    if any(s > 1 for s in label.own.shape[kept:]):
        return MANY
    lead = label.own.shape[:kept]
    return [Owners(label.own.reshape(*lead, *([1] * (r.ndim - kept)))) for r in results]


def contracted_over(label: Axis | Owners, dims: Sequence[int]) -> Lineage:
    """Through a product that sums over ``dims``: rows there are not certain to be mixed, for factors may be zero."""
    found = reduced(label, dims, True)
    return MANY if isinstance(found, Many) else found


def linear(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    x = first(args, kwargs)
    if any(tape.lineage(t) is not None for t in (*flat(args[1:]), *flat(kwargs)) if t is not x):
        return MANY
    label = tape.lineage(x)
    if label is None or isinstance(label, Many):
        return label
    return contracted_over(label, (x.ndim - 1,)) if flat(out)[0].ndim == x.ndim else MANY


def product(tape: Labelled, a: Tensor, b: Tensor, out: Tensor) -> Labels:
    """a @ b: batch dimensions are broadcast, the last of a is summed with the last but one of b."""
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
        tape.suspect()  # the others carry no gradient, but what is computed depends on them
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
    """The letter of the rows must be one and the same in every operand with data, and in the result."""
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


def attention(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Scaled dot products: (…, L, d) with (…, S, d): leading dimensions are kept and broadcast, positions are mixed."""
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
    """ids → ids with one more dimension; a table that holds data is not known."""
    table = argument(args, kwargs, 1, "weight", "num_classes")
    if isinstance(table, Tensor) and tape.lineage(table) is not None:
        return MANY
    if table is None or (
        isinstance(table, int) and table < 0
    ):  # one_hot: the largest of all rows' ids decides the number of classes
        tape.suspect()
    label = tape.lineage(first(args, kwargs))
    return Owners(label.own.unsqueeze(-1)) if isinstance(label, Owners) else label


def bag(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """embedding_bag of a matrix of ids: a bag for each of its rows."""
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
    """Losses of (N, C, …) against (N, …): dimension 1 is summed. A mean over the batch is not a loss of rows."""
    x, target = first(args, kwargs), argument(args, kwargs, 1, "target")
    if not isinstance(out, Tensor) or x.ndim < 2 or out.ndim != x.ndim - 1 or out.shape[0] != x.shape[0]:
        return MANY
    if any(tape.lineage(t) is not None for t in (*flat(args), *flat(kwargs)) if t is not x and t is not target):
        return MANY  # weights of the classes that hold data
    found = []
    for t in (x, target):
        label = tape.lineage(t)
        if label is None:
            continue
        if t.ndim == x.ndim and not isinstance(label, Many):
            label = reduced(label, (1,), False)
            label = MANY if isinstance(label, Many) else label  # nll_loss takes one of the classes
        found.append((t, label))
    return agreed(tape, found, out.shape)


def by_row(target: int | None = None) -> Rule:
    """Losses of (N, d) tensors that leave one value per row. target: the place of a (N,) argument, if any."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        short = None if target is None else argument(args, kwargs, target, "target")
        tensors = [t for t in (*flat(args), *flat(kwargs)) if tape.lineage(t) is not None]
        if not isinstance(out, Tensor) or out.ndim != 1 or any(tape.lineage(t) != Axis(0) for t in tensors):
            return MANY
        return Axis(0) if all(t.ndim == 2 or (t is short and t.ndim == 1) for t in tensors) else MANY

    return rule


def halved(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """glu: two halves of ``dim`` become one, position by position."""
    x = first(args, kwargs)
    label, dim = tape.lineage(x), argument(args, kwargs, 1, "dim", default=-1)
    if not isinstance(label, (Axis, Owners)):
        return label
    own = owners(label, x.shape, tape.rows)
    return merged([Owners(half) for half in own.chunk(2, dim)], out.shape, tape.rows)


def recurrent(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """torch.lstm and its kind with frozen weights, on padded batches."""
    if len(args) < 4 or isinstance(args[3], (list, tuple)):
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


def companions(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """companion_norm: statistics over a record's own rows, which lie as (rows_per_record, records) in dimension 0."""
    x, label = args[0], tape.lineage(args[0])
    return label if label == Axis(0, before=args[3]) and x.shape == out.shape else MANY


def standardised_gru(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    frozen = all(tape.lineage(t) is None for t in flat(args[1:]))
    return [Axis(0), Axis(0)] if frozen and tape.lineage(args[0]) == Axis(0) else MANY
