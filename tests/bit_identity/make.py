"""The bit-identity record: short runs of every method with an insecure seed, their ledgers, metrics and weights.

    python tests/bit_identity/make.py            rewrites tests/bit_identity/bit_identity.json
    python tests/bit_identity/make.py --old      rewrites tests/bit_identity/old_run as well (a run killed half-way)

test_bit_identity.py makes the same runs and compares. A change of the numbers is a change of what users
get: the record is written anew only where that is meant (for example when sums are added in another order), and it
names the commit that wrote it. The package before it was moved into its rooms (commit 5a436b9) and the one after
(commit a5afda6) wrote the same record. Written anew since: in November 2026, when the accountant's grids became
finer (ε and calibrated noise changed by up to 1e-4) and sums over few records were rounded to single precision; and,
on another processor, when the best recipe of MNIST changed (all other runs came out as recorded, up to rounding).

The last bits of a float depend on the processor as well: numpy, MKL and oneDNN choose their loops by its instruction
sets and caches. So the record names the arithmetic that wrote it (`arithmetic`). Where a test runs under the same one,
it asks for the same bits; elsewhere the same entries, metrics and norms of the weights must come out up to rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
import torch
from safetensors.torch import load_file

from sordino.native.kernels import compiled
from sordino.runs.best import best_recipe
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe
from sordino.training.loop import Loop

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from small_recipes import shorten_test_rows  # noqa: E402

RECORD = HERE / "bit_identity.json"
OLD_RUN = HERE / "old_run"

BASE: dict[str, Any] = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"noise_multiplier": 1.0, "delta": 1e-5, "insecure_seed": 7},
    "sampling": {"expected_batch": 64},
    "train": {"steps": 4, "lr": 0.5, "eval_every": 2, "chunk": 48},
}
PUBLIC = {"records": 200, "expected_batch": 32, "shared": "drop"}
VARIANTS: dict[str, dict[str, Any]] = {
    "dpsgd": {"train": {"optimizer": "adam", "average": "ema", "scheduler": "cosine"}},
    "dpsgd-sampling": {
        "sampling": {"name": "partition"},
        "clipping": {"name": "l1", "clip_norm": 2.0},
        "train": {"momentum": 0.9},
    },
    "dpsgd-histogram": {
        "privacy": {"norm_histogram": 10.0},
        "features": {"private": "centre", "private_noise": 30.0, "private_bound": 28.0},
        "clipping": {"name": "automatic", "gamma": 0.1},
    },
    "dpsgd-allocation": {"sampling": {"name": "allocation", "expected_batch": 4000}},
    "dpsgd-inner": {"method": {"inner_length": 2, "inner_decay": 0.3, "outer_kept": 0.9}},
    "dpsgd-views": {
        "model": {"name": "mnist-cnn"},
        "augmentation": {"views": 3, "crop": 2, "flip": True, "erase": 0.3, "mixup": 0.2},
        "train": {"steps": 2},
    },
    "dpsgd-record-momentum": {
        "sampling": {"expected_batch": 12_000},
        "method": {"record_momentum_kept": 0.9},
        "train": {"steps": 2, "chunk": 2048},
    },
    "dpsgd-companions": {
        "model": {"name": "resnet", "form": "batch", "depth": 8},
        "sampling": {"expected_batch": 16},
        "public": {"records": 20, "shared": "drop"},
        "batch_clipping": {"companions": 3, "draws": 1},
        "train": {"steps": 2, "eval_every": 0},
    },
    "correlated": {
        "method": {"name": "correlated", "strategy": "lambda", "lambda": 0.9},
        "sampling": {"expected_batch": 4000},
    },
    "correlated-sampled": {
        "method": {"name": "correlated", "strategy": "banded-root", "bands": 2, "groups": 2},
        "sampling": {"expected_batch": 400},
    },
    "modelmix": {"method": {"name": "modelmix", "lr": 0.5, "tau_over_lr": 0.01}, "train": {"lr": None}},
    "modelmix-control": {"train": {"optimizer": "averaging-sgd"}},
    "hidden-state": {
        "method": {"name": "hidden-state", "cap": 0.2, "regularisation": 1e-4, "unit": True, "bias": 0.3},
        "features": {"private": "centre", "private_noise": 30.0, "private_bound": 28.0},
        "privacy": {"noise_multiplier": 5.0},
        "sampling": {"name": "partition", "expected_batch": 500},
        "train": {"lr": None, "eval_every": None, "steps": 6},
    },
    "coupling": {"method": {"name": "coupling", "rule": "mse", "warm_up": 2, "warm_up_lr": 0.1}, "public": PUBLIC},
    "coupling-centring": {
        "method": {"name": "coupling", "alpha": 0.3, "centring": True, "adaptive_clipping": 0.5, "projection": 2},
        "public": PUBLIC,
    },
    "dp-mac": {
        "features": {"name": "dp-pca", "components": 20, "noise_multiplier": 8.0, "whiten": 0.5, "multiply": 3.0},
        "model": {"name": "classifier", "hidden": [16]},
        "method": {"name": "dp-mac", "bound": 0.3, "z_start": "backward", "z_rate": 0.1, "z_steps": 1}
        | {"thresholds_noise": 4.0, "thresholds_every": 3},
        "train": {"optimizer": "adam", "lr": 0.03, "average": "tail", "scheduler": "linear"},
    },
    "dp-mac-autoencoder": {
        "model": {"name": "autoencoder", "hidden": [12]},
        "method": {"name": "dp-mac", "bounding": "normalise", "z_start": "backward", "z_rate": 0.01, "z_steps": 0}
        | {"order": 2},
        "train": {"optimizer": "cg", "lr": 0.1},
    },
}
BUNDLED: dict[str, tuple[str, ...]] = {
    "bundled-demo": ("train.steps=3", "train.eval_every=0", "run.noise_free=false", "privacy.insecure_seed=7"),
    "bundled-audit": ("train.steps=3", "privacy.insecure_seed=7"),
}
RECIPES = HERE.parents[1] / "experiments" / "recipes"
EXPERIMENTS = tuple(
    f"experiment-{name}"
    for name in (
        "bias_table2_cifar10", "coupling_cifar10_probe", "coupling_mnist", "fashion_mnist_scattering_linear",
        "hidden_state_composition", "hidden_state_fashion_mnist", "hidden_state_fashion_mnist_all", "mac_mnist_eps2",
        "mac_usps_autoencoder", "modelmix_control", "modelmix_fashion_mnist", "modelmix_table1_fashion_mnist",
    )
)  # fmt: skip
"""The recipes of experiments/ that need about a second at a small size, and no texts."""
SMALLER: dict[str, dict[str, Any]] = {
    "public": {"fraction": None, "records": 200, "expected_batch": 32},
    "privacy": {"insecure_seed": 7},
    "sampling": {"expected_batch": 64},
    "train": {"epochs": None, "steps": 2, "eval_every": None, "chunk": 64},
}
NETS = {"resnet": {"depth": 8}, "classifier": {"hidden": [16]}, "autoencoder": {"hidden": [12]}}
BEST = ("best-adult", "best-cifar10", "best-fashion-mnist", "best-imdb", "best-mnist")
"""The package's best known recipes, at a small size."""
KINDS = (*VARIANTS, *BUNDLED, *BEST, *EXPERIMENTS)


