"""A recipe with its data: everything that a run or an audit needs, checked and in memory; nothing has been written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino import data, features, nets
from sordino.audit.one_run import AuditResult, audit_plan
from sordino.diagnostics.instruments import ReadingSteps, Watch
from sordino.diagnostics.instruments.watch import check_watched, source_of_rows
from sordino.errors import InputError, Refused
from sordino.features.private import Normaliser
from sordino.plan.core import Plan
from sordino.plan.public import PublicSet, drop_shared_rows, refuse_shared_rows, split_public
from sordino.ranks.layout import gather_into, shard_blocks
from sordino.records.companions import answers, companion_model, majority
from sordino.runs.build import (
    check_companions,
    check_unit,
    clipping_of,
    method_of,
    optimizer_of,
    plan_from,
    private_normalisation,
    private_records,
    public_origin,
    public_size,
    settings_of,
)
from sordino.runs.recipe import Recipe
from sordino.runs.words import NO_OWNERS
from sordino.runs.work import Work
from sordino.training.callbacks import Callback
from sordino.training.fit import train, train_without_noise
from sordino.training.job import Result
from sordino.training.loop import Settings
from sordino.training.progress import working
from sordino.training.steps import unit_dataset


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked and in memory; nothing has been written."""

    recipe: Recipe
    dataset: data.Dataset
    plan: Plan
    settings: Settings
    optimizer: type[torch.optim.Optimizer] | None  # None: the plan contains the update
    public: data.Split | None = None  # rows that were set aside; `dataset.train` has the others
    inputs: Mapping[str, Any] = field(default_factory=dict)  # the data before features: shape, type, classes

    def model(self) -> nn.Module:
        """A fresh model, initialised from the recipe's public seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.run.seed)
            net = network_of(recipe=self.recipe, shape=self.dataset.input_shape, classes=self.dataset.classes,
                             vectors=self.dataset.vectors)  # fmt: skip
        if not self.recipe.batch_clipping.given:
            return net
        if self.public is None:
            raise Refused("[batch_clipping] needs public rows: say which in [public]")
        return companion_model(net, self.public, self.recipe.batch_clipping.companions)

    def changed(self, plan: Plan, dataset: data.Dataset) -> Prepared:
        """The same work with another plan of the same method and other rows."""
        return replace(self, plan=plan, dataset=dataset)

    def normaliser(self, out: Path | None) -> Normaliser | None:
        """Releases the private statistics of this run, if the recipe asks for some."""
        settings = private_normalisation(self.recipe)
        return Normaliser(settings, self.plan, out) if settings is not None else None

    def train_sharded(self, out: Path, *, resume: bool, callbacks: Sequence[Callback] = ()) -> Result:
        """The private run with the model divided over the ranks of the process group; all of them call it."""
        result = self.train(out, resume=resume, model=shard_blocks(self.model()), callbacks=callbacks)
        return replace(result, model=gather_into(result.model, self.model()))

    def train(
        self, out: Path, *, resume: bool, model: nn.Module | None = None, callbacks: Sequence[Callback] = ()
    ) -> Result:
        """The private run, with the given model or a fresh one, by the method's own training function if it has one."""
        normaliser = self.normaliser(out)
        object.__setattr__(self, "_normaliser", normaliser)  # the run without noise uses the same statistics
        first = {} if normaliser is None else {"first": normaliser.first}
        options: dict[str, Any] = {
            "settings": self.settings, "evaluate": self._evaluate(normaliser), "out": out, "resume": resume,
            "callbacks": callbacks, **first,
        }  # fmt: skip
        if self.plan.method.trained_by is not None:
            return self.plan.method.train(self.plan, self.dataset.train, **options)
        if self.recipe.instruments.given:
            options["watch"] = _watch(self, normaliser)
        module = self.model() if model is None else model
        return train(module, cross_entropy, self._private(), self.plan, **options, **self._chosen())

    def _private(self) -> Any:
        """The private rows with the plan's unit of privacy as their record."""
        users = self.dataset.users if self.plan.unit == "user" else None
        if self.plan.unit == "user" and users is None:
            raise Refused(NO_OWNERS)
        return unit_dataset(self.plan, self.dataset.train, users)

    def without_noise(self) -> Result:
        """The same run without noise, with the statistics that the private run released."""
        normaliser: Normaliser | None = getattr(self, "_normaliser", None)
        split = self._private() if normaliser is None else normaliser.apply(self.dataset.train)
        return train_without_noise(
            self.model(), cross_entropy, split, self.plan, settings=self.settings,
            evaluate=self._evaluate(normaliser), **self._chosen(),
        )  # fmt: skip

    def audit(self, *, width_scale: float = 1.0, runs: int = 1, **options: Any) -> AuditResult:
        """The method's own audit, or canaries among the records."""
        own = self.plan.method.audit(self.plan, **options)
        if own is not None:
            if runs != 1:
                raise InputError(f"the audit of {self.plan.method.name} makes one run: leave out --runs")
            return own
        public = method_of(self.recipe).public_use(self.recipe, self.public)
        return audit_plan(
            self.plan, self.model(), cross_entropy, self._private(), **options, width_scale=width_scale, runs=runs,
            chunk=self.settings.chunk, public=public,
        )  # fmt: skip

    def _chosen(self) -> dict[str, Any]:
        public = method_of(self.recipe).public_use(self.recipe, self.public)
        return {"optimizer": self.optimizer, "lr": self.recipe.train.lr, "public": public}

    def _evaluate(self, normaliser: Normaliser | None) -> Callable[[nn.Module], dict[str, float]] | None:
        if not len(self.dataset.test):
            return None  # no rows are declared for it, so nothing is measured
        draws = self.recipe.batch_clipping.draws
        return partial(test_metrics, split=self.dataset.test, normaliser=normaliser, draws=draws)


