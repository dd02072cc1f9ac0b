"""A recipe, carried out into a run directory.

    recipe.toml        the recipe, all defaults filled in
    ledger.jsonl       every release, written before its value existed
    metrics.jsonl      ε and test metrics over the steps
    model.safetensors  the published weights
    result.json        the guarantee and the figures
    report.html        the page a reviewer reads
    not_private.json   for the data's owner only; no guarantee covers it

Everything that can be wrong with the input is found before the directory is made.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

import sordino
from sordino import data, features, nets, report
from sordino.batchclipping import answers, companion_model, majority
from sordino.building import (
    PLANS,
    check_companions,
    clipping_of,
    one_of,
    optimizer_of,
    private_normalisation,
    private_records,
    public_origin,
    public_size,
    public_use,
    settings_of,
    statistics_of,
)
from sordino.errors import InputError
from sordino.features.private import Normaliser
from sordino.hidden.recipe import plan_from_recipe
from sordino.hidden.training import train_hidden
from sordino.instruments import Schedule, Watch
from sordino.instruments.watch import check_watched, source_of_rows
from sordino.methods import Coupling, HiddenState
from sordino.plan import Plan
from sordino.progress import working
from sordino.public import PublicSet, drop_shared_rows, refuse_shared_rows, split_public
from sordino.recipe import Recipe
from sordino.state import model_tensors, write_atomically
from sordino.training import Result, Settings, train, train_without_noise


@dataclass(frozen=True)
class Prepared:
    """Everything a run needs, checked and in memory; nothing has been written."""

    recipe: Recipe
    dataset: data.Dataset
    plan: Plan
    settings: Settings
    optimizer: type[torch.optim.Optimizer] | None  # None: the plan brings the update
    public: data.Split | None = None  # rows that were set aside; `dataset.train` holds the others

    def model(self) -> nn.Module:
        """A fresh model, initialised from the recipe's public seed."""
        section = self.recipe.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.run.seed)
            shape = tuple(self.dataset.train.inputs.shape[1:])
            net = nets.build(section.name, shape, self.dataset.classes, self.dataset.vectors, **section.options)
        if not self.recipe.batch_clipping.given:
            return net
        assert self.public is not None
        return companion_model(net, self.public, self.recipe.batch_clipping.companions)

    def normaliser(self, out: Path | None) -> Normaliser | None:
        """What makes the private statistics of this run, where the recipe asks for some."""
        settings = private_normalisation(self.recipe)
        return Normaliser(settings, self.plan, out) if settings is not None else None


