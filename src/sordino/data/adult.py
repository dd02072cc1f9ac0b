"""Adult (census income): rows of public categories and publicly scaled numbers.

The categories are those listed in the dataset's documentation (adult.names), not those that occur. Numbers are divided
by round constants chosen without looking at the records, and truncated at 1. The survey weight (fnlwgt) is left out:
it describes the survey, not the person.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from sordino.data.files import read_bytes
from sordino.errors import InputError

COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
)

CATEGORIES: dict[str, tuple[str, ...]] = {
    name: tuple(values.split())
    for name, values in {
        "workclass": "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
        "education": "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th "
        "12th Masters 1st-4th 10th Doctorate 5th-6th Preschool",
        "marital-status": "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
        "occupation": "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving Priv-house-serv "
        "Protective-serv Armed-Forces",
        "relationship": "Wife Own-child Husband Not-in-family Other-relative Unmarried",
        "race": "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black",
        "sex": "Female Male",
        "native-country": "United-States Cambodia England Puerto-Rico Canada Germany "
        "Outlying-US(Guam-USVI-etc) India Japan Greece South China Cuba Iran Honduras Philippines Italy "
        "Poland Jamaica Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan "
        "Haiti Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands",
    }.items()
}

SCALES = {"age": 100.0, "education-num": 16.0, "hours-per-week": 100.0}
LOG_SCALES = {"capital-gain": math.log1p(100_000.0), "capital-loss": math.log1p(5_000.0)}
WIDTH = len(SCALES) + len(LOG_SCALES) + sum(len(values) for values in CATEGORIES.values())


def read_adult(path: Path) -> tuple[Tensor, Tensor]:
    """adult.data or adult.test → (n, 104) float32 in [0, 1] and (n,) int64: 1 if the income is above 50K.

    An unknown value (`?`) is encoded as zeros in its column. The first line of adult.test is a comment.
    """
    try:
        lines = read_bytes(path).decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not plain text", private=str(error)) from error
    rows, labels = [], []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("|"):
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(COLUMNS) + 1:
            raise InputError(
                f"{path}: a line without {len(COLUMNS) + 1} fields; the file is truncated or not Adult",
                private=f"line {number} has {len(fields)} fields",
            )
        income = fields.pop().removesuffix(".")
        if income not in ("<=50K", ">50K"):
            raise InputError(f"{path}: an income that is neither <=50K nor >50K", private=f"line {number}: {income!r}")
        rows.append(_row(path, number, dict(zip(COLUMNS, fields, strict=True))))
        labels.append(int(income == ">50K"))
    if not rows:
        raise InputError(f"{path}: no rows")
    return torch.tensor(rows, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)


def _row(path: Path, line: int, record: dict[str, str]) -> list[float]:
    out: list[float] = []
    for name in COLUMNS:
        value = record[name]
        if name in CATEGORIES:
            if value != "?" and value not in CATEGORIES[name]:
                raise InputError(
                    f"{path}: a value of {name} is not in the public list of categories",
                    private=f"line {line}: {value!r}",
                )
            out += [float(value == one) for one in CATEGORIES[name]]
        elif name in SCALES or name in LOG_SCALES:
            try:
                number = float(value)
                if math.isnan(number):
                    raise ValueError("NaN")
            except ValueError as error:
                raise InputError(
                    f"{path}: a value of {name} is not a number", private=f"line {line}: {value!r}"
                ) from error
            scaled = number / SCALES[name] if name in SCALES else math.log1p(max(number, 0.0)) / LOG_SCALES[name]
            out.append(min(max(scaled, 0.0), 1.0))
    return out
