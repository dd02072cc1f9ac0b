"""The recipes that are attacked: a small one for each method and each part of a record's vector, on embedded data."""

from __future__ import annotations

from typing import Any

from sordino.runs.recipe import Recipe

Document = dict[str, dict[str, Any]]

BASE: Document = {
    "data": {"name": "fashion-mnist-mini"},
    "model": {"name": "linear"},
    "privacy": {"epsilon": 4.0, "delta": 1e-5},
    "sampling": {"expected_batch": 1000},
    "clipping": {"name": "flat", "clip_norm": 0.5},
    "train": {"steps": 12, "lr": 0.1},
}

ZOO: dict[str, Document] = {
    "dpsgd": {},
    "per-layer": {"model": {"name": "mlp", "hidden": [16]}, "clipping": {"name": "per-layer", "clip_norm": 0.5}},
    "laplace": {"clipping": {"name": "l1", "clip_norm": 0.5}, "train": {"steps": 3}},
    "partition": {"sampling": {"name": "partition", "expected_batch": 1000}},
    "without-replacement": {"sampling": {"name": "without-replacement", "expected_batch": 1000}},
    "truncated": {"sampling": {"name": "truncated-poisson", "expected_batch": 1000, "cap": 1200}},
    "views": {"augmentation": {"views": 3, "erase": 0.3}},
    "inner-momentum": {"method": {"name": "dpsgd", "inner_length": 2, "inner_decay": 0.5}},
    "record-momentum": {
        "method": {"name": "dpsgd", "record_momentum_kept": 0.5},
        "sampling": {"expected_batch": 12000},
    },
    "statistics": {
        "privacy": {"norm_histogram": 3.0},
        "features": {"private": "centre", "private_noise": 4.0, "private_bound": 20.0},
    },
    "companions": {
        "model": {"name": "resnet", "form": "batch", "depth": 8},
        "public": {"records": 20, "shared": "drop"},
        "batch_clipping": {"companions": 3, "draws": 2},
        "sampling": {"expected_batch": 30},
        "train": {"chunk": 64},
    },
    "modelmix": {"method": {"name": "modelmix", "lr": 0.5, "tau_over_lr": 0.002}, "train": {"lr": None}},
    "hidden-state": {
        "method": {
            "name": "hidden-state",
            "loss": "softmax",
            "cap": 0.1,
            "regularisation": 0.01,
            "unit": True,
            "bias": 0.3,
        },
        "sampling": {"name": "partition", "expected_batch": 1000},
        "privacy": {"relation": "replace-one"},
        "clipping": {"name": None, "clip_norm": None},
        "train": {"lr": None},
    },
    "dp-mac": {
        "method": {"name": "dp-mac", "bound": 0.3},
        "features": {"name": "dp-pca", "components": 12, "noise_multiplier": 8.0},
        "model": {"name": "classifier", "hidden": [8]},
        "clipping": {"name": None, "clip_norm": None},
        "train": {"optimizer": "adam", "lr": 0.02},
    },
    "allocation": {"sampling": {"name": "allocation", "expected_batch": 1000}},
    "correlated": {"method": {"name": "correlated", "strategy": "lambda", "lambda": 0.5}},
    "cyclic": {"method": {"name": "correlated", "strategy": "banded-root", "bands": 3, "groups": 4}},
    "coupling": {"method": {"name": "coupling", "alpha": 0.5}, "public": {"records": 200, "expected_batch": 50}},
}


def recipe(name: str, **changes: dict[str, Any]) -> Recipe:
    """The recipe of this name with further changes; keys that are None are left out."""
    document = {"run": {"name": name}}
    for part in (BASE, ZOO[name], changes):
        for section, keys in part.items():
            document[section] = {**document.get(section, {}), **keys}
    kept = {section: {k: v for k, v in keys.items() if v is not None} for section, keys in document.items()}
    return Recipe.from_dict({section: keys for section, keys in kept.items() if keys})
