"""Models whose parameters are divided over processes: each process has a shard, and the whole is gathered for each use.

The engine works on whole parameters, one group (a transformer block) at a time. `Shards` is its interface: the
whole of a parameter, and the destination of its sum. `Reading` is a torch mode under which every operation receives
whole parameters instead of shards. Under `Packing` autograd saves the name of a whole parameter instead of its memory,
and the parameter is gathered again in the backward pass.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sordino.errors import Refused
from sordino.gradients.labels.vocabulary import ASKS


class Shards(Protocol):
    """The shards of a model's parameters, and how they are gathered."""

    @property
    def groups(self) -> Sequence[Sequence[str]]:
        """Names of the trained parameters, in groups that are gathered together; each name once."""

    def whole(self, shard: Tensor) -> Tensor:
        """The whole of a parameter (or of an earlier value of it), without a gradient."""

    def reading(self, leaves: Sequence[str] = ()) -> AbstractContextManager[Mapping[str, Tensor]]:
        """A context in which operations receive whole parameters. It yields those of `leaves`, which require a
        gradient."""

    def put(self, name: str, total: Tensor) -> None:
        """Receives a chunk's sum for one parameter, to be added to the other processes' sums; overwrites it."""


def reading(shards: Shards | None, leaves: Sequence[str] = ()) -> AbstractContextManager[Any]:
    """`shards.reading`; an empty context for a model that is not divided."""
    return nullcontext({}) if shards is None else shards.reading(leaves)


class Reading(TorchFunctionMode):
    """Replaces shards by whole parameters in every operation.

    Args:
        holds: Is this tensor a shard?
        whole: The whole of a shard.
        leaves: Tensors that replace some shards instead, by identity.
    """

    def __init__(
        self, holds: Callable[[Tensor], bool], whole: Callable[[Tensor], Tensor], leaves: Mapping[int, Tensor]
    ) -> None:
        super().__init__()
        self.holds, self.whole, self.leaves = holds, whole, leaves

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _takes_shards(func):
            return func(*args, **(kwargs or {}))
        if not kwargs:
            return func(*self._whole(args))
        return func(*self._whole(args), **{key: self._whole(value) for key, value in kwargs.items()})

    def _whole(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            if not self.holds(tree):
                return tree
            leaf = self.leaves.get(id(tree))
            return self.whole(tree) if leaf is None else leaf
        if type(tree) in (list, tuple):
            return type(tree)(self._whole(item) for item in tree)
        if type(tree) is dict:
            return {key: self._whole(value) for key, value in tree.items()}
        return tree


_QUESTIONS = ("is_inference", "is_signed", "is_conj", "is_neg", "is_shared", "is_pinned", "is_same_size", "type")
_AS_THEY_ARE = frozenset(
    [torch.autograd.grad, torch.autograd.backward, Tensor.requires_grad_, Tensor.detach]
    + [getattr(Tensor, name) for name in _QUESTIONS]
)
_VALUES = frozenset(("T", "mT", "H", "mH", "data", "real", "imag"))


@functools.lru_cache(1 << 12)
def _takes_shards(func: Any) -> bool:
    """Whether the operation is called with the shards themselves: it does not read their values."""
    return func in ASKS or func in _AS_THEY_ARE or _is_attribute(func)


def _is_attribute(func: Any) -> bool:
    """A property that is not a view of the values: .grad, .grad_fn, ._version and the like."""
    name = getattr(func, "__name__", "")
    return name in ("__get__", "__set__") and getattr(func.__self__, "__name__", "") not in _VALUES


class Named(NamedTuple):
    """What autograd saves of a whole parameter, or of a view of it."""

    shard: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class Packing:
    """Saves whole parameters by name (torch.autograd.graph.saved_tensors_hooks).

    A whole parameter is recognised by its memory as long as another object holds it, so that the memory can't be
    reused.
    """

    def __init__(self, whole: Callable[[Tensor], Tensor]) -> None:
        self._whole = whole
        self._known: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}

    def know(self, shard: Tensor, whole: Tensor) -> None:
        if whole.numel():
            self._known[whole.untyped_storage().data_ptr()] = weakref.ref(whole), shard

    def __call__(self, t: Tensor) -> Any:
        known = self._known.get(t.untyped_storage().data_ptr()) if _plain(t) else None
        whole = None if known is None else known[0]()
        if known is None or whole is None or t.dtype != whole.dtype:
            return t
        return Named(known[1], tuple(t.shape), tuple(t.stride()), int(t.storage_offset()))

    def unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, Named):
            return kept  # type: ignore[no-any-return]
        return self._whole(kept.shard).as_strided(kept.size, kept.stride, kept.offset)

    def entered(self) -> AbstractContextManager[Any]:
        """Raises Refused if other saved-tensor hooks are active, which would not be called under these."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise Refused(
                "hooks on what autograd saves (saved_tensors_hooks, save_on_cpu) are in place, and the parameters of a "
                "sharded model are gathered by such hooks: train outside of them"
            )
        return torch.autograd.graph.saved_tensors_hooks(self, self.unpack)


def _plain(t: Tensor) -> bool:
    return t.layout == torch.strided and not t.is_nested and type(t) in (Tensor, torch.nn.Parameter)


class Counting:
    """Records the memory of the tensors that autograd saves: bytes by address."""

    def __init__(self, found: dict[int, int]) -> None:
        self.found = found

    def __call__(self, t: Tensor) -> Tensor:
        if _plain(t):
            storage = t.untyped_storage()
            self.found[storage.data_ptr()] = storage.nbytes()
        return t

    def hooks(self) -> AbstractContextManager[Any]:
        return torch.autograd.graph.saved_tensors_hooks(self, lambda t: t)


def hooked(top: Any) -> bool:
    """Are these saved-tensor hooks (None: there are none) not ours?"""
    return top is not None and not isinstance(top[0], (Packing, Counting))
