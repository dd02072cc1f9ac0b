"""Mutated recipes; those that are accepted are run completely, with two steps on forty records for every method."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_type_hints
from unittest import mock

import tomli_w
import torch

from faulty import mutate
from faulty.outcome import Tally, tried
from sordino import data, registry, report
from sordino.accounting import rdp
from sordino.cli import main
from sordino.data import sources
from sordino.errors import SordinoError
from sordino.runs.prepared import work_of
from sordino.runs.recipe import Recipe

RECORDS = 40
_PRIVACY = {"noise_multiplier": 1.0, "delta": 1e-5, "insecure_seed": 1}


def _base(**sections: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "run": {"name": "small", "seed": 0},
        "data": {"name": "fashion-mnist-mini", "records": RECORDS},
        "model": {"name": "linear"},
        "privacy": dict(_PRIVACY),
        "sampling": {"expected_batch": 10},
        "train": {"steps": 2, "lr": 0.5, "eval_every": 1, "checkpoint_every": 1},
    }
    for name, section in sections.items():
        found[name] = {**found.get(name, {}), **section}
    return found


BASES: tuple[dict[str, Any], ...] = (
    _base(),
    _base(train={"optimizer": "adam", "scheduler": "cosine", "average": "ema", "weight_decay": 0.1}),
    _base(train={"momentum": 0.9, "average": "tail"}, clipping={"name": "automatic", "gamma": 0.1}),
    _base(clipping={"name": "per-layer"}, sampling={"name": "truncated-poisson", "cap": 20}),
    _base(features={"name": "scattering", "normalise": "group", "groups": 27}, sampling={"name": "partition"}),
    _base(model={"name": "mlp", "hidden": [8]}, method={"name": "dpsgd", "inner_length": 2, "inner_decay": 0.5}),
    _base(augmentation={"views": 2, "crop": 2, "flip": True}, privacy={"norm_histogram": 20.0}),
    _base(
        features={"name": "scattering", "private": "centre", "private_noise": 5.0, "private_bound": 10.0},
        instruments={"every": 1, "rows": 5, "split": "test"},
    ),
    _base(
        method={"name": "coupling", "alpha": 0.5}, data={"records": RECORDS - 10},
        public={"records": 10, "expected_batch": 5, "shared": "drop"},
    ),
    _base(method={"name": "modelmix", "lr": 0.5, "tau_over_lr": 0.1}, train={"lr": None}),
    _base(
        method={"name": "hidden-state", "loss": "softmax", "regularisation": 0.05, "cap": 0.5},
        train={"lr": None, "eval_every": None, "checkpoint_every": None}, sampling={"name": "partition"},
    ),
    _base(
        method={"name": "dp-mac"}, model={"name": "classifier", "hidden": [6]},
        features={"name": "dp-pca", "components": 5, "noise_multiplier": 4.0},
    ),
    _base(
        batch_clipping={"companions": 2, "draws": 2}, public={"records": 10, "shared": "drop"},
        data={"records": RECORDS - 10},
        model={"name": "resnet", "form": "batch", "depth": 8},
    ),
)  # fmt: skip


def bases() -> list[dict[str, Any]]:
    """The documents, without keys that are None."""
    return [
        {name: {key: value for key, value in part.items() if value is not None} for name, part in one.items()}
        for one in BASES
    ]


OPTIONS: dict[str, dict[str, Any]] = {
    "train": {
        "momentum": 0.9, "dampening": 0.1, "nesterov": True, "weight_decay": 0.1, "betas": [0.9, 0.99], "eps": 1e-8,
        "amsgrad": True, "capturable": True, "differentiable": True, "fused": True, "foreach": True, "maximize": True,
        "momentum_decay": 0.1, "alpha": 0.9, "centered": True, "lr_decay": 0.1, "initial_accumulator_value": 0.1,
        "decoupled_weight_decay": True,
    },
    "model": {"hidden": [8], "depth": 8, "groups": 4, "form": "batch", "activation": "relu", "width": 2},
    "features": {
        "J": 2, "L": 8, "normalise": "group", "groups": 27, "frequencies": 2, "resolution": 64, "tokens": 16,
        "components": 4, "noise_multiplier": 4.0, "scale": 0.1, "whiten": True, "multiply": 0.5,
    },
    "clipping": {"gamma": 0.1, "bounds": [1.0, 2.0], "linf": 0.1, "p": 10, "weights": [0.5, 0.5], "linf_p": 10.0},
    "method": {
        "inner_length": 2, "inner_decay": 0.5, "outer_kept": 0.5, "record_momentum_kept": 0.5, "alpha": 0.5, "lr": 0.1,
        "rule": "mse", "horizon": 5, "tau_over_lr": 0.3, "noise_factors": {"kind": "geometric", "values": [1.0, 0.5]},
        "loss": "huber", "regularisation": 0.01, "feature_norm": 1.0, "unit": True, "bias": 0.3, "cap": 0.1,
        "radius": 10.0, "bound": 1.0, "w_steps": 2, "floor": 1.0, "z_steps": 2, "z_lr": 0.1, "order": 2,
        "thresholds_noise": 10.0, "thresholds_every": 1, "bound_first": 1.0, "z_optimizer": "sgd",
    },
}  # fmt: skip
"""Keys of the sections that depend on the method, model or optimizer, with a usual value."""
_USUAL: dict[str, Any] = {"int": 3, "float": 0.5, "str": "x", "bool": True}


@cache
def known_keys() -> list[tuple[str, str, Any]]:
    """(section, key, a usual value) of every declared key of a recipe and of the keys in OPTIONS."""
    declared = [
        (name, part.name, _USUAL.get(str(part.type).partition(" ")[0], 1))
        for name, kind in get_type_hints(Recipe).items() for part in fields(kind) if part.name != "options"
    ]  # fmt: skip
    return declared + [(name, key, usual) for name, part in OPTIONS.items() for key, usual in part.items()]


def small_data(name: str, data_dir: Any = None, *, normalise: bool = True) -> data.Dataset:
    """Forty records in the shape of any dataset of the catalogue."""
    known = data.entry(name)
    draw = torch.Generator().manual_seed(0)
    text = len(known.shape) == 1
    inputs = torch.randint(0, 50, (RECORDS, *known.shape), generator=draw)
    seen = inputs if text else inputs.float() / 50
    split = data.Split(seen, torch.arange(RECORDS) % known.classes)
    return data.Dataset(name, split, split, known.classes, "", "")


@contextmanager
def small_world() -> Iterator[None]:
    """Replaces what is slow and not under test: small data, no report, cached accounting."""
    curves: dict[str, Any] = {}
    points = entry_points(group=registry.GROUP)

    def curve(event: Any, *rest: Any, **named: Any) -> Any:
        key = repr((event, rest, named))
        if key not in curves:
            curves[key] = exact(event, *rest, **named)
        return curves[key]

    exact = rdp.rdp_curve
    with (
        mock.patch.object(sources, "load", small_data),
        mock.patch.object(report, "write", lambda folder: folder),
        mock.patch.object(rdp, "rdp_curve", curve),
        mock.patch.object(registry, "entry_points", return_value=points),
    ):
        yield


def _checked(path: Path) -> int:
    """The exit code after all checks that precede a run."""
    try:
        work_of(Recipe.read(path), None, False)
    except SordinoError as error:
        return error.exit_code
    return 0


def fuzz(seed: int, tally: Tally, folder: Path) -> None:
    """Tries one mutated recipe; after wrong input nothing may be left on the disk."""
    draw = random.Random(seed)
    base = draw.choice(bases())
    text = tomli_w.dumps(base).encode()
    if draw.random() < 0.8:
        try:
            text = tomli_w.dumps(mutate.document(draw, base, known_keys())).encode(errors="replace")
        except (TypeError, ValueError):
            text = mutate.content(draw, text)
    else:
        text = mutate.content(draw, text)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path, out = folder / "recipe.toml", folder / "runs" / "run"
    path.write_bytes(text)
    whole = seed % 10 == 0  # for the others only the checks that precede a run are made
    outcome = tried(lambda: main(["train", str(path), "--out", str(out), "--json"]) if whole else _checked(path))
    tally.add(outcome, text.decode(errors="replace"))
    if outcome == "exit 2" and (folder / "runs").exists():
        tally.left_behind.append(f"seed {seed}")
