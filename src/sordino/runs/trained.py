"""A finished run as a model to use: `sordino.load(DIR)`.

The files of a run suffice: recipe.toml names the network, its features and the encoding of the data, model.safetensors
contains the weights, ledger.jsonl the plan. Nothing is unpickled. A directory that `sordino.train` made with your own
module contains only its weights: give the module (`load(DIR, model=net)`).

Predictions are post-processing of the published model: they have no privacy cost for the training records. The rows
that are predicted have no protection here.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sordino import data, features
from sordino.checks import brief
from sordino.data.arrays import NpzSource
from sordino.data.own import Source, TableSource
from sordino.errors import InputError, SordinoError
from sordino.features.private import Normaliser
from sordino.files import require_regular, write_atomically
from sordino.plan.core import Plan
from sordino.records.companions import answers, companion_model, majority
from sordino.release.ledger import read_ledger
from sordino.runs.build import private_normalisation
from sordino.runs.closing import file_digest, result_digest
from sordino.runs.finished import read_result
from sordino.runs.prepared import network_of
from sordino.runs.recipe import Recipe
from sordino.split import Split
from sordino.training.sealed import Damaged, read_sealed
from sordino.training.state import load_model

CHUNK = 1024
LARGEST = 1 << 28  # numbers in one record
_TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
Rows = Tensor | npt.NDArray[Any] | Mapping[str, Any] | Path | str
MADE_BY = "sordino.train"
"""The value of [run] made_by in a directory whose model is the caller's module."""


@dataclass(frozen=True, eq=False)
class Trained:
    """A published model with its guarantee, ready to predict.

    Args:
        model: The network, in evaluation mode.
        result: The content of result.json: epsilon, delta, the guarantee's sentence, test metrics.
        labels: The public names of the classes, in the order of the outputs.
        source: How a file of rows is read; None: rows are given as tensors.
        prepare: Maps rows as they are read to inputs of the network; None: unchanged.
        draws: The number of draws of companions that are averaged, if the model has companions.
        through: Replaces the network, if the method computes outputs in its own way.
    """

    model: nn.Module
    result: Mapping[str, Any]
    labels: tuple[str, ...] | None = None
    source: Source | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    draws: int = 10
    through: Callable[[Tensor], Tensor] | None = None

    @property
    def guarantee(self) -> str:
        """The guarantee in a sentence."""
        return str(self.result["guarantee"]["sentence"])

    def read(self, path: Path | str) -> Tensor:
        """The rows of a file, encoded like the training rows.

        Args:
            path: The file.

        Returns:
            (rows, …) the encoded rows.

        Raises:
            InputError: the file does not fit; the message says what is wrong.
        """
        if self.source is None:
            raise InputError("this run does not describe files of rows: give the rows as a tensor to predict(rows)")
        return self.source.rows(Path(path), labelled=False)[0]

    def probabilities(self, rows: Rows) -> Tensor:
        """The model's probability of each class.

        Args:
            rows: The rows as a tensor or an array; a data frame or a dict of columns, if the run was trained on a
                table; or the file that contains them.

        Returns:
            (rows, classes): the mean of the softmax over the draws of companions, if the model has companions.
        """
        return self._answers(rows)[0]

    def predict(self, rows: Rows) -> list[Any]:
        """The label of each row.

        Args:
            rows: The rows as a tensor or an array; a data frame or a dict of columns, if the run was trained on a
                table; or the file that contains them.

        Returns:
            One label per row; its number if the classes have no names.
        """
        chosen = self._answers(rows)[1].tolist()
        return [self.labels[one] for one in chosen] if self.labels is not None else chosen

    def _answers(self, rows: Rows) -> tuple[Tensor, Tensor]:
        inputs = self._inputs(rows)
        shares, chosen = [], []
        with torch.no_grad():
            for part in torch.split(inputs, CHUNK):
                try:
                    drawn = self._draws(part)
                except (RuntimeError, TypeError, ValueError, IndexError) as error:
                    raise InputError(f"the model fails on rows of shape {tuple(part.shape[1:])}: {error}") from error
                for outputs in drawn:
                    shares.append(outputs.double().softmax(2).mean(0))
                    chosen.append(majority(outputs))
        if not shares:
            raise InputError("there is no row to predict")
        return torch.cat(shares), torch.cat(chosen)

    def _inputs(self, rows: Any) -> Tensor:
        if isinstance(rows, Path | str):
            return self.read(rows)
        table = isinstance(rows, Mapping) or (hasattr(rows, "columns") and hasattr(rows, "to_numpy"))
        values = self.source.framed(rows) if table and isinstance(self.source, TableSource) else _tensor(rows)
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise InputError("some rows have values that are not finite (NaN or infinite): nothing was predicted")
        return values

    def _draws(self, part: Tensor) -> list[Tensor]:
        if self.through is not None:
            return [self.through(part)[None]]
        seen = part if self.prepare is None else self.prepare(part)
        return [outputs for _, outputs in answers(self.model, seen, draws=self.draws)]


