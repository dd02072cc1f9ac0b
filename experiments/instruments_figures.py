"""Figs. 1, 3, 5a and 7 of Xiao et al. 2023 on a small CNN: what clipping does to the gradient, without noise.

python experiments/instruments_figures.py [--steps 300]

Nothing here is private: the data is the embedded subset of Fashion-MNIST, a public benchmark, and no noise is added.
The paper uses ResNet-20 on CIFAR-10; this script uses the CNN of Liu et al. 2023 with 26,010 parameters, which takes
minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import pages
from provenance import origin
from sordino import data, nets
from sordino.clipping import FlatClip
from sordino.diagnostics.instruments import measure, noise_vectors, p_averaged, windowed_noise
from sordino.gradients import Rows, clipped_sum
from sordino.report.curves import curves_svg
from sordino.report.plots import Series

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "clipping_bias_theory.md"
PUBLIC = "Fashion-MNIST, a public benchmark"
BATCH, ROWS, EVERY, SEED = 256, 500, 15, 0
WINDOWS, WINDOW_RECORDS = (1, 2, 4, 8), 8
GROUPS = (1, 2, 4, 10)


@dataclass(frozen=True)
class Setting:
    """Clipped SGD without noise, on means of p records. Step sizes are proportional to 1/c, so that steps have the same
    length."""

    name: str
    clip_norm: float
    lr: float
    p: int = 1


SETTINGS = (
    Setting("no clipping", 1e30, 0.1),
    Setting("c = 1", 1.0, 0.4),
    Setting("c = 0.1", 0.1, 4.0),
    Setting("c = 1, p = 4", 1.0, 0.4, p=4),
    Setting("c = 1, p = 10", 1.0, 0.4, p=10),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    started = time.process_time()
    dataset = data.load("fashion-mnist-mini")
    runs = {setting.name: train(setting, dataset, steps) for setting in SETTINGS}
    document = {
        **origin(f"python experiments/instruments_figures.py --steps {steps}"),
        "setting": {
            "data": f"fashion-mnist-mini: {len(dataset.train)} records, readings of the first {ROWS}",
            "model": "mnist-cnn, 26,010 parameters", "batch": BATCH, "steps": steps, "seed": SEED,
            "settings": [vars(setting) for setting in SETTINGS],
            "note": "SGD without noise; batches without replacement; not private, public data. One seed.",
        },
        "core_seconds": round(time.process_time() - started, 1),
        "runs": runs,
    }  # fmt: skip
    target = ROOT / "experiments" / "results" / "instruments.json"
    target.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    draw(runs)
    PAGE.write_text(pages.filled(PAGE.read_text("utf8"), blocks(document)), "utf8")
    return 0


def blocks(document: Mapping[str, Any]) -> dict[str, str]:
    """The table of docs/clipping_bias_theory.md: the readings after the last step."""
    rows = []
    for name, run in document["runs"].items():
        last = run["readings"][-1]
        rows.append(
            [
                name,
                f"{last['sampling_noise'] ** 0.5:.3g}",
                f"{last['norm_quantile_0.25']:.2g} / {last['norm_quantile_0.75']:.3g}",
                f"{last.get('clip_cosine', 1):.2f}",
                f"{100 * run['test_accuracy']:.1f}",
            ]
        )
    head = [
        "clipped SGD without noise", "τ of what is clipped", "25 % / 75 % quantile of its norm", "cosine with ∇F",
        "test accuracy, %",
    ]  # fmt: skip
    return {"instruments": pages.table(head, rows)}


def train(setting: Setting, dataset: data.Dataset, steps: int) -> dict[str, Any]:
    """One run with readings during training; the run with c = 1 also provides Figs. 5a and 7."""
    torch.manual_seed(SEED)
    model = nets.build("mnist-cnn", dataset.input_shape, dataset.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=setting.lr)
    some = data.Split(dataset.train.inputs[:ROWS], dataset.train.targets[:ROWS])
    clipping, more = FlatClip(setting.clip_norm), setting == SETTINGS[1]
    generator = torch.Generator().manual_seed(SEED)
    readings, cosines, windows = [], [], []
    recent: list[Tensor] = []
    for step in range(steps + 1):
        ahead = -step % EVERY
        if more and ahead < max(WINDOWS):
            vectors = noise_vectors(model, cross_entropy, some, WINDOW_RECORDS, public=PUBLIC).float()
            recent = [*recent, vectors][-max(WINDOWS) :]
        if ahead == 0:
            grouped = setting.p > 1
            found = (
                p_averaged(model, cross_entropy, some, clipping, setting.p, public=PUBLIC)
                if grouped
                else measure(model, cross_entropy, some, clipping, public=PUBLIC)
            )
            readings.append({"step": step, "loss": found.loss, **found.metrics()})
            if more:
                cosines.append({"step": step, **{str(p): cosine(model, some, clipping, p) for p in GROUPS}})
            if more and len(recent) == max(WINDOWS):
                windows.append({"step": step, **{str(k): windowed_noise(recent, k) for k in WINDOWS}})
        if step < steps:
            update(model, optimizer, setting, dataset, generator)
    accuracy = float((model(dataset.test.inputs).argmax(1) == dataset.test.targets).double().mean())
    return {"readings": readings, "test_accuracy": accuracy, "cosine_by_p": cosines, "noise_by_window": windows}


def update(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    setting: Setting,
    dataset: data.Dataset,
    generator: torch.Generator,
) -> None:
    """A step in the direction of the mean of the clipped means of groups of p records."""
    count = BATCH - BATCH % setting.p
    chosen = torch.randperm(len(dataset.train), generator=generator)[:count]
    rows = Rows(
        dataset.train.inputs[chosen],
        dataset.train.targets[chosen],
        record=torch.arange(count) // setting.p,
        records=count // setting.p,
    )
    sums = clipped_sum(model, cross_entropy, rows, FlatClip(setting.clip_norm), reduction="mean").sums
    for name, parameter in model.named_parameters():
        parameter.grad = (sums[name] / (count // setting.p)).to(parameter.dtype)
    optimizer.step()


def cosine(model: nn.Module, rows: data.Split, clipping: FlatClip, p: int) -> float | None:
    if p == 1:
        return measure(model, cross_entropy, rows, clipping, public=PUBLIC).cosine
    return p_averaged(model, cross_entropy, rows, clipping, p, public=PUBLIC).cosine


def draw(runs: dict[str, Any]) -> None:
    folder = ROOT / "docs" / "figures"
    folder.mkdir(exist_ok=True)
    plain = ("no clipping", "c = 1", "c = 0.1")
    for number, name in enumerate(plain):
        readings = runs[name]["readings"]
        curves = {
            "sampling noise τ": [row["sampling_noise"] ** 0.5 for row in readings],
            "25 % quantile of ‖g‖": [row["norm_quantile_0.25"] for row in readings],
            "75 % quantile of ‖g‖": [row["norm_quantile_0.75"] for row in readings],
            "‖mean gradient‖": [row["gradient_norm"] for row in readings],
        }
        write(folder / f"instruments_fig1{'abc'[number]}.svg", readings, curves, f"Per-record gradients, {name}")
    names = ("c = 1", "c = 1, p = 4", "c = 1, p = 10")
    readings = runs["c = 1"]["readings"]
    noise = {name: [row["sampling_noise"] ** 0.5 for row in runs[name]["readings"]] for name in names}
    write(folder / "instruments_fig3.svg", readings, noise, "Sampling noise τ of what is clipped")
    found = runs["c = 1"]["noise_by_window"]
    over = {f"K₀ = {k}": [row[str(k)] for row in found] for k in WINDOWS}
    write(folder / "instruments_fig5a.svg", found, over, "Norm of the sampling noise averaged over K₀ iterations")
    found = runs["c = 1"]["cosine_by_p"]
    turned = {f"p = {p}": [row[str(p)] for row in found] for p in GROUPS}
    write(folder / "instruments_fig7.svg", found, turned, "Cosine of the clipped and the true gradient")


def write(path: Path, rows: list[dict[str, Any]], curves: dict[str, list[float]], title: str) -> None:
    ends = "; ".join(f"{name} from {values[0]:.3g} to {values[-1]:.3g}" for name, values in curves.items())
    series = Series(title, f"{ends}.", "step", "instruments")
    path.write_text(curves_svg([row["step"] for row in rows], curves, series, from_zero="fig7" not in path.name))


if __name__ == "__main__":
    raise SystemExit(main())
