"""nn.MultiheadAttention: torch's functional form runs unchanged, and the tape intercepts the operations inside it.

Attention with a learned bias (relative positions in windows) or learned queries: each such parameter is replaced by a
leaf that is expanded over the rows, so that autograd computes its gradient for every row.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.labels.flow import contracted_over
from sordino.gradients.labels.lineage import MANY, Lineage, Many, aligned, merged
from sordino.gradients.layers.elementwise import placeable, stand_in
from sordino.gradients.tape.tape import Tape

# F.multi_head_attention_forward dispatches itself as one call if a mode is active. We run the same code with that check
# answered by "no", so that its linear maps and products are intercepted one by one. Torch's own function is not
# changed.
_forward = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda *_: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def multi_head(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    with tape:
        return _forward(*args, **kwargs)


def scaled_dot_product(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "attn_mask")
    call = {**dict(zip((*names, "dropout_p", "is_causal"), args, strict=False)), **kwargs}
    query, key, value, mask = (call.get(name) for name in names)
    if not isinstance(query, Tensor) or not isinstance(key, Tensor) or not isinstance(value, Tensor):
        return NotImplemented
    try:
        batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])  # type: ignore[no-untyped-call]
    except RuntimeError:  # keys have fewer heads than queries
        return NotImplemented
    shapes = {name: (*batch, *call[name].shape[-2:]) for name in names[:3]}
    shapes["attn_mask"] = (*batch, query.shape[-2], key.shape[-2])
    slots = {name: s for name in names if (s := tape.slot(call.get(name))) is not None}
    data = [t for t in (query, key, value, mask) if isinstance(t, Tensor) and tape.is_data(t)]
    label = _label(tape, data, len(batch) + 2)
    fits = all(placeable(s, shapes[name], label) for name, s in slots.items())
    if (mask is not None and mask.ndim > len(batch) + 2) or (tape.rows > 1 and not fits):
        return NotImplemented
    for name, slot in slots.items():
        call[name] = stand_in(tape, func, slot, shapes[name], label)
    return func(**call)


def _label(tape: Tape, data: Sequence[Tensor], ndim: int) -> Lineage:
    """The rows' dimensions among the leading dimensions that all arguments share."""
    labels: list[Lineage] = []
    for t in data:
        label = tape.lineage(t)
        if label is None or isinstance(label, Many) or tape.rows == 1:
            return MANY
        label = contracted_over(label, (t.ndim - 2, t.ndim - 1))
        labels.append(label if isinstance(label, Many) else aligned(label, t.shape, [1] * ndim, tape.rows))
    return merged(labels, [1] * ndim, tape.rows) if labels else MANY
