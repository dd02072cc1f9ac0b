"""What the readers return: two splits of tensors, with a name and a licence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sordino.split import Split


@dataclass(frozen=True)
class Dataset:
    """A private training set and a test set. No constant by which records were scaled was measured from them.

    Args:
        name: The name of the dataset.
        train: The private records.
        test: The test records, which the guarantee does not protect.
        classes: The number of classes.
        description: A short description.
        licence: The licence.
        vectors: Public word vectors, if the inputs are word ids.
        users: The user of each row of `train`, if the source has users.
        labels: The public names of the classes, if they have any.
    """

    name: str
    train: Split
    test: Split
    classes: int
    description: str
    licence: str
    vectors: Tensor | None = None
    users: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.train.inputs.shape[1:])

    @property
    def described(self) -> dict[str, Any]:
        """What is public about the form of the records, JSON-serialisable."""
        return {
            "input_shape": list(self.input_shape),
            "input_type": str(self.train.inputs.dtype).removeprefix("torch."),
            "classes": self.classes,
            "labels": list(self.labels) if self.labels is not None else None,
        }


@dataclass(frozen=True)
class TextSplit:
    """Raw strings and their classes, for a tokenizer of your own.

    Args:
        texts: The strings.
        targets: (n,) their classes.
    """

    texts: tuple[str, ...]
    targets: Tensor
