"""The operations whose effect on row labels is known, by name: torch.f, Tensor.f, Tensor.f_ and F.f alike."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sordino.gradients.labels import flow, flow_layers, moves, selections
from sordino.gradients.labels.flow import Rule


def names(text: str) -> list[str]:
    return text.split()


_POINTWISE = names(
    """
    abs absolute acos acosh add addcdiv addcmul alpha_dropout angle arccos arcsin arctan asin asinh atan atan2 atanh
    bernoulli bfloat16 binary_cross_entropy binary_cross_entropy_with_logits bitwise_and bitwise_not bitwise_or
    bitwise_xor bool byte ceil celu char clamp clamp_max clamp_min clip clone complex conj conj_physical contiguous
    copysign cos cosh cpu cuda deg2rad detach digamma div divide double dropout dropout1d dropout2d dropout3d elu eq
    erf erfc erfinv exp exp2 expm1 feature_alpha_dropout feature_dropout fix float float_power floor floor_divide
    fmax fmin fmod frac ge gelu greater greater_equal gt half hardshrink hardsigmoid hardswish hardtanh heaviside
    hinge_embedding_loss huber_loss hypot imag int isclose isfinite isinf isnan isneginf isposinf isreal kl_div
    l1_loss ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and
    logical_not logical_or logical_xor logit log_sigmoid long lt margin_ranking_loss masked_fill maximum minimum
    mish mse_loss mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal poisson_nll_loss positive pow
    real reciprocal relu relu6 remainder resolve_conj resolve_neg round rrelu rsqrt rsub selu sgn short sigmoid sign
    signbit silu sin sinc sinh smooth_l1_loss soft_margin_loss softplus softshrink softsign sqrt square sub subtract
    tan tanh tanhshrink threshold _threshold trunc true_divide type xlogy requires_grad retain_grad data
    pin_memory and or xor invert floordiv mod
    """
)
_CONSTANT = names(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty
    new_full new_tensor normal_ uniform_ random_ exponential_ geometric_ cauchy_ log_normal_ zero_ fill_ bernoulli_
    """
)

