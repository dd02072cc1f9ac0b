"""Code beneath the operations: modes of the dispatcher, and tensors of classes that define operations themselves.

An operation's name says what it does only if torch itself performs it. A TorchDispatchMode, or a tensor class with its
own ``__torch_function__`` or ``__torch_dispatch__``, may do anything in its place, and read any value there. Nothing of
that is intercepted. A mode that a model enters is refused. Where a tensor of such a class takes part, the rows of the
results are not known, and any value may have been read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from sordino.errors import Refused
from sordino.gradients.labels.book import Book
from sordino.gradients.labels.flow import flat

depth = torch._C._len_torch_dispatch_stack
"""The number of active modes of the dispatcher."""

_PLAIN = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
_NONE = torch._C._disabled_torch_function_impl


def refuse_mode() -> None:
    """Raises Refused with the name of the innermost mode of the dispatcher."""
    mode = type(torch._C._get_dispatch_stack_at(depth() - 1)).__name__
    raise Refused(
        f"{mode}: the forward pass runs under a TorchDispatchMode, which may replace torch's operations by others that "
        "sordino can't see; leave it out of the model and the loss while it is trained"
    )


@functools.lru_cache(1 << 10)
def own_code(kind: Any) -> bool:
    """Does this class of tensors define what operations on it do?"""
    if kind is Tensor or kind is torch.nn.Parameter:
        return False
    function, dispatch = (getattr(kind, name, None) for name in ("__torch_function__", "__torch_dispatch__"))
    plain = function is _NONE or getattr(function, "__func__", None) is _PLAIN
    return not plain or (dispatch is not None and getattr(dispatch, "__func__", dispatch) is not _DISPATCH)


_DISPATCH = getattr(Tensor.__torch_dispatch__, "__func__", Tensor.__torch_dispatch__)


def any_own(kinds: Iterable[Any]) -> bool:
    return any(map(own_code, kinds))


def unknown(book: Book, out: Any) -> None:
    """The rows of these results are not known, and any value may have been read."""
    for t in flat(out):
        book.hidden(t)
    book.failed()
    book.foreign = True
