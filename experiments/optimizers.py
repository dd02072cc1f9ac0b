"""Optimizers that claim gains by using released gradients only: low-pass filtering, and scaling before clipping.

    python experiments/optimizers.py --data-dir DIR [--out FILE]

The design is experiments/designs/optimizers.toml, fixed before the runs. Every setting of every optimizer is tried once
on held-out training rows; the best is then trained on all training rows with each seed and measured on the test rows.

*Doppler* (Zhang et al. 2024, arXiv 2408.13460) applies a linear low-pass filter to the released gradients: this is
post-processing for all coefficients.

*Scaled Adam* (Ganesh, McMahan & Thakurta 2025, arXiv 2507.01129, algorithm 8) multiplies each record's gradient by
s = floor/(√v + floor), coordinate by coordinate, *before* clipping, and divides the released gradient by s; v is Adam's
second moment, computed from earlier releases. Its privacy: the map g ↦ clip(s ⊙ g) has norm at most C for every g and
every s, and s is a function of earlier releases only, so given these one record moves the sum by at most C. The
accountants of Poisson sampling and of random allocation are proven for steps that depend on earlier releases
(docs/guarantees), so ε is that of the plan. In this script s ⊙ g is the gradient with respect to u of a model whose
weights are s ⊙ u, so the engine clips it like every gradient. Runs that are already in FILE are not repeated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

import sordino
from provenance import add_run, read_runs
from tasks import Rows, held_out, rows_of

DESIGN = Path(__file__).parent / "designs" / "optimizers.toml"
COMMAND = "python experiments/optimizers.py --data-dir DIR"
Weights = dict[str, Tensor]


class Scaled(nn.Module):
    """One or two linear layers whose weights are scale ⊙ raw; `raw` is trained, `scale` is set between steps."""

    def __init__(self, inputs: int, outputs: int, hidden: int | None, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = [inputs, outputs] if hidden is None else [inputs, hidden, outputs]
        self.layers = len(sizes) - 1
        for k, (a, b) in enumerate(itertools.pairwise(sizes)):
            start = torch.randn(b, a, generator=generator) / math.sqrt(a) if self.layers > 1 else torch.zeros(b, a)
            self.register_parameter(f"weight{k}", nn.Parameter(start))
            self.register_parameter(f"bias{k}", nn.Parameter(torch.zeros(b)))
            self.register_buffer(f"weight{k}_scale", torch.ones(b, a))
            self.register_buffer(f"bias{k}_scale", torch.ones(b))

    def forward(self, x: Tensor) -> Tensor:
        for k in range(self.layers):
            if k:
                x = torch.tanh(x)
            weight = getattr(self, f"weight{k}") * getattr(self, f"weight{k}_scale")
            x = linear(x, weight, getattr(self, f"bias{k}") * getattr(self, f"bias{k}_scale"))
        return x

    def weights(self) -> Weights:
        """The weights themselves."""
        return {name: p.detach() * getattr(self, f"{name}_scale") for name, p in self.named_parameters()}

    @torch.no_grad()
    def set_weights(self, weights: Weights, scales: Weights) -> None:
        """Sets the weights and the scales of the next step."""
        for name, p in self.named_parameters():
            getattr(self, f"{name}_scale").copy_(scales[name])
            p.copy_(weights[name] / scales[name])


class Adam:
    """m̂/(√v̂ + eps), with Adam's bias correction."""

    def __init__(self, eps: float) -> None:
        self.eps, self.t = eps, 0
        self.m: Weights = {}
        self.v: Weights = {}

    def direction(self, gradients: Weights) -> Weights:
        self.t += 1
        found = {}
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m.get(name, torch.zeros_like(g)) + 0.1 * g
            self.v[name] = 0.999 * self.v.get(name, torch.zeros_like(g)) + 0.001 * g**2
            found[name] = self.m[name] / (1 - 0.9**self.t) / (self.root(name) + self.eps)
        return found

    def root(self, name: str) -> Tensor:
        """√v̂."""
        return (self.v[name] / (1 - 0.999**self.t)).sqrt()


class Momentum:
    """m ← 0.9·m + g."""

    def __init__(self) -> None:
        self.m: Weights = {}

    def direction(self, gradients: Weights) -> Weights:
        self.m = {name: 0.9 * self.m.get(name, torch.zeros_like(g)) + g for name, g in gradients.items()}
        return self.m


class LowPass:
    """m_t = 0.9·m_{t−1} + 0.05·(g_t + g_{t−1}), divided by the same filter of the sequence 1, 1, …"""

    def __init__(self) -> None:
        self.m: Weights = {}
        self.last: Weights = {}
        self.weight, self.before = 0.0, 0.0

    def filtered(self, gradients: Weights) -> Weights:
        zero = {name: torch.zeros_like(g) for name, g in gradients.items()}
        m, last = self.m or zero, self.last or zero
        self.m = {name: 0.9 * m[name] + 0.05 * (g + last[name]) for name, g in gradients.items()}
        self.weight = 0.9 * self.weight + 0.05 * (1 + self.before)
        self.last, self.before = gradients, 1.0
        return {name: value / self.weight for name, value in self.m.items()}


