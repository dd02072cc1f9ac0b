"""Two items of Xiao, Wan & Devadas 2022 (ModelMix) at a size for two cores: Algorithm 2 and Fig. 2; one JSON file.

    python experiments/modelmix_variants.py [--seeds 0 1 2]

Fashion-MNIST, the small CNN on scattering features, 60 steps with batches of 4,096, c = 0.1, η = 64, true Poisson
sampling, add-remove, δ = 1e-5. These are the settings that experiments/modelmix.py chose for mixing on held-out rows;
nothing is tuned here. The arms:

    p = 1, p = 25, p = 100   ModelMix at ε = 1, half of the noise's variance uniform; coordinates are truncated at c/√p
                             (Algorithm 2), for which the uniform noise costs less (Cor. 4.1)
    no mixing                Fig. 2: plain descent with only the Gaussian noise of the arm p = 1
    mean of two              the same noise, descending from the mean of the last two iterates: mixing without its noise

The last two have less noise than p = 1 and therefore a larger ε, which the file states: Fig. 2 compares at equal
Gaussian noise. The paper's setting, ResNet-20 on CIFAR-10, would take hours for each curve.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from modelmix import splits
from provenance import add_run, read_runs
from sordino import nets
from sordino.clipping import FlatClip, L2LinfClip
from sordino.methods import modelmix
from sordino.plan import Plan
from sordino.runs.prepared import test_metrics
from sordino.training import Settings, train
from sordino.training.updates import AveragingSGD

EPSILON, DELTA, BATCH, STEPS, CLIP, RATE, EVERY = 1.0, 1e-5, 4096, 60, 0.1, 64.0, 6
TRUNCATED = {"p = 1": 1.0, "p = 25": 25.0, "p = 100": 100.0}
ARMS = ("p = 1", "no mixing", "mean of two", "p = 25", "p = 100")  # in this order: truncated arms take longest
COMMAND = "python experiments/modelmix_variants.py"


def common(seed: int, records: int) -> dict[str, Any]:
    return {"delta": DELTA, "records": records, "insecure_seed": seed, "expected_batch": BATCH, "steps": STEPS}


def mixed(p: float, seed: int, records: int) -> Plan:
    """The ModelMix plan at ε whose uniform noise has the standard deviation of its Gaussian noise."""
    options = common(seed, records) | {"clipping": L2LinfClip(CLIP, p) if p > 1 else FlatClip(CLIP)}

    def at(sigma: float) -> Plan:
        tau = sigma * 12**0.5 * CLIP / BATCH
        return modelmix.plan(noise_multiplier=sigma, tau_over_lr=tau, lr=RATE, **options)

    high = Plan.dpsgd(epsilon=EPSILON, clip_norm=CLIP, **common(seed, records)).noise.noise_multiplier
    low = high / 8
    for _ in range(12):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if at(middle).guarantee().epsilon <= EPSILON else (middle, high)
    return at(high)


def make_plan(arm: str, seed: int, records: int) -> Plan:
    if arm in TRUNCATED:
        return mixed(TRUNCATED[arm], seed, records)
    sigma = mixed(1.0, seed, records).noise.noise_multiplier
    return Plan.dpsgd(noise_multiplier=sigma, clip_norm=CLIP, **common(seed, records))


def run(arm: str, seed: int) -> dict[str, Any]:
    records, images = splits(False)
    plan = make_plan(arm, seed, len(records))
    torch.manual_seed(seed)
    model = nets.build("scatter-cnn", tuple(records.inputs.shape[1:]), 10)
    optimizer: dict[str, Any] = {} if arm in TRUNCATED else {
        "optimizer": torch.optim.SGD if arm == "no mixing" else AveragingSGD, "lr": RATE,
    }  # fmt: skip
    found = train(
        model, nn.functional.cross_entropy, records, plan, **optimizer,
        settings=Settings(chunk=1024, seed=seed, progress=False, eval_every=EVERY),
        evaluate=lambda m: test_metrics(m, images),
    )  # fmt: skip
    if found.guarantee is None:
        raise SystemExit("the run has no guarantee")
    seen = [row for row in found.metrics if "test_accuracy" in row]
    return {
        "arm": arm, "seed": seed, "epsilon": found.guarantee.epsilon, "delta": DELTA,
        "relation": found.guarantee.relation, "beside": dict(found.guarantee.beside), "steps": STEPS, "lr": RATE,
        "noise_multiplier": plan.noise.noise_multiplier, "clipping": plan.clipping.to_dict(),
        "curve": [[int(row["step"]), row["test_accuracy"]] for row in seen], "accuracy": seen[-1]["test_accuracy"],
        "seconds": round(found.seconds, 1),
    }  # fmt: skip


def table(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Mean and standard deviation over the seeds for each arm, with its ε and noise."""
    rows = []
    for arm in ARMS:
        own = [r for r in runs.values() if r["arm"] == arm]
        if own:
            reached = [r["accuracy"] for r in own]
            rows.append(
                {
                    "arm": arm,
                    "epsilon": own[0]["epsilon"],
                    "noise_multiplier": own[0]["noise_multiplier"],
                    "mean": statistics.fmean(reached),
                    "spread": statistics.stdev(reached) if len(reached) > 1 else None,
                    "seeds": len(reached),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "modelmix_variants.json")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in given.seeds:
        for arm in ARMS:
            key = f"{arm} seed={seed}"
            if key not in read_runs(given.out):
                runs = add_run(given.out, COMMAND, key, run(arm, seed), table)
                print(f"{key}: {runs[key]['accuracy']:.2%}, {runs[key]['seconds']} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
