"""Calls of the operations that multiply, mix trailing dimensions, or move positions; see ``flow_cases``."""

# ruff: noqa: SIM905, B008 (tables of names and calls)

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from flow_cases import CASES, Case, const, f, ids, mask, several, z
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from sordino.gradients.layers.companion_norm import companion_norm
from sordino.gradients.layers.gru import standardised_gru


def _sized(n: int) -> tuple[Tensor, ...]:
    return (f(3, 3, *([3] * n)),)


for _n in (1, 2, 3):
    for _kind in ("max", "avg"):
        _pool, _adaptive = getattr(F, f"{_kind}_pool{_n}d"), getattr(F, f"adaptive_{_kind}_pool{_n}d")
        CASES[f"{_kind}_pool{_n}d"] = several([lambda x, c=_pool: c(x, 3, 1, 1)], _sized(_n), (f(3, *([3] * _n)),))
        CASES[f"adaptive_{_kind}_pool{_n}d"] = several([lambda x, c=_adaptive: c(x, 2)], _sized(_n))
    CASES[f"lp_pool{_n}d"] = several([lambda x, c=getattr(F, f"lp_pool{_n}d"): c(x, 2.0, 2)], _sized(_n))
    for _name in (f"max_pool{_n}d_with_indices", f"adaptive_max_pool{_n}d_with_indices"):
        CASES[_name] = several([lambda x, c=getattr(F, _name): c(x, 2)], _sized(_n))
    _conv, _up = getattr(F, f"conv{_n}d"), getattr(F, f"conv_transpose{_n}d")
    for _call, _name in ((_conv, f"conv{_n}d"), (_up, f"conv_transpose{_n}d")):
        CASES[_name] = several([lambda x, w, c=_call: c(x, w, padding=1)], (*_sized(_n), f(3, 3, *([3] * _n))))
        CASES[_name] += several([lambda x, n=_n, c=_call: c(x, const(3, 3, *([1] * n)))], (f(3, *([3] * _n)),))


def _linalg(name: str) -> list[Case]:
    call = (
        getattr(torch.linalg, name.removeprefix("linalg_"), None)
        if name.startswith("linalg_")
        else getattr(torch, name)
    )
    assert call is not None
    return several([lambda x: call(x @ x.mT + torch.eye(3)), lambda x: call(x)], (f(3, 3, 3) + 3 * torch.eye(3),))


CASES |= {name: _linalg(name) for name in "inverse linalg_inv linalg_det linalg_qr linalg_svd det".split()}
CASES |= {name: _linalg(name) for name in "linalg_matrix_exp matrix_exp linalg_pinv linalg_eigh".split()}
CASES["linalg_cholesky"] = several([lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3))], (f(3, 3, 3),))


def _recurrent(name: str, batch_first: bool, gates: int, two: bool) -> Any:
    def run(x: Tensor, h: Tensor) -> Any:
        weights = [const(gates * 3, 3), const(gates * 3, 3)]
        state = (h, h.clone()) if two else h
        return getattr(torch, name)(x, state, weights, False, 1, 0.0, False, False, batch_first)

    return run


for _name, _gates in (("rnn_tanh", 1), ("rnn_relu", 1), ("gru", 3), ("lstm", 4)):
    CASES[_name] = several(
        [_recurrent(_name, b, _gates, _name == "lstm") for b in (True, False)], (f(3, 3, 3), f(1, 3, 3))
    )

