"""Random architectures from all supported layers, random records, random clippings: equal to brute force in float64."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradients.cases import Fn, agree, squared
from sordino.clipping import AutomaticClip, Clipping, FlatClip, L1Clip, L2LinfClip, NormalisedClip, PerLayerClip
from sordino.gradients import Rows, brute_force, clipped_sum

WIDTH, LENGTH = 4, 3  # every layer maps (rows, LENGTH, WIDTH) to the same shape


def last(self: Any, x: Tensor) -> Tensor:
    return self.layer(x)[0]


def channels(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.mT).mT


def time_first(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


def flattened(self: Any, x: Tensor) -> Tensor:
    return self.layer(x.reshape(-1, WIDTH)).view_as(x)


def attention(self: Any, x: Tensor) -> Tensor:
    return self.layer(x, x, x)[0]


def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.scale * self.layer(x) + self.shift


LAYERS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "flattened linear": lambda: Fn(flattened, layer=nn.Linear(WIDTH, WIDTH, bias=False)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "rms norm": lambda: nn.RMSNorm(WIDTH),
    "group norm": lambda: Fn(channels, layer=nn.GroupNorm(2, WIDTH)),
    "instance norm": lambda: Fn(channels, layer=nn.InstanceNorm1d(WIDTH, affine=True)),
    "convolution": lambda: Fn(channels, layer=nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)),
    "dilated convolution": lambda: Fn(channels, layer=nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2)),
    "transposed convolution": lambda: Fn(channels, layer=nn.ConvTranspose1d(WIDTH, WIDTH, 3, padding=1)),
    "lstm": lambda: Fn(last, layer=nn.LSTM(WIDTH, WIDTH, batch_first=True)),
    "gru": lambda: Fn(time_first, layer=nn.GRU(WIDTH, WIDTH // 2, bidirectional=True)),
    "rnn": lambda: Fn(last, layer=nn.RNN(WIDTH, WIDTH, 2, batch_first=True)),
    "attention": lambda: Fn(attention, layer=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.0, batch_first=True),
    "residual": lambda: Fn(
        residual, layer=nn.Linear(WIDTH, WIDTH), scale=torch.randn(WIDTH), shift=torch.randn(1, LENGTH, 1)
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "prelu": lambda: nn.PReLU(),
    "tanh": nn.Tanh,
}

CLIPPINGS: list[Clipping] = [
    FlatClip(0.5),
    AutomaticClip(),
    NormalisedClip(1.0),
    PerLayerClip(1.0),
    L1Clip(1.0),
    L2LinfClip(1.0, 9.0),
]


@st.composite
def cases(draw: st.DrawFn) -> tuple[nn.Module, Rows, Clipping, dict[str, Any]]:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    names = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=4))
    layers = [LAYERS[name]() for name in names]
    if draw(st.booleans()) and len(layers) > 1:
        layers.append(layers[0])  # a module called twice
    first: nn.Module = nn.Embedding(5, WIDTH) if draw(st.booleans()) else nn.Linear(2, WIDTH)
    model = nn.Sequential(first, *layers, nn.Linear(WIDTH, 2)).double()
    for parameter in list(model.parameters())[: draw(st.integers(0, 1))]:
        parameter.requires_grad_(False)
    rows = draw(st.integers(1, 6))
    x = (
        torch.randint(0, 5, (rows, LENGTH))
        if isinstance(first, nn.Embedding)
        else torch.randn(rows, LENGTH, 2).double()
    )
    record = draw(st.none() | st.lists(st.integers(0, 3), min_size=rows, max_size=rows).map(torch.tensor))
    coefficient = draw(st.none() | st.lists(st.floats(-2, 2), min_size=rows, max_size=rows).map(torch.tensor))
    options: dict[str, Any] = {"reduction": draw(st.sampled_from(["sum", "mean"]))}
    if draw(st.booleans()):
        other = {k: p.detach() + 0.1 * torch.randn_like(p) for k, p in model.named_parameters() if p.requires_grad}
        options["iterates"] = [({}, 1.0), (other, -0.7)]
    data = Rows(x, torch.randn(rows).double() + 3, record, None if record is None else 4, coefficient)
    return model, data, draw(st.sampled_from(CLIPPINGS)), {**options, "chunk": draw(st.sampled_from([None, 1, 2]))}


@given(cases())
@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
def test_random_architectures_equal_brute_force(case: Any) -> None:
    model, rows, clipping, options = case
    oracle = brute_force(model, squared, rows, clipping, **options)
    engine = clipped_sum(model, squared, rows, clipping, **options)
    if float(oracle.norms.max()) > 1e-9:
        agree(engine, oracle, 1e-7)