def _tensor(rows: Any) -> Tensor:
    """Rows as a tensor; arrays, lists and tables of numbers are converted, double precision to single."""
    try:
        values = rows if isinstance(rows, Tensor) else torch.as_tensor(np.asarray(rows))
    except (TypeError, ValueError) as error:
        raise InputError(f"rows must be numbers, a data frame or a path, got a {type(rows).__name__}") from error
    if not values.dim():
        raise InputError("rows must be a list of rows, not a single number")
    return values.float() if values.dtype == torch.float64 and not isinstance(rows, Tensor) else values


def load(
    folder: Path | str,
    model: nn.Module | None = None,
    *,
    allow_code: bool = False,
    data_dir: Path | str | None = None,
) -> Trained:
    """The published model of a run directory.

    Args:
        folder: The directory that `sordino train` or `sordino.train(out=…)` wrote.
        model: The module that the weights belong to; needed if the run was made with your own module.
        allow_code: Allow module:function in the recipe, whose code is then run.
        data_dir: Where the weights of published feature extractors are.

    Returns:
        The model with `predict`, `probabilities` and its guarantee.

    Raises:
        InputError: a file is missing or does not fit.
        Refused: the recipe names code, and `allow_code` is not given.
    """
    if not isinstance(folder, str | os.PathLike):
        raise InputError(f"give the directory of a run, not {brief(folder)}")
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(f"model = {brief(model)}: give the module itself, an instance of torch.nn.Module")
    folder = Path(folder)
    if not (folder / "result.json").is_file():
        what = "contains no finished run: there is no result.json" if folder.is_dir() else "is not a directory"
        raise InputError(f"{folder} {what}; give the directory that a run was written to")
    require_regular(folder)
    result = read_result(folder / "result.json")
    weights, stated = read_weights(folder)
    _of_one_run(folder, result, stated)
    recipe = _recipe(folder, allow_code)
    inputs = _checked_inputs(folder, stated)
    labels = tuple(inputs["labels"]) if inputs.get("labels") else None
    if recipe is None or model is not None:
        if model is None:
            raise InputError(
                f"{folder} was made by sordino.train with your own module, and contains only its weights: give the "
                "module, sordino.load(folder, model=…)"
            )
        _fill(folder, model, weights)
        return Trained(model.eval(), result, labels)
    place = None if data_dir is None else Path(data_dir)
    if "input_shape" not in inputs or "classes" not in inputs:
        raise InputError(f"{folder / 'model.safetensors'} does not describe its inputs: an older version made it")
    made = _rebuilt(folder, recipe, weights, inputs, place)
    return Trained(
        made[0].eval(), result, labels, _source(recipe, labels, inputs), made[1], recipe.batch_clipping.draws, made[2]
    )


_Function = Callable[[Tensor], Tensor] | None


def _rebuilt(
    folder: Path, recipe: Recipe, weights: Mapping[str, Tensor], inputs: Mapping[str, Any], data_dir: Path | None
) -> tuple[nn.Module, _Function, _Function]:
    """(module with its weights, what is applied before it, what replaces both)."""
    shape, classes = tuple(inputs["input_shape"]), inputs["classes"]
    header, _ = read_ledger(folder / "ledger.jsonl")
    plan = Plan.from_dict({key: value for key, value in header.items() if key != "kind"})
    own = plan.method.restored(plan, recipe, folder, shape, classes)
    if own is not None and own[1] is not None:
        _fill(folder, own[0], weights)
        return own[0], None, own[1]
    extract = features.build({"name": recipe.features.name, **recipe.features.options}, data_dir)
    settings = private_normalisation(recipe)
    normaliser = None if settings is None else Normaliser(settings, plan, folder).restored()

    def before(rows: Tensor) -> Tensor:
        seen = extract(rows)
        return seen if normaliser is None else normaliser(seen)

    if own is not None:
        module = own[0]
    else:
        kind = torch.zeros(1, *shape, dtype=getattr(torch, inputs["input_type"]))
        seen_shape = shape if recipe.features.name == "none" else tuple(extract(kind).shape[1:])
        vectors = data.read(recipe.data, data_dir).vectors if recipe.data.name == "imdb-glove" else None
        module = network_of(recipe, seen_shape, classes, vectors)
        if recipe.batch_clipping.given:
            public = Split(weights["public"], weights["public_targets"])
            module = companion_model(module, public, recipe.batch_clipping.companions)
    _fill(folder, module, weights)
    return module, before, None