def network_of(recipe: Recipe, shape: tuple[int, ...], classes: int, vectors: Tensor | None = None) -> nn.Module:
    """The network that [model] names, with initial weights: built in, or returned by module:function."""
    section = recipe.model
    if not data.is_code(section.name):
        return nets.build(section.name, shape, classes, vectors, **section.options)
    made = data.called(section.name, (shape, classes), section.options)
    if not isinstance(made, nn.Module):
        raise InputError(f"{section.name}(shape, classes, …) must return a torch.nn.Module, not {type(made).__name__}")
    return made


def work_of(recipe: Recipe, data_dir: Path | None = None, progress: bool | None = None) -> Work:
    """The work of a recipe, for any method.

    Raises:
        InputError: the recipe is wrong, or needs a network or a schedule that does not fit on this machine.
    """
    method = method_of(recipe)
    try:
        if method.reads_own_data:
            method.check_recipe(recipe)
            check_unit(recipe)
            return method.work(recipe, data_dir, progress)
        return prepare(recipe, data_dir, progress)
    except (RuntimeError, MemoryError, OverflowError) as error:
        raise InputError(
            "the recipe needs more than this machine has, or sizes that do not fit together",
            private=str(error),
        ) from error


def prepare(recipe: Recipe, data_dir: Path | None = None, progress: bool | None = None) -> Prepared:
    """Checks the recipe and loads the data."""
    method = method_of(recipe)
    if method.reads_own_data:
        raise Refused(
            f"the method {recipe.method.name} makes its own networks and features: use it with train or audit"
        )
    optimizer = optimizer_of(recipe)
    clipping = clipping_of(recipe)
    if recipe.instruments.given:
        check_watched(recipe)
        source_of_rows(recipe)  # refuses rows that are not declared public before anything is read
    records = private_records(recipe)
    check_companions(recipe)
    plan = None if method.needs_shape else plan_from(recipe, clipping, records)
    settings = settings_of(recipe, optimizer, plan.steps if plan else 1, progress)
    extract = features.build({"name": recipe.features.name, **recipe.features.options}, data_dir)
    with working(f"reading {recipe.data.name} and computing its features (cached for the next run)", progress) as say:
        raw = data.read(recipe.data, data_dir)
        dataset = _with_features(raw, extract, say)
    public = None
    if plan is not None and recipe.public.given:
        public, private = set_aside(recipe, raw.train, dataset.train)
        dataset = replace(dataset, train=private)
        plan = replace(plan, public=PublicSet.of(public, public_origin(recipe)))
    if plan is None:
        plan = plan_from(recipe, clipping, records, dataset.input_shape, dataset.classes)
    if (normalisation := private_normalisation(recipe)) is not None:
        normalisation.check_shape(dataset.input_shape)
    prepared = Prepared(recipe, dataset, plan, settings, optimizer, public, raw.described)
    prepared.model()  # finds a wrong option of the network
    if plan.unit == "user":
        prepared._private()  # finds rows without users
    return prepared