def recipe(kind: str) -> Recipe:
    """The recipe of one line of the record."""
    if kind in EXPERIMENTS:
        return _smaller((RECIPES / f"{kind.removeprefix('experiment-')}.toml").read_text("utf8"))
    if kind in BEST:
        return _smaller(best_recipe(kind.removeprefix("best-"), 1.0).recipe().to_toml())
    if kind in BUNDLED:
        with as_file(files("sordino") / "recipes" / f"{kind.removeprefix('bundled-')}.toml") as path:
            return Recipe.read(path, BUNDLED[kind])
    changes = VARIANTS[kind]
    document = {name: {**BASE.get(name, {}), **changes.get(name, {})} for name in {**BASE, **changes}}
    return Recipe.from_dict({n: {k: v for k, v in part.items() if v is not None} for n, part in document.items()})


def _smaller(text: str) -> Recipe:
    """A recipe with two small steps on the embedded images, without extracted features."""
    document = tomllib.loads(text)
    changes = SMALLER | {"model": NETS.get(document["model"]["name"], {})}
    features = document.get("features", {})
    if features.get("name") == "dp-pca":
        changes["features"] = {"components": 20}
    else:  # no extractor, and what is private about the features as it was
        changes["features"] = dict.fromkeys(key for key in features if not key.startswith("private"))
        if "private_bound" in features:
            changes["features"]["private_bound"] = 28.0
    for name, part in changes.items():
        if name in document:
            merged = document[name] | part
            document[name] = {key: value for key, value in merged.items() if value is not None}
    return Recipe.from_dict(document | {"data": BASE["data"]})


def outcome(kind: str, folder: Path) -> dict[str, Any]:
    """What a run of that recipe leaves, without times: see `described`; and its ε."""
    result = run_recipe(recipe(kind), folder, progress=False)
    return described(folder) | {"epsilon": float(result["epsilon"])}


def described(folder: Path) -> dict[str, Any]:
    """The ledger's entries, the metrics, and of each tensor of the model the digest of its bytes and its norm."""
    entries = [_without(line, "time", "source", "hash") for line in _lines(folder / "ledger.jsonl")[1:]]
    metrics = [_without(row, "seconds") for row in _lines(folder / "metrics.jsonl")]
    weights = sorted(load_file(folder / "model.safetensors").items())
    return {
        "entries": entries,
        "metrics": metrics,
        "digests": {name: _digest(value) for name, value in weights},
        "norms": {name: float(value.double().norm()) for name, value in weights},
    }