_REDUCTIONS = names(
    """
    mean prod std var amax amin max min argmax argmin any all logsumexp nanmean median nanmedian mode std_mean
    var_mean aminmax
    """
)
_MIXING = {
    **dict.fromkeys(names("cumsum cumprod logcumsumexp cummax cummin softmax log_softmax softmin"), flow.mixing()),
    **dict.fromkeys(names("sort argsort"), flow.sorting),
    "histc": flow.counted(1, "bins"),
    "bincount": flow.counted(2, "minlength"),
    "topk": flow.mixing(2, -1),
    "kthvalue": flow.reduction(2, -1),
    "quantile": flow.quantile,
    "nanquantile": flow.quantile,
    "normalize": flow.mixing(2, 1),
    "cosine_similarity": flow.cosine,
    "norm": flow.reduction(2),
    "linalg_vector_norm": flow.reduction(2),
    "linalg_norm": flow.reduction(2),
    "gumbel_softmax": flow.mixing(4, -1),
    **dict.fromkeys(
        names("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"), flow.uncertain(flow.mixing(2, -1))
    ),
    **dict.fromkeys(names("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"), flow.uncertain(flow.mixing(2, (-2, -1)))),
    **dict.fromkeys(names("fft_fftn fft_ifftn fft_rfftn fft_irfftn"), flow.uncertain(flow.mixing(2))),
}
_TRAILING: dict[str, Rule] = {
    **{f"{kind}_pool{n}d": flow.trailing(n) for kind in ("max", "avg", "lp") for n in (1, 2, 3)},
    **{f"adaptive_{kind}_pool{n}d": flow.trailing(n) for kind in ("max", "avg") for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d_with_indices": flow.trailing(n) for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": flow.trailing(n) for n in (1, 2, 3)},
    **dict.fromkeys(names("pixel_shuffle pixel_unshuffle"), flow.trailing(3)),
    "interpolate": flow.trailing(lambda x: x.ndim - 2),
    **dict.fromkeys(
        names("group_norm instance_norm local_response_norm channel_shuffle fold affine_grid"),
        flow.trailing(lambda x: x.ndim - 1),
    ),
    "grid_sample": flow.trailing(lambda x: x.ndim - 1, also=1),
    "im2col": flow.trailing(lambda x: x.ndim - 1),
    **{name: flow.trailing(2) for name in names("inverse linalg_inv linalg_det linalg_cholesky linalg_qr linalg_svd")},
    **{name: flow.trailing(2) for name in names("linalg_matrix_exp matrix_exp linalg_pinv linalg_eigh det")},
    **{f"conv{n}d": flow.trailing(n + 1) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": flow.trailing(n + 1) for n in (1, 2, 3)},
    "rnn_tanh": flow_layers.recurrent,
    "rnn_relu": flow_layers.recurrent,
    "lstm": flow_layers.recurrent,
    "gru": flow_layers.recurrent,
}
_PRODUCTS: dict[str, Rule] = {
    "linear": flow_layers.linear,
    **dict.fromkeys(names("matmul mm bmm mv"), flow_layers.matmul),
    "rmatmul": flow_layers.reflected_matmul,
    **dict.fromkeys(names("addmm baddbmm addmv"), flow_layers.added_product),
    "einsum": flow_layers.einsum,
    **dict.fromkeys(flow_layers.GROUPED, flow_layers.grouped),
    "scaled_dot_product_attention": flow_layers.attention,
    **dict.fromkeys(names("tril triu"), flow_layers.triangle),
    "embedding": flow_layers.embedding,
    "one_hot": flow_layers.embedding,
    "embedding_bag": flow_layers.bag,
    "bilinear": flow_layers.bilinear,
    "glu": flow_layers.halved,
    **dict.fromkeys(names("cross_entropy nll_loss"), flow_layers.by_class),
    **dict.fromkeys(
        names("multilabel_margin_loss multilabel_soft_margin_loss triplet_margin_loss pairwise_distance"),
        flow_layers.by_row(),
    ),
    "multi_margin_loss": flow_layers.by_row(target=1),
    "cosine_embedding_loss": flow_layers.by_row(target=2),
    "gaussian_nll_loss": flow.same_rank,
    "where": flow.choice,
    "copy": flow.copied,
    "to": flow.only_first,
    "type_as": flow.only_first,
    "companion_norm": flow_layers.companions,
    "standardised_gru": flow_layers.standardised_gru,
    "batch_norm": flow_layers.batch_norm,
    "prelu": flow_layers.prelu,
    "layer_norm": lambda t, a, k, o: flow.trailing(len(flow.argument(a, k, 1, "normalized_shape")))(t, a, k, o),
    "rms_norm": lambda t, a, k, o: flow.trailing(len(flow.argument(a, k, 1, "normalized_shape")))(t, a, k, o),
    "view_as_real": flow.trailing(0),
    "view_as_complex": flow.trailing(1),
}
_MOVES: dict[str, Rule] = {
    **dict.fromkeys(names("view reshape flatten unflatten view_as reshape_as ravel"), moves.reshape),
    **{
        name: moves.permutation(name)
        for name in names("permute transpose swapaxes swapdims t T H mT mH adjoint movedim moveaxis")
    },
    "unsqueeze": moves.unsqueeze,
    "squeeze": moves.squeeze,
    **dict.fromkeys(names("expand expand_as broadcast_to"), moves.expand),
    **dict.fromkeys(names("repeat tile"), moves.repeat),
    "repeat_interleave": moves.repeat_interleave,
    **dict.fromkeys(names("chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split"), moves.pieces),
    "unbind": moves.unbind,
    "select": moves.select,
    "narrow": moves.narrow,
    "index_select": selections.index_select,
    "gather": selections.gather,
    "take_along_dim": selections.take_along_dim,
    "getitem": selections.getitem,
    **dict.fromkeys(names("cat concat concatenate"), moves.cat),
    "stack": moves.stack,
    "flip": moves.turned(1),
    "roll": moves.turned(2),
    "pad": moves.pad,
    "unfold": moves.unfold,
    "masked_select": selections.masked_select,
    **dict.fromkeys(names("index_add index_copy scatter scatter_add"), selections.scattered(3)),
    "_pack_padded_sequence": moves.packed,
    "_pad_packed_sequence": moves.unpacked,
}

RULES: dict[str, Rule] = {
    **dict.fromkeys(_POINTWISE, flow.pointwise),
    **dict.fromkeys(_CONSTANT, flow.constant),
    **dict.fromkeys(_REDUCTIONS, flow.reduction()),
    **dict.fromkeys(names("sum nansum count_nonzero"), flow.uncertain(flow.reduction())),
    **_MIXING,
    **_TRAILING,
    **_PRODUCTS,
    **_MOVES,
}

_PROPERTIES = names("shape ndim dtype device layout requires_grad is_cuda is_nested is_leaf is_sparse itemsize nbytes")
ASKS = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES if hasattr(Tensor, name)]
    + [Tensor.dim, Tensor.size, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_contiguous]
    + [Tensor.is_floating_point, Tensor.is_complex, Tensor.nelement, Tensor.element_size, Tensor.get_device]
)
"""Queries about a tensor whose answers do not depend on its values."""

