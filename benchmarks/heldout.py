"""Workloads that the engine was not tuned on: small batches, large tables, and models of timm, transformers and peft.

Sizes are chosen so that a plain step takes about a second or less on one thread. Dropout is off: plain PyTorch and
sordino then compute the same function. Libraries are imported when a model is built, so that the workloads of
plain torch can be measured without them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workloads import SIX, RowLoss, Workload, mlp, texts, vectors

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

GOAL, CLOSE_GOAL = 1.5, 1.2
VOCABULARY, LENGTH = 8_000, 64


class BagOfWords(nn.Module):
    """The mean of word vectors, and a linear map: nearly all parameters are a table of 50,000 words."""

    def __init__(self, vocabulary: int = 50_000, width: int = 100, classes: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.words(ids).mean(1))
        return logits


class BiLstm(nn.Module):
    """An embedding of width 64, a bidirectional nn.LSTM of 64 units, and a classifier on the mean of its states."""

    def __init__(self, vocabulary: int = VOCABULARY, width: int = 64, hidden: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, 2)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(ids))
        logits: Tensor = self.head(states.mean(1))
        return logits


class Logits(nn.Module):
    """A model of transformers or peft that returns only its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids).logits
        return logits


_OPERATORS: list[torch.library.Library] = []  # kept, because a declaration ends with its object


def _declare_torchvision_operators() -> None:
    """timm and transformers import torchvision, whose compiled operators do not load on a CPU build of torch.

    The two that its import looks up are declared, which is enough for models that use none of them.
    """
    try:
        import torchvision  # type: ignore[import-untyped] # noqa: F401
    except RuntimeError:
        for module in [m for m in sys.modules if m.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        _OPERATORS.append(torch.library.Library("torchvision", "DEF"))  # type: ignore[no-untyped-call]
        for operator in ("nms", "qnms"):
            signature = f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            _OPERATORS[-1].define(signature)  # type: ignore[no-untyped-call]


def _timm(name: str, **options: Any) -> nn.Module:
    """A model of timm, with GroupNorm instead of BatchNorm."""
    _declare_torchvision_operators()
    import timm

    from sordino import fix

    return fix(timm.create_model(name, num_classes=10, **options))


def convnext() -> nn.Module:
    return _timm("convnext_atto")


def edgenext() -> nn.Module:
    return _timm("edgenext_xx_small")


def maxvit() -> nn.Module:
    model = _timm("maxvit_rmlp_pico_rw_256", img_size=64)
    for module in model.modules():  # the network that computes the position biases has dropout
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def resnet18() -> nn.Module:
    return _timm("resnet18")


def vit() -> nn.Module:
    return _timm("vit_tiny_patch16_224", img_size=64, patch_size=8)


def mobilenet() -> nn.Module:
    return _timm("mobilenetv2_100")


def deberta() -> nn.Module:
    _declare_torchvision_operators()
    import transformers as hf

    config = hf.DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=LENGTH,
        relative_attention=True,
        position_buckets=32,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pooler_dropout=0.0,
        num_labels=2,
    )
    return Logits(hf.DebertaV2ForSequenceClassification(config))


def mixtral() -> nn.Module:
    _declare_torchvision_operators()
    import transformers as hf

    config = hf.MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return Logits(hf.MixtralForCausalLM(config))


def _gpt2() -> nn.Module:
    _declare_torchvision_operators()
    import transformers as hf

    config = hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=256,
        n_layer=4,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model: nn.Module = hf.GPT2LMHeadModel(config)
    return model


def gpt2() -> nn.Module:
    return Logits(_gpt2())


def lora() -> nn.Module:
    model = _gpt2()
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules=["c_attn"], fan_in_fan_out=True)
    return Logits(get_peft_model(model, config))


def next_token(outputs: Tensor, ids: Tensor) -> Tensor:
    """For each text, the mean over its positions of the cross-entropy of the next token."""
    return F.cross_entropy(outputs[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def two_sided(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of one logit."""
    return F.binary_cross_entropy_with_logits(outputs[:, 0], targets, reduction="none")


def _binary(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4096), torch.randint(2, (n,)).float()


def _language(n: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (n, LENGTH))
    return ids, ids


def _held(
    name: str,
    title: str,
    records: int,
    model: Callable[[], nn.Module],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    loss: RowLoss | None = None,
    goal: float = GOAL,
) -> Workload:
    return Workload(name, title, records, goal, model, batch, loss)


HELD_OUT: dict[str, Workload] = {
    w.name: w
    for w in (
        _held("mlp10", "MLP 784-300-10", 10, mlp, vectors(784)),
        _held("words", "embedding 50,000 × 100, linear", 256, BagOfWords, texts(LENGTH, 50_000, 4)),
        _held("logistic", "logistic regression 4096→1", 2048, lambda: nn.Linear(4096, 1), _binary, loss=two_sided),
        _held("convnext", "ConvNeXt-atto, 64×64", 32, convnext, vectors(3, 64, 64)),
        _held("edgenext", "EdgeNeXt-xx-small, 64×64", 32, edgenext, vectors(3, 64, 64)),
        _held("maxvit", "MaxViT-RMLP-pico, 64×64", 16, maxvit, vectors(3, 64, 64)),
        _held("deberta", "DeBERTa-v2, 4 layers of 128", 24, deberta, texts(LENGTH, VOCABULARY)),
        _held("mixtral", "Mixtral, 4 layers of 128, 4 experts", 24, mixtral, _language, loss=next_token),
        _held("resnet18", "ResNet-18 GroupNorm, 64×64", 32, resnet18, vectors(3, 64, 64)),
        _held("vit", "ViT-tiny, 64×64, patches of 8", 32, vit, vectors(3, 64, 64)),
        _held("mobilenet", "MobileNetV2 GroupNorm, 64×64", 32, mobilenet, vectors(3, 64, 64)),
        _held("bilstm", "biLSTM of 64 units", 64, BiLstm, texts(LENGTH, VOCABULARY)),
        _held("gpt2", "GPT-2, 4 layers of 256", 16, gpt2, _language, loss=next_token, goal=CLOSE_GOAL),
        _held("lora", "LoRA r = 8 on GPT-2", 16, lora, _language, loss=next_token, goal=CLOSE_GOAL),
    )
}

WORKLOADS: dict[str, Workload] = SIX | HELD_OUT
