"""Experiments with DP-MAC: one JSON file, written after every run; runs that are already in it are not repeated.

    python experiments/mac.py --out experiments/results/mac.json [--only mnist usps …]

The data are public, so insecure seeds are used and every run can be repeated. Every private run states its ε, δ,
relation and seed. `work` lists the sections and their runs; settings come from experiments/recipes/mac_*.toml.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from mac_tables import audited, paper_noise, sensitivity_table
from provenance import origin
from sordino import data
from sordino.methods.dp_mac.coefficients import Expansion, layer_terms
from sordino.methods.dp_mac.network import Network, chain, loss
from sordino.methods.dp_mac.optimise import WSteps
from sordino.methods.dp_mac.recipe import MacRecipe, read
from sordino.methods.dp_mac.run import Sets, prepare_sets, released_projection, test_metrics
from sordino.methods.dp_mac.thresholds import PrivateThresholds
from sordino.methods.dp_mac.training import Mac, train_mac, train_mac_without_privacy
from sordino.methods.dp_mac.zsteps import ZSteps
from sordino.plan import Plan
from sordino.randomness import RandomSource
from sordino.runs.recipe import Recipe
from sordino.training import train
from sordino.training.steps import plan_batches

RECIPES = Path(__file__).parent / "recipes"
MNIST = {"0.5": "mac_mnist_eps05", "2": "mac_mnist_eps2", "8": "mac_mnist_eps8"}
USPS = "mac_usps_autoencoder"
SEEDS = (0, 1, 2)
PAPER_Z = ZSteps(30, 0.003)
DPSGD_CLIP = {"mnist": 1.0, "usps": 0.1}  # chosen on held-out images, like all settings
USPS_LR = {"dp-mac": {1: 0.004, 2: 0.004, 4: 0.006, 8: 0.006}, "dp-sgd": {1: 0.004, 2: 0.004, 4: 0.004, 8: 0.004}}
Row = dict[str, Any]


@cache
def dataset(name: str) -> data.Dataset:
    return data.load(name, normalise=False)


def recipe(name: str, seed: int, *overrides: str) -> MacRecipe:
    settings = [f"run.seed={seed}", f"privacy.insecure_seed={seed}", *overrides]
    return read(Recipe.read(RECIPES / f"{name}.toml", settings), progress=False)


def sets_of(made: MacRecipe) -> Sets:
    raw = dataset(made.recipe.data.name)
    return prepare_sets(made, raw, released_projection(made, raw.train.inputs, None, made.plan.source()))


def private(plan: Plan, rows: Any, seconds: float, autoencoder: bool) -> Row:
    """The entries of every private run."""
    guarantee, key = plan.guarantee(), "test_error" if autoencoder else "test_accuracy"
    return {
        key: rows[-1][key],
        "curve": [[int(row["step"]), round(float(row[key]), 5)] for row in rows],
        "epsilon": guarantee.epsilon, "delta": guarantee.delta, "relation": guarantee.relation,
        "noise_multiplier": plan.noise.noise_multiplier, "steps": plan.steps, "expected_batch": plan.expected_batch,
        "records": plan.records, "seed": plan.insecure_seed, "seconds": round(seconds, 1),
    }  # fmt: skip


def run_mac(made: MacRecipe, mac: Mac | None = None, plan: Plan | None = None) -> Row:
    """The recipe (or a variant of it) with DP-MAC."""
    sets, plan = sets_of(made), plan or made.plan
    evaluate = partial(test_metrics, sets=sets, autoencoder=made.autoencoder)
    began = time.monotonic()
    found = train_mac(made.network(), sets.train, plan, mac or made.mac, settings=made.settings, evaluate=evaluate)
    return private(plan, found.metrics, time.monotonic() - began, made.autoencoder)


def variant(made: MacRecipe, mac: Mac, epsilon: float, steps: int | None = None) -> Row:
    """Other settings at the same ε, with a plan of their own that includes the statistics that they release."""
    from sordino.methods import dp_mac

    layers, base = len(made.widths) - 1, made.plan
    count = steps or base.steps
    paid = [] if made.pca is None else [made.pca.statistic()]
    paid += [] if mac.private is None else [mac.private.statistic(count, base.sampling_rate)]
    plan = dp_mac.plan(
        parts=mac.parts(layers), epsilon=epsilon, delta=base.delta, records=base.records, steps=count,
        expected_batch=base.expected_batch, insecure_seed=base.insecure_seed, statistics=paid,
    )  # fmt: skip
    return run_mac(made, mac, plan)


def run_dpsgd(made: MacRecipe) -> Row:
    """DP-SGD (Adam) with the same network, records, sampling and budget; its noise is calibrated to that budget."""
    sets, base, clip = sets_of(made), made.plan, DPSGD_CLIP[made.recipe.data.name]
    paid = [] if made.pca is None else [made.pca.statistic()]
    plan = Plan.dpsgd(
        epsilon=made.recipe.privacy.epsilon, delta=base.delta, records=base.records, steps=base.steps,
        expected_batch=base.expected_batch, clip_norm=clip, insecure_seed=base.insecure_seed, statistics=paid,
    )  # fmt: skip
    network = made.network()
    began = time.monotonic()
    found = train(
        network, loss(network.output), sets.train, plan, optimizer=torch.optim.Adam, lr=made.mac.w.lr,
        settings=made.settings, evaluate=partial(test_metrics, sets=sets, autoencoder=made.autoencoder),
    )  # fmt: skip
    return private(plan, found.metrics, time.monotonic() - began, made.autoencoder) | {
        "clip_norm": clip,
        "lr": made.mac.w.lr,
    }


def without_privacy(made: MacRecipe, lr: float, mac: Mac | None = None, steps: int | None = None) -> Row:
    """Back-propagation (mac=None) or MAC with Adam, without clipping and noise: NOT private."""
    sets, network, count = sets_of(made), made.network(), steps or made.plan.steps
    plan = replace(made.plan, steps=count)
    settings = replace(made.settings, scheduler=None, eval_every=max(1, count // 5))
    evaluate = partial(test_metrics, sets=sets, autoencoder=made.autoencoder)
    key, began = "test_error" if made.autoencoder else "test_accuracy", time.monotonic()
    if mac is not None:
        free = replace(mac, w=WSteps("adam", lr))
        found = train_mac_without_privacy(network, sets.train, plan, free, settings=settings, evaluate=evaluate)
        rows = [dict(row) for row in found.metrics]
    else:
        rows = _back_propagation(network, sets, plan, lr, settings.eval_every, evaluate)
    curve = [[int(row["step"]), round(row[key], 5)] for row in rows]
    seconds = round(time.monotonic() - began, 1)
    return {key: rows[-1][key], "curve": curve, "steps": count, "lr": lr, "seconds": seconds} | {
        "seed": made.recipe.run.seed, "private": False
    }  # fmt: skip


def _back_propagation(
    network: Network, sets: Sets, plan: Plan, lr: float, every: int, evaluate: Callable[[Any], dict[str, float]]
) -> list[dict[str, float]]:
    objective, optimizer = loss(network.output), torch.optim.Adam(network.parameters(), lr=lr)
    inputs, targets = sets.train
    source, rows = RandomSource.seeded(0), []
    for batch in plan_batches(plan, records=len(inputs), source=source, chunk=4096):
        optimizer.zero_grad()
        (objective(network(inputs[batch.indices]), targets[batch.indices]).sum() / plan.divisor).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if (batch.step + 1) % every == 0 or batch.step + 1 == plan.steps:
            with torch.no_grad():
                rows.append({"step": float(batch.step + 1), **evaluate(network)})
    return rows


def scales(start: str) -> Row:
    """The median gradient norm of each layer of the USPS autoencoder at public initial weights, for ways to find Z.

    Measured on test images, which are public here, so it has no privacy cost.
    """
    made, images = recipe(USPS, 0), dataset("usps").test.inputs[:500].flatten(1)
    ways = {
        "forward, 30 joint steps, lr 0.001 (paper)": ZSteps(30, 0.001),
        "forward, 100 joint steps, lr 0.001": ZSteps(100, 0.001),
        "forward, 30 joint steps, lr 0.01": ZSteps(30, 0.01),
        "forward, sweep from the last layer, lr 0.01": ZSteps(30, 0.01, order="sweep"),
        "backward, rate 0.1, μ 10": ZSteps(0, start="backward", rate=0.1, mu=10.0),
        "backward, rate 0.001, μ 1000": ZSteps(0, start="backward", rate=0.001, mu=1000.0),
    }
    network = made.network()
    if start == "uniform":  # the default of torch's linear layers: the authors' scale
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for layer in network.layers:
                layer.reset_parameters()  # type: ignore[operator]
    found = {}
    with torch.no_grad():
        for name, z in ways.items():
            norms = [float(t.gradient_norms().median()) for t in layer_terms(chain(network), images, images, z)]
            found[name] = {"median_norms": norms, "largest_over_smallest": max(norms) / min(norms)}
    return {"initial_weights": start, "layers": list(made.widths), "ways": found}


def mnist_variants(made: MacRecipe) -> dict[str, Callable[[], Row]]:
    """ε = 2, one seed: the paper's Z-steps, analytic bounds, second order, private thresholds."""
    w, z = made.mac.w, made.mac.z
    return {
        "paper's Z-steps (forward, 30)": lambda: variant(made, replace(made.mac, z=PAPER_Z), 2.0),
        "normalised": lambda: variant(made, Mac(z, Expansion(bounding="normalise"), w), 2.0),
        "analytic bounds (softplus, radius 3)": lambda: variant(
            replace(made, recipe=_softplus(made.recipe)),
            Mac(replace(z, radius=3.0), Expansion(bounding="analytic"), w), 2.0,
        ),
        "second order, diagonal, conjugate gradients": lambda: variant(
            made, Mac(z, Expansion(order=2), WSteps("cg", 0.3, 5), {"gradient": 0.3, "curvature": 0.3}), 2.0
        ),
        "private thresholds": lambda: variant(
            made, Mac(z, Expansion(), w, private=PrivateThresholds(4.0, made.plan.steps // 4)), 2.0
        ),
    }  # fmt: skip


def usps_variants(made: MacRecipe) -> dict[str, Callable[[], Row]]:
    """ε = 8, one seed: the paper's algorithm, and each change of ours."""
    w, mac = made.mac.w, made.mac
    paper = Mac(ZSteps(30, 0.001), Expansion(), WSteps("adam", 0.003), {"gradient": 0.001})
    return {
        "paper (forward, 30 Z-steps, bound 0.001)": lambda: variant(made, paper, 8.0, made.plan.steps // 2),
        "the recipe, half the steps": lambda: variant(made, mac, 8.0, made.plan.steps // 2),
        "backward start, one bound 0.001": lambda: variant(made, Mac(mac.z, Expansion(), w, {"gradient": 1e-3}), 8.0),
        "backward start, bounds by public estimates": lambda: variant(
            made, Mac(mac.z, Expansion(), w, {"gradient": public_bounds(made)}), 8.0
        ),
        "forward, sweep of 10 Z-steps per layer, normalised, sqrt-dim": lambda: variant(
            made, replace(mac, z=ZSteps(10, 0.01, order="sweep")), 8.0, made.plan.steps // 2
        ),
        "backward start, normalised": lambda: variant(made, Mac(mac.z, Expansion(bounding="normalise"), w), 8.0),
        "backward start, private thresholds": lambda: variant(
            made, Mac(mac.z, Expansion(split="sqrt-dim"), w, private=PrivateThresholds(3.0, made.plan.steps // 4)), 8.0
        ),
        "backward start and 3 Z-steps, normalised, sqrt-dim": lambda: variant(
            made, replace(mac, z=replace(mac.z, steps=3, lr=1e-4)), 8.0
        ),
    }


def public_bounds(made: MacRecipe) -> list[float]:
    """The median norm of each layer's gradient at the initial weights, on test images, which are public here."""
    images = dataset(made.recipe.data.name).test.inputs[:500].flatten(1)
    with torch.no_grad():
        terms = layer_terms(chain(made.network()), images, images, made.mac.z)
    return [float(t.gradient_norms().median()) for t in terms]


def _softplus(made: Recipe) -> Recipe:
    return replace(made, model=replace(made.model, options={**made.model.options, "activation": "softplus"}))


def work() -> dict[str, dict[str, Callable[[], Row]]]:
    """Every section and its runs, in the order in which they are made."""
    mnist: dict[str, Callable[[], Row]] = {
        f"eps={e}, seed {s}, {how}": partial(_mnist, name, s, how)
        for s in SEEDS for e, name in MNIST.items() for how in ("dp-mac", "dp-sgd")
    }  # fmt: skip
    usps: dict[str, Callable[[], Row]] = {
        f"eps={e}, seed {s}, {how}": partial(_usps, e, s, how)
        for s in SEEDS for e in (1, 2, 4, 8) for how in ("dp-mac", "dp-sgd")
    }  # fmt: skip
    first, deep = recipe(MNIST["8"], 0), recipe(USPS, 0, "privacy.epsilon=8", f"train.lr={USPS_LR['dp-mac'][8]}")
    free: dict[str, Callable[[], Row]] = {
        f"mnist, seed {s}, {how}": partial(without_privacy, recipe(MNIST["8"], s), lr, mac)
        for s in SEEDS[:2]
        for how, lr, mac in (
            ("back-propagation", 0.003, None), ("mac, paper's Z-steps", 0.003, Mac(PAPER_Z)),
            ("mac, backward start", 0.003, Mac(first.mac.z)),
        )
    }  # fmt: skip
    free |= {
        "usps, seed 0, back-propagation": partial(without_privacy, deep, 0.001),
        "usps, seed 0, mac, paper's Z-steps": partial(without_privacy, deep, 0.001, Mac(ZSteps(30, 0.001)), 200),
        "usps, seed 0, mac, backward start": partial(without_privacy, deep, 0.001, Mac(deep.mac.z)),
    }
    return {
        "sensitivities": {"table": sensitivity_table},
        "paper_noise": {"table": paper_noise},
        "scales": {name: partial(scales, name) for name in ("he", "uniform")},
        "audit": {f"seed {s}, noise × {f}": partial(audited, s, f) for s in range(6) for f in (1.0, 0.5)},
        "mnist": mnist,
        "usps": usps,
        "not_private": free,
        "mnist_variants": mnist_variants(recipe(MNIST["2"], 0)),
        "usps_variants": usps_variants(deep),
    }


def _mnist(name: str, seed: int, how: str) -> Row:
    made = recipe(name, seed)
    return run_mac(made) if how == "dp-mac" else run_dpsgd(made)


def _usps(epsilon: int, seed: int, how: str) -> Row:
    made = recipe(USPS, seed, f"privacy.epsilon={epsilon}", f"train.lr={USPS_LR[how][epsilon]}")
    return run_mac(made) if how == "dp-mac" else run_dpsgd(made)


def summary(document: Row) -> Row:
    """Mean and standard deviation over the seeds of every setting with several seeds."""
    found: dict[str, dict[str, Any]] = {}
    for section in ("mnist", "usps", "not_private"):
        groups: dict[str, list[float]] = {}
        for name, row in document.get(section, {}).items():
            key = ", ".join(part for part in name.split(", ") if not part.startswith("seed"))
            groups.setdefault(key, []).append(row.get("test_accuracy", row.get("test_error")))
        found[section] = {
            key: {"mean": statistics.fmean(v), "spread": statistics.stdev(v) if len(v) > 1 else None, "seeds": len(v)}
            for key, v in groups.items()
        }
    audits = document.get("audit", {}).values()
    found["audit"] = {
        str(f): {
            "claims_broken": sum(not a["holds"] for a in audits if a["noise_scale"] == f),
            "of": sum(a["noise_scale"] == f for a in audits),
        }
        for f in (1.0, 0.5)
    }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "mac.json")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="these sections alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: Row = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    document |= origin("python experiments/mac.py --out experiments/results/mac.json")
    for section, runs in work().items():
        if arguments.only and section not in arguments.only:
            continue
        for name, run in runs.items():
            if name in document.setdefault(section, {}):
                continue
            document[section][name] = run()
            document |= {"summary": summary(document)}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            row = document[section][name]
            result = row.get("test_accuracy", row.get("test_error", "done"))
            print(f"{section}: {name}: {result} ({row.get('seconds', '–')} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
