"""A dataset and a model of the user's own code: what it may return, and how its mistakes are told."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sordino.data.code import called, dataset_of
from sordino.errors import InputError

CODE = """
import torch
X, Y = torch.rand(6, 2), [0, 1, 0, 1, 0, 1]
def numbers(): return {"train": (X.double().numpy(), Y), "classes": 2}
def named(): return {"train": (X, ["no", "yes"] * 3), "classes": ["no", "yes"]}
def items(): return {"train": [(X[i], torch.tensor(Y[i])) for i in range(6)], "classes": 2}
def wide(): return {"train": (X.numpy(), torch.tensor(Y).numpy().astype("uint16")), "classes": 2}
def private(private=1): return {"train": (X[:private], Y[:private]), "classes": 2}
def unnamed(): return {"train": (X, ["no", "secret"] * 3), "classes": ["no", "yes"]}
def texts(): return {"train": ([["a"]] * 6, Y), "classes": 2}
def triples(): return {"train": [(X[i], 0, 0) for i in range(6)], "classes": 2}
def dicts(): return {"train": [{"x": X[i], "label": 0} for i in range(6)], "classes": 2}
def shapes(): return {"train": [(torch.zeros(1 + i), 0) for i in range(6)], "classes": 2}
def ragged(): return {"train": ([[1.0], [1.0, 2.0]], [0, 1]), "classes": 2}
def lengths(): return {"train": (X, Y[:-1]), "classes": 2}
def empty(): return {"train": [], "classes": 2}
def fails(): raise ValueError("patient 1234")
def net(shape, classes): return torch.nn.Linear("four", classes)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("SORDINO_TRACEBACK", raising=False)
    (tmp_path / "mine.py").write_text(CODE, encoding="utf8")
    return str(tmp_path / "mine.py")


@pytest.mark.parametrize("function", ["numbers", "named", "items", "wide"])
def test_arrays_names_of_classes_and_items_are_taken(function: str, mine: str) -> None:
    made = dataset_of(f"{mine}:{function}", {})
    assert made.train.inputs.shape == (6, 2)
    assert made.train.inputs.dtype == torch.float32
    assert made.train.targets.tolist() == [0, 1, 0, 1, 0, 1]


def test_a_key_may_have_any_name(mine: str) -> None:
    assert len(dataset_of(f"{mine}:private", {"private": 3}).train) == 3


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("unnamed", "a label that is not in data.classes"),
        ("texts", "can't become a tensor: give numbers"),
        ("triples", "each item must be a pair"),
        ("dicts", "each item must be a pair"),
        ("shapes", "inputs of different shapes"),
        ("ragged", "different shapes"),
        ("lengths", "different lengths"),
        ("empty", "has no records"),
    ],
)
def test_what_can_not_be_trained_on_is_one_sentence(function: str, said: str, mine: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        dataset_of(f"{mine}:{function}", {})
    assert "secret" not in str(error.value)


def test_an_error_in_a_dataset_is_told_by_its_line_and_its_words_to_the_owner_alone(mine: str) -> None:
    with pytest.raises(InputError, match=r"fails in mine\.py, line 17; nothing was spent: ValueError") as error:
        dataset_of(f"{mine}:fails", {})
    assert "1234" not in str(error.value)
    assert error.value.private == "patient 1234"


def test_an_error_in_a_model_is_told_in_full(mine: str) -> None:
    with pytest.raises(InputError, match=r"fails in mine\.py, line 18; nothing was spent: TypeError: "):
        called(f"{mine}:net", ((4,), 2), {})


def test_a_key_that_the_function_does_not_take_is_named(mine: str) -> None:
    with pytest.raises(InputError, match="keys of its section: got an unexpected keyword argument 'colour'"):
        called(f"{mine}:net", ((4,), 2), {"colour": 3})


def test_a_file_that_is_no_python_is_told_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text("x = 1\ndef rows(: pass\n", encoding="utf8")
    with pytest.raises(InputError, match=r"wrong\.py, line 2; nothing was spent: SyntaxError"):
        dataset_of(f"{tmp_path}/wrong.py:rows", {})
