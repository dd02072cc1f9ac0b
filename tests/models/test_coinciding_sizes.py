"""Models that were wrong once: a batch as long as one of their own dimensions, experts that no record chooses."""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import Tensor, nn
from torch.nn import functional as F

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, brute_force, clipped_sum

SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 16,
}


def texts(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(1, 31, (rows, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def classified(out: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(out.logits, target, reduction="none")


def test_deberta_with_as_many_records_as_twice_its_buckets(agree, awaken) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    config = hf.DebertaV2Config(
        **SMALL, relative_attention=True, position_buckets=3, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm",
        share_att_key=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pooler_dropout=0.0, num_labels=3,
    )  # fmt: skip
    model = hf.DebertaV2ForSequenceClassification(config)
    for length in (5, 6):  # the fault did not occur where a text is as long as the batch
        agree(awaken(model), classified, Rows(texts(6, length), torch.arange(6) % 3))


def test_mixtral_with_experts_that_no_text_chooses_and_products_that_double_precision_does_not_have() -> None:
    torch.manual_seed(0)
    config = hf.MixtralConfig(
        **SMALL, num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=1, num_labels=3, pad_token_id=0
    )
    model, rows = hf.MixtralForSequenceClassification(config), Rows(texts(3, 4), torch.arange(3))
    found, wanted = (f(model, classified, rows, FlatClip(1.0)) for f in (clipped_sum, brute_force))
    torch.testing.assert_close(found.norms, wanted.norms, rtol=1e-4, atol=1e-6)
    for name, want in wanted.sums.items():
        torch.testing.assert_close(found.sums[name].float(), want, rtol=1e-3, atol=1e-4)


def test_a_vision_transformer_with_shared_relative_positions(agree, awaken) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    model = VisionTransformerRelPos(
        img_size=8, patch_size=4, in_chans=1, num_classes=3, embed_dim=8, depth=2, num_heads=2, shared_rel_pos=True,
        rel_pos_type="mlp", rel_pos_dim=4, class_token=True,
    )  # fmt: skip
    for part in model.modules():  # timm drops an eighth of the positions' network, and a loop would draw other numbers
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    images = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    agree(awaken(model), nn.CrossEntropyLoss(), Rows(images, torch.arange(4) % 3))


class Routed(nn.Module):
    """Each record goes to the expert that its first number names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out = x.new_zeros(len(x), 3)
        for number, expert in enumerate(self.experts):
            rows = torch.nonzero(x[:, 0] == number).flatten()
            out = out.index_add(0, rows, expert(x[rows]))
        return out


def test_an_expert_that_the_first_records_miss_is_trained_all_the_same() -> None:
    torch.manual_seed(0)
    x = torch.randn(24, 4)
    x[:, 0] = torch.tensor([0.0] * 8 + [1.0] * 8 + [2.0] * 8)  # the first chunk has one expert, the last another
    model = Routed()
    before = [p.detach().clone() for p in model.parameters()]
    plan = sordino.Plan.dpsgd(
        noise_multiplier=1e-3, delta=1e-3, records=24, expected_batch=24, steps=2, clip_norm=1.0, insecure_seed=1
    )
    sordino.train(model, F.cross_entropy, (x, torch.arange(24) % 3), plan, lr=1.0)
    assert all(float((p - old).abs().max()) > 1e-2 for p, old in zip(model.parameters(), before, strict=True))
