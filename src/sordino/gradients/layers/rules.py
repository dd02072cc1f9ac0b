"""Which rule handles which operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from sordino.gradients.labels.flow_layers import GROUPED
from sordino.gradients.labels.vocabulary import name_of, names, own_name
from sordino.gradients.layers import (
    attention,
    companion_norm,
    contraction,
    convolution,
    derived,
    elementwise,
    embedding,
    fallback,
    grouped,
    linear,
    normalisation,
    recurrent,
    transforms,
)
from sordino.gradients.layers.gru import standardised_gru
from sordino.gradients.sums.standardisation import standardised_weight
from sordino.gradients.tape.tape import TYPE_ONLY, Rulebook, Tape

Rule = Callable[[Tape, Any, Any, Any], Any]

RULES: dict[Any, Rule] = {
    F.linear: linear.linear,
    torch.addmm: linear.addmm,
    torch.Tensor.addmm: linear.addmm,
    torch.matmul: linear.matmul,
    torch.Tensor.matmul: linear.matmul,
    torch.mm: linear.matmul,
    torch.Tensor.mm: linear.matmul,
    torch.bmm: contraction.bmm,
    torch.Tensor.bmm: contraction.bmm,
    torch.baddbmm: contraction.baddbmm,
    torch.Tensor.baddbmm: contraction.baddbmm,
    torch.mv: contraction.mv,
    torch.Tensor.mv: contraction.mv,
    torch.einsum: contraction.einsum,
    F.scaled_dot_product_attention: attention.scaled_dot_product,
    torch.conv1d: convolution.convolution,
    torch.conv2d: convolution.convolution,
    torch.conv3d: convolution.convolution,
    torch.conv_transpose1d: convolution.transposed,
    torch.conv_transpose2d: convolution.transposed,
    torch.conv_transpose3d: convolution.transposed,
    F.embedding: embedding.embedding,
    F.embedding_bag: embedding.bag,
    torch.Tensor.__getitem__: embedding.getitem,
    F.layer_norm: normalisation.layer_norm,
    F.rms_norm: normalisation.rms_norm,
    F.group_norm: normalisation.group_norm,
    F.instance_norm: normalisation.instance_norm,
    F.batch_norm: normalisation.batch_norm,
    companion_norm.companion_norm: companion_norm.rule,
    torch.cat: elementwise.cat,
    torch.concat: elementwise.cat,
    torch.lstm: recurrent.lstm,
    torch.gru: recurrent.gru,
    torch.rnn_tanh: recurrent.rnn_tanh,
    torch.rnn_relu: recurrent.rnn_relu,
    standardised_gru: recurrent.standardised,
    torch.lstm_cell: recurrent.lstm_cell,
    torch.gru_cell: recurrent.gru_cell,
    torch.rnn_tanh_cell: recurrent.rnn_cell,
    torch.rnn_relu_cell: recurrent.rnn_cell,
}

TABLES = (embedding.embedding, embedding.getitem)

VIEWS = frozenset(names("view reshape flatten unflatten permute transpose unsqueeze squeeze contiguous mT"))
ON_CONSTANTS = frozenset((F.linear, torch.conv1d, torch.conv2d, torch.conv3d))  # whose results may contain the rows

# checked on every call with data, whether or not a parameter is involved
GUARDS: dict[Any, Callable[[Tape, Any, Any, Any], None]] = {
    F.batch_norm: normalisation.refuse_batch_statistics,
    torch.batch_norm: normalisation.refuse_batch_statistics,
    F.instance_norm: normalisation.refuse_running_statistics,
}


def positional(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Rewrites torch.matmul(input=x, other=w) as torch.matmul(x, other=w): rules expect the first argument by position.

    torch.where calls its second argument ``input``.
    """
    if args or "input" not in kwargs or "condition" in kwargs:
        return args, kwargs
    return (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}


def apply(tape: Tape, func: Any, args: Any, kwargs: Any, data: bool) -> Any:
    """Run an operation that uses a slot, under gradient mode."""
    args, kwargs = positional(args, kwargs)
    if transforms.active():
        return transforms.inside(tape, func, args, kwargs)
    rule = RULES.get(func) if data else None
    if rule is not None and rule not in TABLES and _complex((*args, *kwargs.values())):
        return fallback.general(tape, func, args, kwargs)  # the rules' products assume real numbers
    if rule is not None:
        out = rule(tape, func, args, kwargs)
        return fallback.general(tape, func, args, kwargs) if out is NotImplemented else out
    name = own_name(func)
    first = tape.slot(args[0]) if args else None
    if name in elementwise.SHAPE_ONLY and args and first is None:
        return func(*tape.values(args), **tape.values(kwargs))
    if data and name in GROUPED and (out := grouped.grouped_mm(tape, func, args, kwargs)) is not NotImplemented:
        return out
    if func is F.multi_head_attention_forward:
        return attention.multi_head(tape, func, args, kwargs)
    if func in TYPE_ONLY and first is not None:
        return tape.derive(func, args, kwargs)
    if name in elementwise.STRETCHING and first is not None:
        return elementwise.stretch(tape, func, args, kwargs)
    if not data and func is standardised_weight:
        return normalisation.weight_standardisation(tape, func, args, kwargs)
    if not data:
        return weights_alone(tape, func, args, kwargs)
    out = elementwise.broadcast(tape, func, args, kwargs) if name in elementwise.ELEMENTWISE else NotImplemented
    return fallback.general(tape, func, args, kwargs) if out is NotImplemented else out


def _complex(given: Sequence[Any]) -> bool:
    """Is there a complex tensor among them, or in a list of them?"""
    for t in given:
        if t.is_complex() if isinstance(t, torch.Tensor) else isinstance(t, (list, tuple)) and _complex(t):
            return True
    return False


def weights_alone(tape: Tape, func: Any, args: Any, kwargs: Any) -> Any:
    """An operation on parameters and constants, recorded if that helps when the result is combined with data."""
    if func is F.embedding:
        return embedding.constant_places(tape, func, args, kwargs)
    first = tape.slot(args[0]) if args else None
    if first is not None and first.tiled is not None and name_of(func) in ("transpose", "mT", "permute"):
        base = tape.derive(func, (first.tiled, *args[1:]), kwargs)
        out = func(first.value, *args[1:], **kwargs)
        if base.shape[1:] == out.shape[1:] and base.shape[0] == first.tiled.shape[0]:
            return tape.derive(func, args, kwargs, tiled=base)
    again = func in ON_CONSTANTS or (first is not None and first.made is not None and name_of(func) in VIEWS)
    return tape.derive(func, args, kwargs, made=(func, args, kwargs) if again else None)


RULEBOOK = Rulebook(apply, derived.adopt, GUARDS)
