"""A DP-MAC recipe, carried out into a run directory: as `sordino.run`, and

    projection.safetensors   the released directions of DP-PCA, which whoever uses the model needs
    pictures.json            reconstructions of test images, learned features: from public images and released weights

Resume: the ledger, the checkpoints and projection.safetensors are all that is needed. A run that was killed between
the release of DP-PCA and the writing of its file can be resumed with an insecure seed only; else it is refused, for the
same statistic must not be drawn twice.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from sordino import data, report
from sordino.errors import Refused
from sordino.features.pca import PURPOSE, Projection, private_projection
from sordino.ledger import Ledger
from sordino.mac.network import Network
from sordino.mac.pictures import pictures
from sordino.mac.recipe import MacRecipe, read
from sordino.mac.training import Data, train_mac, train_mac_without_privacy
from sordino.progress import working
from sordino.randomness import RandomSource
from sordino.recipe import Recipe
from sordino.state import model_tensors, write_atomically
from sordino.steps import check_records
from sordino.training import Result

PROJECTION = "projection.safetensors"


@dataclass(frozen=True, eq=False)
class Sets:
    """The private records as DP-MAC takes them, and the public test images."""

    train: Data
    test: Data
    classes: Tensor  # of the test images


def run_mac(
    recipe: Recipe, out: Path, *, resume: bool = False, data_dir: Path | None = None, progress: bool | None = None
) -> dict[str, Any]:
    """Trains as the recipe says and writes the run directory; what result.json holds."""
    made = read(recipe, progress)
    with working(f"reading {recipe.data.name}", progress):
        raw = data.load(recipe.data.name, data_dir, normalise=False)
    check_records(made.plan, len(raw.train))  # before anything is released
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "recipe.toml", recipe.to_toml().encode())
    source = made.plan.source()
    with working("DP-PCA", progress):
        projection = released_projection(made, raw.train.inputs, out, source)
    sets = prepare_sets(made, raw, projection)
    network = made.network()
    result = train_mac(
        network, sets.train, made.plan, made.mac, settings=made.settings,
        evaluate=lambda net: test_metrics(net, sets, made.autoencoder), out=out, resume=resume, source=source,
    )  # fmt: skip
    noise_free = _without_noise(made, sets) if recipe.run.noise_free else None
    images = pictures(network, projection, raw.test.inputs, sets.test[0], made)
    write_atomically(out / "pictures.json", (json.dumps({"pictures": images}) + "\n").encode())
    return _write_results(made, result, noise_free, out)


def released_projection(made: MacRecipe, inputs: Tensor, out: Path | None, source: RandomSource) -> Projection | None:
    """The projection of the run: made once, through the run's own ledger, and read from its file afterwards."""
    if made.pca is None:
        return None
    path = out / PROJECTION if out is not None else None
    if path is not None and path.exists():
        return Projection(load_file(path)["matrix"], made.pca.scale)
    with Ledger.open(out / "ledger.jsonl" if out else None, made.plan.to_dict()) as ledger:
        if source.secure and ledger.last_step(PURPOSE) >= 0:
            raise Refused(
                f"{path} is missing, but the ledger holds its release: with secure noise it can't be made again "
                "without paying again; start anew in another directory"
            )
        found = private_projection(inputs, made.pca, source=source, ledger=ledger)
    if path is not None:
        write_atomically(path, save({"matrix": found.matrix.contiguous()}))
    return found


def prepare_sets(made: MacRecipe, raw: data.Dataset, projection: Projection | None) -> Sets:
    """Records through the released projection and the public factor; targets as the output layer wants them."""

    def inputs(split: data.Split) -> Tensor:
        rows = split.inputs.flatten(1) if projection is None else projection(split.inputs)
        return rows * made.multiply

    train, test = inputs(raw.train), inputs(raw.test)
    if made.autoencoder:
        return Sets((train, train), (test, test), raw.test.targets)
    hot = [nn.functional.one_hot(split.targets, raw.classes).float() for split in (raw.train, raw.test)]
    return Sets((train, hot[0]), (test, hot[1]), raw.test.targets)


def test_metrics(network: Network | nn.Module, sets: Sets, autoencoder: bool) -> dict[str, float]:
    """Accuracy, or the mean squared error per pixel, on the public test images."""
    inputs, targets = sets.test
    outputs = network(inputs)
    if autoencoder:
        return {"test_error": float((outputs - targets).square().mean())}
    return {"test_accuracy": float((outputs.argmax(1) == sets.classes).float().mean())}


def _without_noise(made: MacRecipe, sets: Sets) -> Mapping[str, float]:
    """The same run without clipping and noise: NOT private, for public data only."""
    rows = train_mac_without_privacy(
        made.network(), sets.train, made.plan, made.mac, settings=made.settings,
        evaluate=lambda net: test_metrics(net, sets, made.autoencoder),
    )  # fmt: skip
    return rows[-1]


def _write_results(
    made: MacRecipe, result: Result, noise_free: Mapping[str, float] | None, out: Path
) -> dict[str, Any]:
    """model.safetensors, result.json, report.html, in this order; then the checkpoints may go."""
    from sordino.run import NOT_PRIVATE, environment

    assert result.guarantee is not None
    plan, guarantee, last = made.plan, result.guarantee, result.metrics[-1]
    weights = {name: tensor.detach().contiguous() for name, tensor in model_tensors(result.model).items()}
    write_atomically(out / "model.safetensors", save(weights))
    document = {
        "name": made.recipe.run.name,
        "method": plan.method.name,
        **{key: getattr(guarantee, key) for key in ("epsilon", "delta", "relation", "sampler", "accountant")},
        "theorem": guarantee.theorem,
        "secure": guarantee.secure,
        "guarantee": {"sentence": str(guarantee), **guarantee.to_dict()},
        "test_accuracy": last.get("test_accuracy"),
        "test_error": last.get("test_error"),
        "noise_free_accuracy": (noise_free or {}).get("test_accuracy"),
        "noise_free_error": (noise_free or {}).get("test_error"),
        "seconds": round(result.seconds, 3),
        "seed": made.recipe.run.seed,
        "insecure_seed": plan.insecure_seed,
        "steps": plan.steps,
        "skipped_steps": result.skipped_steps,
        "records": plan.records,
        "expected_batch": plan.expected_batch,
        "noise_multiplier": plan.noise.noise_multiplier,
        "parameters": sum(p.numel() for p in result.model.parameters()),
        "environment": environment(),
    }
    write_atomically(out / "not_private.json", _json({"warning": NOT_PRIVATE, **result.not_private}))
    write_atomically(out / "result.json", _json(document))
    report.write(out)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    return document


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