def _source(recipe: Recipe, labels: tuple[str, ...] | None, inputs: Mapping[str, Any]) -> Source:
    """How a file of rows is read: as the recipe's data, else arrays as the dataset has them."""
    own = data.source_of(recipe.data)
    if own is not None:
        return own
    return NpzSource(path="", classes=list(labels) if labels else int(inputs["classes"]))


def _recipe(folder: Path, allow_code: bool) -> Recipe | None:
    """The recipe of the run; None if `sordino.train` made it."""
    path = folder / "recipe.toml"
    try:
        run = tomllib.loads(path.read_text(encoding="utf8")).get("run")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can't be read: {error}") from error
    made_by = run.get("made_by") if isinstance(run, Mapping) else None
    return None if made_by == MADE_BY else Recipe.read(path, allow_code=allow_code)


def read_weights(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The published tensors, and what their file says about them."""
    path = folder / "model.safetensors"
    try:
        return read_sealed(path)
    except (OSError, Damaged) as error:
        raise InputError(f"{path} can't be read: {error}") from error


def _checked_inputs(folder: Path, stated: Mapping[str, Any]) -> dict[str, Any]:
    """What the model's file says about its inputs, checked: the directory may come from somebody else.

    Raises:
        InputError: an entry has a wrong type, or a size that no model has.
    """
    inputs = stated.get("inputs") or {}
    right = isinstance(inputs, dict) and (
        "input_shape" not in inputs
        or (_sizes(inputs["input_shape"]) and _sizes([inputs.get("classes", 1)]) and inputs.get("input_type") in _TYPES)
    )
    labels = inputs.get("labels") if right else None
    if not right or not (labels is None or (isinstance(labels, list) and all(isinstance(one, str) for one in labels))):
        raise InputError(f"{folder / 'model.safetensors'} describes its inputs in a way that no run writes")
    return dict(inputs)


def _sizes(value: Any) -> bool:
    """Whether it is a list of positive whole numbers whose product is a size of one record."""
    whole = isinstance(value, list) and all(type(one) is int and 0 < one <= LARGEST for one in value)
    return whole and math.prod(value) <= LARGEST


def _of_one_run(folder: Path, result: Mapping[str, Any], stated: Mapping[str, Any]) -> None:
    """Refuses weights that do not belong to result.json; files of older versions contain nothing to compare."""
    listed = result.get("files")
    digest = listed.get("model.safetensors") if isinstance(listed, Mapping) else None
    same = digest is None or digest == file_digest(folder / "model.safetensors")
    if not same or stated.get("result", result_digest(result)) != result_digest(result):
        raise InputError(
            f"{folder}: model.safetensors and result.json are not of the same run, or one was edited, so the guarantee "
            f"is not that of these weights; `sordino verify {folder}` compares all files"
        )


def _fill(folder: Path, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    try:
        load_model(model, weights)
    except InputError as error:
        raise InputError(f"{folder / 'model.safetensors'}: {error}") from error


def write_predictions(path: Path, labels: list[Any], shares: Tensor, names: tuple[str, ...]) -> None:
    """The predictions as .csv, .npz or .parquet: row (from 1), prediction, and the probability of each class."""
    columns: dict[str, list[Any]] = {"row": list(range(1, len(labels) + 1)), "prediction": labels}
    columns |= {f"probability_{name}": shares[:, at].tolist() for at, name in enumerate(names)}
    write_atomically(path, _encoded(path, columns))


def _encoded(path: Path, columns: Mapping[str, list[Any]]) -> bytes:
    import csv
    import io

    import numpy as np

    match path.suffix.lower():
        case ".csv":
            text = io.StringIO(newline="")
            writer = csv.writer(text, lineterminator="\n")
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
            return text.getvalue().encode()
        case ".npz":
            buffer = io.BytesIO()
            np.savez(buffer, **{name: np.asarray(values) for name, values in columns.items()})  # type: ignore[arg-type]
            return buffer.getvalue()
        case ".parquet":
            try:
                import pyarrow as pa
                import pyarrow.parquet as pq
            except ImportError as error:
                raise SordinoError("writing .parquet needs pyarrow: install sordino[tables]") from error
            out = io.BytesIO()
            pq.write_table(pa.table(dict(columns)), out)
            return out.getvalue()
    raise InputError(f"--out {path}: give a name that ends in .csv, .npz or .parquet")
