"""`sordino.hf.train`: a transformer, its texts and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.hf.arguments import evaluates, optimizer_and_settings
from sordino.hf.texts import IGNORED, TextRecords, causal_loss, class_loss, users_of
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
    _check_adapter(model, peft_config)
    if not isinstance(plan, Plan):
        raise InputError(f"plan is a {type(plan).__name__}: make one with a method of sordino")
    if evaluate is None and evaluates(training_arguments):
        raise InputError("training_arguments ask for an evaluation: give evaluate=…, a function of the model")
    optimizer, lr, settings = optimizer_and_settings(training_arguments, plan.steps, chunk=chunk)
    classes = _classes(model, tokenizer) if kind == "classification" else None
    padding = getattr(getattr(model, "config", None), "pad_token_id", None) or 0
    _check_length(model, length, getattr(peft_config, "num_virtual_tokens", None) or 0)
    records = TextRecords(dataset, tokenizer, length, classes, text, label, padding).tensors()
    _check_tokens(model, records)
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
        if hasattr(tokenizer, "save_pretrained"):
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
    if hasattr(base, "module") or hasattr(base, "_orig_mod"):  # DataParallel, DDP; torch.compile
        raise InputError(f"the model is wrapped in a {name}: give the model of transformers itself")
    raise InputError(f"a {name} is neither a causal language model nor a sequence classifier: give task= and loss=")


def _classes(model: nn.Module, tokenizer: Any) -> int:
    """The number of classes of a classifier."""
    config: Any = getattr(model, "config", None)
    classes, problem = getattr(config, "num_labels", None), getattr(config, "problem_type", None)
    if not isinstance(classes, int) or classes < 2 or problem in ("regression", "multi_label_classification"):
        raise InputError(
            f"the model has num_labels = {classes} and problem_type = {problem!r}: here a record has one class of two "
            "or more; for regression or several labels use sordino.train with your own loss"
        )
    if tokenizer is None and config.pad_token_id is None:
        raise InputError("the model has no padding token: set model.config.pad_token_id, or give the tokenizer")
    return classes


def _check_adapter(model: nn.Module, peft_config: Any) -> None:
    """Refused if an adapter, given or in the model, is DoRA."""
    there: Any = getattr(model, "peft_config", None)
    for config in (peft_config, *(there.values() if isinstance(there, Mapping) else ())):
        if getattr(config, "use_dora", False):
            raise Refused(
                "DoRA (use_dora=True) is not supported: its layer computes with the adapter's weights on a matrix that "
                "has no records, and the engine finds no gradient per record there. Use LoRA: LoraConfig(…) without "
                "use_dora"
            )


def _adapted(model: nn.Module, peft_config: Any) -> nn.Module:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise InputError("peft_config needs the package peft: install sordino[hf]") from error
    if hasattr(model, "peft_config"):
        raise InputError("the model has an adapter already: leave out peft_config, or give the model without it")
    if not isinstance(peft_config, PeftConfig):
        raise InputError(
            f"peft_config is a {type(peft_config).__name__}: give a peft.LoraConfig(…), or another of peft's"
        )
    try:
        found: nn.Module = get_peft_model(model, peft_config)
    except (ValueError, TypeError) as error:
        raise InputError(f"peft can't add this adapter to the model: {error}") from error
    return found


def _check_length(model: nn.Module, length: int, virtual: int) -> None:
    """InputError if a record's tokens and the `virtual` ones before them exceed the model's positions."""
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        free = positions - _first_position(model) - virtual
        if free < checks.whole("length", length, minimum=2):
            raise InputError(f"length = {length} exceeds the {free} positions of the model: give length={free}")


def _check_tokens(model: nn.Module, records: Split) -> None:
    """InputError if a token is not in the model's vocabulary."""
    config = getattr(model, "config", None)
    tokens = getattr(config, "vocab_size", None)
    given: Any = records.inputs
    wanted = records.targets[records.targets != IGNORED] if records.targets.ndim == 2 else records.targets[:0]
    if isinstance(tokens, int) and any(
        part.numel() and not 0 <= int(part.min()) <= int(part.max()) < tokens for part in (given["input_ids"], wanted)
    ):
        raise InputError(
            f"some tokens are not in 0 … {tokens - 1}, the model's vocabulary; nothing was spent: is the tokenizer "
            "that of the model?"
        )


def _first_position(model: nn.Module) -> int:
    """The first position that a token can have: after the padding's in RoBERTa and its relatives."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0