class Rule:
    """One optimizer of the design with one setting."""

    def __init__(self, name: str, setting: Mapping[str, float], noise: float) -> None:
        self.lr, self.floor = setting["lr"], setting.get("floor", 0.0) * noise
        self.low_pass = LowPass() if name.startswith("doppler") else None
        self.adam = Adam(setting.get("eps", 1e-5) * noise) if "adam" in name else None
        self.momentum = Momentum() if name == "momentum" else None

    def move(self, model: Scaled, released: Weights) -> None:
        """Makes one step from a released gradient with respect to the raw weights."""
        gradients = {name: g.float() / getattr(model, f"{name}_scale") for name, g in released.items()}
        filtered = self.low_pass.filtered(gradients) if self.low_pass else gradients
        base = self.adam or self.momentum
        direction = base.direction(filtered) if base else filtered
        weights = {name: w - self.lr * direction[name] for name, w in model.weights().items()}
        scales = {name: torch.ones_like(w) for name, w in weights.items()}
        if self.floor and self.adam:
            scales = {name: self.floor / (self.adam.root(name) + self.floor) for name in weights}
        model.set_weights(weights, scales)


def plan_of(design: Mapping[str, Any], records: int) -> sordino.Plan:
    return sordino.dpsgd(
        records=records, expected_batch=records / design["batches"], epochs=design["epochs"],
        epsilon=design["epsilon"], delta=design["delta"], sampling=design["sampling"],
    )  # fmt: skip


def per_row(outputs: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(outputs, targets, reduction="none")


def accuracy(
    plan: sordino.Plan, train: Rows, test: Rows, rule: tuple[str, Mapping[str, float]], seed: int, hidden: int | None
) -> float:
    """The accuracy on the test rows after a private run."""
    model = Scaled(train[0].shape[1], int(train[1].max()) + 1, hidden, seed)
    name, setting = rule
    moved = Rule(name, setting, plan.noise.noise_multiplier / plan.divisor)
    gradient_sum = sordino.record_gradients(model, per_row, train, plan.clipping)
    with sordino.Ledger.open(None, plan.to_dict()) as ledger:
        steps = sordino.private_steps(
            plan, gradient_sum, records=len(train[1]), source=plan.source(), ledger=ledger, chunk=4096
        )
        for step in steps:
            moved.move(model, step.gradients)
    with torch.no_grad():
        outputs = model(test[0])
    return float((outputs.argmax(1) == test[1]).double().mean())


def settings_of(optimizer: Mapping[str, Any]) -> list[dict[str, float]]:
    names = [name for name in optimizer if name != "control"]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(optimizer[n] for n in names))]


def run(design: Mapping[str, Any], task: str, optimizer: str, folder: Path) -> dict[str, Any]:
    """One row: tuned on held-out training rows, then measured on the test rows."""
    described = design["tasks"][task]
    train, test = rows_of(described, folder)
    most, rest = held_out(train, design["held_out"])
    hidden = described.get("hidden")
    tuning, plan = plan_of(design, len(most[1])), plan_of(design, len(train[1]))
    settings = settings_of(design["optimizers"][optimizer])
    tried = [accuracy(tuning, most, rest, (optimizer, setting), 0, hidden) for setting in settings]
    best = settings[max(range(len(tried)), key=lambda k: tried[k])]
    found = [accuracy(plan, train, test, (optimizer, best), seed, hidden) for seed in range(design["seeds"])]
    return {
        "task": task, "optimizer": optimizer, "setting": best, "epsilon": plan.guarantee().epsilon,
        "delta": plan.delta, "relation": plan.relation, "noise_multiplier": plan.noise.noise_multiplier,
        "records": len(train[1]), "steps": plan.steps,
        "held_out": [{**setting, "accuracy": value} for setting, value in zip(settings, tried, strict=True)],
        "accuracies": found, "accuracy": statistics.mean(found), "spread": statistics.stdev(found),
    }  # fmt: skip


def table(design: Mapping[str, Any], runs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each task and optimizer, with its difference from its control in standard errors."""
    rows = []
    for task in design["tasks"]:
        for name, optimizer in design["optimizers"].items():
            found = runs.get(f"{task}, {name}")
            if found is None:
                continue
            row = {key: found[key] for key in ("task", "optimizer", "accuracy", "spread", "setting")}
            control = runs.get(f"{task}, {optimizer.get('control')}")
            if control is not None:
                error = math.hypot(found["spread"], control["spread"]) / math.sqrt(design["seeds"])
                gain = found["accuracy"] - control["accuracy"]
                row |= {"control": optimizer["control"], "gain": gain, "standard_errors": gain / max(error, 1e-9)}
            rows.append(row)
    return rows


def verdicts(design: Mapping[str, Any], rows: list[dict[str, Any]]) -> dict[str, str]:
    """The design's rule, applied."""
    found = {}
    for name, optimizer in design["optimizers"].items():
        errors = [row["standard_errors"] for row in rows if row["optimizer"] == name and "standard_errors" in row]
        if "control" in optimizer and len(errors) == len(design["tasks"]):
            kept = sum(e > 2 for e in errors) >= 2 and min(errors) > -2
            found[name] = "kept" if kept else "not kept"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "optimizers.json")
    arguments = parser.parse_args()
    design = tomllib.loads(DESIGN.read_text(encoding="utf8"))

    def shown(runs: dict[str, Any]) -> dict[str, Any]:
        rows = table(design, runs)
        return {"rows": rows, "verdicts": verdicts(design, rows), "design": design}

    for task in design["tasks"]:
        for optimizer in design["optimizers"]:
            label = f"{task}, {optimizer}"
            if label in read_runs(arguments.out):
                continue
            row = run(design, task, optimizer, arguments.data_dir)
            add_run(arguments.out, COMMAND, label, row, shown)
            print(f"{label}: {row['accuracy']:.4f} ± {row['spread']:.4f}, {row['setting']}", flush=True)
    print(json.dumps(json.loads(arguments.out.read_text(encoding="utf8"))["table"]["verdicts"]))


if __name__ == "__main__":
    main()
