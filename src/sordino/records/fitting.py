"""Checks a dataset against the model before anything is spent: types that fit, labels that the loss accepts.

Messages contain no value and no count of records: they are for the data's owner, but error messages are often passed
on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sordino.errors import InputError, SordinoError
from sordino.gradients.engine import row_loss
from sordino.gradients.rows import Rows, call, placed, tensors, tree_map
from sordino.gradients.state.roots import roots_of
from sordino.gradients.state.trial import trial
from sordino.gradients.survey import survey
from sordino.records.companions import with_companions
from sordino.records.mapped import Mapped
from sordino.records.precision import refuse_half
from sordino.records.reading import Collated, row_reader, stated_records, tensors_of
from sordino.split import Split

_AT_ONCE = 1 << 20  # labels in memory at once
_CLASS_LOSSES = (F.cross_entropy, F.nll_loss)


def fitted(model: nn.Module, loss: Callable[..., Tensor], dataset: Any) -> Any:
    """The dataset with floats in the model's precision and labels as int64, if it consists of tensors.

    Rounding a row to the model's precision is a function of that row only.

    Raises:
        InputError: the records are sparse, or labels are not whole numbers.
        Refused: the model is in half precision.
    """
    refuse_half(model.parameters())
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()}
    whole = dataset.dataset if isinstance(dataset, Collated) else dataset
    if isinstance(whole, Mapped):
        classes = _classifies(loss) and np.ndim(whole.targets) == 1
        if classes:
            _labels(whole.rows(torch.arange(min(1, len(whole)))).targets)
        made = replace(whole, kind=next(iter(kinds)) if len(kinds) == 1 else None, classes=classes)
        return replace(dataset, dataset=made) if isinstance(dataset, Collated) else made
    pair = _in_memory(dataset)
    if pair is None:
        return dataset
    inputs, targets = pair
    if any(t.layout != torch.strided for t in (*tensors(inputs), *tensors(targets))):
        raise InputError("the records are sparse tensors, whose rows can't be selected: make them dense (.to_dense())")
    if len(kinds) == 1:
        (kind,) = kinds
        inputs = tree_map(lambda t: t.to(kind) if t.is_floating_point() and t.dtype != kind else t, inputs)
    if _classifies(loss) and isinstance(targets, Tensor) and targets.ndim == 1:
        targets = _labels(targets)
    same = inputs is pair[0] and targets is pair[1]
    if isinstance(dataset, Rows):
        return dataset if same else replace(dataset, inputs=inputs, targets=targets)
    if isinstance(dataset, tuple | list):
        return inputs, targets
    return dataset if same else Split(inputs, targets)


def _in_memory(dataset: Any) -> tuple[Any, Any] | None:
    """(inputs, targets) if the rows are in memory, whether or not they have owners; else None."""
    if isinstance(dataset, Rows) and stated_records(dataset):
        return dataset.inputs, dataset.targets
    return tensors_of(dataset)


def rows_not_finite(dataset: Any) -> int:
    """The number of rows with a value that is NaN or infinite, if the rows are in memory; else 0. Private."""
    pair = _in_memory(dataset)
    floats = [t for t in tensors(pair) if t.ndim and t.is_floating_point()] if pair is not None else []
    wrong: Tensor | None = None
    for values in floats:
        if bool(values.sum().isfinite()):
            continue  # the sum of finite values can overflow, but that of others is never finite
        found = torch.cat([~part.flatten(1).isfinite().all(1) if part.ndim > 1 else ~part.isfinite()
                           for part in torch.split(values, _AT_ONCE)])  # fmt: skip
        wrong = found if wrong is None else wrong | found
    return 0 if wrong is None else int(wrong.sum())


def _classifies(loss: Any) -> bool:
    return loss in _CLASS_LOSSES or isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss)


def _labels(targets: Tensor) -> Tensor:
    if targets.is_floating_point():
        raise InputError("the labels are not whole numbers, but this loss expects the classes 0, 1, …")
    return targets.long()


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: statistics of layers are not updated; every module's mode is restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _kinds(dataset: Any) -> str:
    """The types of the inputs, if they are tensors."""
    pair = tensors_of(dataset)
    found = sorted({str(t.dtype).removeprefix("torch.") for t in tensors(pair[0])}) if pair is not None else []
    return f" (inputs of {', '.join(found)})" if found else ""


def check_fits(model: nn.Module, loss: Callable[..., Tensor], dataset: Any) -> None:
    """InputError if the model fails on a record, a label is not a class of the model, or the loss fails on a target.
    Refused if the model is of a kind that can't be trained (compiled, scripted), before its code runs.

    All targets that are in memory are tried, with the model's outputs of one record.
    """
    rows = None
    survey(model)
    try:
        rows = with_companions(placed(row_reader(dataset)(torch.arange(1)), model), model, seed=0, step=0)
        roots = roots_of(list(model.modules()), loss)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), _evaluating(model), trial(roots, rows.inputs):
            outputs = call(model, rows.inputs)
    except SordinoError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        how = ""
        if isinstance(error, TypeError) and rows is not None and not isinstance(rows.inputs, Tensor):
            how = " (a dict's entries are the model's keyword arguments, those of a list or tuple its positional ones)"
        raise InputError(
            f"the model fails on a record{_kinds(dataset)}; nothing was spent: {_text(error)}{how}"
        ) from error
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or len(outputs) != 1:
        return
    for targets in _targets(dataset):
        if _classifies(loss):
            _check_labels(targets, outputs.shape[1], loss)
        elif isinstance(targets, Tensor) and targets.ndim == 1 and targets.device == outputs.device:
            _check_targets(targets, outputs, loss)


def _targets(dataset: Any) -> Iterator[Any]:
    """All targets of a dataset that consists of tensors or mapped arrays, some at a time."""
    whole = dataset.dataset if isinstance(dataset, Collated) else dataset
    if isinstance(whole, Mapped):
        for first in range(0, len(whole) if whole.classes else 0, _AT_ONCE):
            yield torch.from_numpy(np.asarray(whole.targets[first : first + _AT_ONCE]).astype(np.int64))
    elif (pair := _in_memory(dataset)) is not None:
        yield pair[1]


def _check_targets(targets: Tensor, outputs: Tensor, loss: Callable[..., Tensor]) -> None:
    """InputError if the loss works on the first targets and fails on others, such as a label that is no class."""
    rows, roots = max(1, _AT_ONCE // outputs.shape[1]), roots_of([], loss)

    def tried(some: Tensor) -> Exception | None:
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), trial(roots, (outputs, some)):
                loss(outputs.expand(len(some), -1), some)
        except (RuntimeError, ValueError, IndexError) as error:
            return error
        return None

    if tried(targets[:2]) is not None:
        return  # not these targets: the loss does not fit the model, which the test of the first batch explains
    for some in torch.split(targets, rows):
        if (error := tried(some)) is not None:
            raise InputError(
                f"the loss fails on some targets ({type(error).__name__}); nothing was spent: labels must be "
                f"0 … {outputs.shape[1] - 1} for {outputs.shape[1]} outputs, other targets in the range of the loss",
                private=_text(error),
            )


def _check_labels(targets: Any, classes: int, loss: Any) -> None:
    if isinstance(targets, Tensor) and targets.ndim > 1 and not targets.is_floating_point():
        raise InputError(
            "the labels have more than one dimension, but this loss expects one class per record: give them as "
            "(records,), for example labels.squeeze(1)"
        )
    if isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point():
        ignored = getattr(loss, "ignore_index", -100)
        if bool((((targets < 0) | (targets >= classes)) & (targets != ignored)).any()):
            raise InputError(
                f"some labels are not in 0 … {classes - 1}, the classes of the model's {classes} outputs; nothing was "
                "spent: number the classes from 0, or give the model more outputs"
            )


def explained(error: Exception, model: nn.Module, loss: Callable[..., Tensor], rows: Rows) -> Exception:
    """The error as an InputError if plain PyTorch fails on these rows too, without the engine; else the error itself.

    Args:
        error: What the engine raised in the test before anything was spent.
        model: The model.
        loss: The loss.
        rows: Two rows of the data (their number appears in torch's messages, and that of a batch is private).
    """
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            outputs = call(copy.deepcopy(model), rows.inputs)
        except Exception as plain:
            return _failed("the model fails on two records", rows.inputs, plain)
        try:
            row_loss(loss)(outputs, rows.targets)
        except Exception as plain:
            return _failed("the loss fails on the outputs and targets of two records", (outputs, rows.targets), plain)
    return error


def _failed(what: str, given: Any, error: Exception) -> InputError:
    forms = ", ".join(f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors(given))
    message = f"{what}{f' ({forms})' if forms else ''}; nothing was spent"
    if isinstance(error, IndexError):  # its message contains the label or the word that is out of range
        return InputError(f"{message}: IndexError, a label or an id of a word is out of range", private=_text(error))
    return InputError(f"{message}: {_text(error)}")


def _text(error: Exception) -> str:
    """The type and the first line of an error of the user's own code."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
