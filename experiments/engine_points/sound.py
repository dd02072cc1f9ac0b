"""Refused though right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from .common import (
    RECORDS,
    Fn,
    Seen,
    accepted,
    accepted_and_right,
    ce,
    data,
    declare_torchvision,
    layers,
    plain,
    point,
    refusal,
)

LINE = "refused though right"
ACCEPTED = "tests/gradients/test_assurance.py::test_sound_models_are_accepted"
ADAPTERS = "tests/models/test_peft_adapters.py::test_adapters_match_the_loop"
DRAWN = "tests/gradients/test_neutral.py::test_a_row_draws_the_same_alone_as_in_a_batch"


def _net(forward: Callable[..., Any]) -> nn.Module:
    return Fn(forward, **layers())


@point(
    LINE,
    "the stock `nn.TransformerEncoderLayer` (dropout 0.1), 3 of 3 times",
    f"{ACCEPTED}[a stock encoder layer with dropout-train]",
)
def encoder_layer_with_dropout() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        found: Tensor = s.b(s.e(s.a(x)[:, None].expand(-1, 4, -1)).mean(1))
        return found

    model = Fn(forward, e=nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), **layers())
    return accepted(model, ce, data(), times=3)


@point(LINE, "normal numbers (a diffusion model)", f"{ACCEPTED}[a diffusion loss-train]")
def normal_numbers() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        t = torch.randint(0, 10, (len(x), 1)) / 10
        found: Tensor = s.b(torch.relu(s.a(x * (1 - t) + t * torch.empty_like(x).normal_())))
        return found

    return accepted(_net(forward), ce, data())


@point(LINE, "uniform numbers", f"{DRAWN}[uniform_-0.5]")
def uniform_numbers() -> Seen:
    return accepted(_net(lambda s, x: plain(s, x + torch.empty_like(x).uniform_(-1, 1))), ce, data())


@point(LINE, "multinomial numbers", f"{DRAWN}[multinomial-0.5]")
def multinomial_numbers() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        h = s.a(x)
        which = torch.multinomial(h.detach().softmax(1), 2)
        found: Tensor = s.b(torch.zeros_like(h).scatter(1, which, 1.0) * h)
        return found

    return accepted(_net(forward), ce, data())


@point(LINE, "Gumbel numbers", f"{ACCEPTED}[Gumbel numbers-train]")
def gumbel_numbers() -> Seen:
    return accepted(_net(lambda s, x: s.b(F.gumbel_softmax(s.a(x)))), ce, data())


@point(
    LINE,
    "experts that the first records miss",
    "tests/models/test_coinciding_sizes.py::test_an_expert_that_the_first_records_miss_is_trained_all_the_same",
)
def experts_that_the_first_records_miss() -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(s.e):
            rows = torch.nonzero(x[:, 0] == number).flatten()
            out = out.index_add(0, rows, expert(x[rows]))
        return out

    x, y = data()
    x[:, 0] = (torch.arange(RECORDS) // 11).float()
    return accepted(Fn(forward, e=nn.ModuleList(nn.Linear(8, 3) for _ in range(3))), ce, (x, y))


@point(LINE, "an autocast transformer", "tests/gradients/test_autocast.py::test_a_transformer_under_autocast")
def autocast_transformer() -> Seen:
    class Autocast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
            body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.body = nn.Sequential(nn.Linear(8, 16), body, nn.Flatten(), nn.Linear(16 * 6, 3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                out: Tensor = self.body(x)
            return out.float()

    return accepted(Autocast(), ce, data(6, 8))


@point(
    LINE,
    "spectral_norm",
    f"{ACCEPTED}[spectral_norm-train]",
    "tests/gradients/test_spectral.py::test_a_step_iterates_as_one_plain_pass_does",
)
def spectral_norm() -> Seen:
    return accepted(Fn(plain, a=parametrizations.spectral_norm(nn.Linear(8, 16)), b=nn.Linear(16, 3)), ce, data())


def _checkpointed(reentrant: bool) -> Seen:
    def forward(s: Any, x: Tensor) -> Tensor:
        found: Tensor = s.b(checkpoint(lambda t: torch.tanh(s.c(t)), s.a(x), use_reentrant=reentrant))
        return found

    model = Fn(forward, c=nn.Linear(16, 16), **layers())
    try:
        said = refusal(model, ce, data())
    except RuntimeError as error:  # torch's CheckpointError among them
        return Seen(True, f"{type(error).__name__}: {str(error).splitlines()[0][:110]}")
    if said is not None:
        return Seen(True, f"refused: {said}")
    return Seen(False, "trained")


@point(LINE, "gradient checkpointing, use_reentrant=False", f"{ACCEPTED}[checkpointing-train]")
def checkpointing() -> Seen:
    return _checkpointed(False)


@point(LINE, "gradient checkpointing, use_reentrant=True", f"{ACCEPTED}[reentrant checkpointing-train]")
def checkpointing_reentrant() -> Seen:
    return _checkpointed(True)


def _adapter(make: Callable[[Any], Any], tolerance: float = 1e-6) -> Seen:
    declare_torchvision()
    import peft
    import transformers as hf

    config = hf.BertConfig(
        vocab_size=31, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=16, num_labels=3,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = peft.get_peft_model(hf.BertForSequenceClassification(config), make(peft)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ids = torch.randint(1, 31, (6, 5))

    def loss(out: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(out.logits, target, reduction="none")

    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return accepted_and_right(model, loss, inputs, torch.arange(6) % 3, tolerance=tolerance)


WORDS = ["query", "value"]


@point(LINE, "LoHa", f"{ADAPTERS}[LoHa]")
def loha() -> Seen:
    return _adapter(lambda peft: peft.LoHaConfig(r=4, target_modules=WORDS))


@point(LINE, "OFT", f"{ADAPTERS}[OFT]")
def oft() -> Seen:
    return _adapter(lambda peft: peft.OFTConfig(r=0, oft_block_size=4, target_modules=WORDS))


@point(LINE, "BOFT", f"{ADAPTERS}[BOFT]")
def boft() -> Seen:
    given = {"boft_block_size": 4, "boft_n_butterfly_factor": 2}
    return _adapter(lambda peft: peft.BOFTConfig(**given, target_modules=WORDS))


@point(LINE, "FourierFT", f"{ADAPTERS}[FourierFT]")
def fourierft() -> Seen:
    return _adapter(lambda peft: peft.FourierFTConfig(n_frequency=20, target_modules=WORDS))
