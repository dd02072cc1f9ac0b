"""One specification per layer family: norms and clipped sums equal a plain loop over the records, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from gradients.cases import ROWS, Fn, matches, noise
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum

B = ROWS


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def ids(*shape: int, high: int = 10) -> Tensor:
    return torch.randint(0, high, shape)


@pytest.mark.parametrize("middle", [(), (7,), (5,), (2, 3)])  # (5,): as long as the batch
def test_linear_with_any_leading_dimensions(middle: tuple[int, ...]) -> None:
    matches(nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)), noise(B, *middle, 4))


IN_PLACE: dict[str, Any] = {
    "relu": lambda y, x: F.relu(y, inplace=True),
    "a residual": lambda y, x: y.add_(x.sum(-1, keepdim=True)),
    "one position": lambda y, x: y.index_fill_(-1, torch.tensor([0]), 0.5),
    "a view of it": lambda y, x: (y[..., 1:].mul_(2.0), y)[1],
}


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_an_operation_in_place_on_the_result_of_an_inner_map_leaves_the_map_its_gradient(write: Any) -> None:
    """torch returns a view from a biased linear map of more than two dimensions, from unbatched convolutions and from
    einsum, and a write to a view removes what is attached to it from the graph."""

    def forward(s: Any, x: Tensor) -> Tensor:
        h = torch.tanh(s.first(x))
        return s.third(write(s.second(h), x))  # type: ignore[no-any-return]

    matches(Fn(forward, first=nn.Linear(4, 6), second=nn.Linear(6, 5), third=nn.Linear(5, 3)), noise(B, 3, 4))


def test_wide_linear_keeps_positions_and_narrow_linear_keeps_products() -> None:
    matches(nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 2)), noise(B, 3, 40))


CONVOLUTIONS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.Conv1d(3, 4, 4, padding="same"), (3, 8)),
    (nn.Conv1d(4, 4, 1), (4, 8)),
    (nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 8, 7)),
    (nn.Conv2d(4, 6, 3, groups=2, dilation=2, padding="same", padding_mode="circular"), (4, 8, 8)),
    (nn.Conv2d(4, 4, 3, groups=4, padding="valid", bias=False, padding_mode="reflect"), (4, 5, 5)),
    (nn.Conv2d(3, 5, 4, stride=4), (3, 9, 8)),
    (nn.Conv2d(30, 50, 1), (30, 2, 2)),
    (nn.Conv3d(2, 4, (2, 1, 2), padding=1), (2, 4, 4, 4)),
    (nn.ConvTranspose1d(3, 4, 3, stride=2), (3, 6)),
    (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), (4, 5, 5)),
    (nn.ConvTranspose3d(2, 2, 2), (2, 3, 3, 3)),
]


@pytest.mark.parametrize(("layer", "shape"), CONVOLUTIONS, ids=lambda v: str(v)[:70])
def test_convolutions(layer: nn.Module, shape: tuple[int, ...]) -> None:
    matches(nn.Sequential(layer, nn.Tanh(), nn.Flatten()), noise(B, *shape))


def test_convolution_over_frames_folded_into_the_batch() -> None:
    body = nn.Conv2d(2, 3, 3)
    matches(Fn(lambda s, x: s.body(x.flatten(0, 1)).unflatten(0, x.shape[:2]), body=body), noise(B, 4, 2, 5, 5))


@pytest.mark.parametrize("padding", [None, 0, -1])
def test_embedding(padding: int | None) -> None:
    table = nn.Embedding(10, 4, padding_idx=padding)
    matches(nn.Sequential(table, nn.LayerNorm(4), nn.Linear(4, 3)), ids(B, 6))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_embedding_bag(mode: str) -> None:
    matches(nn.EmbeddingBag(10, 4, mode=mode), ids(B, 6))
    matches(nn.EmbeddingBag(10, 4, mode="sum", padding_idx=3), ids(B, 6))


def test_table_lookup_by_indexing() -> None:
    matches(Fn(lambda s, i: s.table[i], table=noise(10, 3)), ids(B, 6) - 10)


NORMS: list[tuple[nn.Module, tuple[int, ...]]] = [
    (nn.LayerNorm(4), (7, 4)),
    (nn.LayerNorm((3, 4)), (3, 4)),
    (nn.LayerNorm(4, bias=False), (4,)),
    (nn.RMSNorm(4), (7, 4)),
    (nn.GroupNorm(2, 4), (4, 3, 3)),
    (nn.GroupNorm(1, 4), (4,)),
    (nn.InstanceNorm1d(4, affine=True), (4, 6)),
    (nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    (nn.InstanceNorm2d(4, affine=True, track_running_stats=True).eval(), (4, 3, 3)),
    (nn.BatchNorm1d(4).eval(), (4,)),
    (nn.BatchNorm2d(4).eval(), (4, 3, 3)),
]


@pytest.mark.parametrize(("layer", "shape"), NORMS, ids=lambda v: str(v)[:60])
def test_normalisations(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Unflatten(1, shape), layer, nn.Flatten(), nn.Tanh())
    model.train(layer.training)
    size = torch.Size(shape).numel()
    matches(nn.Sequential(nn.Linear(3, size), model), noise(B, 3))


RECURRENT = [
    (nn.LSTM, {}),
    (nn.LSTM, {"bias": False}),
    (nn.LSTM, {"proj_size": 2}),
    (nn.GRU, {}),
    (nn.GRU, {"bias": False}),
    (nn.RNN, {}),
    (nn.RNN, {"nonlinearity": "relu"}),
]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(("layers", "bidirectional"), [(1, False), (2, True)])
@pytest.mark.parametrize(("family", "options"), RECURRENT)
def test_recurrent_layers(
    family: Any, options: dict[str, Any], layers: int, bidirectional: bool, batch_first: bool
) -> None:
    rnn = family(3, 4, num_layers=layers, bidirectional=bidirectional, batch_first=batch_first, **options)

    def forward(self: Any, x: Tensor) -> Tensor:
        out, state = self.rnn(x if batch_first else x.transpose(0, 1))
        last = state[1] if isinstance(state, tuple) else state
        return torch.cat(((out if batch_first else out.transpose(0, 1)).flatten(1), last.transpose(0, 1).flatten(1)), 1)

    matches(Fn(forward, rnn=rnn), noise(B, 6, 3))


@pytest.mark.parametrize("family", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_outputs_are_torchs_own(family: Any) -> None:
    rnn = family(4, 5, 2, bidirectional=True, batch_first=True)
    x, seen = torch.randn(3, 7, 4), []

    def loss(out: Any, _: Tensor) -> Tensor:
        seen.append(out[0].detach())
        return out[0].square().sum((1, 2))

    clipped_sum(rnn, loss, Rows(x, torch.zeros(3)), FlatClip(1.0))
    assert torch.allclose(seen[-1], rnn(x)[0], atol=1e-6)


def test_recurrent_with_learned_initial_state() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.h.expand(-1, x.shape[0], -1).contiguous()
        return self.rnn(x, (h, self.c.repeat(1, x.shape[0], 1)))[0]

    matches(Fn(forward, rnn=nn.LSTM(3, 4, batch_first=True), h=noise(1, 1, 4), c=noise(1, 1, 4)), noise(B, 6, 3))


@pytest.mark.parametrize("family", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(family: Any) -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    model = Fn(forward, rnn=family(3, 4, num_layers=2, bidirectional=True))
    matches(model, (noise(B, 6, 3), torch.tensor([3, 6, 1, 4, 4])))


def test_cells() -> None:
    parts = {
        "a": nn.LSTMCell(4, 3),
        "b": nn.GRUCell(4, 3),
        "c": nn.RNNCell(4, 3),
        "d": nn.RNNCell(4, 3, nonlinearity="relu"),
    }
    matches(Fn(lambda s, x: s.a(x)[0] + s.b(x) + s.c(x) + s.d(x), **parts), noise(B, 4))


@pytest.mark.parametrize("length", [4, 5])  # 5: as long as the batch
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_self_attention(length: int, batch_first: bool, weights: bool) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x if batch_first else x.transpose(0, 1)
        out = self.attention(x, x, x, need_weights=weights)[0]
        return out if batch_first else out.transpose(0, 1)

    matches(Fn(forward, attention=nn.MultiheadAttention(8, 2, batch_first=batch_first)), noise(B, length, 8))


@pytest.mark.parametrize("options", [{}, {"kdim": 6, "vdim": 6}, {"add_bias_kv": True}, {"bias": False}])
def test_cross_attention(options: dict[str, Any]) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True, **options)
    matches(
        Fn(lambda s, q, k: s.attention(q, k, k)[0], attention=attention),
        (noise(B, 4, 8), noise(B, 3, options.get("kdim", 8))),
    )


@pytest.mark.parametrize("training", [True, False])  # eval: the fused fast path of torch must not be taken
def test_transformer_encoder(training: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=training)
    matches(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train(training), noise(B, 4, 8))


def test_transformer_with_decoder_and_time_first() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0)
    matches(
        Fn(lambda s, a, b: s.t(a.transpose(0, 1), b.transpose(0, 1)).transpose(0, 1)[:, 0], t=model),
        (noise(B, 4, 8), noise(B, 3, 8)),
    )


def class_token(self: Any, x: Tensor) -> Tensor:
    return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos


def repeated_token(self: Any, x: Tensor) -> Tensor:
    return torch.cat([self.cls.repeat(x.shape[0], 1, 1), x], 1) * self.gamma


def constant_expansion(self: Any, x: Tensor) -> Tensor:
    return x * self.p.expand(5, 4).unsqueeze(0).expand(x.shape[0], 5, 4)


def learned_queries(self: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(self.q.expand(x.shape[0], -1, -1), x, x)


def conv1d_of_gpt2(self: Any, x: Tensor) -> Tensor:
    return torch.addmm(self.b, x.view(-1, 4), self.w).view(*x.shape[:2], 3)


def twice(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Tanh(), layer)


FUNCTIONAL: dict[str, tuple[nn.Module, Any]] = {
    "class token, positions": (Fn(class_token, cls=noise(1, 1, 4), pos=noise(1, 7, 4)), noise(B, 6, 4)),
    "repeated token, LayerScale": (Fn(repeated_token, cls=noise(1, 1, 4), gamma=noise(4)), noise(B, 6, 4)),
    "positions by embedding": (Fn(lambda s, x: x + F.embedding(torch.arange(6), s.p), p=noise(9, 4)), noise(B, 6, 4)),
    "as many positions as rows": (Fn(lambda s, x: x + s.p[: x.shape[1]], p=noise(9, 4)), noise(B, 5, 4)),
    "an expansion as long as the batch": (Fn(constant_expansion, p=noise(1, 4)), noise(B, 5, 4)),
    "learned queries": (Fn(learned_queries, q=noise(1, 3, 4)), noise(B, 6, 4)),
    "queries without a batch": (Fn(lambda s, x: torch.softmax(s.q @ x.mT, -1) @ x, q=noise(3, 4)), noise(B, 6, 4)),
    "einsum": (Fn(lambda s, x: torch.einsum("bsd,dk->bks", x, s.w), w=noise(4, 3)), noise(B, 6, 4)),
    "einsum, square": (Fn(lambda s, x: torch.einsum("bsd,dk->bks", x, s.w), w=noise(4, 3)), noise(B, 5, 4)),
    "matrix product": (Fn(lambda s, x: x @ s.w + s.b, w=noise(4, 3), b=noise(3)), noise(B, 6, 4)),
    "Conv1D of GPT-2": (Fn(conv1d_of_gpt2, w=noise(4, 3), b=noise(3)), noise(B, 6, 4)),
    "transposed weight": (Fn(lambda s, x: F.linear(x, s.w.t()), w=noise(4, 3)), noise(B, 6, 4)),
    "PReLU": (nn.Sequential(nn.Linear(4, 3), nn.PReLU(3)), noise(B, 4)),
    "bilinear": (nn.Bilinear(4, 3, 2), (noise(B, 4), noise(B, 3))),
    "weight norm": (nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 5)), nn.Tanh()), noise(B, 3, 4)),
    "orthogonal": (nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh()), noise(B, 4)),
    "module called twice": (twice(nn.Linear(4, 4)), noise(B, 4)),
    "convolution called twice": (twice(nn.Conv1d(2, 2, 3)), noise(B, 2, 8)),
    "scalar": (Fn(lambda s, x: torch.tanh(x * s.scale) ** 2 / s.scale, scale=noise()), noise(B, 6)),
}


@pytest.mark.parametrize("name", FUNCTIONAL)
def test_parameters_used_outside_known_layers(name: str) -> None:
    matches(*FUNCTIONAL[name])


def test_assignment_of_a_parameter_into_the_data() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = self.token
        return torch.tanh(x)

    matches(Fn(forward, token=noise(4)), noise(B, 3, 4))


def test_weight_standardised_convolution() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return F.conv2d(x, w, self.bias)

    matches(Fn(forward, weight=noise(3, 2, 3, 3), bias=noise(3)), noise(B, 2, 5, 5))


def test_embedding_tied_to_the_output_layer() -> None:
    """The cross terms between the two uses count: norms are not the root of the sum of squares."""
    matches(Fn(lambda s, x: F.linear(torch.tanh(s.e(x)), s.e.weight), e=nn.Embedding(7, 4)), ids(B, 6, high=7))


def test_low_rank_adapter_on_a_frozen_layer() -> None:
    base = nn.Linear(6, 6).requires_grad_(False)
    parts = {"base": base, "a": nn.Linear(6, 2, bias=False), "b": nn.Linear(2, 6, bias=False)}
    matches(Fn(lambda s, x: torch.tanh(s.base(x) + 2 * s.b(s.a(x))), **parts), noise(B, 3, 6))


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    matches(model, noise(B, 4))


def test_mixture_of_experts_with_rows_picked_by_data() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        first = flat[:, 0] > 0
        out = torch.zeros(len(flat), 3, dtype=x.dtype)
        out[first] = self.one(flat[first])
        out[~first] = self.two(flat[~first])
        return out.unflatten(0, x.shape[:2])

    matches(Fn(forward, one=nn.Linear(4, 3), two=nn.Linear(4, 3)), noise(B, 6, 4))


def test_several_inputs_outputs_and_things_that_are_not_tensors() -> None:
    def forward(self: Any, x: Tensor, scale: float, extra: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        h = torch.tanh(self.a(x) * scale)
        return h + self.b(extra["y"]), {"h": h}

    model = Fn(forward, a=nn.Linear(4, 3), b=nn.Linear(2, 3))
    matches(model, (noise(B, 4), 2.0, {"y": noise(B, 2)}))
