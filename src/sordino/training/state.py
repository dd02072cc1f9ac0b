"""The state of a training run, saved atomically in one file.

A checkpoint is a single safetensors file: tensors (weights, buffers, optimizer state, average) with a JSON document in
its header (step, plan, scalars, the head of the ledger) and a checksum of all its bytes. One file means one atomic
rename, so a process killed at any moment leaves either the old checkpoint or the new one, and changed bytes are
detected. Nothing is pickled: reading a checkpoint runs no code.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sordino.errors import InputError, SordinoError
from sordino.files import make_folder, write_atomically
from sordino.release.ledger_lines import Head
from sordino.training.sealed import read_sealed, sealed
from sordino.training.updates import Average

KEEP = 2
"""The number of checkpoints kept: the newest, and the one before it in case the newest can't be read."""


@dataclass(frozen=True)
class TrainState:
    """Everything a resumed run needs; `step` is the next step to make."""

    step: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any] | None = None
    average: Average | None = None
    scalars: Mapping[str, Any] = field(default_factory=dict)
    past: tuple[Mapping[str, Tensor], ...] = ()  # earlier weights that the next steps need, the oldest first
    ledger: Head | None = None  # the head of the ledger at that time; None in checkpoints of earlier versions

    def save(self, folder: Path, fingerprint: str) -> Path:
        """Writes `folder/step-….safetensors` and syncs it to disk. Older checkpoints are removed."""
        tensors, document = self.content(fingerprint)
        path = self.place(folder)
        write_atomically(path, sealed(tensors, document), private=True)
        remove_older(folder)
        return path

    def place(self, folder: Path) -> Path:
        """The file of this state, in a folder that is created if needed."""
        make_folder(folder, private=True)
        return folder / f"step-{self.step:09d}.safetensors"

    def content(self, fingerprint: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors of the file, and the document in its header."""
        tensors: dict[str, Tensor] = {f"model/{name}": value for name, value in self.model.items()}
        document: dict[str, Any] = {
            "step": self.step,
            "fingerprint": fingerprint,
            "scheduler": self.scheduler,
            "scalars": dict(self.scalars),
            "optimizer": _detach_tensors(self.optimizer, "optimizer", tensors),
        }
        if self.average is not None:
            document["average_total"] = self.average.total
            tensors |= {f"average/{name}": value for name, value in self.average.sums.items()}
        for age, weights in enumerate(self.past):
            tensors |= {f"past/{age}/{name}": value for name, value in weights.items()}
        document["past"] = len(self.past)
        if self.ledger is not None:
            document["ledger"] = self.ledger.to_dict()
        return tensors, document

    @classmethod
    def load(cls, folder: Path, fingerprint: str) -> TrainState | None:
        """The newest undamaged checkpoint of the same plan and recipe; None if there is none.

        If the newest one is damaged, this warns, and the run resumes from the one before it; the result states how many
        steps were skipped.
        """
        paths = sorted(folder.glob("step-*.safetensors"), reverse=True)
        failures = []
        for path in paths:
            try:
                found = cls._read(path, fingerprint)
            except InputError:  # the checkpoint belongs to another plan
                raise
            except (SordinoError, KeyError, TypeError, ValueError, AttributeError, OSError) as error:
                failures.append(f"{path.name}: {error}")
                continue
            if failures:
                warnings.warn(f"using the checkpoint {path.name}: {'; '.join(failures)}", stacklevel=2)
            return found
        if failures:
            raise SordinoError(
                f"no checkpoint in {folder} can be read ({'; '.join(failures)}): start again in another directory"
            )
        return None

    @classmethod
    def _read(cls, path: Path, fingerprint: str) -> TrainState:
        tensors, document = read_sealed(path)
        require_fingerprint(path, document, fingerprint)
        return cls.of(tensors, document)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> TrainState:
        """The inverse of `content`."""
        average = None
        if "average_total" in document:
            average = Average(_under("average/", tensors), document["average_total"])
        return cls(
            step=document["step"],
            model=_under("model/", tensors),
            optimizer=_attach_tensors(document["optimizer"], tensors),
            scheduler=document["scheduler"],
            average=average,
            scalars=document["scalars"],
            past=tuple(_under(f"past/{age}/", tensors) for age in range(document.get("past", 0))),
            ledger=Head(**document["ledger"]) if "ledger" in document else None,
        )


def require_fingerprint(path: Path, document: Mapping[str, Any], fingerprint: str) -> None:
    """InputError if a checkpoint belongs to another run."""
    if document["fingerprint"] != fingerprint:
        raise InputError(
            f"{path} was written under another plan or recipe: resume with the settings it was started with, "
            "or start again in another directory"
        )


def remove_older(folder: Path) -> None:
    """Removes all but the newest checkpoints."""
    for old in sorted(folder.glob("step-*.safetensors"))[:-KEEP]:
        with contextlib.suppress(OSError):  # an extra checkpoint does no harm
            old.unlink()


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, each once (tied weights are not written twice)."""
    return {
        **dict(model.named_parameters()),
        **{name: b for name, b in model.named_buffers() if name in model.state_dict()},
    }


def load_model(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copies the values into the model, in place; names and shapes must agree."""
    own = model_tensors(model)
    if set(own) != set(values):
        raise InputError(f"the weights belong to another model: {sorted(set(own) ^ set(values))[:4]} differ")
    with torch.no_grad():
        for name, tensor in own.items():
            if tensor.shape != values[name].shape:
                raise InputError(f"{name} has shape {tuple(values[name].shape)}, the model's is {tuple(tensor.shape)}")
            tensor.copy_(values[name])


def refuse_unsaveable(optimizer_state: Mapping[str, Any]) -> None:
    """SordinoError if the optimizer's state can't be saved in a checkpoint."""
    _detach_tensors(optimizer_state, "optimizer", {})


def _detach_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The value with each tensor replaced by a reference, the tensor itself moved into `tensors`."""
    if isinstance(value, Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, Mapping):
        return {"map": [[key, _detach_tensors(v, f"{path}/{i}", tensors)] for i, (key, v) in enumerate(value.items())]}
    if isinstance(value, list | tuple):
        return {"list": [_detach_tensors(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise SordinoError(f"the optimizer's state contains a {type(value).__name__}, which can't be saved as JSON")


def _attach_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "map":
        return {key: _attach_tensors(v, tensors) for key, v in content}
    if kind == "list":
        return [_attach_tensors(v, tensors) for v in content]
    return content


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
