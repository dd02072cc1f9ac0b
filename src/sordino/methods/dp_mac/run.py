"""A DP-MAC recipe run in a run directory: as `sordino.runs.run`, and

    projection.safetensors   the released directions of DP-PCA, which are needed to use the model
    pictures.json            reconstructions of test images, learned features: from public images and released weights

Resume needs the ledger, the checkpoints and projection.safetensors. A run that was killed between the release of DP-PCA
and the writing of its file can be resumed with an insecure seed only; otherwise it is refused, because the same
statistic must not be drawn twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save
from torch import Tensor, nn

from sordino import data
from sordino.audit.one_run import AuditResult
from sordino.errors import InputError, Refused
from sordino.files import write_atomically
from sordino.methods.dp_mac.audit import audit_mac
from sordino.methods.dp_mac.network import Network
from sordino.methods.dp_mac.pca import PURPOSE, Projection, private_projection
from sordino.methods.dp_mac.pictures import pictures
from sordino.methods.dp_mac.recipe import MacRecipe, read
from sordino.methods.dp_mac.training import Data, mac_update, rehearse_w_step, train_mac, train_mac_without_privacy
from sordino.plan.core import Plan
from sordino.plan.explained import Explained
from sordino.randomness import RandomSource
from sordino.release.ledger import Ledger
from sordino.training.callbacks import Callback
from sordino.training.job import Result
from sordino.training.loop import Evaluate
from sordino.training.progress import working
from sordino.training.steps import check_records

if TYPE_CHECKING:
    from sordino.runs.recipe import Recipe

PROJECTION = "projection.safetensors"
Outputs = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Sets:
    """The private records as inputs of DP-MAC, and the public test images."""

    train: Data
    test: Data
    classes: Tensor  # classes of the test images


@dataclass(eq=False)
class MacWork:
    """A DP-MAC recipe with its records in memory; nothing has been written or released."""

    made: MacRecipe
    raw: data.Dataset
    progress: bool | None = None
    _sets: Sets | None = None

    @classmethod
    def of(cls, recipe: Recipe, data_dir: Path | None, progress: bool | None) -> MacWork:
        made = read(recipe, progress) if data.published(recipe.data).shape else None
        with working(f"reading {recipe.data.name}", progress):
            raw = data.read(recipe.data, data_dir, normalise=False)
        made = made or read(recipe, progress, (raw.input_shape, raw.classes))
        check_records(made.plan, len(raw.train))  # before anything is released
        return cls(made, raw, progress)

    @property
    def plan(self) -> Plan:
        return self.made.plan

    @property
    def dataset(self) -> data.Dataset:
        return self.raw

    def changed(self, plan: Plan, dataset: data.Dataset) -> MacWork:
        """The same work under another plan of the same method, on other rows."""
        return MacWork(replace(self.made, plan=plan), dataset, self.progress)

    @property
    def inputs(self) -> dict[str, Any]:
        return self.raw.described

    def train(self, out: Path, *, resume: bool, callbacks: Sequence[Callback] = ()) -> Result:
        made, source = self.made, self.made.plan.source()
        rehearse_w_step(mac_update(made.plan, made.network(), made.mac), made.settings)  # before DP-PCA is released
        with working("DP-PCA", self.progress):
            projection = released_projection(made, self.raw.train.inputs, out, source)
        sets = self._sets = prepare_sets(made, self.raw, projection)
        network = made.network()
        result = train_mac(
            network, sets.train, made.plan, made.mac, settings=made.settings,
            evaluate=_measured(sets, made), out=out, resume=resume, source=source, callbacks=callbacks,
        )  # fmt: skip
        images = pictures(network, projection, self.raw.test.inputs, sets.test[0], made) if len(self.raw.test) else []
        write_atomically(out / "pictures.json", (json.dumps({"pictures": images}) + "\n").encode())
        return result

    def without_noise(self) -> Result:
        """The same run without clipping and noise, with the released projection: NOT private."""
        made, sets = self.made, self._sets
        if sets is None:
            raise Refused("the run without noise uses the projection that the private run released: train first")
        return train_mac_without_privacy(
            made.network(), sets.train, made.plan, made.mac, settings=made.settings,
            evaluate=_measured(sets, made),
        )  # fmt: skip

    def audit(self, **options: Any) -> AuditResult:
        """`audit_mac` of the recipe's plan, network and records, with a separate DP-PCA."""
        for name in ("runs", "width_scale"):
            if name in options:
                raise InputError(f"the audit of dp-mac has no --{name.replace('_', '-')}: leave it out")
        made, source = self.made, self.made.plan.source()
        sets = prepare_sets(made, self.raw, released_projection(made, self.raw.train.inputs, None, source))
        return audit_mac(made.plan, made.network(), sets.train, made.mac, chunk=made.settings.chunk, **options)


