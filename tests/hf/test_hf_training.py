"""Transformers under a plan: causal and classification, adapters, users, and arguments that change the sampling."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sordino
from sordino.errors import InputError, Refused

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from sordino import hf  # noqa: E402

pytestmark = [pytest.mark.models, pytest.mark.filterwarnings("ignore")]
WORDS = ["[PAD]", "[END]", *(f"w{i}" for i in range(20))]


class Tokenizer:
    """Words of a fixed list; as much of Hugging Face's interface as is used."""

    pad_token_id, eos_token_id = 0, 1

    def __call__(self, text: str, truncation: bool = False, max_length: int | None = None) -> dict[str, list[int]]:
        return {"input_ids": [WORDS.index(word) for word in text.split()][: max_length or None]}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


def gpt() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": len(WORDS)}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def plan_of(records: int, **options: Any) -> sordino.Plan:
    return sordino.dpsgd(noise_multiplier=1.0, delta=1e-5, records=records, expected_batch=8, steps=2, **options)


ROWS = [{"text": f"w{i % 20} w{(i + 1) % 20} w3", "who": i // 3, "label": i % 2} for i in range(36)]


def test_an_adapter_is_trained_with_users_as_the_unit(tmp_path: Path) -> None:
    model, before = gpt(), {name: p.detach().clone() for name, p in gpt().named_parameters()}
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    arguments = {"learning_rate": 0.1, "warmup_steps": 1, "lr_scheduler_type": "linear"}
    plan = plan_of(12, unit="user", rows_per_user=2)
    result = hf.train(model, ROWS, plan, Tokenizer(), arguments, config, length=8, users="who", out=tmp_path / "r")
    moved = {name for name, p in result.model.named_parameters() if p.requires_grad}
    assert moved
    assert all("lora" in name for name in moved)
    assert torch.equal(model.transformer.wte.weight, before["transformer.wte.weight"])
    assert result.guarantee.unit == "user"
    assert (tmp_path / "r" / "report.html").exists()
    assert (tmp_path / "r" / "hf" / "adapter_model.safetensors").exists()


def test_users_and_the_plans_unit_go_together() -> None:
    with pytest.raises(Refused, match="its ε would be about rows"):
        hf.train(gpt(), ROWS, plan_of(36), Tokenizer(), length=8, users="who")
    with pytest.raises(Refused, match="the rows have no owners"):
        hf.train(gpt(), ROWS, plan_of(12, unit="user"), Tokenizer(), length=8)
    with pytest.raises(InputError, match="every row must have its user under 'author'"):
        hf.train(gpt(), ROWS, plan_of(12, unit="user"), Tokenizer(), length=8, users="author")
    with pytest.raises(InputError, match="the dataset has another number"):  # rows where users were meant
        hf.train(gpt(), ROWS, plan_of(12), Tokenizer(), length=8)


def test_a_classifier_has_a_loss_per_record() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=8, num_labels=2, **sizes)
    model = transformers.BertForSequenceClassification(config)
    result = hf.train(model, ROWS, plan_of(36), Tokenizer(), {"optim": "sgd", "learning_rate": 0.5}, length=6)
    assert result.guarantee is not None
    with pytest.raises(InputError, match="class is not in"):
        hf.train(model, [{**row, "label": 7} for row in ROWS], plan_of(36), Tokenizer(), length=6)


def test_the_causal_loss_of_a_record_depends_on_its_own_tokens_alone() -> None:
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, 3, 4], [1, 2, -100, -100]])
    both = hf.causal_loss(SimpleNamespace(logits=logits), targets)
    alone = hf.causal_loss(SimpleNamespace(logits=logits[1:]), targets[1:])
    assert torch.equal(both[1:], alone)
    assert both[1] == torch.nn.functional.cross_entropy(logits[1, :1], torch.tensor([2]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"packing": True}, "several records"),
        ({"group_by_length": True}, "lengths of all records"),
        ({"gradient_accumulation_steps": 4}, "noise is added once"),
        ({"per_device_train_batch_size": 2}, "expected_batch"),
        ({"max_steps": 9}, "the plan's"),
        ({"label_smoothing_factor": 0.1}, "per record"),
        ({"bf16": True}, "precision"),
        ({"torch_compile": True}, "would be ignored"),
    ],
)
def test_arguments_that_change_the_sampling_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said):
        hf.train(gpt(), ROWS, plan_of(36), Tokenizer(), arguments, length=8)


def test_training_arguments_are_read_where_they_differ_from_their_defaults(tmp_path: Path) -> None:
    made = transformers.TrainingArguments(output_dir=str(tmp_path), learning_rate=0.02, use_cpu=True, weight_decay=0.1)
    optimizer, lr, settings = hf.optimizer_and_settings(made, 10)
    assert optimizer is torch.optim.AdamW
    assert lr == 0.02
    assert settings.optimizer_options["weight_decay"] == 0.1
    changed = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, gradient_accumulation_steps=2)
    with pytest.raises(Refused, match="gradient_accumulation_steps"):
        hf.optimizer_and_settings(changed, 10)


def test_what_is_no_text_model_is_refused() -> None:
    with pytest.raises(InputError, match="neither a causal"):
        hf.train(torch.nn.Linear(2, 2), ROWS, plan_of(36), Tokenizer())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"length": 64}, "exceeds the 8 positions of the model: give length=8"),
        ({"dataset": [{"input_ids": [999]}] * 36}, "the model's vocabulary"),
        ({"dataset": (row for row in ROWS)}, "the dataset is a generator"),
        ({"model": "gpt2"}, "from_pretrained"),
        ({"peft_config": {"r": 4}}, r"peft\.LoraConfig"),
        ({"peft_config": peft.LoraConfig(target_modules=["q_proj"])}, "peft can't add this adapter"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_spent(given: dict[str, Any], said: str) -> None:
    """Most were `IndexError: index out of range in self`, or an error of the library below."""
    options: dict[str, Any] = {"model": gpt(), "dataset": ROWS, "length": 8, **given}
    with pytest.raises(InputError, match=said):
        hf.train(options.pop("model"), options.pop("dataset"), plan_of(36), Tokenizer(), {}, **options)