CASES |= {
    "pixel_shuffle": several([lambda x: F.pixel_shuffle(x, 3)], (f(3, 9, 3, 3),)),
    "pixel_unshuffle": several([lambda x: F.pixel_unshuffle(x, 3)], (f(3, 3, 3, 3),)),
    "interpolate": several(
        [lambda x: F.interpolate(x, scale_factor=2), lambda x: F.interpolate(x, size=3, mode="linear")], (f(3, 3, 3),)
    ),
    "group_norm": several([lambda x: F.group_norm(x, 1), lambda x: F.group_norm(x, 3, const(3))], (f(3, 3, 3),)),
    "instance_norm": several([lambda x: F.instance_norm(x)], (f(3, 3, 3),)),
    "local_response_norm": several([lambda x: F.local_response_norm(x, 3)], (f(3, 3, 3),)),
    "channel_shuffle": several([lambda x: F.channel_shuffle(x, 3)], (f(3, 6, 3, 3),)),
    "fold": several(
        [lambda x: F.fold(x, 3, 2), lambda x: F.fold(x[0], 3, 2), lambda x: F.fold(x[0, :3], (2, 2), 1)], (f(3, 12, 4),)
    ),
    "affine_grid": several([lambda x: F.affine_grid(x, [3, 3, 3, 3], align_corners=False)], (f(3, 2, 3),)),
    "grid_sample": several([lambda x, g: F.grid_sample(x, g, align_corners=False)], (f(3, 3, 3, 3), f(3, 3, 3, 2))),
    "im2col": several([lambda x: torch._C._nn.im2col(x, (2, 2), (1, 1), (0, 0), (1, 1))], (f(3, 3, 3, 3),)),
    "linear": several([lambda x: F.linear(x, const(3, 3)), F.linear, lambda x: F.linear(x, const(3))], (f(3, 3),))[:1],
    "matmul": several(
        [torch.matmul, lambda a, b: a @ b, lambda a, b: torch.matmul(input=a, other=b), lambda a, b: b.__rmatmul__(a)],
        *(
            (f(*s), f(*t))
            for s, t in [((3, 3), (3, 3)), ((3,), (3, 3)), ((3, 3), (3,)), ((3, 3, 3), (3, 3)), ((3, 3), (3, 3, 3))]
        ),
        *(
            (f(*s), f(*t))
            for s, t in [
                ((3, 3, 3), (3,)),
                ((3,), (3, 3, 3)),
                ((3, 1, 3, 3), (3, 3, 3)),
                ((6, 3), (3, 6)),
                ((3,), (3,)),
            ]
        ),
    ),
    "mm": several([torch.mm, lambda a, b: a.mm(mat2=b)], (f(3, 3), f(3, 3))),
    "bmm": several([torch.bmm], (f(3, 3, 3), f(3, 3, 3))),
    "mv": several([torch.mv], (f(3, 3), f(3))),
    "rmatmul": several([lambda a, b: b.__rmatmul__(a)], (f(3, 3), f(3, 3)), (f(3, 3, 3), f(3, 3))),
    "addmm": several(
        [torch.addmm, lambda s, a, b: s.addmm(a, mat2=b)], (f(3, 3), f(3, 3), f(3, 3)), (f(3), f(3, 3), f(3, 3))
    ),
    "baddbmm": several([torch.baddbmm], (f(3, 3, 3), f(3, 3, 3), f(3, 3, 3)), (f(3, 3), f(3, 3, 3), f(3, 3, 3))),
    "addmv": several([torch.addmv], (f(3), f(3, 3), f(3))),
    "einsum": several(
        [
            lambda a, b, e=e: torch.einsum(e, a, b)
            for e in ("ij,ij->i", "ij,jk->ik", "ij,kj->ki", "bi,bj->bij", "ii,ij->j", "ij,ij", "ij,ik->jk")
        ],
        (f(3, 3), f(3, 3)),
    ),
    "scaled_dot_product_attention": several(
        [F.scaled_dot_product_attention, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)],
        (f(3, 3, 3), f(3, 3, 3), f(3, 3, 3)),
        (f(3, 3, 3, 3), f(3, 3, 3, 3), f(3, 3, 3, 3)),
    )
    + several(
        [lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m)],
        (f(3, 3, 3), f(3, 3, 3), f(3, 3, 3), f(3, 3)),
        (f(3, 3, 3), f(3, 3, 3), f(3, 3, 3), f(3, 1, 3)),
    )
    + several([lambda q, k: F.scaled_dot_product_attention(q, k, k, enable_gqa=True)], (f(3, 6, 3, 3), f(3, 3, 3, 3))),
    "embedding": several([F.embedding], (ids(3, 3, 3), f(3, 3)), (ids(3, 3), f(3, 3))),
    "one_hot": several(
        [lambda i: F.one_hot(i, 3), F.one_hot, lambda i: F.one_hot(i, num_classes=4)], (ids(3, 3, 3),), (ids(3, 6),)
    ),
    "embedding_bag": several([F.embedding_bag], (ids(3, 3, 3), f(3, 3)))
    + several([lambda i, o: F.embedding_bag(i, const(3, 3), o)], (ids(3, 6), torch.tensor([0, 2, 3]))),
    "bilinear": several([F.bilinear], (f(3, 3), f(3, 3), f(3, 3, 3))),
    "glu": several([F.glu, lambda x: F.glu(x, 0), lambda x: F.glu(x, dim=1)], (f(6, 6),), (f(6, 6, 2),)),
    "cross_entropy": several(
        [lambda x, t: F.cross_entropy(x, t, reduction="none")],
        (f(3, 3), ids(3, 3)),
        (f(3, 3), f(3, 3)),
        (f(3, 3, 3), ids(3, 3, 3)),
    )
    + several([lambda x, t, w: F.cross_entropy(x, t, w, reduction="none")], (f(3, 3), ids(3, 3), f(3)))
    + several([F.cross_entropy], (f(3, 3), ids(3, 3))),
    "nll_loss": several(
        [lambda x, t: F.nll_loss(x, t, reduction="none")], (f(3, 3), ids(3, 3)), (f(3, 3, 3), ids(3, 3, 3))
    ),
    "multi_margin_loss": several([lambda x, t: F.multi_margin_loss(x, t, reduction="none")], (f(3, 3), ids(3, 3)))
    + several([lambda x, t, w: F.multi_margin_loss(x, t, weight=w, reduction="none")], (f(3, 3), ids(3, 3), f(3))),
    "multilabel_margin_loss": several(
        [lambda x, t: F.multilabel_margin_loss(x, t, reduction="none")], (f(3, 3), ids(3, 3, 3))
    ),
    "multilabel_soft_margin_loss": several(
        [lambda x, t: F.multilabel_soft_margin_loss(x, t, reduction="none")], (f(3, 3), f(3, 3))
    )
    + several([lambda x, t, w: F.multilabel_soft_margin_loss(x, t, w, reduction="none")], (f(3, 3), f(3, 3), f(3))),
    "triplet_margin_loss": several(
        [lambda a, p, n: F.triplet_margin_loss(a, p, n, reduction="none")], (f(3, 3), f(3, 3), f(3, 3))
    ),
    "cosine_embedding_loss": several(
        [lambda a, b, t: F.cosine_embedding_loss(a, b, t.sign(), reduction="none")], (f(3, 3), f(3, 3), f(3))
    ),
    "pairwise_distance": several(
        [F.pairwise_distance, lambda a, b: F.pairwise_distance(a, b, keepdim=True)],
        (f(3, 3), f(3, 3)),
        (f(3), f(3, 3)),
        (f(3, 3, 3), f(3, 3)),
    ),
    "to": several([lambda x: x.to(torch.float32), lambda x: torch.zeros(3).to(x)], (f(3, 3),)),
    "type_as": several([lambda x: x.type_as(torch.zeros(3)), lambda x: torch.zeros(3).type_as(x)], (f(3, 3),)),
    "companion_norm": several(
        [lambda x: companion_norm(x, None, None, 2), lambda x: companion_norm(x, None, None, 3)], (f(6, 3),)
    ),
    "standardised_gru": several(
        [lambda x: standardised_gru(x, const(9, 3), const(9, 3), const(9), const(9))], (f(3, 3, 3),)
    ),
    "batch_norm": several([lambda x: F.batch_norm(x, const(3), const(3).abs(), training=False)], (f(3, 3, 3),)),
    "prelu": several([F.prelu], (f(3, 3) - 0.5, f(3)), (f(3, 3, 3) - 0.5, f(1))),
    "layer_norm": several([lambda x: F.layer_norm(x, (3,)), lambda x: F.layer_norm(x, (3, 3))], (f(3, 3, 3),))
    + several([lambda x, w: F.layer_norm(x, (3,), w)], (f(3, 3), f(3))),
    "rms_norm": several([lambda x: F.rms_norm(x, (3,)), lambda x: F.rms_norm(x, (3, 3))], (f(3, 3, 3),)),
    "view_as_real": several([torch.view_as_real], (z(3, 3),)),
    "view_as_complex": several([torch.view_as_complex], (f(3, 3, 2),)),
}
CASES["linear"] += several([F.linear], (f(3, 3), f(3, 3)), (f(3, 3), f(3)), (f(3, 3, 3), f(3, 3)))

