"""What people give as a dataset: accepted, or refused in a sentence that tells nothing about the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import sordino
from sordino.clipping import FlatClip
from sordino.errors import InputError, Refused
from sordino.records.reading import Collated, row_reader

LOSS = nn.functional.cross_entropy
X = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Items(Dataset[Any]):
    """Records of different lengths."""

    def __init__(self, function: Any = lambda i: (X[i][: 1 + i % 5], Y[i])) -> None:
        self.function = function

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Any:
        return self.function(index)


def train(dataset: Any, model: nn.Module | None = None, **options: Any) -> sordino.Result:
    known = {"noise_multiplier": 2.0, "delta": 1e-5, "records": 200, "expected_batch": 40, "steps": 1}
    plan = sordino.dpsgd(**{**known, **options.pop("plan", {})})
    settings = sordino.Settings(progress=False)
    return sordino.train(model or nn.Linear(5, 2), LOSS, dataset, plan, **{"lr": 0.1, "settings": settings, **options})


@pytest.mark.parametrize(
    "dataset",
    [
        (X.numpy(), Y.numpy()),
        (X.double().numpy(), Y.int().numpy()),
        (X.numpy(), Y.tolist()),
        [X, Y],
        (X.double(), Y.to(torch.uint8)),
        TensorDataset(X, Y),
        Items(lambda i: (X[i].numpy(), int(Y[i]))),
        Items(lambda i: {"input": X[i], "labels": Y[i]}),
    ],
    ids=["arrays", "doubles", "list", "pair", "float64", "tensors", "items", "dicts"],
)
def test_what_people_have_is_taken(dataset: Any) -> None:
    assert train(dataset).guarantee is not None


def longest(items: list[Any]) -> Any:
    width = max(2, *(len(x) for x, _ in items))
    rows = [nn.functional.pad(x, (0, width - len(x))) for x, _ in items]
    return torch.stack(rows), torch.stack([y for _, y in items])


class Sum(nn.Module):
    """Takes rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.layer(rows.sum(1, keepdim=True))
        return out


def test_records_of_different_lengths_are_padded_to_a_public_one() -> None:
    with pytest.raises(InputError, match=r"pad_to\(length\)"):
        train(Items(), Sum())
    assert train(Items(), collate=sordino.pad_to(5), num_workers=2).guarantee is not None
    with pytest.raises(Refused, match="depend on the other records"):
        train(Items(), Sum(), collate=longest)


MODEL = nn.Linear(5, 2)


@pytest.mark.parametrize(
    ("dataset", "options", "kind", "said"),
    [
        (DataLoader(TensorDataset(X, Y)), {}, Refused, "draws its own batches"),
        ((X, Y[:-1]), {}, InputError, "lengths differ"),
        ((X, Y + 1), {}, InputError, r"not in 0 … 1"),
        ((X, Y.float()), {}, InputError, "whole numbers"),
        ((X.long(), Y), {}, InputError, "nothing was spent"),
        ((X[:, :3], Y), {}, InputError, "nothing was spent"),
        ((np.array([["a"]] * 200), Y), {}, InputError, "give numbers"),
        (sordino.Rows(X, Y, record=torch.arange(200) // 2), {}, InputError, "the dataset has another number"),
        ((X, Y), {"model": nn.Linear(5, 2).bfloat16()}, Refused, "bfloat16"),
        ((X, Y), {"optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1)}, InputError, "is an instance"),
        ((X, Y), {"plan": {"records": 100}}, InputError, "the dataset has another number"),
        (iter([1]), {}, InputError, "has no length"),
    ],
)
def test_mistakes_cost_nothing_and_their_sentences_measure_nothing(
    dataset: Any, options: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as error:
        train(dataset, **options)
    assert "199" not in str(error.value)
    assert "has 200" not in str(error.value)
    assert "records=2" not in str(error.value)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_an_own_loop_refuses_weights_in_half_precision_as_train_does(kind: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2).to(kind))
    with pytest.raises(Refused, match="the model's weights are"):
        sordino.record_gradients(model, nn.functional.cross_entropy, (X, Y), FlatClip(1.0))
    model[1].requires_grad_(False)
    sordino.record_gradients(model, nn.functional.cross_entropy, (X, Y), FlatClip(1.0))


# a row is a function of its own record


class OneBuffer(Dataset[Any]):
    """Every item is read into the same memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(5)

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        return self.memory.copy_(X[place]), Y[place]


def test_items_that_share_one_memory_are_rows_of_their_own() -> None:
    rows = row_reader(OneBuffer())(torch.tensor([3, 1, 7]))
    assert torch.equal(rows.inputs, X[[3, 1, 7]])


def test_a_collate_function_does_not_see_several_records() -> None:
    """Padding to the longest was noticed among the first eight records only: a longer one later changed all rows."""
    items = [(torch.ones(3), 0)] * 20 + [(torch.ones(4), 0)]

    def padded(batch: list[Any]) -> Any:
        most = max(len(x) for x, _ in batch)
        return torch.stack([torch.nn.functional.pad(x, (0, most - len(x))) for x, _ in batch]), torch.zeros(len(batch))

    read = row_reader(Collated(items, padded))
    assert read(torch.arange(4)).inputs.shape == (4, 3)
    with pytest.raises(InputError, match="different lengths"):
        read(torch.tensor([0, 20]))


def test_texts_of_records_are_refused() -> None:
    items = [({"x": torch.ones(2), "text": str(k)}, 0) for k in range(4)]
    with pytest.raises(Refused, match="a text as its tokens"):
        row_reader(items)(torch.arange(3))
