"""Calls of every operation in ``vocabulary.RULES``, in the forms in which programs write them.

A case is a function and the tensors it is called with. Sizes are 3, the number of rows, or multiples of it wherever the
operation allows, so that a rule that looks at a length is wrong in one of the cases.
"""

# ruff: noqa: SIM905, B008, E501 (tables of names and calls)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sordino.gradients.labels.vocabulary import _POINTWISE

Case = tuple[Callable[..., Any], tuple[Tensor, ...]]
_draw = torch.Generator().manual_seed(0)
NOT_HERE = {"cuda", "pin_memory", "grouped_mm_fallback"}
"""Of another device or another library, or names by which no function is called any more."""


def f(*shape: int) -> Tensor:
    """Numbers between 0.1 and 0.9, in the domain of nearly all functions."""
    return 0.1 + 0.8 * torch.rand(shape, generator=_draw, dtype=torch.float64)


def ids(below: int, *shape: int) -> Tensor:
    return torch.randint(0, below, shape, generator=_draw)


def mask(*shape: int) -> Tensor:
    return torch.rand(shape, generator=_draw) < 0.5


def z(*shape: int) -> Tensor:
    return torch.complex(f(*shape), f(*shape))


def const(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


BINARY = set(
    """add sub subtract mul multiply div divide true_divide atan2 copysign eq ne not_equal ge greater greater_equal gt le less
less_equal lt fmax fmin maximum minimum fmod remainder hypot isclose logaddexp logaddexp2 logical_and logical_or
logical_xor nextafter pow float_power floor_divide heaviside xlogy rsub l1_loss mse_loss huber_loss
smooth_l1_loss soft_margin_loss poisson_nll_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits
hinge_embedding_loss""".split()
)
OPERATORS = dict(
    add=("__add__", "__radd__", "__iadd__"),
    sub=("__sub__", "__isub__"),
    rsub=("__rsub__",),
    mul=("__mul__", "__rmul__", "__imul__"),
    div=("__truediv__", "__itruediv__", "__rtruediv__"),
    pow=("__pow__", "__rpow__", "__ipow__"),
    remainder=("__mod__",),
    **{"and": ("__and__",), "or": ("__or__", "__ior__"), "xor": ("__xor__",)},
)
LOGIC = {"and", "or", "xor", "bitwise_and", "bitwise_or", "bitwise_xor"}
OTHER = set(
    """addcdiv addcmul bitwise_not invert complex conj conj_physical imag real resolve_conj resolve_neg copy clamp clamp_max
clamp_min clip gaussian_nll_loss ldexp lerp margin_ranking_loss masked_fill mvlgamma threshold type where tril triu retain_grad data
cuda pin_memory acosh asinh atanh heaviside floor_divide floordiv kl_div dropout feature_dropout feature_alpha_dropout mod _threshold soft_margin_loss
""".split()
)


def forms(name: str) -> list[Callable[..., Any]]:
    """torch.f, F.f, Tensor.f, Tensor.f_ and the operators, whichever there are."""
    found: list[Callable[..., Any]] = []
    for home in (F,) if hasattr(F, name) else (torch,):
        call = getattr(home, name, None)
        if call is not None and callable(call) and not isinstance(call, torch.dtype):
            found.append(call)
    if name.endswith("loss") or name in ("kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"):
        return [lambda *a, call=call, **k: call(*a, reduction="none", **k) for call in found]
    for method in (name, *OPERATORS.get(name, ())):
        if hasattr(Tensor, method) and callable(getattr(Tensor, method)):
            found.append(lambda x, *a, m=method: getattr(x.clone() if m.startswith("__i") else x, m)(*a))
    if hasattr(Tensor, name + "_"):
        found.append(lambda x, *a: getattr(x.clone(), name + "_")(*a))
    return found


def pointwise(name: str) -> list[Case]:
    calls = forms(name)
    if name in LOGIC:
        pairs = [(ids(4, 3, 3), ids(4, 3, 3)), (mask(3, 3), mask(3))]
    elif name in BINARY or name in OPERATORS:
        pairs = [(f(3, 3), f(3, 3)), (f(6, 3), f(3)), (f(3, 3, 3), f(3, 1))]
        if name in (
            "mse_loss",
            "l1_loss",
            "binary_cross_entropy_with_logits",
            "huber_loss",
            "smooth_l1_loss",
            "binary_cross_entropy",
        ):
            pairs = [(f(3, 3), f(3, 3)), (f(6, 3), f(6, 3))]
    else:
        extra = (0.5, True) if name == "alpha_dropout" else ()
        calls = [lambda *a, call=call: call(*a, *extra) for call in calls]
        sizes = [(3, 3, 3, 3, 3), (6, 3, 2, 3, 3)] if name == "dropout3d" else [(3, 3, 3, 3), (3, 6, 3, 2)]
        sizes = sizes if name in ("dropout1d", "dropout2d", "dropout3d") else [(3, 3), (6, 3, 2)]
        if name == "dropout1d":
            sizes = [(3, 3, 3), (6, 3, 2)]
        pairs = [(f(*s),) for s in sizes]
    return [(call, pair) for call in calls for pair in pairs]


def several(calls: list[Callable[..., Any]], *inputs: tuple[Tensor, ...]) -> list[Case]:
    return [(call, given) for call in calls for given in inputs]


def _inplace(act: Callable[..., Any]) -> Callable[..., Any]:
    """The result is what was written to, not what the call returned."""

    def run(x: Tensor, *rest: Tensor) -> Tensor:
        y = x.clone()
        act(y, *rest)
        return y

    return run


def _set_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x.detach().flip(0)
    return y


CASES: dict[str, list[Case]] = {name: pointwise(name) for name in sorted({*_POINTWISE} - OTHER - NOT_HERE)}
CASES |= {
    "acosh": several([torch.acosh, Tensor.acosh], (f(3, 3) + 1,)),
    "addcdiv": several(
        [torch.addcdiv, lambda x, y, w: x.clone().addcdiv_(y, w, value=2)],
        (f(3, 3), f(3, 3), f(3)),
        (f(3, 3), f(3, 1), f(3, 3)),
    ),
    "addcmul": several(
        [torch.addcmul, lambda x, y, w: x.addcmul(y, w, value=2)], (f(3, 3), f(3, 3), f(3)), (f(3, 3), f(3, 1), f(3, 3))
    ),
    **{name: several([getattr(torch, name)], (f(3, 3),), (f(6, 3),)) for name in ("asinh", "atanh")},
    "heaviside": several(
        [lambda x, y: torch.heaviside(x.detach(), y.detach())], (f(3, 3) * 0, f(3, 3)), (f(6, 3) * 0, f(3))
    ),
    "floor_divide": several([lambda x, y: torch.floor_divide(x.detach(), y.detach())], (f(3, 3), f(3, 3))),
    "kl_div": several([lambda x, y: F.kl_div(x.log(), y, reduction="none")], (f(3, 3), f(3, 3))),
    "dropout": several(
        [F.dropout, lambda x: torch.dropout(x, 0.5, True), lambda x: torch.dropout_(x.clone(), 0.5, True)], (f(3, 3),)
    ),
    "feature_dropout": several([lambda x: torch.feature_dropout(x, 0.5, True)], (f(3, 3, 3),)),
    "feature_alpha_dropout": several([lambda x: F.feature_alpha_dropout(x, 0.5, True)], (f(3, 3, 3),)),
    "bitwise_not": several([torch.bitwise_not], (ids(4, 3, 3),)),
    "invert": several([lambda x: ~x], (mask(3, 3),)),
    "complex": several([torch.complex], (f(3, 3), f(3, 3)), (f(3, 3), f(3))),
    **{
        name: several([getattr(torch, name)], (z(3, 3),))
        for name in ("conj", "conj_physical", "resolve_conj", "resolve_neg")
    },
    "real": several([lambda x: x.real, torch.real], (z(3, 3),)),
    "imag": several([lambda x: x.imag, torch.imag], (z(3, 6),)),
    "copy": several(
        [_inplace(lambda y, x: y.copy_(x)), lambda y, x: torch.zeros_like(y).copy_(x)],
        (f(3, 3), f(3, 3)),
        (f(3, 3), f(3)),
    ),
    **{
        name: several(
            [
                getattr(torch, name),
                lambda x, y, n=name: getattr(x, n)(y),
                lambda x, y, n=name: getattr(x.clone(), n + "_")(y),
            ],
            (f(3, 3), f(3, 3)),
            (f(6, 3), f(3)),
        )
        for name in ("clamp", "clamp_max", "clamp_min", "clip", "ldexp")
    },
    "gaussian_nll_loss": several(
        [lambda x, t, v: F.gaussian_nll_loss(x, t, v, reduction="none")],
        (f(3, 3), f(3, 3), f(3, 3)),
        (f(3, 3), f(3, 3), f(3)),
        (f(3, 3), f(3, 3), f(3, 1)),
    ),
    "lerp": several(
        [torch.lerp, lambda x, y, w: x.clone().lerp_(y, w)], (f(3, 3), f(3, 3), f(3, 1)), (f(3, 3), f(3), f(3, 3))
    ),
    "margin_ranking_loss": several(
        [lambda a, b, t: F.margin_ranking_loss(a, b, t - 0.5, reduction="none")],
        (f(3), f(3), f(3)),
        (f(3, 3), f(3, 3), f(3, 3)),
    ),
    "masked_fill": several(
        [
            lambda x, m: x.masked_fill(m, -1.0),
            lambda x, m: x.clone().masked_fill_(m, 2.0),
            lambda x, m: torch.masked_fill(x, m, x.sum()),
        ],
        (f(3, 3), mask(3, 3)),
        (f(3, 3), mask(3)),
        (f(3, 3, 3), mask(3, 1)),
    ),
    "mvlgamma": several([lambda x: torch.mvlgamma(x + 3, 2)], (f(3, 3),)),
    "mod": several([lambda x: 2 % x.detach()], (f(3, 3),)),
    "floordiv": several([lambda x: x.detach() // 0.3, lambda x: 2 // x.detach()], (f(3, 3),)),
    "soft_margin_loss": several([lambda x, t: F.soft_margin_loss(x, t.detach(), reduction="none")], (f(3, 3), f(3, 3))),
    "threshold": several([lambda x: torch.threshold(x, 0.5, 0.0)], (f(3, 3),)),
    "_threshold": several([lambda x: F.threshold(x, 0.5, 0.0)], (f(3, 3),)),
    "type": several([lambda x: x.type(torch.float32)], (f(3, 3),)),
    "where": [
        *several(
            [torch.where, lambda m, x, y: x.where(m, y)], (mask(3, 3), f(3, 3), f(3, 3)), (mask(3), f(3, 3), f(3, 1))
        ),
        *several([lambda m: torch.where(m)[0]], (torch.ones(3, dtype=torch.bool),), (mask(3, 3),)),
    ],
    "tril": several([torch.tril, lambda x: x.tril(-1)], (f(3, 3),), (f(3, 3, 3),)),
    "triu": several([torch.triu, lambda x: x.clone().triu_(1)], (f(3, 3),), (f(3, 3, 3),)),
    "retain_grad": several([lambda x: (y := x * 1, y.requires_grad and y.retain_grad())[0]], (f(3, 3),)),
    "data": several([lambda x: x.data, _set_data], (f(3, 3),)),
}
CASES |= {
    name: several([lambda x, n=name: getattr(torch, n)(x)], (f(3, 3),))
    for name in ("zeros_like", "ones_like", "rand_like", "randn_like")
}
CASES |= {
    "empty_like": several([lambda x: torch.empty_like(x).zero_()], (f(3, 3),)),
    "full_like": several([lambda x: torch.full_like(x, 2.0)], (f(3, 3),)),
    "randint_like": several([lambda x: torch.randint_like(x, 5)], (f(3, 3),)),
    "new_zeros": several([lambda x: x.new_zeros(3, 3)], (f(3, 3),)),
    "new_ones": several([lambda x: x.new_ones(3)], (f(3, 3),)),
    "new_empty": several([lambda x: x.new_empty(3).zero_()], (f(3, 3),)),
    "new_full": several([lambda x: x.new_full((3, 3), 2.0)], (f(3, 3),)),
    "new_tensor": several([lambda x: x.new_tensor([1.0, 2.0, 3.0])], (f(3, 3),)),
    "fill_": several([_inplace(lambda y: y.fill_(2.0)), _inplace(lambda y: y.fill_(y.sum()))], (f(3, 3),)),
    "zero_": several([_inplace(lambda y: y.zero_()), _inplace(lambda y: y[1:].zero_())], (f(3, 3),)),
    "bernoulli_": several(
        [_inplace(lambda y: y.bernoulli_(0.5)), lambda x: torch.zeros(3, 3).bernoulli_(x)], (f(3, 3),)
    ),
    "normal_": several([_inplace(lambda y: y.normal_(0, 1))], (f(3, 3),)),
    **{
        name: several([_inplace(lambda y, n=name: getattr(y, n)())], (f(3, 3),))
        for name in ("uniform_", "random_", "exponential_", "cauchy_", "log_normal_")
    },
    "geometric_": several([_inplace(lambda y: y.geometric_(0.5))], (f(3, 3),)),
}

DIMS: list[Any] = [0, 1, -1]
_CUBES = [(f(3, 3),), (f(3, 6, 3),)]


def reductions(name: str, tuples: bool) -> list[Case]:
    call = getattr(torch, name)
    calls = [lambda x, d=d: call(x, d) for d in DIMS]
    calls += [lambda x, d=d: call(x, dim=d, keepdim=True) for d in DIMS]
    calls += [lambda x: call(input=x, dim=0)]
    if hasattr(Tensor, name):
        calls += [lambda x: getattr(x, name)(1), lambda x: getattr(x, name)(dim=-2, keepdim=True)]
    if tuples:
        calls += [lambda x: call(x, (0, 1)), lambda x: call(x, dim=(-1, 0), keepdim=True)]
    return several(calls, *_CUBES)


for _name in "sum nansum mean std var amax amin any all logsumexp nanmean std_mean var_mean count_nonzero".split():
    CASES[_name] = reductions(_name, True)
for _name in "prod max min argmax argmin median nanmedian mode".split():
    CASES[_name] = reductions(_name, False)
CASES["count_nonzero"] = several([lambda x: x.count_nonzero(0), lambda x: torch.count_nonzero(x, dim=(0, 1))], *_CUBES)
CASES["aminmax"] = several([lambda x, d=d: torch.aminmax(x, dim=d) for d in DIMS], *_CUBES)
for _name in "max min".split():
    CASES[_name] += several([getattr(torch, _name)], (f(3, 3), f(3, 3)), (f(3, 3), f(3)))
    CASES[_name] += several([lambda x, n=_name: getattr(x, n)()], *_CUBES)
for _name in "mean sum std var any all argmax median prod logsumexp".split():
    if _name != "logsumexp":
        CASES[_name] += several([lambda x, n=_name: getattr(x, n)()], *_CUBES)
CASES["std"] += several(
    [lambda x: x.std(False), lambda x: x.std(0, True), lambda x: torch.std(x, 1, correction=0)], *_CUBES
)

for _name in "cumsum cumprod logcumsumexp cummax cummin softmax log_softmax softmin sort argsort".split():
    _home = F if _name == "softmin" else torch
    CASES[_name] = several([lambda x, d=d, c=getattr(_home, _name): c(x, dim=d) for d in DIMS], *_CUBES)
    if _name != "softmin":
        CASES[_name] += several([lambda x, n=_name: getattr(x, n)(1)], *_CUBES)
CASES["sort"] += several(
    [lambda x: x.sort(), lambda x: torch.sort(x, stable=True, dim=0), lambda x: x.sort(0, True)[1]], *_CUBES
)
for _name in ("sort", "argsort"):
    CASES[_name] += several(
        [lambda x, c=getattr(torch, _name): c(x), lambda x, n=_name: getattr(x, n)(descending=True)],
        *((f(3),), (f(6),), (ids(3, 3),), (ids(4, 6),)),
    )
CASES["histc"] = several([lambda x: torch.histc(x, 4, 0, 1), lambda x: x.histc(bins=3)], (f(3),), (f(3, 3),))
CASES["bincount"] = several(
    [torch.bincount, lambda x: x.bincount(minlength=2), lambda x: torch.bincount(x, minlength=9)], (ids(4, 3),)
)
if hasattr(F, "grouped_mm"):
    CASES["_grouped_mm"] = several(
        [lambda x, ends, w=torch.randn(2, 4, 4): F.grouped_mm(x, w, offs=ends)],
        (torch.randn(6, 4), torch.tensor([2, 6], dtype=torch.int32)),
        (torch.randn(6, 4), torch.tensor([3, 5], dtype=torch.int32)),
    )
else:
    NOT_HERE.add("_grouped_mm")
CASES["softmax"] += several([lambda x: F.softmax(x, -1), lambda x: x.softmax(-2)], *_CUBES)
_QS = [0.5, torch.tensor(0.3, dtype=torch.float64), torch.tensor([0.2, 0.5, 0.9], dtype=torch.float64)]
CASES |= {
    "topk": several([lambda x: x.topk(2), lambda x: x.topk(3, 0)[0], lambda x: torch.topk(x, k=1, dim=1)[1]], *_CUBES),
    "kthvalue": several(
        [lambda x: x.kthvalue(2), lambda x: x.kthvalue(2, 0), lambda x: torch.kthvalue(x, 1, dim=1, keepdim=True)],
        *_CUBES,
    ),
    **{
        name: several(
            [
                *(lambda x, q=q, d=d, n=name: getattr(torch, n)(x, q, d) for q in _QS for d in DIMS),
                *(lambda x, q=q, n=name: getattr(x, n)(q=q, dim=1) for q in _QS),
                lambda x, n=name: getattr(x, n)(_QS[2], 0, keepdim=True),
                lambda x, n=name: getattr(x, n)(0.5),
            ],
            *_CUBES,
        )
        for name in ("quantile", "nanquantile")
    },
    "normalize": several([F.normalize, lambda x: F.normalize(x, 2.0, 0), lambda x: F.normalize(x, dim=-1)], *_CUBES),
    "cosine_similarity": several(
        [
            F.cosine_similarity,
            lambda a, b: F.cosine_similarity(a, b, dim=0),
            lambda a, b: F.cosine_similarity(x1=a, x2=b, dim=-1),
        ],
        (f(3, 3), f(3, 3)),
        (f(3, 1, 3), f(1, 3, 3)),
        (f(3, 3, 3), f(3, 3)),
    ),
    "norm": several(
        [lambda x: x.norm(), lambda x: x.norm(2, 1), lambda x: x.norm(dim=0), lambda x: torch.norm(x, 2, -1, True)],
        *_CUBES,
    ),
    "linalg_vector_norm": several(
        [
            torch.linalg.vector_norm,
            lambda x: torch.linalg.vector_norm(x, 1, 0),
            lambda x: torch.linalg.vector_norm(x, dim=(0, 1)),
        ],
        *_CUBES,
    ),
    "linalg_norm": several(
        [
            lambda x: torch.linalg.norm(x, dim=0),
            lambda x: torch.linalg.norm(x, dim=(0, 1)),
            lambda x: torch.linalg.norm(x, 1, -1, True),
        ],
        *_CUBES,
    ),
    "gumbel_softmax": several([F.gumbel_softmax, lambda x: F.gumbel_softmax(x, hard=True, dim=0)], *_CUBES),
}
for _name in "fft ifft rfft hfft".split():
    _call = getattr(torch.fft, _name)
    CASES["fft_" + _name] = several([_call, lambda x, c=_call: c(x, dim=0), lambda x, c=_call: c(x, 3, 1)], *_CUBES)
for _name in "irfft ihfft".split():
    _call = getattr(torch.fft, _name)
    CASES["fft_" + _name] = several([lambda x, c=_call: c(x, dim=0), lambda x, c=_call: c(x, 3, -1)], *_CUBES)
for _name in "fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn".split():
    _call = getattr(torch.fft, _name)
    CASES["fft_" + _name] = several(
        [_call, lambda x, c=_call: c(x, dim=(0, 1)), lambda x, c=_call: c(x, (3, 3), (-1, 1))], (f(3, 3, 3),)
    )
