"""The parts of experiments/coupling.py, and one run: its rows, its plan, its training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from resnet18 import resnet18
from sordino import data, features, nets
from sordino.clipping import AutomaticClip, FlatClip
from sordino.errors import InputError
from sordino.methods import coupling
from sordino.methods.coupling import DPMD, AdaMix, Constant, Equation5, LeastError, OnlyPrivate, PublicUse, Rule, WarmUp
from sordino.plan import Plan
from sordino.plan.public import PublicSet, drop_shared_rows, split_public
from sordino.runs.prepared import test_metrics
from sordino.training import Settings, train

EPSILON, DELTA = 2.0, 1e-5
WARM_UP = 2  # the steps on public rows before the others, divided by the number of the others
LOSS = nn.functional.cross_entropy


@dataclass(frozen=True)
class Part:
    """What is trained, and the first step sizes of the search: column → {variant: first step size}."""

    dataset: str
    features: str
    net: str
    epochs: float
    batch: int
    public_batch: int
    first: Mapping[str, Mapping[float, float]]


# Clipped gradients are short and need large step sizes, at which public gradients, which are not clipped, diverge.
# Variants: α of Coupling (−1: equation 5), H of MSE, clip norm of DOPE, K/T of DPMD, directions that AdaMix keeps
# of the last layer's released gradient (0: all of them).
PARTS = {
    "mnist": Part(
        "mnist", "none", "mnist-cnn", 4.0, 500, 100,
        {
            "NonPriv": {0: 0.05}, "OnlyPub": {0: 0.05}, "OnlyPriv": {0: 1.0},
            "AdaMix": {0: 0.05, 5: 0.05}, "DPMD": {1: 0.1, 2: 0.2},
            "OnlyPriv+": {0: 0.25}, "AdaMix+": {0: 0.05, 5: 0.05}, "DPMD+": {1: 0.1, 2: 0.2},
            "DOPE+": {8: 0.025, 2: 0.05},
            "Coupling": {0.03: 0.25, -1: 0.2}, "MSE": {100: 0.05}, "DOPE": {8: 0.05, 2: 0.1, 0.5: 0.2},
            "Coupling+": {0.03: 0.5}, "MSE+": {100: 0.05},
        },
    ),
    "cifar10": Part(
        "cifar10", "efficientnet-lite0", "linear", 10.0, 1000, 200,
        {
            "NonPriv": {0: 0.1}, "OnlyPub": {0: 0.1}, "OnlyPriv": {0: 0.5},
            "AdaMix": {0: 0.1, 5: 0.1}, "DPMD": {1: 0.2, 2: 0.4},
            "OnlyPriv+": {0: 0.4}, "AdaMix+": {0: 0.1, 5: 0.1}, "DPMD+": {1: 0.4, 2: 0.4}, "DOPE+": {4: 0.05, 1: 0.1},
            "Coupling": {0.1: 0.4, -1: 0.2}, "MSE": {100: 0.1, 10: 0.1}, "DOPE": {4: 0.1, 1: 0.1},
            "Coupling+": {0.1: 0.4}, "MSE+": {100: 0.1},
        },
    ),
    "imdb": Part(
        "imdb-texts", "minilm", "linear", 10.0, 1000, 200,
        {
            "NonPriv": {0: 4.0}, "OnlyPub": {0: 4.0}, "OnlyPriv": {0: 4.0},
            "AdaMix": {0: 4.0}, "DPMD": {1: 4.0, 2: 4.0},
            "OnlyPriv+": {0: 4.0}, "AdaMix+": {0: 4.0}, "DPMD+": {1: 4.0, 2: 4.0}, "DOPE+": {0.5: 4.0, 0.1: 4.0},
            "Coupling": {0.1: 4.0, -1: 4.0}, "MSE": {100: 4.0, 10: 4.0}, "DOPE": {0.5: 4.0, 0.1: 4.0},
            "Coupling+": {0.1: 4.0}, "MSE+": {100: 4.0},
        },
    ),
    "cifar10_resnet18": Part(
        "cifar10", "none", "resnet18", 0.5, 500, 100,
        {"OnlyPub": {0: 0.05}, "OnlyPriv+": {0: 0.02}, "Coupling+": {0.1: 0.02, 0.5: 0.05}},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run. `held_out` runs choose settings; the others are the result."""

    part: str
    column: str
    share: float
    lr: float
    variant: float
    seed: int
    epochs: float
    held_out: bool
    redrawn: bool = False  # every seed has other public rows

    @property
    def key(self) -> str:
        return (
            f"{'held-out' if self.held_out else 'test'} {self.column} r_pub={self.share:g} lr={self.lr:g} "
            f"variant={self.variant:g} seed={self.seed} epochs={self.epochs:g}{' redrawn' if self.redrawn else ''}"
        )


