"""One run of a comparison, in a separate process: `python -m sordino.runs.compare_job KIND DIR [DATA_DIR]`.

DIR contains recipe.toml (for a private run, whose directory run_recipe creates, it is DIR.toml). The outcome is written
as outcome.json; a killed process leaves none, and is started again. It ends with the comparison that started it: no
process is left behind that would hold the run's directory.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from dp_accounting import dp_event
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sordino.accounting.account import epsilon
from sordino.errors import InputError, SordinoError
from sordino.files import json_bytes, write_atomically
from sordino.runs.origin import commit
from sordino.runs.prepared import Prepared, prepare, test_metrics
from sordino.runs.recipe import Recipe
from sordino.runs.results import environment
from sordino.runs.run import run_recipe

KEPT = (
    "test_accuracy", "epsilon", "delta", "relation", "sampler", "noise_multiplier", "steps", "expected_batch",
    "records", "parameters", "environment",
)  # fmt: skip


def carried_out(kind: str, recipe: Recipe, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """The outcome: accuracy, guarantee, core seconds (None for a run that another process started)."""
    started, resumed = time.process_time(), folder.exists()
    found = {"private": _private, "opacus": _opacus, "plain": _plain}[kind](recipe, folder, data_dir)
    return {**found, "core_seconds": None if resumed else round(time.process_time() - started, 1)}


def _private(recipe: Recipe, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    result = run_recipe(recipe, folder, resume=True, data_dir=data_dir, progress=False)
    return {**{key: result.get(key) for key in KEPT}, "seconds": result["seconds"]}


def _plain(recipe: Recipe, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """Minibatches of the expected batch, drawn without replacement in every epoch; no clipping, no noise."""
    prepared = prepare(recipe, data_dir, progress=False)
    rows, steps = prepared.dataset.train, prepared.plan.steps
    size = min(recipe.sampling.expected_batch, len(rows))
    generator = torch.Generator().manual_seed(recipe.run.seed)

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        made = 0
        while made < steps:
            order = torch.randperm(len(rows), generator=generator)
            for at in torch.split(order, size)[: steps - made]:
                yield rows.inputs[at], rows.targets[at]
                made += 1

    model = prepared.model()
    seconds = _steps(model, _optimizer(prepared, model), batches(), prepared)
    return _found(model, prepared, seconds, {"epsilon": None, "noise_multiplier": None, "sampler": "shuffled"})


def _opacus(recipe: Recipe, folder: Path, data_dir: Path | None) -> dict[str, Any]:
    """PrivacyEngine.make_private_with_epsilon with its defaults: Poisson batches, hooks, flat clipping, PRV accountant.

    Batch, number of steps, optimizer, step size, schedule and clip norm are the recipe's; Opacus rounds the number of
    batches in an epoch up, so its batch is a little smaller, and the steps are whole epochs. The recipe's average of
    the iterates is not used: Opacus has none.
    """
    try:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager
    except ImportError:
        raise InputError("Opacus is not installed: pip install opacus, or leave out its rows") from None
    warnings.filterwarnings("ignore")
    prepared = prepare(recipe, data_dir, progress=False)
    rows, plan = prepared.dataset.train, prepared.plan
    model = prepared.model()
    optimizer = _optimizer(prepared, model)
    torch.manual_seed(recipe.run.seed)  # Opacus draws batches and noise from torch's generator
    data = torch.utils.data.TensorDataset(rows.inputs, rows.targets)
    loader = torch.utils.data.DataLoader(data, batch_size=recipe.sampling.expected_batch)
    epochs = max(1, round(plan.steps / len(loader)))
    engine = PrivacyEngine()
    private, private_optimizer, private_loader = engine.make_private_with_epsilon(
        module=model, optimizer=optimizer, data_loader=loader, target_epsilon=recipe.privacy.epsilon,
        target_delta=recipe.privacy.delta, epochs=epochs, max_grad_norm=recipe.clipping.clip_norm,
    )  # fmt: skip
    with BatchMemoryManager(
        data_loader=private_loader, max_physical_batch_size=recipe.train.chunk, optimizer=private_optimizer
    ) as physical:
        seconds = _steps(private, private_optimizer, (some for _ in range(epochs) for some in physical), prepared)
    sigma, steps = float(private_optimizer.noise_multiplier), epochs * len(loader)
    rate = 1 / len(loader)  # Opacus draws each record with this probability: its expected batch is at most the recipe's
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(sigma))
    ours = epsilon(dp_event.SelfComposedDpEvent(event, steps), plan.delta, plan.relation)
    return _found(
        model, prepared, seconds,
        {
            "epsilon": float(engine.get_epsilon(plan.delta)), "our_epsilon": ours, "noise_multiplier": sigma,
            "sampler": "poisson", "steps": steps, "expected_batch": rate * plan.records,
        },
    )  # fmt: skip


def _optimizer(prepared: Prepared, model: nn.Module) -> torch.optim.Optimizer:
    if prepared.optimizer is None:
        raise InputError(f"{prepared.recipe.method.name} has its own update: compare a recipe with an optimizer")
    options: Mapping[str, Any] = prepared.settings.optimizer_options
    make: Callable[..., torch.optim.Optimizer] = prepared.optimizer
    return make(model.parameters(), lr=prepared.recipe.train.lr, **options)


def _steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]], prepared: Prepared
) -> float:
    """One step for each batch, with the recipe's schedule; returns the wall seconds."""
    started = time.monotonic()
    schedule = prepared.settings.scheduler(optimizer) if prepared.settings.scheduler is not None else None
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(model(inputs), targets))
        optimizer.step()
        if schedule is not None and not getattr(optimizer, "_is_last_step_skipped", False):  # Opacus: a part of a batch
            schedule.step()
    return time.monotonic() - started


def _found(model: nn.Module, prepared: Prepared, seconds: float, further: Mapping[str, Any]) -> dict[str, Any]:
    plan = prepared.plan
    model.eval()
    with torch.no_grad():
        measured = test_metrics(model, prepared.dataset.test)
    return {
        **measured, "delta": plan.delta, "relation": plan.relation, "steps": plan.steps,
        "expected_batch": prepared.recipe.sampling.expected_batch, "records": plan.records,
        "parameters": sum(p.numel() for p in model.parameters()), "seconds": round(seconds, 3),
        "environment": environment(), **further,
    }  # fmt: skip


def main(words: list[str]) -> int:
    """Makes one run; errors are written as its outcome."""
    kind, folder, data_dir = words[0], Path(words[1]), Path(words[2]) if len(words) > 2 else None
    recipe = Recipe.read(folder.with_name(folder.name + ".toml"), allow_code=True)
    try:
        found = {**carried_out(kind, recipe, folder, data_dir), "commit": commit()}
    except SordinoError as error:
        found = {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:  # its message may contain private values, and the outcome is stored
        found = {"error": f"{type(error).__name__}; run this recipe by itself to see more"}
    write_atomically(folder.with_name(folder.name + ".outcome.json"), json_bytes(found))
    return 0 if "error" not in found else 1


def end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone: started again, the comparison makes this run again."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)  # as a kill does, from which every run can be resumed

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with(os.getppid())
    torch.set_num_threads(1)
    sys.exit(main(sys.argv[1:]))