def run_recipe(
    recipe: Recipe,
    out: Path,
    *,
    resume: bool = False,
    data_dir: Path | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Trains as the recipe says, writes the run directory, and returns what result.json holds.

    A run that is complete already is not made again: with `resume` its result is returned as it stands.
    """
    if (done := _earlier_result(recipe, out, resume)) is not None:
        return done
    private_records(recipe)  # public rows under a method that would not look at them are refused here
    check_watched(recipe)
    check_companions(recipe)
    if recipe.method.name == "dp-mac":  # its networks, features and pictures are its own
        from sordino.mac.run import run_mac

        return run_mac(recipe, out, resume=resume, data_dir=data_dir, progress=progress)
    prepared = prepare(recipe, data_dir, progress)
    model = prepared.model()
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "recipe.toml", recipe.to_toml().encode())
    fit = partial(_fit, prepared, prepared.normaliser(out))
    try:
        result = fit(_trainer(prepared.plan), model, out=out, resume=resume)
    except InputError:
        _take_back(out)
        raise
    noise_free = fit(train_without_noise, prepared.model()) if recipe.run.noise_free else None
    return _write_results(prepared, result, noise_free, out)


def prepare(recipe: Recipe, data_dir: Path | None = None, progress: bool | None = None) -> Prepared:
    """Checks the recipe against what there is, and loads the data."""
    make_plan = one_of(PLANS, recipe.method.name, "method.name")
    optimizer = optimizer_of(recipe)
    clipping = clipping_of(recipe)
    if recipe.instruments.given:
        check_watched(recipe)
        source_of_rows(recipe)  # rows that nobody declared public are refused before anything is read
    records = private_records(recipe)
    check_companions(recipe)
    late = recipe.method.name == HiddenState.name  # its guarantee depends on the number of features
    plan = None if late else make_plan(recipe, clipping, records)
    settings = settings_of(recipe, optimizer, plan.steps if plan else 1, progress)
    extract = features.build({"name": recipe.features.name, **recipe.features.options}, data_dir)
    with working(f"reading {recipe.data.name} and computing its features (kept for the next run)", progress) as say:
        raw = data.load(recipe.data.name, data_dir)
        dataset = _with_features(raw, extract, say)
    public = None
    if plan is not None and recipe.public.given:
        public, private = set_aside(recipe, raw.train, dataset.train)
        dataset = replace(dataset, train=private)
        plan = replace(plan, public=PublicSet.of(public, public_origin(recipe)))
    if plan is None:
        width = dataset.train.inputs[0].numel()
        plan = plan_from_recipe(recipe, records, width, dataset.classes, statistics_of(recipe))
    prepared = Prepared(recipe, dataset, plan, settings, optimizer, public)
    prepared.model()  # a wrong option of the net is found here
    return prepared


def set_aside(recipe: Recipe, raw: data.Split, seen: data.Split) -> tuple[data.Split, data.Split]:
    """(public, private) rows of the training split as the model sees them; InputError where the two share content.

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


def _trainer(plan: Plan) -> Callable[..., Result]:
    """`train`, or what stands in its place: hidden-state plans make their own model and update."""
    if not isinstance(plan.method, HiddenState):
        return train

    def hidden(model: nn.Module, loss: object, dataset: Any, plan: Plan, **options: Any) -> Result:
        settings, _, _ = options.pop("settings"), options.pop("optimizer"), options.pop("lr")
        return train_hidden(plan, dataset, progress=settings.progress, **options)

    return hidden


def _fit(
    prepared: Prepared, normaliser: Normaliser | None, trainer: Callable[..., Result], model: nn.Module, **options: Any
) -> Result:
    train_split, further = prepared.dataset.train, dict(options)
    if normaliser is not None and trainer is train_without_noise:
        train_split = normaliser.apply(train_split)
    elif normaliser is not None:
        further["first"] = normaliser.first
    if trainer is not train_without_noise and prepared.recipe.instruments.given:
        further["watch"] = _watch(prepared, normaliser)
    if isinstance(prepared.plan.method, Coupling):
        further["public"] = public_use(prepared.recipe, prepared.public)
    return trainer(
        model,
        nn.functional.cross_entropy,
        train_split,
        prepared.plan,
        optimizer=prepared.optimizer,
        lr=prepared.recipe.train.lr,
        settings=prepared.settings,
        evaluate=partial(
            test_metrics,
            split=prepared.dataset.test,
            normaliser=normaliser,
            draws=prepared.recipe.batch_clipping.draws,
        ),
        **further,
    )


def _watch(prepared: Prepared, normaliser: Normaliser | None) -> Watch:
    """The instruments of [instruments], on the rows that it names as the model sees them."""
    recipe, section = prepared.recipe, prepared.recipe.instruments
    origin, split = watched_rows(prepared)
    some = data.Split(split.inputs[: section.rows], split.targets[: section.rows])
    return Watch(
        Schedule(section.every or 1, section.window),
        nn.functional.cross_entropy,
        lambda: some if normaliser is None else normaliser.apply(some),
        prepared.plan.clipping,
        public=origin,
        not_private=origin is None,
        views=getattr(prepared.plan.method, "augmentation", None),
        seed=recipe.run.seed,
    )


def watched_rows(prepared: Prepared) -> tuple[str | None, data.Split]:
    """(where they are from, the rows): None for private ones, which [instruments] not_private asks for."""
    recipe = prepared.recipe
    source = source_of_rows(recipe)
    if source == "train":
        return None, prepared.dataset.train
    if source == "test":
        return f"the test split of {recipe.data.name}, which the recipe takes to be public", prepared.dataset.test
    assert prepared.public is not None
    return public_origin(recipe), prepared.public


def test_metrics(
    model: nn.Module,
    split: data.Split,
    normaliser: Normaliser | None = None,  # noqa: PT028 (not a test)
    draws: int = 10,  # noqa: PT028
) -> dict[str, float]:
    """Accuracy and mean cross-entropy on a public split, seen through the run's released statistics.

    A network with companions answers by majority over `draws` draws of them; its loss is the mean over the draws.
    """
    split = split if normaliser is None else normaliser.apply(split)
    right, total = 0, 0.0
    for rows, outputs in answers(model, split.inputs, draws=draws):
        targets = split.targets[rows]
        right += int((majority(outputs) == targets).sum())
        losses = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.repeat(len(outputs)), reduction="sum")
        total += float(losses) / len(outputs)
    return {"test_accuracy": right / len(split.targets), "test_loss": total / len(split.targets)}


