"""Hugging Face's TrainingArguments: which are used, and which are refused because they change the sampling.

The plan draws every batch and determines their number. An argument that would change which records take part in a step,
how often, or how they are combined is refused; so is one that would be silently ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from sordino import checks
from sordino.errors import InputError, Refused
from sordino.training.loop import Settings

REASONS: Mapping[str, str] = {
    "packing": "packed sequences contain tokens of several records, whose gradients can't be separated",
    "group_by_length": "batches of equal lengths depend on the lengths of all records; the plan draws them at random",
    "train_sampling_strategy": "the plan draws every batch",
    "gradient_accumulation_steps": "the noise is added once per batch of the plan: give expected_batch there",
    "per_device_train_batch_size": "the batch is the plan's expected_batch; chunk=… bounds the memory",
    "auto_find_batch_size": "the batch is the plan's expected_batch; chunk=… bounds the memory",
    "max_steps": "the number of steps is the plan's",
    "num_train_epochs": "the number of steps is the plan's",
    "dataloader_drop_last": "the plan's batches have random sizes, and none is dropped",
    "max_grad_norm": "each record is clipped by the plan; the released gradient is not clipped again",
    "label_smoothing_factor": "the loss is computed here, per record; give your own loss=…",
    "neftune_noise_alpha": "its noise is not part of the guarantee, and it hooks into the model",
    "fp16": "norms and sums of that precision are not covered by the bound",
    "bf16": "norms and sums of that precision are not covered by the bound",
    "resume_from_checkpoint": "give out=… and resume=True",
    "average_tokens_across_devices": "a record's loss is divided by its own number of tokens",
    "output_dir": "the run directory is an argument of this function: give out=…",
    "max_length": "the public length is an argument of this function: give length=…",
    "max_seq_length": "the public length is an argument of this function: give length=…",
    "dataset_text_field": "the key of the text is an argument of this function: give text=…",
    "report_to": "give callbacks=[sordino.TensorBoard(…)] or [sordino.MLflow(…)]: they write what may be published",
    "push_to_hub": "nothing is sent anywhere: use result.model.push_to_hub(…) after the training",
    "data_seed": "the batches are drawn from a cryptographic generator",
}
OFF: Mapping[str, tuple[Any, ...]] = {  # values that switch an argument off, besides None and False
    "gradient_accumulation_steps": (1,),
    "max_steps": (-1,),
    "label_smoothing_factor": (0,),
    "report_to": ("none", [], ["none"]),
}
HONOURED = frozenset(
    (
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "lr_scheduler_type",
        "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio", "optim", "seed", "eval_steps", "save_steps",
    )
)  # fmt: skip
HARMLESS = frozenset(
    (
        "do_train", "do_eval", "do_predict", "run_name", "logging_dir", "logging_steps", "logging_strategy",
        "logging_first_step", "log_level", "disable_tqdm", "save_strategy", "save_total_limit", "eval_strategy",
        "remove_unused_columns", "use_cpu", "no_cuda", "dataloader_num_workers", "dataloader_pin_memory",
        "overwrite_output_dir", "logging_nan_inf_filter", "per_device_eval_batch_size",
    )
)  # fmt: skip
OPTIMIZERS: Mapping[str, type[Optimizer]] = {
    "adamw_torch": torch.optim.AdamW,
    "adamw_torch_fused": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
}


def optimizer_and_settings(
    arguments: Any, steps: int, **options: Any
) -> tuple[Callable[..., Optimizer], float, Settings]:
    """Translates Hugging Face's arguments into those of `sordino.train`.

    Args:
        arguments: transformers.TrainingArguments (or a subclass), a dict of some of them, or None.
        steps: The plan's number of steps.
        options: Further fields of Settings.

    Returns:
        (optimizer, lr, settings); AdamW at 1e-3 if no arguments are given.

    Raises:
        Refused: an argument would change the sampling, or would be ignored.
        InputError: the optimizer is unknown, or `arguments` has a wrong type.
    """
    given = {name: value for name, value in _given(arguments).items() if not _is_off(name, value)}
    for name, value in given.items():
        if name in REASONS:
            raise Refused(f"training_arguments {name} = {value!r}: {REASONS[name]}")
        if name not in HONOURED and name not in HARMLESS:
            raise Refused(
                f"training_arguments {name} = {value!r} would be ignored: leave it at its default. Those used are "
                f"{', '.join(sorted(HONOURED))}"
            )
    name = str(getattr(given.get("optim", "adamw_torch"), "value", given.get("optim", "adamw_torch")))
    if name not in OPTIMIZERS:
        raise InputError(f"training_arguments optim = {name!r}: known names are {', '.join(OPTIMIZERS)}")
    made: dict[str, Any] = {"weight_decay": _real(given, "weight_decay", 0.0)}
    if "adamw" in name:
        made |= {
            "betas": (_real(given, "adam_beta1", 0.9), _real(given, "adam_beta2", 0.999)),
            "eps": _real(given, "adam_epsilon", 1e-8),
        }
    settings: dict[str, Any] = {"optimizer_options": made, "scheduler": _scheduler(given, steps)}
    settings |= {"seed": checks.count("training_arguments seed", given.get("seed", 0), minimum=0)}
    if "eval_steps" in given:
        settings["eval_every"] = _steps(given, "eval_steps", steps)
    if "save_steps" in given:
        settings["checkpoint_every"] = _steps(given, "save_steps", steps)
    return OPTIMIZERS[name], _real(given, "learning_rate", 1e-3), Settings(**{**settings, **options})


def evaluates(arguments: Any) -> bool:
    """Whether the arguments ask for an evaluation."""
    given = _given(arguments)
    strategy = given.get("eval_strategy", "no")
    return "eval_steps" in given or str(getattr(strategy, "value", strategy)) != "no"


def _is_off(name: str, value: Any) -> bool:
    return value is None or value is False or any(value == one for one in OFF.get(name, ()))


def _real(given: Mapping[str, Any], name: str, default: float) -> float:
    return checks.real(f"training_arguments {name}", given.get(name, default))


def _steps(given: Mapping[str, Any], name: str, steps: int) -> int:
    """A number of steps; as in transformers, a fraction below 1 is one of all steps."""
    number = checks.positive(f"training_arguments {name}", given[name])
    return math.ceil(number * steps) if number < 1 else checks.count(f"training_arguments {name}", number)


def _given(arguments: Any) -> dict[str, Any]:
    """The arguments that differ from the defaults of their class; all entries of a dict."""
    if arguments is None:
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    if not is_dataclass(arguments) or isinstance(arguments, type):
        kind_given = "a class" if isinstance(arguments, type) else f"a {type(arguments).__name__}"
        raise InputError(f"training_arguments must be transformers.TrainingArguments(…) or a dict, not {kind_given}")
    kind: Any = type(arguments)
    try:
        plain = kind(output_dir=getattr(arguments, "output_dir", "out"))
    except Exception as error:
        raise InputError(
            f"the defaults of {kind.__name__} are not known ({error}): give a dict, such as {{'learning_rate': 1e-3}}"
        ) from error
    return {
        one.name: getattr(arguments, one.name)
        for one in fields(arguments)
        if one.name == "learning_rate" or repr(getattr(arguments, one.name)) != repr(getattr(plain, one.name))
    }


def _scheduler(given: Mapping[str, Any], steps: int) -> Callable[[Optimizer], Any] | None:
    kind = given.get("lr_scheduler_type", "constant")
    ratio = checks.within("training_arguments warmup_ratio", given.get("warmup_ratio", 0.0), 0, 1)
    warmup = _steps(given, "warmup_steps", steps) if given.get("warmup_steps", 0) != 0 else round(ratio * steps)
    name = str(getattr(kind, "value", kind))
    if name == "constant" and not warmup:
        return None
    from transformers import get_scheduler

    chosen = "constant_with_warmup" if name == "constant" else name
    further = given.get("lr_scheduler_kwargs") or {}

    def scheduler(optimizer: Optimizer) -> Any:
        return get_scheduler(
            chosen, optimizer, num_warmup_steps=warmup, num_training_steps=steps, scheduler_specific_kwargs=further
        )

    trial = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    try:
        made = scheduler(trial)
        trial.step()
        made.step()
    except Exception as error:  # an unknown name, a missing option, a schedule that needs a metric
        raise InputError(
            f"training_arguments lr_scheduler_type = {name!r} (lr_scheduler_kwargs = {further!r}): {error}"
        ) from error
    return scheduler
