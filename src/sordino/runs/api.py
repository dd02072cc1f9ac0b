"""`sordino.train`: trains, and with `out` writes the same run directory as a recipe.

recipe.toml        what was run: the plan, the update and its settings, with [run] made_by = "sordino.train"
ledger.jsonl, metrics.jsonl, model.safetensors, result.json, report.html, not_private.json    as for a recipe
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sordino import ranks
from sordino.errors import InputError
from sordino.files import write_atomically
from sordino.gradients.rows import tensors
from sordino.plan.core import Plan
from sordino.ranks.layout import shard_of, whole_of
from sordino.records.mapped import Mapped, mapped
from sordino.records.reading import tensors_of
from sordino.release.ledger import read_ledger
from sordino.runs.declaration import DeclarationSection
from sordino.runs.finished import read_result
from sordino.runs.recipe import parse_section
from sordino.runs.results import Described, write_results
from sordino.runs.trained import MADE_BY, read_weights
from sordino.training import fit
from sordino.training.callbacks import AtStart
from sordino.training.fit import First, Loss
from sordino.training.job import Result
from sordino.training.loop import Evaluate, Reader, Settings
from sordino.training.metrics import read_metrics
from sordino.training.state import load_model, model_tensors


def train(
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    plan: Plan,
    *,
    optimizer: Callable[..., Optimizer] | None = None,
    lr: float | None = None,
    settings: Settings | None = None,
    evaluate: Evaluate | None = None,
    out: Path | str | None = None,
    resume: bool = False,
    first: First | None = None,
    watch: Reader | None = None,
    public: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    num_workers: int = 0,
    callbacks: Sequence[Any] = (),
    labels: Sequence[str] | None = None,
    users: Any = None,
    declaration: Mapping[str, str] | None = None,
) -> Result:
    """Trains `model` in place under `plan` and returns it with its guarantee.

    Args:
        model: Any torch module; BatchNorm and other layers that mix records are refused.
        loss: `loss(outputs, targets)` gives one value per row.
        dataset: A pair (inputs, targets) of tensors or arrays, or a map-style dataset of (inputs, target) or of dicts.
        plan: The plan that is accounted and run.
        optimizer: A torch optimizer class (default: SGD). If the guarantee depends on the update, the plan contains the
            step sizes and the update: then `optimizer` and `lr` must be left out.
        lr: The step size.
        settings: All other settings, which the guarantee does not depend on.
        evaluate: Evaluates the model, on public or held-out data only: what it returns is logged.
        out: The run directory: ledger, metrics, checkpoints, and at the end model.safetensors, result.json and
            report.html; without it nothing is written and the ledger is in memory.
        resume: Continue the run in `out`; a complete run is read back.
        first: Releases the plan's statistics of the dataset and returns the dataset to train on (private
            normalisation).
        watch: Reads the weights during training (sordino.diagnostics.instruments) and changes nothing.
        public: Rows that the plan declares public and their use, for a method that combines them with private steps; ε
            does not depend on it.
        collate: Maps a list of a map-style dataset's items to (inputs, targets), each record separately
            (`sordino.pad_to`).
        num_workers: The number of threads that read the items of a map-style dataset.
        callbacks: Called with each row of the metrics (`EarlyStopping`, `TensorBoard`, `MLflow`, or a function that
            ends the run by returning True).
        labels: Public names of the classes, stored with the model.
        users: One id (a whole number or a text) for each row, for a plan with unit="user"; `plan.records` is then the
            public number of users.
        declaration: What only you can say, for the report and the card: the keys of a recipe's [declaration] (unit,
            trust, tuning, public_sources, collection, contact, …). It needs `out`.

    Returns:
        The model, its guarantee, the metrics; `not_private` is for the data's owner only.

    Raises:
        Refused: no guarantee covers the request.
        InputError: a value is wrong; nothing was written.
    """
    given: dict[str, Any] = {
        "optimizer": optimizer, "lr": lr, "settings": settings, "evaluate": evaluate, "first": first, "watch": watch,
        "public": public, "collate": collate, "num_workers": num_workers, "callbacks": callbacks,
    }  # fmt: skip
    if out is None:
        if declaration is not None:
            raise InputError("declaration is for the files of a run: give out=")
        return fit.train(model, loss, dataset, plan, resume=resume, users=users, **given)
    declared = parse_section("declaration", DeclarationSection, declaration or {})
    folder = Path(out)
    earlier = folder / "result.json"
    if earlier.exists():
        if not resume:
            raise InputError(f"{folder} already contains a run: resume it, or give another directory")
        if read_result(earlier).get("stopped_at") is None:
            return _read_back(folder, model, plan)
        if isinstance(callbacks, list | tuple):  # the result describes the model before the steps that now follow
            given["callbacks"] = [*callbacks, AtStart(lambda _: earlier.unlink(missing_ok=True))]
    result = fit.train(model, loss, dataset, plan, out=folder, resume=resume, users=users, **given)
    with ranks.noticing_closed(ranks.current()):
        return _written(folder, model, loss, dataset, plan, result, labels, given, declared)


def _written(
    folder: Path,
    model: nn.Module,
    loss: Loss,
    dataset: Any,
    plan: Plan,
    result: Result,
    labels: Sequence[str] | None,
    given: Mapping[str, Any],
    declaration: DeclarationSection,
) -> Result:
    """The result, after the leader has written the run directory; all ranks call this together."""
    rank, settings = ranks.current(), given["settings"]
    if rank is not None and not rank.leads:
        for tensor in model_tensors(result.model).values():
            whole_of(tensor)  # for the leader, which writes the directory
        return result
    seed = settings.seed if settings is not None else 0
    document = _described(folder, model, loss, plan, given) | {"declaration": asdict(declaration)}
    write_atomically(folder / "recipe.toml", _as_toml(document).encode())
    described = Described(folder.resolve().name, seed, _inputs(dataset, labels), {"stopped_at": result.stopped_at})
    write_results(folder, plan, result, described)
    return result


def _read_back(folder: Path, model: nn.Module, plan: Plan) -> Result:
    """The result of a complete run, with its weights loaded into the model."""
    header, _ = read_ledger(folder / "ledger.jsonl")
    if Plan.from_dict({key: value for key, value in header.items() if key != "kind"}) != plan:
        raise InputError(f"{folder} was made under another plan: give another directory")
    document = read_result(folder / "result.json")
    weights = read_weights(folder)[0]
    own = model_tensors(model)
    load_model(model, {name: shard_of(own[name], w) if hasattr(own.get(name), "placements") else w
                       for name, w in weights.items()})  # fmt: skip
    rows = tuple(read_metrics(folder / "metrics.jsonl"))
    return Result(model, plan.guarantee(), rows, float(document["seconds"]), int(document["skipped_steps"]), {})


def _inputs(dataset: Any, labels: Sequence[str] | None) -> dict[str, Any]:
    """What is public about the form of the records, if they are one tensor."""
    named = {"labels": list(labels) if labels is not None else None}
    found = mapped(dataset)
    pair = tensors_of(found)
    if isinstance(found, Mapped):
        inputs = found.rows(torch.arange(0)).inputs
    elif pair is None or not isinstance(pair[0], Tensor):
        return named
    else:
        (inputs,) = tensors(pair[0])
    return {"input_shape": list(inputs.shape[1:]), "input_type": str(inputs.dtype).removeprefix("torch."), **named}


def _described(folder: Path, model: nn.Module, loss: Loss, plan: Plan, given: Mapping[str, Any]) -> dict[str, Any]:
    """What was run."""
    settings = given["settings"] or Settings()
    return {
        "run": {"name": folder.resolve().name, "made_by": MADE_BY, "seed": settings.seed},
        "model": {"name": type(model).__qualname__, "written": str(model)},
        "train": {
            "loss": getattr(loss, "__name__", type(loss).__name__),
            "optimizer": getattr(given["optimizer"], "__name__", "SGD"),
            "lr": given["lr"],
            **{one.name: getattr(settings, one.name) for one in fields(settings)},
        },
        "plan": plan.to_dict(),
    }


def _as_toml(document: Mapping[str, Any]) -> str:
    """TOML for readers: the command line can't run it."""
    written = tomli_w.dumps({name: part for name, part in _plain(document).items() if part})
    return f"# Made by {MADE_BY}: describes the run for readers; not a recipe for the command line.\n{written}"


def _plain(value: Any) -> Any:
    """The value without None, and with types that TOML does not have as text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value if entry is not None]
    return value if isinstance(value, bool | int | float | str) else repr(value)