def restored(recipe: Recipe, folder: Path, shape: tuple[int, ...], classes: int) -> tuple[Network, Outputs]:
    """The network of a finished run, without its weights, and the function from records to its outputs."""
    made = read(recipe, None, (shape, classes))
    matrix = load_file(folder / PROJECTION)["matrix"] if made.pca is not None else None
    projection = Projection(matrix, made.pca.scale) if made.pca is not None and matrix is not None else None
    network = made.network()

    def outputs(inputs: Tensor) -> Tensor:
        rows = inputs.flatten(1) if projection is None else projection(inputs)
        found: Tensor = network(rows * made.multiply)
        return found

    return network, outputs


def released_projection(made: MacRecipe, inputs: Tensor, out: Path | None, source: RandomSource) -> Projection | None:
    """The projection of the run: released once, in the run's ledger, and read from its file afterwards."""
    if made.pca is None:
        return None
    path = out / PROJECTION if out is not None else None
    if path is not None and path.exists():
        return Projection(load_file(path)["matrix"], made.pca.scale)
    with Ledger.open(out / "ledger.jsonl" if out else None, made.plan.to_dict()) as ledger:
        ledger.guard(Explained(made.plan, ledger.entries))
        if source.secure and ledger.last_step(PURPOSE) >= 0:
            raise Refused(
                f"{path} is missing, but the ledger contains its release: with secure noise it can't be made again "
                "without a second release; start again in another directory"
            )
        found = private_projection(inputs, made.pca, source=source, ledger=ledger)
    if path is not None:
        write_atomically(path, save({"matrix": found.matrix.contiguous()}))
    return found


def prepare_sets(made: MacRecipe, raw: data.Dataset, projection: Projection | None) -> Sets:
    """Records after the released projection and the public factor; targets in the form of the output layer."""

    def inputs(split: data.Split) -> Tensor:
        rows = split.inputs.flatten(1) if projection is None else projection(split.inputs)
        return rows * made.multiply

    train, test = inputs(raw.train), inputs(raw.test)
    if made.autoencoder:
        return Sets((train, train), (test, test), raw.test.targets)
    hot = [nn.functional.one_hot(split.targets, raw.classes).float() for split in (raw.train, raw.test)]
    return Sets((train, hot[0]), (test, hot[1]), raw.test.targets)


def _measured(sets: Sets, made: MacRecipe) -> Evaluate | None:
    """The metrics of the test rows; None if there are none."""
    return (lambda network: test_metrics(network, sets, made.autoencoder)) if len(sets.classes) else None


def test_metrics(network: Network | nn.Module, sets: Sets, autoencoder: bool) -> dict[str, float]:
    """Accuracy, or the mean squared error per pixel, on the public test images."""
    inputs, targets = sets.test
    outputs = network(inputs)
    if autoencoder:
        return {"test_error": float((outputs - targets).square().mean())}
    return {"test_accuracy": float((outputs.argmax(1) == sets.classes).float().mean())}
