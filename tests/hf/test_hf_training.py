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
    with pytest.raises(InputError, match="users is a list: give the key"):
        hf.train(gpt(), ROWS, plan_of(12, unit="user"), Tokenizer(), length=8, users=["a"])  # type: ignore[arg-type]
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
        ({"output_dir": "runs/mine"}, "give out="),
        ({"max_length": 4}, "give length="),
        ({"dataset_text_field": "content"}, "give text="),
        ({"report_to": "tensorboard"}, "sordino.TensorBoard"),
        ({"push_to_hub": True}, "after the training"),
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


def test_arguments_that_are_switched_off_are_no_arguments() -> None:
    """`fp16 = False` was refused as if it were on."""
    off = {"fp16": False, "packing": False, "gradient_accumulation_steps": 1, "max_steps": -1, "report_to": "none"}
    optimizer, lr, settings = hf.optimizer_and_settings({**off, "label_smoothing_factor": 0.0}, 10)
    assert (optimizer, lr, settings.scheduler) == (torch.optim.AdamW, 1e-3, None)


def test_a_fraction_is_one_of_all_steps_as_in_transformers() -> None:
    """0.3 became 0: no warm-up, and no evaluation."""
    given = {"eval_steps": 0.25, "save_steps": 0.5, "warmup_steps": 0.3, "learning_rate": 1.0}
    _, _, settings = hf.optimizer_and_settings(given, 10)
    assert (settings.eval_every, settings.checkpoint_every) == (3, 5)
    assert settings.scheduler is not None
    made = settings.scheduler(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0))
    assert made.get_last_lr() == [0.0], "the first step of a warm-up"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"learning_rate": "big"}, "learning_rate must be a number"),
        ({"seed": "x"}, "seed must be a number"),
        ({"eval_steps": 0}, "eval_steps must be greater than 0"),
        ({"warmup_steps": -3}, "warmup_steps must be greater than 0"),
        ({"warmup_ratio": 2.0}, "warmup_ratio"),
        ({"lr_scheduler_type": "cosin"}, "lr_scheduler_type = 'cosin'.*not a valid"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type = 'reduce_lr_on_plateau'.*metrics"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs"),
        (transformers.TrainingArguments, "not a class"),
        ("runs", "not a str"),
    ],
)
def test_a_wrong_argument_is_named(arguments: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        hf.optimizer_and_settings(arguments, 10)


def test_an_evaluation_that_was_asked_for_needs_a_function() -> None:
    with pytest.raises(InputError, match="give evaluate="):
        hf.train(gpt(), ROWS, plan_of(36), Tokenizer(), {"eval_steps": 1}, length=8)


def test_masked_tokens_are_left_out_and_given_labels_are_used() -> None:
    """Padding of the rows was trained on, and the labels of prompts (-100) were ignored."""
    row = {"input_ids": [0, 0, 3, 4, 5], "attention_mask": [0, 0, 1, 1, 1], "labels": [-100, -100, -100, 4, 5]}
    found = hf.TextRecords([row], None, 4, padding=9)[0]
    assert found["input_ids"].tolist() == [3, 4, 5, 9]
    assert found["attention_mask"].tolist() == [1, 1, 1, 0]
    assert found["labels"].tolist() == [-100, 4, 5, -100]
    array = {key: torch.tensor(value) for key, value in row.items()}
    assert all(torch.equal(found[key], hf.TextRecords([array], None, 4, padding=9)[0][key]) for key in found)


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (["w1 w2"] * 36, "a row is a str: give dicts"),
        ([("w1", 0)] * 36, "a row is a tuple"),
        ({"train": ROWS}, r"the dataset is a dict: give one of its parts, such as dataset\['train'\]"),
        ([{"input_ids": [1.5, 2.5]}] * 36, "flat list of whole numbers"),
        ([{"input_ids": [[1, 2]]}] * 36, "flat list of whole numbers"),
        ([{"input_ids": None}] * 36, "flat list of whole numbers"),
        ([{"input_ids": [2**70]}] * 36, "flat list of whole numbers"),
        ([{"input_ids": [2, 3], "labels": [2]}] * 36, "must have the same length"),
        ([{"input_ids": [2, 3], "labels": [2, 99]}] * 36, "the model's vocabulary"),
        ([{"input_ids": [2, 3], "token_type_ids": [0, 1]}] * 36, "would be ignored"),
    ],
)
def test_rows_of_another_form_are_named(dataset: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        hf.train(gpt(), dataset, plan_of(36), None, length=8)


def test_virtual_tokens_of_an_adapter_take_positions() -> None:
    prompt = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(InputError, match="exceeds the 6 positions of the model: give length=6"):
        hf.train(gpt(), ROWS, plan_of(36), Tokenizer(), peft_config=prompt, length=8)
    result = hf.train(gpt(), ROWS, plan_of(36), Tokenizer(), {"learning_rate": 0.1}, prompt, length=6)
    assert [name for name, p in result.model.named_parameters() if p.requires_grad] == [
        "prompt_encoder.default.embedding.weight"
    ]


def test_roberta_keeps_positions_for_its_padding() -> None:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.RobertaConfig(vocab_size=22, max_position_embeddings=8, pad_token_id=1, **sizes)
    with pytest.raises(InputError, match="exceeds the 6 positions"):
        hf.train(transformers.RobertaForSequenceClassification(config), ROWS, plan_of(36), Tokenizer(), length=7)


def test_a_classifier_needs_classes_and_a_padding_token() -> None:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": len(WORDS)}
    one = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes, num_labels=1))
    with pytest.raises(InputError, match=r"num_labels = 1 .*regression"):
        hf.train(one, ROWS, plan_of(36), Tokenizer(), length=8)
    two = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**sizes))
    with pytest.raises(InputError, match=r"set model\.config\.pad_token_id"):
        hf.train(two, [{"input_ids": [2], "label": 0}] * 36, plan_of(36), length=8)