def set_aside(recipe: Recipe, raw: data.Split, seen: data.Split) -> tuple[data.Split, data.Split]:
    """(public, private) rows of the training split as inputs of the model; InputError if the two share content.

    Content is compared before features are computed: an extractor's last bits may depend on a row's neighbours.
    """
    section = recipe.public
    if section.shared not in ("refuse", "drop"):
        raise InputError(f'public.shared = {section.shared!r} is unknown: use "refuse" or "drop"')
    places = data.Split(torch.arange(len(raw)), raw.targets)
    public, private = split_public(places, records=public_size(recipe), seed=section.seed)
    contents = [data.Split(raw.inputs[side.inputs], side.inputs) for side in (public, private)]
    if section.shared == "refuse":
        refuse_shared_rows(*contents)
    kept = drop_shared_rows(*contents).targets
    ours, theirs = (data.Split(seen.inputs[at], seen.targets[at]) for at in (public.inputs, kept))
    return ours, (drop_shared_rows(ours, theirs) if section.shared == "drop" else theirs)


def _watch(prepared: Prepared, normaliser: Normaliser | None) -> Watch:
    """The instruments of [instruments], on its rows as inputs of the model."""
    recipe, section = prepared.recipe, prepared.recipe.instruments
    origin, split = watched_rows(prepared)
    some = data.Split(split.inputs[: section.rows], split.targets[: section.rows])
    return Watch(
        ReadingSteps(section.every or 1, section.window),
        cross_entropy,
        lambda: some if normaliser is None else normaliser.apply(some),
        prepared.plan.clipping,
        public=origin,
        not_private=origin is None,
        views=prepared.plan.contribution.augmentation,
        seed=recipe.run.seed,
    )


def watched_rows(prepared: Prepared) -> tuple[str | None, data.Split]:
    """(where the rows come from, the rows): None for private rows, which need [instruments] not_private."""
    recipe = prepared.recipe
    source = source_of_rows(recipe)
    if source == "train":
        return None, prepared.dataset.train
    if source == "test":
        return f"the test split of {recipe.data.name}, which the recipe declares public", prepared.dataset.test
    if prepared.public is None:
        raise Refused("[instruments] reads public rows, but the recipe declares none: say which in [public]")
    return public_origin(recipe), prepared.public


def test_metrics(
    model: nn.Module,
    split: data.Split,
    normaliser: Normaliser | None = None,  # noqa: PT028 (not a test)
    draws: int = 10,  # noqa: PT028
) -> dict[str, float]:
    """Accuracy and mean cross-entropy on a public split, normalised by the run's released statistics.

    A network with companions predicts by majority over `draws` draws of them; its loss is the mean over the draws.
    """
    split = split if normaliser is None else normaliser.apply(split)
    right, total = 0, 0.0
    for rows, outputs in answers(model, split.inputs, draws=draws):
        targets = split.targets[rows]
        right += int((majority(outputs) == targets).sum())
        losses = cross_entropy(outputs.flatten(0, 1), targets.repeat(len(outputs)), reduction="sum")
        total += float(losses) / len(outputs)
    return {"test_accuracy": right / len(split.targets), "test_loss": total / len(split.targets)}


def _with_features(
    dataset: data.Dataset, extract: features.Extractor, say: Callable[[str], None] | None = None
) -> data.Dataset:
    """The records mapped by a public extractor; cached on disk, because it is the same in every run."""
    folder = features.default_folder()
    return replace(
        dataset,
        train=data.Split(extract.cached(dataset.train.inputs, folder, say), dataset.train.targets),
        test=data.Split(extract.cached(dataset.test.inputs, folder, say), dataset.test.targets),
    )
