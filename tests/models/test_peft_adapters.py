"""peft's adapters on a small BERT match the loop over records; what mixes records or hides itself is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from sordino.clipping import FlatClip
from sordino.errors import Refused
from sordino.gradients import Rows, clipped_sum

TARGETS = ["query", "value"]
TUNED: dict[str, Any] = {"task_type": "SEQ_CLS", "num_virtual_tokens": 3}
ADAPTERS: dict[str, Callable[[], Any]] = {
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True),
    "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS),
    "OFT": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, target_modules=TARGETS),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=20, target_modules=TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=4, target_modules=TARGETS),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=TARGETS),
    "IA3": lambda: peft.IA3Config(target_modules=[*TARGETS, "output.dense"], feedforward_modules=["output.dense"]),
    "RandLoRA": lambda: peft.RandLoraConfig(target_modules=TARGETS),
    "prefix": lambda: peft.PrefixTuningConfig(**TUNED),
    "prompt": lambda: peft.PromptTuningConfig(**TUNED),
    "P-tuning": lambda: peft.PromptEncoderConfig(**TUNED, encoder_hidden_size=8),
}


def bert() -> Any:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForSequenceClassification(
        hf.BertConfig(vocab_size=61, max_position_embeddings=32, num_labels=3, **sizes, **still)
    )


def rows(count: int) -> Rows:
    ids = torch.randint(1, 61, (count, 9))
    return Rows({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.randn(count, dtype=torch.float64))


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return (outputs.logits @ torch.tensor([0.3, -1.0, 0.7], dtype=torch.float64) - targets) ** 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_match_the_loop(
    name: str, awaken: Callable[[nn.Module], nn.Module], agree: Callable[..., Any]
) -> None:
    model = awaken(peft.get_peft_model(bert(), ADAPTERS[name]()))
    for count in (3, 4, 9):  # 4 heads, 9 words
        agree(model, loss, rows(count), tolerance=1e-6 if name == "FourierFT" else 1e-8)  # peft takes it in float32


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (lambda: peft.LilyConfig(target_modules=TARGETS), "records interact"),
        (lambda: peft.C3AConfig(target_modules=TARGETS, block_size=8), "an operation that sordino can't intercept"),
        (lambda: peft.OSFConfig(target_modules=TARGETS), "a hook on this parameter"),
    ],
    ids=["Lily", "C3A", "OSF"],
)
def test_adapters_that_are_refused_by_name(
    config: Callable[[], Any], reason: str, awaken: Callable[[nn.Module], nn.Module]
) -> None:
    model = awaken(peft.get_peft_model(bert(), config()))
    with pytest.raises(Refused, match=reason):
        clipped_sum(model, loss, rows(5), FlatClip(1.0))