def test_what_is_no_text_model_is_refused() -> None:
    with pytest.raises(InputError, match="neither a causal"):
        hf.train(torch.nn.Linear(2, 2), ROWS, plan_of(36), Tokenizer())


def test_dora_is_refused_by_its_name_given_or_in_the_model() -> None:
    """Its refusal by the engine named an operation, and said that records interact."""
    config = peft.LoraConfig(target_modules=["c_attn"], use_dora=True)
    for model, given in ((gpt(), config), (peft.get_peft_model(gpt(), config), None)):
        with pytest.raises(Refused, match=r"DoRA .* Use LoRA"):
            hf.train(model, ROWS, plan_of(36), Tokenizer(), peft_config=given, task="causal")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"length": 64}, "exceeds the 8 positions of the model: give length=8"),
        ({"dataset": [{"input_ids": [999]}] * 36}, "the model's vocabulary"),
        ({"dataset": (row for row in ROWS)}, "the dataset is a generator"),
        ({"model": "gpt2"}, "from_pretrained"),
        ({"model": torch.nn.DataParallel(gpt())}, "wrapped in a DataParallel"),
        (
            {
                "model": peft.get_peft_model(gpt(), peft.LoraConfig(target_modules=["c_attn"])),
                "peft_config": peft.LoraConfig(target_modules=["c_attn"]),
            },
            "an adapter already",
        ),
        ({"tokenizer": "gpt2"}, "tokenizer is a str"),
        ({"peft_config": {"r": 4}}, r"peft\.LoraConfig"),
        ({"peft_config": peft.LoraConfig(target_modules=["q_proj"])}, "peft can't add this adapter"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_spent(given: dict[str, Any], said: str) -> None:
    """Most were `IndexError: index out of range in self`, or an error of the library below."""
    options: dict[str, Any] = {"model": gpt(), "dataset": ROWS, "length": 8, **given}
    with pytest.raises(InputError, match=said):
        hf.train(options.pop("model"), options.pop("dataset"), plan_of(36), **{"tokenizer": Tokenizer(), **options})
    with pytest.raises(InputError, match="plan is a dict"):
        hf.train(gpt(), ROWS, {"epsilon": 3.0})  # type: ignore[arg-type]
