"""nn.MultiheadAttention: its functional form is run as it is written in torch, with the tape looking at its parts."""

from __future__ import annotations

import types
from typing import Any

import torch.nn.functional as F

from sordino.gradients.tape import Tape

# F.multi_head_attention_forward hands itself over whole when a mode is active. The same code with that one question
# answered "no" runs through, and its linear maps and products are seen one by one. Torch's own function is untouched.
_forward = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.multi_head_attention_forward.__globals__, "has_torch_function": lambda *_: False},
    "multi_head_attention_forward",
    F.multi_head_attention_forward.__defaults__,
)


def multi_head(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    with tape:
        return _forward(*args, **kwargs)
