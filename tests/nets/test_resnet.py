"""ResNets in their forms and the recurrent classifier: against plain restatements, and in the engine."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradients.cases import agree
from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, brute_force, clipped_sum
from sordino.nets import build
from sordino.nets.resnet import StandardisedConv2d

SIZES = {  # depth: (original, enhanced). He et al.: 0.27M, 0.46M, 0.66M for 20, 32, 44
    8: (75_290, 76_730), 14: (172_506, 173_498), 20: (269_722, 270_266), 32: (464_154, 463_802), 44: (658_586, 657_338),
}  # fmt: skip


@pytest.mark.parametrize("depth", SIZES)
def test_the_family_has_the_sizes_of_the_papers(depth: int) -> None:
    for form, parameters in zip(("original", "enhanced"), SIZES[depth], strict=True):
        model = build("resnet", (3, 32, 32), 10, depth=depth, form=form)
        assert sum(p.numel() for p in model.parameters()) == parameters
        convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
        assert len(convolutions) + 1 == depth  # and the last layer
        assert all(isinstance(part, StandardisedConv2d) == (form == "enhanced") for part in convolutions)


def ws(w: Tensor) -> Tensor:
    """Filter by filter, as PAPERS.md writes it."""
    return torch.stack([(f - f.mean()) / (f.std() + 1e-6) / f.numel() ** 0.5 for f in w])


def gn(x: Tensor, groups: int = 4) -> Tensor:
    parts = x.reshape(len(x), groups, -1)
    mean, variance = parts.mean(2, keepdim=True), parts.var(2, correction=0, keepdim=True)
    return ((parts - mean) / (variance + 1e-5).sqrt()).reshape(x.shape)


def test_the_enhanced_form_is_the_one_described() -> None:
    """Stem: WS-conv, ELU, GN. Block: WS-conv, ELU, GN, WS-conv, GN, sum, ELU, GN. Head: 2×2 pool, standardised."""
    torch.manual_seed(0)
    model = build("resnet", (3, 16, 16), 10, depth=8, form="enhanced").double()
    kernels = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    last = next(m for m in model.modules() if isinstance(m, nn.Linear))
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    out = gn(F.elu(F.conv2d(x, ws(kernels[0]), padding=1)))
    for block in range(3):
        first, second = kernels[1 + 2 * block : 3 + 2 * block]
        grows = len(first) > first.shape[1]
        inside = gn(F.elu(F.conv2d(out, ws(first), padding=1, stride=2 if grows else 1)))
        if grows:
            zeros = torch.zeros_like(out[:, : out.shape[1] // 2, ::2, ::2])
            out = torch.cat((zeros, out[:, :, ::2, ::2], zeros), 1)
        out = gn(F.elu(gn(F.conv2d(inside, ws(second), padding=1)) + out))
    half = out.shape[2] // 2
    pooled = out.unflatten(2, (2, half)).unflatten(4, (2, half)).mean((3, 5)).flatten(1)
    features = (pooled - pooled.mean(1, keepdim=True)) / (pooled.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    assert features.shape == (3, 256)
    assert torch.allclose(model(x), features @ last.weight.T + last.bias, atol=1e-10)


def gru_step(a: Tensor, b: Tensor, h: Tensor) -> Tensor:
    (ar, az, an), (br, bz, bn) = a.chunk(3, -1), b.chunk(3, -1)
    z = torch.sigmoid(az + bz)
    return (1 - z) * torch.tanh(an + torch.sigmoid(ar + br) * bn) + z * h


@pytest.mark.parametrize("form", ["original", "enhanced"])
def test_the_recurrent_net_standardises_both_projections_or_none(form: str) -> None:
    torch.manual_seed(0)
    words = torch.randn(11, 5, dtype=torch.float64)
    model = build("gru", (7,), 2, words, hidden=6, form=form).double()
    gru, tokens = model.gru, torch.randint(0, 11, (4, 7))

    def s(v: Tensor) -> Tensor:
        if form == "original":
            return v
        return (v - v.mean(-1, keepdim=True)) / (v.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()

    h = torch.zeros(4, 6, dtype=torch.float64)
    for t in range(7):
        a = s(words[tokens[:, t]] @ gru.weight_ih_l0.T + gru.bias_ih_l0)
        h = gru_step(a, s(h @ gru.weight_hh_l0.T + gru.bias_hh_l0), h)
    assert torch.allclose(model(tokens), model.head(h), atol=1e-10)
    assert [name for name, _ in model.named_parameters()] == [
        "gru.weight_ih_l0", "gru.weight_hh_l0", "gru.bias_ih_l0", "gru.bias_hh_l0", "head.weight", "head.bias",
    ]  # fmt: skip


def test_the_mean_of_the_states_leaves_padding_out() -> None:
    torch.manual_seed(0)
    words = torch.cat((torch.zeros(1, 5), torch.randn(10, 5)))
    model = build("gru", (6,), 2, words, hidden=4, form="original", readout="mean")
    tokens = torch.tensor([[0, 0, 3, 1, 2, 9], [0, 0, 0, 0, 0, 0]])
    states = model.gru(words[tokens])[0]
    wanted = torch.stack((states[0, 2:].mean(0), torch.zeros(4)))
    assert torch.allclose(model(tokens), model.head(wanted), atol=1e-6)


NETS = [
    ("resnet", (3, 8, 8), {"depth": 8, "form": "original"}),
    ("resnet", (3, 8, 8), {"depth": 8, "form": "enhanced"}),
    ("mnist-cnn", (1, 16, 16), {"form": "enhanced"}),
    ("wide-resnet", (3, 8, 8), {"depth": 10, "width": 1}),
    ("gru", (9,), {"hidden": 6, "form": "original"}),
    ("gru", (9,), {"hidden": 6, "form": "enhanced"}),
    ("gru", (9,), {"hidden": 6, "form": "enhanced", "readout": "mean"}),
]


@pytest.mark.parametrize(("name", "shape", "options"), NETS, ids=lambda v: str(v)[:40])
@pytest.mark.parametrize("past", [False, True], ids=["", "with a past iterate"])
def test_norms_and_sums_equal_brute_force(
    name: str, shape: tuple[int, ...], options: dict[str, object], past: bool
) -> None:
    torch.manual_seed(0)
    words = torch.randn(11, 5)
    model = build(name, shape, 4, words, **options).double()
    rows = torch.randint(0, 11, (5, *shape)) if name == "gru" else torch.randn(5, *shape, dtype=torch.float64)
    data = Rows(rows, torch.randint(0, 4, (5,)), torch.tensor([0, 1, 1, 3, 0]))
    shifted = {key: p.detach() + 0.1 * torch.randn_like(p) for key, p in model.named_parameters()}
    more = {"iterates": [({}, 1.0), (shifted, 0.5)]} if past else {}
    engine = clipped_sum(model, F.cross_entropy, data, FlatClip(0.5), **more)  # type: ignore[arg-type]
    agree(engine, brute_force(model, F.cross_entropy, data, FlatClip(0.5), **more))  # type: ignore[arg-type]


def test_batch_normalisation_is_refused_without_companions() -> None:
    model = build("resnet", (3, 8, 8), 4, depth=8, form="batch")
    data = Rows(torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2]))
    with pytest.raises(Refused, match="BatchNorm"):
        clipped_sum(model, F.cross_entropy, data, FlatClip(1.0))
