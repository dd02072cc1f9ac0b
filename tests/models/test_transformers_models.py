"""transformers' text models, from small configurations, match the loop over records; so do LoRA adapters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum

VOCABULARY, LENGTH = 61, 9


def bert() -> nn.Module:
    return hf.BertForSequenceClassification(
        hf.BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        )
    )


def distilbert() -> nn.Module:
    return hf.DistilBertForSequenceClassification(
        hf.DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
            max_position_embeddings=16,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            num_labels=3,
        )
    )


def gpt2() -> nn.Module:
    return hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=16,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama() -> nn.Module:
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
        )
    )


class T5Classifier(nn.Module):
    """T5's encoder with a head: relative position biases are an Embedding called without a batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
        }
        self.encoder = hf.T5EncoderModel(hf.T5Config(**sizes, dropout_rate=0.0))
        self.head = nn.Linear(32, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits: Tensor = self.head(states.mean(1))
        return logits


def texts(records: int = 3, *, padding: bool = True) -> dict[str, Tensor]:
    mask = torch.ones(records, LENGTH, dtype=torch.int64)
    if padding:
        mask[0, -3:] = 0
    return {"input_ids": torch.randint(1, VOCABULARY, (records, LENGTH)), "attention_mask": mask}


def classes(records: int = 3) -> Tensor:
    return torch.arange(records) % 3


def classification(outputs: hf.utils.ModelOutput, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits, targets, reduction="none")


def next_token(outputs: hf.utils.ModelOutput, targets: Tensor) -> Tensor:
    """The mean over a record's own tokens: one loss per record."""
    logits = outputs.logits[:, :-1].transpose(1, 2)
    return F.cross_entropy(logits, targets[:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("build", [bert, distilbert])
def test_classifier_matches_the_loop(build: Callable[[], nn.Module], agree, awaken) -> None:
    agree(awaken(build()), classification, Rows(texts(), classes()))


@pytest.mark.parametrize("build", [gpt2, llama])
def test_language_model_matches_the_loop(build: Callable[[], nn.Module], agree, awaken) -> None:
    inputs = texts()
    agree(awaken(build()), next_token, Rows(inputs, inputs["input_ids"]))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_implementations_match_the_loop(attention: str, agree, awaken) -> None:
    model = gpt2()
    model.set_attn_implementation(attention)
    inputs = texts()
    agree(awaken(model), next_token, Rows(inputs, inputs["input_ids"]))


def test_t5_encoder_matches_the_loop(agree, awaken) -> None:
    agree(awaken(T5Classifier()), nn.CrossEntropyLoss(), Rows(texts(), classes()))


def test_a_model_without_a_mask_and_with_tuple_inputs(agree, awaken) -> None:
    ids = texts(padding=False)["input_ids"]
    agree(awaken(distilbert()), classification, Rows((ids,), classes()))


def test_tied_embedding_of_gpt2_is_one_parameter_with_one_gradient(agree, awaken) -> None:
    model = awaken(gpt2())
    assert model.lm_head.weight is model.transformer.wte.weight
    inputs = texts()
    ours = agree(model, next_token, Rows(inputs, inputs["input_ids"]))
    assert "lm_head.weight" not in ours.sums
    unused = sorted(set(range(VOCABULARY)) - set(inputs["input_ids"].flatten().tolist()))
    assert ours.sums["transformer.wte.weight"][unused].abs().max() > 0, "the head's share reaches unused tokens"


@pytest.mark.parametrize(
    ("build", "targets"),
    [(bert, ["query", "value"]), (gpt2, ["c_attn"]), (llama, ["q_proj", "v_proj", "down_proj"])],
)
def test_lora_adapter_matches_the_loop(build: Callable[[], nn.Module], targets: list[str], agree, awaken) -> None:
    lora = LoraConfig(r=3, lora_alpha=6, lora_dropout=0.0, target_modules=targets, fan_in_fan_out=build is gpt2)
    model = awaken(get_peft_model(build(), lora))
    inputs = texts()
    language = build is not bert
    rows = Rows(inputs, inputs["input_ids"] if language else classes())
    ours = agree(model, next_token if language else classification, rows)
    assert all("lora_" in name for name in ours.sums)
    assert all(value.abs().max() > 0 for value in ours.sums.values())


def test_dropout_draws_for_each_record_on_its_own() -> None:
    """Two copies of one text get different masks, so different norms; nothing else tells them apart."""
    config = hf.DistilBertConfig(vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=48, dropout=0.3)
    model = hf.DistilBertForSequenceClassification(config).double().train()
    ids = torch.randint(1, VOCABULARY, (1, LENGTH)).repeat(2, 1)
    rows = Rows({"input_ids": ids}, torch.zeros(2, dtype=torch.int64))
    first, second = clipped_sum(model, classification, rows, FlatClip(1.0)).norms.tolist()
    assert first != pytest.approx(second, rel=1e-6)
    model.eval()
    first, second = clipped_sum(model, classification, rows, FlatClip(1.0)).norms.tolist()
    assert first == pytest.approx(second, rel=1e-9)