@lru_cache(maxsize=1)
def dataset(name: str) -> data.Dataset:
    part = PARTS[name]
    loaded, folder, extract = (
        data.load(part.dataset),
        features.default_folder(),
        features.build({"name": part.features}),
    )
    return replace(
        loaded,
        train=data.Split(extract.cached(loaded.train.inputs, folder), loaded.train.targets),
        test=data.Split(extract.cached(loaded.test.inputs, folder), loaded.test.targets),
    )


@lru_cache(maxsize=4)
def splits(name: str, share: float, held_out: bool, seed: int = 0) -> tuple[data.Split, data.Split, data.Split]:
    """(public rows, private rows, rows to evaluate on). Private rows whose content is public are left out."""
    whole = dataset(name)
    rows, measured = whole.train, whole.test
    if held_out:
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        cut = len(rows) - len(rows) // 12
        rows, measured = (data.Split(rows.inputs[at], rows.targets[at]) for at in (order[:cut], order[cut:]))
    public, private = split_public(rows, fraction=share, seed=seed)
    return public, drop_shared_rows(public, private), measured


def rule_of(job: Job, steps: int) -> Rule:
    match job.column.rstrip("+"):
        case "AdaMix":
            return AdaMix()
        case "DPMD":
            return DPMD(round(job.variant * steps) if job.variant else None)
        case "Coupling":
            return Equation5() if job.variant < 0 else Constant(job.variant)
        case "MSE":
            return LeastError(horizon=job.variant)
        case _:
            return OnlyPrivate()


