"""How labels (``lineage.py``) propagate through torch's operations.

Each rule receives the call, its result and the tape, which knows the labels of the arguments, and returns the label of
the result (or one for each result). None: the result contains no data (``zeros_like``). An operation without a rule
gives MANY, and its rows are measured, which costs time but is not wrong. tests/gradients/test_flow.py runs every rule
on random data and changes one row at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sordino.gradients.labels.lineage import MANY, Axis, Lineage, Many, Owners, aligned, owners, reduced

Labels = Lineage | None | list[Lineage | None]


class Labelled(Protocol):
    """What a rule may query of the tape."""

    rows: int

    def lineage(self, t: Any) -> Lineage | None:
        """The label of a tensor that contains data, else None."""

    def join(self, tensors: Sequence[Any], shape: Sequence[int], combines: bool = True) -> Lineage | None:
        """The common label of tensors that are broadcast to ``shape``. combines: their values are combined into
        numbers."""

    def suspect(self) -> None:
        """Record that some rows influence which values other rows receive."""

    def by_place(self) -> None:
        """Record that a row's result depends on its place among the rows."""

    def ordered(self, key: Tensor, label: Lineage, places: Tensor, values: Tensor | None) -> bool:
        """Record that rows were sorted by ``key``; False if the order is not followed."""

    def granted(self) -> bool:
        """Is it proven, by the values of this pass, that the running operation treats each row by itself?"""


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
    """The tensors in a nested argument, in order."""
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


def replace(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, list):
        return [replace(t, fn) for t in tree]
    if isinstance(tree, tuple) and type(tree) is tuple:
        return tuple(replace(t, fn) for t in tree)
    if isinstance(tree, dict):
        return {k: replace(v, fn) for k, v in tree.items()}
    return tree


def constant(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """The result has none of the values of its argument. If it has its shape, it has its rows as well: a sum over them
    would tell their number."""
    if any(tape.lineage(t) is not None for t in (*flat(args[1:]), *flat(kwargs))):
        return MANY
    x, results = first(args, kwargs), flat(out)
    return tape.lineage(x) if len(results) == 1 and results[0] is not x and results[0].shape == x.shape else None


def only_first(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Each position is the same position of the first argument; the others only give a type or a shape."""
    return tape.lineage(first(args, kwargs))


def cosine(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """cosine_similarity: two tensors are broadcast, and ``dim`` is reduced."""
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
    """Each position of the result depends on the same position of the broadcast arguments."""
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
    """where: with three arguments it is elementwise; with one it lists positions, whose number depends on all rows."""
    if isinstance(out, Tensor):
        return pointwise(tape, args, kwargs, out)
    tape.suspect()
    return MANY


def copied(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """copy_: the previous values are overwritten."""
    source = argument(args, kwargs, 1, "src", "other")
    label = tape.lineage(source)
    return aligned(label, source.shape, out.shape, tape.rows) if isinstance(label, (Axis, Owners)) else label


def like_first(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """Each position depends on the same position of the first argument; other arguments contain no data, or agree."""
    x, others = first(args, kwargs), [*flat(args[1:]), *flat(kwargs)]
    if any(tape.lineage(t) is not None for t in others if t is not x):
        return pointwise(tape, args, kwargs, out)
    return tape.lineage(x)


def uncertain(inner: Rule) -> Rule:
    """The rule, but without the claim that several rows were combined: a term may be zero, a length may exclude
    rows."""

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
    """A vector of quantiles adds a leading dimension, unlike other reductions."""
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
    """As a reduction, but the positions along ``dim`` remain: softmax, cumsum, sort, fft."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        x, results = first(args, kwargs), flat(out)
        dims = dims_of(argument(args, kwargs, place, "dim", "axis", default=default), x.ndim)
        if dims is None or not results or results[0].ndim != x.ndim:
            return MANY
        if any(tape.lineage(t) is not None for t in (*flat(args[1:]), *flat(kwargs)) if t is not x):
            return MANY
        return reduce_over(tape, x, dims, out)

    return rule


def sorting(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
    """sort and argsort. A sorted batch depends on all rows; where the rows go is followed (``orders.py``), and then the
    indices belong to no row, and sorted integers to the row of each."""
    x, found, results = first(args, kwargs), mixing(1, -1)(tape, args, kwargs, out), flat(out)
    label = tape.lineage(x)
    if not isinstance(found, Many) or not isinstance(label, (Axis, Owners)) or x.ndim != 1 or "out" in kwargs:
        return found
    places = results[-1]
    values = None if len(results) == 1 or x.is_floating_point() or x.is_complex() else results[0]
    if results[0].shape != x.shape or not tape.ordered(x, label, places, values):
        return found
    own = owners(label, x.shape, tape.rows).expand(x.shape)
    sorted_: list[Lineage | None] = [found if values is None else Owners(own[places])]
    return [*sorted_[: len(results) - 1], Owners(torch.full((1,), -1))]


def counted(place: int, name: str) -> Rule:
    """histc and bincount: numbers that depend on all rows. How many there are must be the argument at ``place``."""

    def rule(tape: Labelled, args: Any, kwargs: Any, out: Any) -> Labels:
        size = argument(args, kwargs, place, name)
        if not isinstance(size, int) or out.shape != (size,):
            tape.suspect()
        return MANY

    return rule


def trailing(count: int | Callable[[Tensor], int], also: int = 0) -> Rule:
    """Combines the last ``count`` dimensions of the first argument and leaves the others unchanged.

    also: the number of further arguments (masks, grids) that may contain data, with the same leading dimensions.
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
    return [Owners(label.own.reshape([*lead, *([1] * (r.ndim - kept))])) for r in results]


def contracted_over(label: Axis | Owners, dims: Sequence[int]) -> Lineage:
    """A product that sums over ``dims``: it is not certain that rows there are combined, because factors may be
    zero."""
    found = reduced(label, dims, True)
    return MANY if isinstance(found, Many) else found
