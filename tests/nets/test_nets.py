"""The networks by name: shapes, sizes known from the papers, strict options."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from sordino.errors import InputError
from sordino.nets import LstmClassifier, TransformerClassifier, build, names
from sordino.nets.resnet import OptionA

SIZES = {
    "linear": ((81, 7, 7), 10, 81 * 49 * 10 + 10),
    "mlp": ((1, 28, 28), 10, 784 * 300 + 300 + 3000 + 10),
    "scatter-cnn": ((81, 7, 7), 10, 33_066),  # 81·16·9+16 + 16·32·9+32 + 512·32+32 + 330
    "scatter-cnn-cifar": ((243, 8, 8), 10, 243 * 64 * 9 + 64 + 64 * 64 * 9 + 64 + 10_240 + 10),
    "mnist-cnn": ((1, 28, 28), 10, 26_010),
    "resnet20": ((3, 32, 32), 10, 269_722),  # He et al. give 0.27M
    "resnet": ((3, 32, 32), 10, 269_722),
    "wide-resnet": ((3, 32, 32), 10, 2_748_890),  # WRN-16-4; De et al. give 2.7M
    "gru": ((200,), 2, 3 * 64 * (50 + 64 + 2) + 130),
    "lstm": ((200,), 2, 20_000 * 100 + 4 * 128 * (100 + 128 + 2) + 258),
    "transformer": ((128,), 2, (20_000 + 128) * 256 + 4 * 789_760 + 512 + 514),
}


WORDS = torch.randn(20_000, 50, generator=torch.Generator().manual_seed(2))


def inputs(shape: tuple[int, ...], n: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randint(0, 20_000, (n, *shape), generator=generator)
        if len(shape) == 1
        else torch.randn(n, *shape, generator=generator)
    )


def test_every_network_is_listed_here() -> None:
    assert set(SIZES) == set(names())


@pytest.mark.parametrize("name", SIZES)
def test_shape_and_number_of_parameters(name: str) -> None:
    shape, classes, parameters = SIZES[name]
    model = build(name, shape, classes, WORDS)
    assert model(inputs(shape, 2)).shape == (2, classes)
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize("name", SIZES)
def test_a_record_does_not_see_its_neighbours(name: str) -> None:
    shape, classes, _ = SIZES[name]
    model = build(name, shape, classes, WORDS, **({"zero": False} if name == "linear" else {}))
    rows = inputs(shape, 3)
    assert torch.allclose(model(rows)[:1], model(rows[:1]), atol=1e-5)
    assert not any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in model.modules())


def test_linear_starts_at_zero_unless_told_otherwise() -> None:
    assert all(not p.any() for p in build("linear", (4,), 3).parameters())
    assert any(p.any() for p in build("linear", (4,), 3, zero=False).parameters())
    assert len(list(build("linear", (4,), 3, bias=False).parameters())) == 1


@settings(deadline=None, max_examples=20)
@given(hidden=st.lists(st.integers(1, 9), max_size=3), act=st.sampled_from(["relu", "tanh", "softplus", "elu"]))
def test_an_mlp_has_the_widths_it_was_given(hidden: list[int], act: str) -> None:
    model = build("mlp", (2, 3), 4, hidden=hidden, act=act)
    widths = [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert widths == [*hidden, 4]
    assert model(torch.randn(5, 2, 3)).shape == (5, 4)


def test_the_mnist_cnn_has_the_shapes_of_the_papers_appendix() -> None:
    x, shapes = torch.zeros(1, 1, 28, 28), []
    for layer in build("mnist-cnn", (1, 28, 28), 10):  # type: ignore[attr-defined]
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    assert [s for s in shapes if len(s) == 3] == [
        (16, 14, 14), (16, 14, 14), (16, 13, 13), (32, 5, 5), (32, 5, 5), (32, 4, 4)
    ]  # fmt: skip


def test_option_a_takes_every_second_pixel_and_pads_channels_with_zeros() -> None:
    x = torch.arange(32.0).view(1, 2, 4, 4)
    out = OptionA(2, 4)(x)
    assert out.shape == (1, 4, 2, 2)
    assert torch.equal(out[:, 1:3], x[:, :, ::2, ::2])
    assert not out[:, 0].any()
    assert not out[:, 3].any()


def test_the_benchmarks_find_plain_constructors() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    assert LstmClassifier(3, vocabulary=10, embedding=4, hidden=5)(tokens).shape == (2, 3)
    small = TransformerClassifier(3, length=16, vocabulary=10, width=8, layers=1, heads=2, ffn=16)
    assert small(tokens).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "shape", "options", "complaint"),
    [
        ("liner", (4,), {}, "did you mean 'linear'"),
        ("mlp", (4,), {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", (4,), {"hidden": [0]}, "can't be \\[0\\]"),
        ("mlp", (4,), {"hidden": 3}, "can't be 3"),
        ("mlp", (4,), {"act": "swish"}, "unknown activation 'swish'"),
        ("linear", (4,), {"bias": 1}, "can't be 1"),
        ("mnist-cnn", (1, 28, 28), {"groups": 2}, "unknown option 'groups'"),
        ("mnist-cnn", (1, 28, 28), {"form": "better"}, "'original' or 'enhanced'"),
        ("scatter-cnn", (81, 7, 7), {"groups": 2}, "there are none"),
        ("mnist-cnn", (784,), {}, "takes images"),
        ("mnist-cnn", (1, 8, 8), {}, "too small"),
        ("resnet20", (3, 32, 32), {"groups": 3}, "divide 16"),
        ("resnet", (3, 32, 32), {"depth": 18}, "6k \\+ 2"),
        ("resnet", (3, 32, 32), {"form": "enhansed"}, "did you mean 'enhanced'"),
        ("resnet", (3, 32, 32), {"groups": 3}, "divide 16"),
        ("wide-resnet", (3, 32, 32), {"depth": 20}, "6k \\+ 4"),
        ("wide-resnet", (784,), {}, "takes images"),
        ("gru", (8,), {}, "no word vectors"),
        ("gru", (8,), {"readout": "first"}, "'last' or 'mean'"),
        ("gru", (8,), {"form": "better"}, "'original' or 'enhanced'"),
        ("gru", (8,), {"vectors": 3}, "unknown option"),
        ("lstm", (1, 28, 28), {}, "takes token ids"),
        ("transformer", (8,), {"width": 6, "heads": 4}, "must divide width"),
    ],
)
def test_a_wrong_request_is_an_error_that_says_what_to_write(
    name: str, shape: tuple[int, ...], options: dict[str, object], complaint: str
) -> None:
    with pytest.raises(InputError, match=complaint):
        build(name, shape, 10, **options)


def test_one_class_is_no_classification() -> None:
    with pytest.raises(InputError, match="classes must be at least 2"):
        build("linear", (4,), 1)
