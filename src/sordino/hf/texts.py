"""Texts as rows: tokens of a public length, one loss per row.

Formal property: a record's row depends on that record and on public constants (tokenizer, length) only, and its loss is
a function of its own logits and tokens. So records do not interact, and clipping bounds what each contributes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sordino import checks
from sordino.errors import InputError
from sordino.split import Split

IGNORED = -100  # a position without a target, as in transformers


def causal_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of a causal language model.

    Args:
        outputs: What the model returns; `logits` is (rows, length, tokens), or longer if an adapter puts virtual tokens
            before a record's own.
        targets: (rows, length) the tokens; IGNORED at padding, which does not count.

    Returns:
        (rows,) each record's mean cross-entropy over its own tokens.
    """
    logits, wanted = outputs.logits[:, -targets.shape[1] : -1], targets[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none", ignore_index=IGNORED)
    return losses.sum(1) / (wanted != IGNORED).sum(1).clamp_min(1)


def class_loss(outputs: Any, targets: Tensor) -> Tensor:
    """The loss of a sequence classifier.

    Args:
        outputs: What the model returns; `logits` is (rows, classes).
        targets: (rows,) the classes.

    Returns:
        (rows,) the cross-entropy of each record.
    """
    return F.cross_entropy(outputs.logits, targets, reduction="none")


@dataclass(frozen=True, eq=False)
class TextRecords:
    """A map-style dataset of rows for a transformer: dicts of input_ids, attention_mask and labels.

    Args:
        rows: Dicts with a text, or with input_ids (tokens); for classification also with a label.
        tokenizer: A Hugging Face tokenizer; None if the rows have input_ids.
        length: Public: longer records are truncated, shorter ones padded.
        classes: The number of classes; None: a causal language model.
        text: The key of the text.
        label: The key of the class.
        padding: The token that fills rows if there is no tokenizer.

    Rows with input_ids may have an attention_mask (tokens that it masks are left out) and, for a causal language model,
    labels: the tokens to predict, with IGNORED where the loss does not count.
    """

    rows: Sequence[Mapping[str, Any]]
    tokenizer: Any
    length: int
    classes: int | None = None
    text: str = "text"
    label: str = "label"
    padding: int = 0

    def __post_init__(self) -> None:
        checks.whole("length", self.length, minimum=2)
        _check_rows(self.rows)
        if self.tokenizer is None:
            return
        if not callable(self.tokenizer) or not hasattr(self.tokenizer, "pad_token_id"):
            raise InputError(
                f"tokenizer is a {type(self.tokenizer).__name__}: give one of transformers, for example "
                "AutoTokenizer.from_pretrained(…)"
            )
        if self.tokenizer.pad_token_id is None:
            end = getattr(self.tokenizer, "eos_token", None)
            which = (
                "tokenizer.eos_token" if end is not None else "a token of the model's vocabulary (it has no eos_token)"
            )
            raise InputError(f"the tokenizer has no padding token: set tokenizer.pad_token = {which}")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        if not isinstance(row, Mapping):
            raise InputError(
                f"a row is a {type(row).__name__}: give dicts, such as {{{self.text!r}: …}}; nothing was spent"
            )
        found, wanted = self._tokens(row)
        ids, filled = found[: self.length], min(len(found), self.length)
        padding = self.padding if self.tokenizer is None else self.tokenizer.pad_token_id
        tokens = torch.tensor([*ids, *[padding] * (self.length - filled)])
        mask = (torch.arange(self.length) < max(filled, 1)).long()  # an empty record attends to one pad: avoids 0/0
        if self.classes is None:
            labels = torch.tensor([*wanted[: self.length], *[IGNORED] * (self.length - filled)])
        else:
            labels = torch.tensor(self._class(row))
        return {"input_ids": tokens, "attention_mask": mask, "labels": labels}

    def tensors(self) -> Split:
        """All records in memory, so that a problem with one is found before anything is spent."""
        items = [self[index] for index in range(len(self))]
        if not items:
            raise InputError("the dataset has no rows")
        stacked = {key: torch.stack([item[key] for item in items]) for key in items[0]}
        labels = stacked.pop("labels")
        return Split(stacked, labels)  # type: ignore[arg-type]

    def _tokens(self, row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The tokens of a row, and those to predict."""
        if "input_ids" in row:
            ids = _whole_numbers("input_ids", row["input_ids"])
            if any(_whole_numbers("token_type_ids", row.get("token_type_ids", ()))):
                raise InputError("token_type_ids of a record that are not 0 would be ignored: give rows without them")
            given = row.get("labels")
            wanted = ids if self.classes is not None or _is_scalar(given) else _whole_numbers("labels", given)
            seen = _whole_numbers("attention_mask", row.get("attention_mask", [1] * len(ids)))
            if not len(ids) == len(wanted) == len(seen):
                raise InputError("input_ids, attention_mask and labels of a record must have the same length")
            return [one for one, on in zip(ids, seen, strict=True) if on], [
                one for one, on in zip(wanted, seen, strict=True) if on
            ]
        if self.tokenizer is None or not isinstance(row.get(self.text), str):
            raise InputError(f"a record must have input_ids, or a text under {self.text!r} with a tokenizer")
        found: list[int] = list(self.tokenizer(row[self.text], truncation=True, max_length=self.length)["input_ids"])
        return found, found

    def _class(self, row: Mapping[str, Any]) -> int:
        value = row.get(self.label, row.get("labels"))
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InputError(f"a record must have a whole number under {self.label!r}, its class")
        if not 0 <= int(value) < (self.classes or 0):
            raise InputError(f"a record's class is not in 0 … {(self.classes or 0) - 1}; nothing was spent")
        return int(value)


def _check_rows(rows: Any) -> None:
    """InputError unless `rows` is a sequence of dicts; only the first row is looked at."""
    kind = type(rows).__name__
    if isinstance(rows, Mapping):
        raise InputError(
            f"the dataset is a {kind}: give one of its parts, such as dataset['train'], or a list of dicts"
        )
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
        raise InputError(f"the dataset is a {kind}: give frame.to_dict('records'), a list of dicts")
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise InputError(f"the dataset is a {kind}: give a list of dicts, or a dataset with a length")


def _is_scalar(value: Any) -> bool:
    return not hasattr(value, "__len__") or isinstance(value, str) or getattr(value, "ndim", 1) == 0


def _whole_numbers(name: str, values: Any) -> list[int]:
    """A flat list, array or tensor of whole numbers as a list of int."""
    found = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(found, list | tuple) or not all(
        isinstance(one, int) and not isinstance(one, bool) and -(2**31) <= one < 2**31 for one in found
    ):
        raise InputError(f"{name} of a record must be a flat list of whole numbers below 2**31; nothing was spent")
    return list(found)


def users_of(rows: Sequence[Mapping[str, Any]], user: str) -> list[Any]:
    """The user of each row: its entry under `user`, a whole number or a text.

    Raises:
        InputError: a row has none, or `user` is no key.
    """
    if not isinstance(user, str):
        raise InputError(f"users is a {type(user).__name__}: give the key of the user in each row, such as 'user'")
    found = [row.get(user) for row in rows]
    if any(one is None for one in found):
        raise InputError(f"every row must have its user under {user!r}; nothing was spent")
    return found