def network(name: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    return resnet18(shape, classes) if name == "resnet18" else nets.build(name, shape, classes)


def run(job: Job) -> dict[str, Any]:
    part = PARTS[job.part]
    public, private, measured = splits(job.part, job.share, job.held_out, job.seed if job.redrawn else 0)
    torch.manual_seed(job.seed)
    model = network(part.net, tuple(public.inputs.shape[1:]), dataset(job.part).classes)
    started = time.process_time()
    if job.column in ("NonPriv", "OnlyPub", "OnlyPub+"):
        plan, found = None, without_privacy(job, model, public, private)
    else:
        try:
            plan, found = with_privacy(job, model, public, private)
        except InputError as error:
            if "not finite" not in str(error) or not job.held_out:
                raise
            return {**asdict(job), "accuracy": 0.0, "diverged": True, "core_seconds": time.process_time() - started}
    model.eval()
    with torch.no_grad():
        accuracy = test_metrics(model, measured)["test_accuracy"]
    return {
        **asdict(job),
        **found,
        "epsilon": plan.guarantee().epsilon if plan is not None else None,
        "noise_multiplier": plan.noise.noise_multiplier if plan is not None else None,
        "public_records": len(public),
        "private_records": len(private),
        "accuracy": accuracy,
        "core_seconds": round(time.process_time() - started, 1),
    }  # fmt: skip


def without_privacy(job: Job, model: nn.Module, public: data.Split, private: data.Split) -> dict[str, Any]:
    """SGD with the same momentum, schedule and number of steps, on all rows in batches of B or on the public rows."""
    part, rows = PARTS[job.part], public
    if job.column == "NonPriv":
        pairs = ((public.inputs, private.inputs), (public.targets, private.targets))
        rows = data.Split(*(torch.cat(pair) for pair in pairs))
    steps = round(job.epochs * len(private) / part.batch) * (1 + WARM_UP if job.column.endswith("+") else 1)
    size = part.batch if job.column == "NonPriv" else part.public_batch
    optimizer = torch.optim.SGD(model.parameters(), lr=job.lr, momentum=0.9)
    schedule = CosineAnnealingLR(optimizer, T_max=steps)
    generator = torch.Generator().manual_seed(job.seed)
    for _ in range(steps):
        at = torch.randperm(len(rows), generator=generator)[:size]
        optimizer.zero_grad()
        torch.autograd.backward(LOSS(model(rows.inputs[at]), rows.targets[at]))
        optimizer.step()
        schedule.step()
    return {"steps": steps}


def with_privacy(job: Job, model: nn.Module, public: data.Split, private: data.Split) -> tuple[Plan, dict[str, Any]]:
    part, rows = PARTS[job.part], private
    if job.column == "FullPriv":
        pairs = ((public.inputs, private.inputs), (public.targets, private.targets))
        rows = data.Split(*(torch.cat(pair) for pair in pairs))
    steps = round(job.epochs * len(private) / part.batch)
    options: dict[str, Any] = {
        "epsilon": EPSILON, "delta": DELTA, "records": len(rows), "expected_batch": part.batch, "steps": steps,
        "clipping": AutomaticClip(1.0, gamma=1.0), "insecure_seed": job.seed,
    }  # fmt: skip
    settings = Settings(
        optimizer_options={"momentum": 0.9}, scheduler=partial(CosineAnnealingLR, T_max=steps), chunk=1024,
        seed=job.seed, progress=False,
    )  # fmt: skip
    if job.column in ("FullPriv", "OnlyPriv"):
        plan, use = calibrated(None, options), None
    else:
        plain = job.column.rstrip("+")
        if plain == "AdaMix":
            options |= {"clipping": FlatClip(1.0), "quantile": 0.9}
        elif plain == "DOPE":
            options |= {"clipping": FlatClip(job.variant)}
        plan = calibrated(public, options | {"centring": plain == "DOPE"})
        warm_up = WarmUp(WARM_UP * steps, part.first["OnlyPub"][0] / 2) if job.column.endswith("+") else None
        use = PublicUse(
            public, rule=rule_of(job, steps), expected_batch=part.public_batch, warm_up=warm_up, seed=job.seed,
            projection=int(job.variant) or None if plain == "AdaMix" else None,
        )  # fmt: skip
    found = train(model, LOSS, rows, plan, optimizer=torch.optim.SGD, lr=job.lr, settings=settings, public=use)
    last = found.metrics[-1]
    return plan, {"steps": steps} | {key: last[key] for key in ("alpha", "private_scale") if key in last}


_NOISE: dict[tuple[Any, ...], float] = {}


def calibrated(public: data.Split | None, options: Mapping[str, Any]) -> Plan:
    """The plan at ε; its noise is calibrated once for all runs with the same options."""
    shape = tuple(options[key] for key in ("records", "expected_batch", "steps"))
    if shape not in _NOISE:
        plain = {key: value for key, value in options.items() if key not in ("centring", "quantile", "clipping")}
        _NOISE[shape] = Plan.dpsgd(**plain).noise.noise_multiplier
    fixed = {key: value for key, value in options.items() if key != "epsilon"} | {"noise_multiplier": _NOISE[shape]}
    if public is None:
        return Plan.dpsgd(**fixed)
    return coupling.plan(public=PublicSet.of(public, "a random part of the training rows"), **fixed)
