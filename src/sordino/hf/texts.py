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
        outputs: What the model returns; `logits` is (rows, length, tokens).
        targets: (rows, length) the tokens; IGNORED at padding, which does not count.

    Returns:
        (rows,) each record's mean cross-entropy over its own tokens.
    """
    logits, wanted = outputs.logits[:, :-1], targets[:, 1:]
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
    """

    rows: Sequence[Mapping[str, Any]]
    tokenizer: Any
    length: int
    classes: int | None = None
    text: str = "text"
    label: str = "label"

    def __post_init__(self) -> None:
        checks.whole("length", self.length, minimum=2)
        if not hasattr(self.rows, "__len__") or not hasattr(self.rows, "__getitem__"):
            raise InputError(
                f"the dataset is a {type(self.rows).__name__}: give a list of dicts, or a dataset with a length"
            )
        if self.tokenizer is not None and self._pad() is None:
            end = getattr(self.tokenizer, "eos_token", None)
            which = (
                "tokenizer.eos_token" if end is not None else "a token of the model's vocabulary (it has no eos_token)"
            )
            raise InputError(f"the tokenizer has no padding token: set tokenizer.pad_token = {which}")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        ids = self._tokens(row)[: self.length]
        filled = len(ids)
        padding = self._pad() or 0
        tokens = torch.tensor([*ids, *[padding] * (self.length - filled)])
        mask = (torch.arange(self.length) < max(filled, 1)).long()  # an empty record attends to one pad: avoids 0/0
        if self.classes is None:
            labels = torch.where(torch.arange(self.length) < filled, tokens, IGNORED)
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

    def _pad(self) -> int | None:
        found: int | None = getattr(self.tokenizer, "pad_token_id", None) if self.tokenizer is not None else 0
        return found

    def _tokens(self, row: Mapping[str, Any]) -> list[int]:
        if "input_ids" in row:
            return [int(one) for one in row["input_ids"]]
        if self.tokenizer is None or not isinstance(row.get(self.text), str):
            raise InputError(f"a record must have input_ids, or a text under {self.text!r} with a tokenizer")
        found: list[int] = list(self.tokenizer(row[self.text], truncation=True, max_length=self.length)["input_ids"])
        return found

    def _class(self, row: Mapping[str, Any]) -> int:
        value = row.get(self.label, row.get("labels"))
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InputError(f"a record must have a whole number under {self.label!r}, its class")
        if not 0 <= int(value) < (self.classes or 0):
            raise InputError(f"a record's class is not in 0 … {(self.classes or 0) - 1}; nothing was spent")
        return int(value)


def users_of(rows: Sequence[Mapping[str, Any]], user: str) -> list[Any]:
    """The user of each row: its entry under `user`, a whole number or a text.

    Raises:
        InputError: a row has none.
    """
    found = [row.get(user) for row in rows]
    if any(one is None for one in found):
        raise InputError(f"every row must have its user under {user!r}; nothing was spent")
    return found
