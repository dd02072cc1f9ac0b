"""Operations on rows in an order that the data decides, and what each leaves (``orders.py`` has the argument).

With t = u.index_select(dim, π) for every member t:

- an operation that works alike on every place gives a member: f(u[π]) = f(u)[π], if all other tensors among its
  arguments are the same for every place;
- a lookup ``h[j]`` by a member j = v[π] gives the member h[v][π];
- ``t[back]`` leads back to u if π[back] = 0, 1, 2, …, and so does a sum or a copy into the places v by a member v[π];
- a grouped product multiplies place r by the weights of group e if end e − 1 ≤ r < end e. If this holds exactly where
  the sorted number key[π][r] is e, it is the member (u_j @ weights[key_j])[π]: every row has the weights of its own
  number. The ends may have been computed in any way: their values are compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sordino.gradients.labels import flow, flow_layers, moves, selections
from sordino.gradients.labels.flow import Labelled, argument, dims_of, first, flat
from sordino.gradients.labels.flow_layers import GROUPED, grouped_call
from sordino.gradients.labels.lineage import Axis, Owners, owners
from sordino.gradients.labels.vocabulary import Kind, names

# pointwise by name, but not alike for every place, or random, or a second way to the same memory
_NOT_ALIKE = frozenset(
    names("tril triu bernoulli dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout rrelu data")
    + names("feature_dropout requires_grad retain_grad")
)
_WITHIN = frozenset(names("softmax log_softmax sum mean amax amin logsumexp"))
_PERMUTING = frozenset(names("permute transpose swapaxes swapdims t T mT movedim moveaxis"))


@dataclass(frozen=True, eq=False)
class Order:
    """places: (S,) the indices π. key: (S,) the numbers that were sorted, in their own order. own: (S,) their rows."""

    places: Tensor
    key: Tensor
    own: Tensor

    @functools.cached_property
    def ranked(self) -> Tensor | None:
        """The sorted numbers, if they are integers and ascend."""
        ranked = self.key[self.places]
        whole = not (ranked.is_floating_point() or ranked.is_complex())
        return ranked if whole and bool((ranked[1:] >= ranked[:-1]).all()) else None


@dataclass(frozen=True)
class Step:
    """dim: the results are members along it; None: they are not in the order any more. shape: that the result must
    have. lead: the number of values before the dimension of the order, where a reshape has moved it. clean: no values
    were exchanged, whatever the labels show. loose: computed from the order alone."""

    dim: int | None
    shape: Sequence[int] | None = None
    lead: int | None = None
    clean: bool = False
    loose: bool = False

    def place(self, t: Tensor, size: int) -> int | None:
        """The dimension of the order in a result; None if it has none."""
        if self.shape is not None and t.shape != self.shape:
            return None
        where = [self.dim] if self.lead is None else range(t.ndim)
        for d in where:
            if d is not None and d < t.ndim and t.shape[d] == size and self.lead in (None, math.prod(t.shape[:d])):
                return d
        return None


@dataclass(frozen=True, eq=False)
class Given:
    """An operation and its arguments. dims: the dimension of each member, by the id of the tensor. blank: does a tensor
    contain constants?"""

    kind: Kind
    args: Any
    kwargs: Any
    tensors: Sequence[Tensor]
    dims: Mapping[int, int]
    order: Order
    blank: Callable[[Tensor], bool]

    def dim(self, t: Any) -> int | None:
        return self.dims.get(id(t))

    def alone(self, t: Any) -> bool:
        """Is it the only member?"""
        return self.dims.keys() == {id(t)}


def step_of(tape: Labelled, given: Given) -> Step | None:
    """What the operation leaves of the order; None if it is not known to work alike on every place."""
    kind, args = given.kind, given.args
    if kind.reads or kind.hooks or "out" in given.kwargs or (kind.own is not None and kind.own != "requires_grad_"):
        return None
    if kind.name in GROUPED:
        return _grouped(tape, given)
    if kind.writes and kind.rule is not None and (not args or given.dim(args[0]) is None):
        return _returned(tape, given) if kind.name in ("index_add", "index_copy") else None
    if kind.rule is flow.pointwise or kind.name in ("to", "type_as"):
        return None if kind.name in _NOT_ALIKE else _alike(given)
    if kind.rule is flow.choice and len(args) == 3:
        return _alike(given)
    if kind.writes:
        return None
    if kind.rule is flow.constant:
        return Step(None) if given.alone(first(args, given.kwargs)) else None
    if kind.name in ("index_add", "index_copy"):
        return _returned(tape, given)
    if kind.name in ("getitem", "index_select", "embedding"):
        return _looked_up(given)
    x = first(args, given.kwargs)
    if kind.name in ("cat", "concat", "concatenate"):
        return _joined(given)
    if given.dim(x) is None or not given.alone(x):
        return None
    return _moved(given, x, given.dims[id(x)])


def _alike(given: Given) -> Step | None:
    """Position by position: a tensor that is no member must be the same for every place."""
    rank = max(t.ndim for t in given.tensors)
    places = {dim + rank - t.ndim for t in given.tensors if (dim := given.dim(t)) is not None}
    if len(places) != 1:
        return None
    place = places.pop()
    for t in given.tensors:
        if given.dim(t) is None and place >= rank - t.ndim and t.shape[place - rank + t.ndim] != 1:
            return None
    shape = torch.broadcast_shapes(*(t.shape for t in given.tensors))  # type: ignore[no-untyped-call]
    return Step(place, shape, loose=True)


def _looked_up(given: Given) -> Step | None:
    args, kwargs = given.args, given.kwargs
    x = first(args, kwargs)
    if given.kind.name == "embedding":
        return Step(given.dims[id(x)]) if given.alone(x) else None
    if given.kind.name == "index_select":
        dims, index = dims_of(argument(args, kwargs, 1, "dim"), x.ndim), argument(args, kwargs, 2, "index")
        if dims != (0,):
            return None
    else:
        index = args[1]
        if given.alone(x) and not flat(index):
            return _sliced(x, index, given.dims[id(x)])
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        return None
    if given.alone(index):
        return Step(given.dims[id(index)])
    places = given.order.places
    if not given.alone(x) or given.dims[id(x)] or index.shape != places.shape:
        return None
    if not len(places) or int(index.min()) < 0 or int(index.max()) >= len(places):
        return None
    if not torch.equal(places[index], torch.arange(len(places), device=places.device)):
        return None
    return Step(None, clean=True)


def _sliced(x: Tensor, index: Any, dim: int) -> Step | None:
    items = index if isinstance(index, tuple) else (index,)
    if not all(i is None or i is Ellipsis or type(i) in (int, slice) for i in items):
        return None
    found = selections.basic(Axis(dim), x.shape, items)
    return Step(found.dim, loose=True) if isinstance(found, Axis) else None


def _returned(tape: Labelled, given: Given) -> Step | None:
    """target.index_add(0, v[π], u[π]) is target.index_add(0, v, u); v must not be data of a row."""
    args, kwargs = given.args, given.kwargs
    target, index = first(args, kwargs), argument(args, kwargs, 2, "index")
    source = argument(args, kwargs, 3, "source", "tensor")
    if dims_of(argument(args, kwargs, 1, "dim"), target.ndim) != (0,) or given.dims.keys() != {id(index), id(source)}:
        return None
    label, places = tape.lineage(index), given.order.places
    if given.dims[id(source)] or not isinstance(label, Owners) or bool((label.own >= 0).any()):
        return None
    every = given.kind.name == "index_copy" and len(target) == len(places) and torch.equal(index, places)
    return Step(None, clean=True) if every or given.blank(target) else None


def _joined(given: Given) -> Step | None:
    """cat of members along another dimension."""
    found = {given.dim(t) for t in given.tensors}
    dims = dims_of(argument(given.args, given.kwargs, 1, "dim", "axis", default=0), given.tensors[0].ndim)
    dim = found.pop()
    return Step(dim, loose=True) if dim is not None and not found and dims is not None and dim not in dims else None


def _moved(given: Given, x: Tensor, dim: int) -> Step | None:
    """Views, and operations along other dimensions; x is the only member."""
    kind, args, kwargs = given.kind, given.args, given.kwargs
    if kind.rule is moves.reshape:
        return Step(dim, lead=math.prod(x.shape[:dim]), loose=True)
    if kind.rule is moves.unsqueeze:
        new = argument(args, kwargs, 1, "dim") % (x.ndim + 1)
        return Step(dim + (new <= dim), loose=True)
    if kind.rule is moves.squeeze:
        gone = dims_of(argument(args, kwargs, 1, "dim"), x.ndim)
        return None if gone is None or dim in gone else Step(dim - sum(d < dim for d in gone if x.shape[d] == 1))
    if kind.name in _PERMUTING:
        order = moves.order_of(kind.name, x, args, kwargs)
        return None if order is None else Step(order.index(dim), loose=True)
    if kind.rule is moves.pieces:
        dims = dims_of(argument(args, kwargs, 2, "dim", default=0), x.ndim)
        return None if dims is None or dim in dims else Step(dim, loose=True)
    if kind.name in _WITHIN:
        return _within(given, x, dim)
    others = [t for t in given.tensors if t is not x]
    if kind.rule is flow_layers.linear or (kind.name in ("matmul", "mm") and args and args[0] is x):
        return Step(dim) if dim < x.ndim - 1 and all(t.ndim <= 2 for t in others) else None
    if kind.name in ("layer_norm", "rms_norm"):
        return Step(dim) if dim < x.ndim - len(argument(args, kwargs, 1, "normalized_shape")) else None
    return None


def _within(given: Given, x: Tensor, dim: int) -> Step | None:
    """A softmax or a reduction along other dimensions."""
    args, kwargs = given.args, given.kwargs
    dims, keep = dims_of(argument(args, kwargs, 1, "dim"), x.ndim), argument(args, kwargs, 2, "keepdim", default=False)
    if dims is None or dim in dims:
        return None
    if given.kind.name in ("softmax", "log_softmax"):
        return Step(dim, x.shape)
    return Step(dim if keep else dim - sum(d < dim for d in dims)) if isinstance(keep, bool) else None


def _grouped(tape: Labelled, given: Given) -> Step | None:
    """Every place has the weights of its own number, by the values of this pass; the number is of the place's row."""
    x, weights, ends, more = grouped_call(given.args, given.kwargs)
    label, ranked = tape.lineage(x), given.order.ranked
    if more or ends is None or ranked is None or not len(ranked) or not given.alone(x) or given.dims[id(x)]:
        return None
    if x.ndim != 2 or weights.ndim != 3 or tape.lineage(weights) is not None or ends.shape != weights.shape[:1]:
        return None
    if not isinstance(label, (Axis, Owners)) or int(ranked[0]) < 0 or int(ranked[-1]) >= len(weights):
        return None
    numbers = torch.arange(len(weights), dtype=ranked.dtype, device=ranked.device)
    if not torch.equal(torch.searchsorted(ranked, numbers, right=True), ends.to(torch.int64)):
        return None
    own = owners(label, x.shape, tape.rows)
    rows = given.order.own[given.order.places.to(given.order.own.device)]
    return Step(0, clean=True) if own.shape[1] == 1 and torch.equal(own[:, 0], rows) else None
