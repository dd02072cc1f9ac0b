"""Searches for settings of a softmax layer on fixed features, on held-out *training* rows; one JSON file, resumable.

    python experiments/heads.py RECIPE.toml --name NAME --held-out 10000 --over "epsilon=1,3 lr=3000,6000 steps=100"

The features are the recipe's, read from the cache. A record's gradient is (p − y) ⊗ (x, 1), so its norm is known in
closed form and a trial consists of a few matrix products: it computes what `sordino train` does, without ledger, engine
and checks. Batches are slices of the rows in random order, with the expected size, instead of Poisson samples; the
noise has the plan's multiplier and is drawn by torch. With whiten > 0 the rows are first whitened by their second
moment, whose release has that noise multiplier and belongs to the plan ([features] private = "whiten"). So a trial can
only be used to choose settings: test rows are not read, and the reported accuracies come from `sordino train`.

What the search would cost: the rows here are public. On private rows every trial would be a run: k trials at (ε, δ)
cost about √k·ε if all results are used (the file says how many trials were made); `sordino sweep --pay` chooses for two
to three times ε.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from provenance import COMMIT, origin
from sordino.features.moment import from_triangle, second_moment, triangle
from sordino.features.private import PrivateNormalisation, shortening, whitened
from sordino.files import write_atomically
from sordino.plan import Plan
from sordino.runs.prepared import prepare
from sordino.runs.recipe import Recipe

DEFAULTS = {
    "epsilon": 3.0,
    "batch": 8192,
    "steps": 100,
    "clip": 0.01,
    "lr": 6000.0,
    "average": 0.95,
    "cosine": 0.0,
    "whiten": 0.0,
    "seed": 0,
}
MOMENTUM, DELTA = 0.9, 1e-5


@cache
def noise_of(epsilon: float, records: int, batch: int, steps: int, whiten: float = 0.0) -> float:
    """The noise multiplier of the plan; 0 if ε is 0, which stands for no privacy."""
    if not epsilon:
        return 0.0
    plan = Plan.dpsgd(
        epsilon=epsilon, delta=DELTA, records=records, expected_batch=batch, steps=steps, clip_norm=1.0,
        statistics=[PrivateNormalisation("whiten", whiten, 1.0).statistic()] if whiten else [],
    )  # fmt: skip
    return plan.noise.noise_multiplier


class Whitening:
    """Rows whitened by the second moment of the first `cut` of them, with noise; the last one made is kept."""

    def __init__(self, rows: Tensor, cut: int) -> None:
        self.rows, self.cut, self.kept = rows, cut, (0.0, rows)
        self.moment: Tensor | None = None

    def __call__(self, noise: float) -> Tensor:
        if self.kept[0] != noise:
            self.kept = (noise, self._made(noise) if noise else self.rows)
        return self.kept[1]

    def _made(self, noise: float) -> Tensor:
        if self.moment is None:
            self.moment = second_moment(self.rows[: self.cut], 1.0)
        upper = triangle(self.moment)
        noisy = upper + noise * torch.randn(upper.shape, generator=torch.Generator().manual_seed(0), dtype=upper.dtype)
        found = shortening(from_triangle(noisy), noise)
        return whitened(self.rows, found["directions"], found["factors"])


def trained(
    rows: Tensor, targets: Tensor, classes: int, setting: dict[str, Any], sigma: float | None = None
) -> tuple[Tensor, float]:
    """(weights (d + 1, classes), noise multiplier) of clipped, noisy momentum SGD with an average of the iterates; with
    ``cosine`` the step size falls to 0 along half a cosine.

    sigma: a noise multiplier that replaces that of a plan for these rows.
    """
    batch, steps, clip = int(setting["batch"]), int(setting["steps"]), setting["clip"]
    if sigma is None:
        sigma = noise_of(setting["epsilon"], len(rows), batch, steps, setting.get("whiten", 0.0))
    generator = torch.Generator().manual_seed(int(setting["seed"]))
    wanted = torch.nn.functional.one_hot(targets, classes).float()
    lengths = rows.square().sum(1) + 1
    weights, momentum, average = (torch.zeros(rows.shape[1] + 1, classes) for _ in range(3))
    for step in range(steps):
        at = int(torch.randint(0, len(rows) - batch + 1, (1,), generator=generator))
        x = rows[at : at + batch]
        error = torch.softmax(x @ weights[:-1] + weights[-1], 1) - wanted[at : at + batch]
        norms = (error.square().sum(1) * lengths[at : at + batch]).sqrt()
        error *= (clip / norms.clamp(min=clip))[:, None]
        total = torch.cat([(error.T @ x).T, error.sum(0, keepdim=True)])  # ten times as fast as x.T @ error
        total += sigma * clip * torch.randn(total.shape, generator=generator)
        momentum = MOMENTUM * momentum + total / batch
        rate = (1 + math.cos(math.pi * step / steps)) / 2 if setting.get("cosine") else 1.0
        weights = weights - setting["lr"] * rate * momentum
        average = setting["average"] * average + (1 - setting["average"]) * weights
    return average / (1 - setting["average"] ** steps), sigma


def rows_of(recipe: Recipe, held_out: int, data_dir: Path | None) -> tuple[Tensor, Tensor, int]:
    """The features of the training rows in random order (public seed); the last `held_out` ones are for evaluation."""
    prepared = prepare(recipe, data_dir, progress=False)
    split = prepared.dataset.train
    order = torch.randperm(len(split), generator=torch.Generator().manual_seed(5))
    return split.inputs.flatten(1)[order].contiguous(), split.targets[order], prepared.dataset.classes


def grid(text: str) -> list[dict[str, Any]]:
    """Settings from "key=v1,v2 key=v3": every combination, with defaults for the other keys."""
    axes = [(key, [float(v) for v in values.split(",")]) for key, _, values in (w.partition("=") for w in text.split())]
    unknown = [key for key, _ in axes if key not in DEFAULTS]
    if unknown:
        raise SystemExit(f"unknown setting {unknown[0]!r}: known are {', '.join(DEFAULTS)}")
    names = [key for key, _ in axes]
    return [DEFAULTS | dict(zip(names, values, strict=True)) for values in product(*(v for _, v in axes))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--name", required=True, help="of the result file: heads_NAME.json")
    parser.add_argument("--held-out", type=int, default=10_000)
    parser.add_argument("--over", action="append", default=[], required=True, metavar='"key=v1,v2 …"')
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--data-dir", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(__file__).parent / "results" / f"heads_{given.name}.json"
    trials: dict[str, Any] = json.loads(path.read_text(encoding="utf8"))["trials"] if path.exists() else {}
    label = " ".join([given.recipe.name, *given.set])
    waiting = {f"{label}: {json.dumps(s)}": s for text in given.over for s in grid(text)}
    waiting = {key: setting for key, setting in waiting.items() if key not in trials}
    if not waiting:
        return 0
    rows, targets, classes = rows_of(Recipe.read(given.recipe, given.set), given.held_out, given.data_dir)
    cut = len(rows) - given.held_out
    whitening = Whitening(rows, cut)
    for key, setting in waiting.items():
        started = time.process_time()
        rows = whitening(setting["whiten"])
        weights, sigma = trained(rows[:cut], targets[:cut], classes, setting)
        right = (rows[cut:] @ weights[:-1] + weights[-1]).argmax(1) == targets[cut:]
        trials[key] = {
            **setting, "recipe": label, "held_out_accuracy": float(right.float().mean()), "noise_multiplier": sigma,
            "core_seconds": round(time.process_time() - started, 1), "commit": COMMIT,
        }  # fmt: skip
        command = f"python experiments/heads.py {given.recipe.as_posix()} --name {given.name} --over …"
        document = {
            **origin(command), "note": f"judged on {given.held_out} held-out training rows; test rows were not read",
            "held_out": given.held_out, "trained_on": cut, "trials": trials,
        }  # fmt: skip
        write_atomically(path, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        print(f"{trials[key]['held_out_accuracy']:.4f} {setting} {trials[key]['core_seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
