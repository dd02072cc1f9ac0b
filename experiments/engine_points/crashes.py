"""Crashes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import sordino

from .common import (
    Fn,
    Seen,
    accepted_and_right,
    against_loop,
    declare_torchvision,
    flat,
    loop,
    point,
    refusal,
    squared,
)

LINE = "crashes"
DERIVED = "tests/gradients/test_derived.py::test_each_parameter_gets_its_own_share_of_a_tensor_made_of_several"
TRANSFORMED = "tests/gradients/test_transforms.py::test_functions_of_one_row_mapped_over_the_rows"
N = 6


def _right(model: nn.Module, *shape: int) -> Seen:
    x, y = torch.randn(N, *shape, dtype=torch.float64), torch.randn(N, dtype=torch.float64)
    return accepted_and_right(model.double(), squared, x, y, tolerance=1e-9)


def _trained(model: nn.Module) -> Seen:
    """By `train`, which lets a parameter's gradients be overwritten by their sum; and against the loop."""
    x, y = torch.randn(N, 4), torch.randn(N)
    said = refusal(copy.deepcopy(model), squared, (x, y))
    return Seen(True, f"refused: {said}") if said is not None else _right(model, 4)


def _fn(forward: Callable[[Any, Tensor], Any], **parts: Any) -> nn.Module:
    return Fn(forward, **parts)


@point(LINE, "`F.linear(x, U @ V)`", DERIVED)
def product_of_two() -> Seen:
    return _trained(_fn(lambda s, x: F.linear(x, s.u @ s.v), u=torch.randn(3, 2), v=torch.randn(2, 4)))


@point(LINE, "weight_norm on Linear with 2-D rows", DERIVED)
def weight_norm() -> Seen:
    return _trained(nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)))


@point(LINE, "`b1 + b2` as bias", DERIVED)
def sum_of_biases() -> Seen:
    parts = {"w": torch.randn(3, 4), "b": torch.randn(3), "c": torch.randn(3)}
    return _trained(_fn(lambda s, x: F.linear(x, s.w, s.b + s.c), **parts))


@point(
    LINE,
    "keyword forms (`torch.matmul(input=…)`)",
    "tests/gradients/test_keywords.py::test_arguments_by_name",
)
def keyword_forms() -> Seen:
    return _right(_fn(lambda s, x: torch.matmul(input=x, other=s.w), w=torch.randn(4, 3)), 4)


@point(
    LINE,
    "AdaptiveLogSoftmax",
    "tests/gradients/test_keywords.py::test_an_adaptive_softmax_whose_clusters_may_be_empty",
)
def adaptive_softmax() -> Seen:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 8)
            self.head = nn.AdaptiveLogSoftmaxWithLoss(8, 12, [3, 7], div_value=4.0)

        def forward(self, x: Tensor, words: Tensor) -> Tensor:
            found: Tensor = self.head(self.body(x), words).output
            return found[:, None]

    words = torch.arange(24) % 12
    said = refusal(Words(), squared, ((torch.randn(24, 4), words), torch.ones(24)))
    if said is not None:
        return Seen(True, f"refused: {said}")
    inputs, y = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, dtype=torch.float64)
    return against_loop(Words().double(), squared, (inputs, words), y, tolerance=1e-9)


@point(LINE, "vmap inside a model", f"{TRANSFORMED}[vmap]")
def vmap_inside() -> Seen:
    return _right(_fn(lambda s, x: torch.vmap(lambda r: torch.tanh(s.l(r)))(x), l=nn.Linear(4, 3)), 4)


@point(LINE, "jacrev inside a model", f"{TRANSFORMED}[jacrev]")
def jacrev_inside() -> Seen:
    return _right(_fn(lambda s, x: torch.vmap(jacrev(lambda r: torch.tanh(s.l(r))))(x), l=nn.Linear(4, 3)), 4)


@point(
    LINE,
    "LazyLinear",
    "tests/gradients/test_survey.py::test_a_lazy_layer_is_named_before_its_first_run_and_trained_after",
)
def lazy_linear() -> Seen:
    """Before its first run it has no weights: that must be said as an error of the input."""
    rows = sordino.Rows(torch.randn(N, 4), torch.randn(N))
    try:
        sordino.clipped_sum(nn.Sequential(nn.LazyLinear(3)), squared, rows, sordino.FlatClip(1.0))
    except (sordino.InputError, sordino.Refused) as said:
        model = nn.Sequential(nn.LazyLinear(3))
        model(torch.randn(1, 4))
        seen = _right(model, 4)
        return Seen(seen.wrong, f"named before its first run ({str(said)[:80]}…); after it, {seen.text}")
    return Seen(True, "a sum without its weights")


@point(
    LINE,
    "Mixtral's grouped products in double",
    "tests/models/test_coinciding_sizes.py::test_mixtral_with_experts_that_no_text_chooses_and_products_that_double_"
    "precision_does_not_have",
)
def mixtral() -> Seen:
    """torch has these products in single precision alone: a loop in double fails as well."""
    declare_torchvision()
    import transformers as hf

    config = hf.MixtralConfig(
        vocab_size=31, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=16, max_position_embeddings=16, num_local_experts=4, num_experts_per_tok=2, num_labels=3,
        pad_token_id=0,
    )  # fmt: skip
    model = hf.MixtralForSequenceClassification(config)
    ids = torch.randint(1, 31, (N, 5))
    inputs, targets = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.arange(N) % 3

    def loss(out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, target, reduction="none")

    _, wanted = loop(model, loss, inputs, targets, 1.0)
    found = sordino.clipped_sum(model.double(), loss, sordino.Rows(inputs, targets), sordino.FlatClip(1.0))
    off = float((flat(found.sums) - flat(wanted)).norm() / flat(wanted).norm())
    return Seen(off > 1e-4, f"the sum of the model in double differs from a loop's in single precision by {off:.0e}")