_SIX = (f(6, 3),), (f(3, 3, 3),)
CASES |= {
    "view": several(
        [lambda x: x.view(-1), lambda x: x.view(3, 3, -1), lambda x: x.view((9, -1))], (f(9, 3),), (f(3, 3, 3),)
    ),
    "reshape": several(
        [lambda x: x.reshape(3, -1), lambda x: torch.reshape(x, (-1, 3)), lambda x: x.reshape(shape=(2, -1))],
        (f(6, 6),),
        (f(3, 4, 3),),
    ),
    "flatten": several([torch.flatten, lambda x: x.flatten(1), lambda x: x.flatten(0, 1)], (f(3, 3, 3),)),
    "unflatten": several([lambda x: x.unflatten(0, (3, -1)), lambda x: x.unflatten(dim=0, sizes=(2, 3))], *_SIX[:1]),
    "view_as": several([lambda x, y: x.view_as(y)], (f(6, 3), f(3, 6))),
    "reshape_as": several([lambda x, y: x.reshape_as(y)], (f(6, 3), f(3, 6))),
    "ravel": several([torch.ravel], *_SIX),
    "permute": several(
        [lambda x: x.permute(2, 0, 1), lambda x: torch.permute(x, (0, -1, 1)), lambda x: x.permute(dims=(1, 0, 2))],
        (f(3, 3, 3),),
    ),
    "transpose": several([lambda x: x.transpose(0, -1), lambda x: torch.transpose(x, dim0=1, dim1=0)], *_SIX),
    "swapaxes": several([lambda x: x.swapaxes(0, 1), lambda x: torch.swapaxes(x, axis0=0, axis1=-1)], *_SIX),
    "swapdims": several([lambda x: x.swapdims(0, 1)], *_SIX),
    "t": several([lambda x: x.t()], *_SIX[:1]),
    "T": several([lambda x: x.T], *_SIX[:1]),
    "H": several([lambda x: x.H], *_SIX[:1]),
    "mT": several([lambda x: x.mT], *_SIX),
    "mH": several([lambda x: x.mH], *_SIX),
    "adjoint": several([lambda x: x.adjoint()], *_SIX),
    "movedim": several(
        [
            lambda x: x.movedim(0, -1),
            lambda x: torch.movedim(x, (0, 1), (2, 0)),
            lambda x: x.movedim(source=2, destination=0),
        ],
        (f(3, 3, 3),),
    ),
    "moveaxis": several([lambda x: x.moveaxis(0, 1)], (f(3, 3, 3),)),
    "unsqueeze": several(
        [lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1), lambda x: torch.unsqueeze(x, dim=-2)], *_SIX
    ),
    "squeeze": several(
        [
            lambda x: x.squeeze(),
            lambda x: x.squeeze(0),
            lambda x: torch.squeeze(x, dim=-1),
            lambda x: x.squeeze((0, 2)),
        ],
        (f(1, 3, 1, 3),),
        (f(3, 1, 3, 1),),
    ),
    "expand": several(
        [lambda x: x.expand(3, 3, 3), lambda x: x.expand(3, -1, 3), lambda x: x.expand((2, 3, 3, 3))],
        (f(3, 1),),
        (f(3, 3, 1),),
        (f(1, 3, 3),),
    )[2:3],
    "expand_as": several([lambda x, y: x.expand_as(y)], (f(3, 1), f(3, 3, 3)), (f(1, 3), f(3, 3))),
    "broadcast_to": several(
        [lambda x: x.broadcast_to(3, 3, 3), lambda x: torch.broadcast_to(x, (3, 3, 3))], (f(3, 1),), (f(3, 1, 3),)
    ),
    "repeat": several(
        [lambda x: x.repeat(2, 3), lambda x: x.repeat((3, 1, 2)), lambda x: x.repeat(1, 3, 1, 1)[0]], (f(3, 3),)
    )[:2],
    "tile": several([lambda x: x.tile(3), lambda x: torch.tile(x, (2, 1, 3))], *_SIX),
    "repeat_interleave": several(
        [
            lambda x: x.repeat_interleave(2, 0),
            lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), dim=0),
            lambda x: torch.repeat_interleave(x, 3, dim=-1),
            lambda x: x.repeat_interleave(2),
        ],
        (f(3, 3),),
    )
    + several(
        [
            lambda x, n: torch.repeat_interleave(x, n, 0, output_size=None),
            lambda x, n: torch.repeat_interleave(const(3), n, 0),
        ],
        (f(3, 3), torch.tensor([1, 1, 1])),
        (f(3), torch.tensor([2, 1, 0])),
    ),
    "chunk": several(
        [lambda x: x.chunk(2), lambda x: x.chunk(3, -1), lambda x: torch.chunk(x, chunks=3, dim=0)], *_SIX
    ),
    "split": several([lambda x: x.split(2), lambda x: x.split([1, 2], -1), lambda x: torch.split(x, 1, dim=0)], *_SIX),
    "tensor_split": several([lambda x: x.tensor_split(4), lambda x: x.tensor_split((1, 2), 1)], *_SIX),
    "split_with_sizes": several([lambda x: x.split_with_sizes((1, 2), 1)], *_SIX),
    "unsafe_chunk": several([lambda x: torch.unsafe_chunk(x, 2, 0)], *_SIX),
    "unsafe_split": several([lambda x: torch.unsafe_split(x, 2, 0)], *_SIX),
    "unbind": several([lambda x: x.unbind(), lambda x: torch.unbind(x, -1), lambda x: x.unbind(dim=1)], *_SIX),
    "select": several(
        [lambda x: x.select(0, 1), lambda x: x.select(-1, -1), lambda x: torch.select(x, dim=1, index=0)], *_SIX
    ),
    "narrow": several(
        [
            lambda x: x.narrow(0, 1, 2),
            lambda x: x.narrow(-1, -2, 2),
            lambda x: torch.narrow(x, dim=1, start=0, length=3),
        ],
        *_SIX,
    ),
    "index_select": several(
        [
            lambda x, i: x.index_select(0, i),
            lambda x, i: torch.index_select(x, dim=-1, index=i),
            lambda x, i: const(3, 3).index_select(1, i),
        ],
        (f(3, 3), ids(3, 3)),
        (f(6, 3, 3), ids(3, 3)),
    ),
    "gather": several(
        [
            lambda x, i: x.gather(0, i),
            lambda x, i: torch.gather(x, dim=-1, index=i),
            lambda x, i: const(3, 3).gather(1, i),
        ],
        (f(3, 3), ids(3, 3, 3)),
        (f(3, 3), ids(3, 2, 3)),
    ),
    "take_along_dim": several(
        [
            lambda x, i: torch.take_along_dim(x, i, 0),
            lambda x, i: x.take_along_dim(i, dim=1),
            lambda x, i: torch.take_along_dim(const(3, 3), i, 0),
        ],
        (f(3, 3), ids(3, 3, 3)),
        (f(3, 3), ids(3, 3, 1)),
        (f(3, 3), ids(3, 1, 3)),
    ),
    "getitem": several(
        [
            lambda x, k=k: x[k]
            for k in (
                0,
                -1,
                slice(1, 3),
                (slice(None), 1),
                (..., 0),
                (None, 0),
                slice(None, None, 2),
                [2, 0, 1],
                (0, None, slice(2)),
                (slice(None), [0, 2]),
                ([0, 1], [1, 2]),
                ([2, 1], slice(None), 0),
            )
        ],
        (f(3, 3, 3),),
    )
    + several(
        [
            lambda x, i: x[i],
            lambda x, i: x[:, i],
            lambda x, i: const(3, 3)[i],
            lambda x, i: const(3, 3)[:, i],
            lambda x, i: x[i, i],
        ],
        (f(3, 3), ids(3, 3)),
        (f(3, 3), mask(3)),
    ),
    "cat": several(
        [
            lambda x, y: torch.cat([x, y]),
            lambda x, y: torch.cat((x, const(3, 3), y), -1),
            lambda x, y: torch.cat(tensors=(x, y), dim=1),
        ],
        (f(3, 3), f(3, 3)),
    ),
    "concat": several([lambda x, y: torch.concat([x, y], 1)], (f(3, 3), f(3, 3))),
    "concatenate": several([lambda x, y: torch.concatenate([x, y], axis=1)], (f(3, 3), f(3, 3))),
    "stack": several(
        [
            lambda x, y: torch.stack([x, y]),
            lambda x, y: torch.stack((x, const(3, 3), y), -1),
            lambda x, y: torch.stack(tensors=(x, y), dim=1),
        ],
        (f(3, 3), f(3, 3)),
    ),
    "flip": several(
        [lambda x: x.flip(0), lambda x: torch.flip(x, (-1, 0)), lambda x: x.flip(dims=[1]), lambda x: x.flip(0, 1)],
        *_SIX,
    ),
    "roll": several(
        [
            lambda x: x.roll(1, 0),
            lambda x: torch.roll(x, (1, 2), (0, -1)),
            lambda x: x.roll(1),
            lambda x: x.roll(shifts=-1, dims=1),
            lambda x: x.roll((1, 1), (0, 0)),
        ],
        *_SIX,
    ),
    "pad": several(
        [lambda x, p=p: F.pad(x, p) for p in ((1, 1), (0, 0, 1, 1), (1, -1), (0, 0, 1, -1), (-1, 1, 0, 0))]
        + [lambda x: F.pad(x, (1, 1), mode="circular"), lambda x: F.pad(x, pad=(1, 1), mode="reflect")],
        (f(3, 3),),
        (f(6, 3),),
    ),
    "unfold": several(
        [lambda x: x.unfold(0, 2, 1), lambda x: x.unfold(-1, 3, 1), lambda x: x.unfold(dimension=1, size=1, step=1)],
        (f(3, 3),),
    )
    + several([lambda x: F.unfold(x, 1), lambda x: F.unfold(x, 2)], (f(3, 3, 3, 3),), (f(3, 3, 3),)),
    "masked_select": several(
        [torch.masked_select, lambda x, m: torch.masked_select(const(3, 3), m)],
        (f(3, 3), mask(3, 3)),
        (f(3, 3), mask(3)),
        (f(3, 3), torch.ones(3, 3, dtype=torch.bool)),
    ),
    "index_add": several(
        [
            lambda x, i, s: x.index_add(0, i, s),
            lambda x, i, s: torch.zeros(3, 3, dtype=s.dtype).index_add_(1, i, s),
            lambda x, i, s: torch.zeros(3, 3).double().index_add(1, i, const(3, 3)),
            lambda x, i, s: torch.index_add(x, 0, torch.tensor([2, 0, 1]), s, alpha=2),
        ],
        (f(3, 3), ids(3, 3), f(3, 3)),
    ),
    "index_copy": several(
        [
            lambda x, i, s: x.index_copy(0, i, s),
            lambda x, i, s: torch.zeros_like(s).index_copy_(1, i, s),
            lambda x, i, s: torch.zeros(3, 3).double().index_copy(0, torch.tensor([2, 0, 1]), s),
        ],
        (f(3, 3), torch.tensor([0, 2, 1]), f(3, 3)),
    ),
    "scatter": several(
        [
            lambda x, i, s: x.scatter(0, i, s[: len(i)]),
            lambda x, i, s: torch.zeros_like(s).scatter_(1, i, s[: len(i)]),
            lambda x, i, s: x.scatter(1, i, 2.0),
            lambda x, i, s: torch.zeros(3, 3).double().scatter(1, i, const(3, 3)),
        ],
        (f(3, 3), ids(3, 3, 3), f(3, 3)),
        (f(3, 3), ids(3, 2, 3), f(3, 3)),
    ),
    "scatter_add": several(
        [
            lambda x, i, s: x.scatter_add(0, i, s),
            lambda x, i, s: torch.zeros_like(s).scatter_add_(dim=1, index=i, src=s),
        ],
        (f(3, 3), ids(3, 3, 3), f(3, 3)),
    ),
}


def _packed(batch_first: bool) -> Any:
    return lambda x: pack_padded_sequence(x, torch.tensor([3, 1, 2]), batch_first, enforce_sorted=False).data


def _unpacked(batch_first: bool) -> Any:
    def run(x: Tensor) -> Tensor:
        return pad_packed_sequence(pack_padded_sequence(x, torch.tensor([3, 2, 1]), batch_first), batch_first)[0]

    return run


CASES["_pack_padded_sequence"] = several([_packed(True), _packed(False)], (f(3, 3, 3),), (f(3, 3),))
CASES["_pad_packed_sequence"] = several([_unpacked(True), _unpacked(False)], (f(3, 3, 3),), (f(3, 3),))
CASES["expand"] += several([lambda x: x.expand(3, 3, 3)], (f(3, 1),), (f(1, 3, 3),))
CASES["log_sigmoid"] = several([F.logsigmoid], (f(3, 3),))
CASES["requires_grad"] = several([lambda x: x.detach().requires_grad_()], (f(3, 3),))