SIZES = frozenset(
    [getattr(Tensor, name).__get__ for name in ("shape", "nbytes") if hasattr(Tensor, name)]
    + [Tensor.size, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__, Tensor.is_contiguous]
)
"""Those of them whose answer may reveal the number of rows."""

_OPENS = names("numpy __array__ untyped_storage storage data_ptr __dlpack__ __reduce_ex__")
OPENS = frozenset(getattr(Tensor, name) for name in _OPENS)
"""Operations that give Python access to a tensor's memory, to read and to write."""

READS = frozenset(
    _OPENS
    + names(
        "item tolist __bool__ __float__ __int__ __index__ __complex__ __contains__ is_nonzero equal allclose "
        "__format__ __repr__ __str__"
    )
)
"""Operations that convert a tensor's values to Python objects, which can't be followed."""


_ATTRIBUTES: Any = Tensor
SETS_GRAD = frozenset((Tensor.requires_grad_, _ATTRIBUTES.requires_grad.__set__))
SETS_CONTENT = frozenset((_ATTRIBUTES.data.__set__, _ATTRIBUTES.grad.__set__))
"""Attributes of a tensor that, set on a parameter or a buffer, would store values of the data in the model."""
NO_GRAD: Any = torch._C._set_grad_enabled
STOPS = SETS_GRAD | {
    *(torch.detach, torch.detach_, NO_GRAD),
    *(Tensor.detach, Tensor.detach_, _ATTRIBUTES.data.__get__, _ATTRIBUTES.data.__set__),
}
"""Operations that stop gradients, or decide whether there are any."""


_OPERATORS = names("add sub mul truediv pow div floordiv mod or and xor")
_REFLECTED, _IN_PLACE = frozenset("r" + name for name in _OPERATORS), frozenset("i" + name for name in _OPERATORS)
_NOT_IN_PLACE = ("__index__", "__int__", "__invert__", "__iter__")


_OTHERS = ("torch._ops.", "torch.ops.")  # operators of torch.library, of which only aten's are torch's own


@functools.lru_cache(1 << 12)
def own_name(func: Any) -> str:
    """Its name if it is a function of torch or of this package; empty for any other, whose name says nothing.

    A custom operator (torch.library) and a user's function with handle_torch_function may have any name: ``relu``.
    """
    name: str = getattr(func, "__name__", "")
    module: str = getattr(func, "__module__", None) or "torch"
    if module.startswith(_OTHERS) and not module.endswith("._ops.aten"):
        return name if module.endswith("._ops.transformers") and name in flow_layers.GROUPED else ""
    return name if module.partition(".")[0] in ("torch", "sordino") else ""


@functools.lru_cache(1 << 12)
def name_of(func: Any) -> str:
    """Its plain name: ``add`` for torch.add, Tensor.add_, Tensor.__iadd__; that of a property for its getter."""
    name = own_name(func)
    if name == "__get__":
        name = getattr(func.__self__, "__name__", "")
    if name in _CONSTANT or name in READS:
        return name
    if name.startswith("__") and name.endswith("__"):
        name = name[2:-2]
        if name in _REFLECTED or name in _IN_PLACE:
            return name[1:]
        return name
    return name[:-1] if name.endswith("_") and not name.startswith("_") else name


@functools.lru_cache(1 << 12)
def rule_for(func: Any) -> Rule | None:
    return RULES.get(name_of(func))


@functools.lru_cache(1 << 12)
def writes(func: Any) -> bool:
    """Does it write into its first argument?"""
    name = own_name(func)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_") and not name.startswith("_")


_JOINING = frozenset(
    (
        *(flow.pointwise, flow.like_first, flow.choice, flow.same_rank, flow.constant, flow.copied, flow.only_first),
        *(moves.stack, moves.cat, selections.getitem, selections.masked_select, flow_layers.embedding),
    )
)


class Kind(NamedTuple):
    """Properties of an operation that follow from its name, computed once.

    own: the name of an operation with its own treatment. hooks: it attaches a hook to its argument, or gives access to
    a node where one can be attached. plain: it works position by position on its arguments, and does nothing else.
    joins: the rule considers every tensor among the arguments, also those without dimensions.
    """

    name: str
    rule: Rule | None
    reads: bool
    writes: bool
    hooks: bool
    own: str | None
    plain: bool
    joins: bool


@functools.lru_cache(1 << 12)
def kind_of(func: Any) -> Kind:
    name, own = name_of(func), own_name(func)
    hooks = func is Tensor.register_hook or name == "grad_fn"
    single = own if own in ("requires_grad_", "__setitem__", "__set__") else None
    rule, written = rule_for(func), writes(func)
    plain = rule is flow.pointwise and not (written or hooks or single)
    return Kind(name, rule, name in READS, written, hooks, single, plain, rule is None or rule in _JOINING)