def rounded_alike(found: Any, recorded: Any, relative: float = 1e-9) -> bool:
    """Whether two outcomes are equal but for what another processor may round otherwise.

    Digests are left out. Norms of weights and metrics come of single-precision arithmetic: they may differ by a
    thousandth, accuracies by two in a hundred. ε and the ledger's entries may differ by 1e-9 of themselves.
    """
    if isinstance(recorded, dict):
        own = {"norms": 1e-3, "metrics": 1e-3, "test_accuracy": 2e-2, "epsilon": 1e-9}
        return set(found) == set(recorded) and all(
            rounded_alike(found[key], recorded[key], own.get(key, relative)) for key in set(found) - {"digests"}
        )
    if isinstance(recorded, list):
        return len(found) == len(recorded) and all(
            rounded_alike(a, b, relative) for a, b in zip(found, recorded, strict=True)
        )
    if isinstance(recorded, float):
        return math.isclose(found, recorded, rel_tol=relative)
    return bool(found == recorded)


def arithmetic() -> str:
    """Of what decides a float's last bits: libraries, C kernels, the processor with its instruction sets and caches."""
    info = Path("/proc/cpuinfo")
    first = info.read_text("utf8").split("\n\n")[0].splitlines() if info.exists() else [platform.processor()]
    kinds = ("vendor_id", "cpu family", "model", "stepping", "cache size", "flags", "Features")
    processor = [line for line in first if line.split("\t")[0].split(":")[0].strip() in (*kinds, platform.processor())]
    versions = [torch.__version__, np.__version__, scipy.__version__, torch.backends.cpu.get_cpu_capability()]
    versions.append("C kernels" if compiled() is not None else "NumPy alone")
    chosen = [f"{k}={v}" for k, v in sorted(os.environ.items()) if k.split("_")[0] in ("MKL", "ATEN", "ONEDNN", "NPY")]
    chosen = [one for one in chosen if not one.startswith("MKL_NUM_THREADS")]
    return hashlib.sha256("\n".join([*processor, *versions, *chosen]).encode()).hexdigest()[:16]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf8").splitlines()]


def _without(row: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in keys}


def _digest(value: torch.Tensor) -> str:
    """SHA-256 over type, shape and bytes, the first half of it."""
    head = f"{value.dtype} {tuple(value.shape)};".encode()
    return hashlib.sha256(head + value.contiguous().numpy().tobytes()).hexdigest()[:32]


def make_old_run() -> None:
    """A run that was killed after its second of four steps: a ledger, a checkpoint and no result."""
    shutil.rmtree(OLD_RUN, ignore_errors=True)
    save, saved = Loop._save, 0

    def dies(self: Loop, *arguments: Any) -> None:
        nonlocal saved
        save(self, *arguments)
        saved += 1
        if saved == 2:
            raise KeyboardInterrupt

    Loop._save = dies  # type: ignore[method-assign]
    try:
        with contextlib.suppress(KeyboardInterrupt):
            run_recipe(old_recipe(), OLD_RUN, progress=False)
    finally:
        Loop._save = save  # type: ignore[method-assign]
    (OLD_RUN / "checkpoint" / "step-000000001.safetensors").unlink()


def resumed(folder: Path) -> dict[str, Any]:
    """What the old run comes to when it is resumed in `folder`."""
    shutil.copytree(OLD_RUN, folder)
    run_recipe(old_recipe(), folder, resume=True, progress=False)
    return described(folder)


def old_recipe() -> Recipe:
    return Recipe.from_dict(
        BASE
        | {"method": {"inner_length": 2, "inner_decay": 0.3}, "run": {"name": "old"}}
        | {"privacy": BASE["privacy"] | {"noise_multiplier": 2.0}}
        | {"train": {"steps": 4, "lr": 0.5, "momentum": 0.9, "checkpoint_every": 1, "average": "ema"}}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", action="store_true", help="also make the old run anew")
    parser.add_argument("--only", nargs="+", choices=KINDS, help="write these runs anew and keep the rest")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(RECORD.read_text("utf8")) if arguments.only else {}
    if kept and kept["arithmetic"] != arithmetic():
        raise SystemExit("the record is another processor's: write all of it anew, without --only")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        shorten_test_rows(patch)
        runs = {kind: outcome(kind, Path(folder) / kind) for kind in arguments.only or KINDS}
        runs = {kind: runs[kind] if kind in runs else kept["runs"][kind] for kind in KINDS}
        if arguments.old:
            make_old_run()
        old = resumed(Path(folder) / "old")
    document = {"written_after_commit": commit.stdout.strip(), "arithmetic": arithmetic(), "old_run": old, "runs": runs}
    RECORD.write_text(json.dumps(document, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
