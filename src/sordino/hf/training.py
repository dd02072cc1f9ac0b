"""`sordino.hf.train`: a transformer, its texts and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sordino.errors import InputError
from sordino.hf.arguments import optimizer_and_settings
from sordino.hf.texts import TextRecords, causal_loss, class_loss, users_of
from sordino.plan.core import Plan
from sordino.runs.api import train as train_module
from sordino.split import Split
from sordino.training.job import Result

TASKS = ("causal", "classification")


def train(
    model: nn.Module,
    dataset: Any,
    plan: Plan,
    tokenizer: Any = None,
    training_arguments: Any = None,
    peft_config: Any = None,
    *,
    length: int = 128,
    users: str | None = None,
    text: str = "text",
    label: str = "label",
    task: str | None = None,
    loss: Callable[[Any, Tensor], Tensor] | None = None,
    chunk: int = 64,
    evaluate: Callable[[nn.Module], Any] | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    declaration: Mapping[str, str] | None = None,
) -> Result:
    """Trains a transformer under a plan.

    Args:
        model: A causal language model or a sequence classifier of transformers (or of peft).
        dataset: Dicts with a text (or input_ids) and, for classification, a label: a list, or a Hugging Face dataset.
        plan: The plan. `records` is the number of rows, or with unit="user" that of users.
        tokenizer: A tokenizer with a padding token; not needed if the rows have input_ids.
        training_arguments: transformers.TrainingArguments or a dict: learning rate, optimizer, schedule. Arguments that
            change the sampling are refused.
        peft_config: An adapter's configuration (LoRA, …): only the adapter is trained.
        length: Public: every record is truncated or padded to this number of tokens.
        users: The key of the user, for a plan with unit="user": then a record is a user with all their rows.
        text: The key of the text.
        label: The key of the class.
        task: "causal" or "classification"; default: by the model's class.
        loss: Maps the model's output and the labels to one value per record; default: the task's.
        chunk: The number of records in memory at once.
        evaluate: Evaluates the model, on public data only.
        out: The run directory; the trained model is also written to `out`/hf, as transformers does.
        resume: Continue the run in `out`.
        callbacks: As for `sordino.train`.
        declaration: As for `sordino.train`.

    Returns:
        The result; its model is the adapted one if peft_config is given.

    Raises:
        Refused: an argument would change the sampling; InputError: a value is wrong; nothing was spent.
    """
    kind = _task(model, task)
    optimizer, lr, settings = optimizer_and_settings(training_arguments, plan.steps, chunk=chunk)
    classes = int(model.config.num_labels) if kind == "classification" else None  # type: ignore[union-attr, arg-type]
    records = TextRecords(dataset, tokenizer, length, classes, text, label).tensors()
    _check_tokens(model, records, length)
    if peft_config is not None:
        model = _adapted(model, peft_config)
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False
    if kind == "classification" and tokenizer is not None and config is not None and config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id
    result = train_module(
        model.train(), loss or (causal_loss if kind == "causal" else class_loss), records, plan, optimizer=optimizer,
        lr=lr, settings=settings, evaluate=evaluate, out=out, resume=resume, callbacks=callbacks,
        declaration=declaration, users=None if users is None else users_of(dataset, users),
    )  # fmt: skip
    if out is not None and hasattr(model, "save_pretrained"):
        saved: Any = model
        saved.save_pretrained(Path(out) / "hf")
        if tokenizer is not None:
            tokenizer.save_pretrained(Path(out) / "hf")
    return result


def _task(model: nn.Module, task: str | None) -> str:
    if task is not None:
        if task not in TASKS:
            raise InputError(f"task = {task!r}: use {' or '.join(TASKS)}")
        return task
    if not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}: load it, for example AutoModelForCausalLM.from_pretrained(…)"
        )
    given: Any = model
    base = given.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(base).__name__
    if "CausalLM" in name or "LMHead" in name:
        return "causal"
    if "SequenceClassification" in name:
        return "classification"
    raise InputError(f"a {name} is neither a causal language model nor a sequence classifier: give task= and loss=")


def _adapted(model: nn.Module, peft_config: Any) -> nn.Module:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise InputError("peft_config needs the package peft: install sordino[hf]") from error
    if not isinstance(peft_config, PeftConfig):
        raise InputError(
            f"peft_config is a {type(peft_config).__name__}: give a peft.LoraConfig(…), or another of peft's"
        )
    try:
        found: nn.Module = get_peft_model(model, peft_config)
    except (ValueError, TypeError) as error:
        raise InputError(f"peft can't add this adapter to the model: {error}") from error
    return found


def _check_tokens(model: nn.Module, records: Split, length: int) -> None:
    """InputError if records are longer than the model's positions, or a token is not in its vocabulary."""
    config = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < length:
        raise InputError(f"length = {length} exceeds the {positions} positions of the model: give length={positions}")
    tokens = getattr(config, "vocab_size", None)
    given: Any = records.inputs
    if isinstance(tokens, int) and not 0 <= int(given["input_ids"].min()) <= int(given["input_ids"].max()) < tokens:
        raise InputError(
            f"some tokens are not in 0 … {tokens - 1}, the model's vocabulary; nothing was spent: is the tokenizer "
            "that of the model?"
        )