def _earlier_result(recipe: Recipe, out: Path, resume: bool) -> dict[str, Any] | None:
    """What an earlier, complete run of the same recipe in `out` found; None when there is work to do."""
    earlier = out / "recipe.toml"
    if not earlier.exists():
        if out.exists() and any(out.iterdir()):
            raise InputError(f"{out} is not empty and holds no run: give another directory with --out")
        return None
    if not resume:
        raise InputError(f"{out} holds a run already: go on with --resume, or give another directory with --out")
    if Recipe.read(earlier) != recipe:
        raise InputError(
            f"{earlier} is not the recipe given: resume with the same one, or give another directory with --out"
        )
    finished = out / "result.json"
    if not finished.exists():
        return None
    if not (out / "report.html").exists():
        report.write(out)
    document: dict[str, Any] = json.loads(finished.read_text(encoding="utf8"))
    return document


def _take_back(out: Path) -> None:
    """The input was wrong after all: if nothing has been released, nothing stays behind."""
    if not (out / "ledger.jsonl").exists():
        (out / "recipe.toml").unlink()
        if not any(out.iterdir()):
            out.rmdir()


def _with_features(
    dataset: data.Dataset, extract: features.Extractor, say: Callable[[str], None] | None = None
) -> data.Dataset:
    """The same records seen through a public extractor; kept on disk, for it is the same every time."""
    folder = features.default_folder()
    return replace(
        dataset,
        train=data.Split(extract.cached(dataset.train.inputs, folder, say), dataset.train.targets),
        test=data.Split(extract.cached(dataset.test.inputs, folder, say), dataset.test.targets),
    )


def _write_results(prepared: Prepared, result: Result, noise_free: Result | None, out: Path) -> dict[str, Any]:
    """model.safetensors, result.json, report.html, in this order; then the checkpoints may go."""
    assert result.guarantee is not None
    recipe, plan, guarantee = prepared.recipe, prepared.plan, result.guarantee
    weights = {name: tensor.detach().contiguous() for name, tensor in model_tensors(result.model).items()}
    write_atomically(out / "model.safetensors", save(weights))
    document = {
        "name": recipe.run.name,
        "method": plan.method.name,
        **{key: getattr(guarantee, key) for key in ("epsilon", "delta", "relation", "sampler", "accountant")},
        **guarantee.beside,
        "theorem": guarantee.theorem,
        "secure": guarantee.secure,
        "guarantee": {"sentence": str(guarantee), **guarantee.to_dict()},
        "test_accuracy": result.metrics[-1]["test_accuracy"],
        "noise_free_accuracy": noise_free.metrics[-1]["test_accuracy"] if noise_free else None,
        "seconds": round(result.seconds, 3),
        "seed": recipe.run.seed,
        "insecure_seed": plan.insecure_seed,
        "steps": plan.steps,
        "skipped_steps": result.skipped_steps,
        "records": plan.records,
        "public": plan.public.to_dict() if plan.public is not None else None,
        "expected_batch": plan.expected_batch,
        "noise_multiplier": plan.noise.noise_multiplier,
        "parameters": sum(p.numel() for p in result.model.parameters() if p.requires_grad),
        "environment": environment(),
    }
    if isinstance(plan.method, HiddenState):
        document["certificate"] = plan.method.certificate.to_dict()
    if recipe.batch_clipping.given:
        document["batch_clipping"] = {
            "companions": recipe.batch_clipping.companions,
            "draws": recipe.batch_clipping.draws,
            "seed": recipe.run.seed,
            "public_rows": "in model.safetensors, as `public`: predictions need them",
        }
    if result.histogram is not None:
        write_atomically(out / "histogram.json", _json(result.histogram.to_dict()))
    write_atomically(out / "not_private.json", _json({"warning": NOT_PRIVATE, **result.not_private}))
    write_atomically(out / "result.json", _json(document))
    report.write(out)
    shutil.rmtree(out / "checkpoint", ignore_errors=True)
    return document


NOT_PRIVATE = "computed from the private records without noise; no guarantee covers this file: do not publish it"


def environment() -> dict[str, str | int]:
    """What the figures were measured with."""
    return {
        "sordino": sordino.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()
