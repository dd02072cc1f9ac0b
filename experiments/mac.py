"""DP-MAC measured: one JSON file, written after every run; what is in it already is not run again.

    python experiments/mac.py --out experiments/results/mac.json [--only mnist usps …]

Public data and insecure seeds: repeatable, and harmless. Every private run says its ε, δ, relation and seed. The
sections and their sizes are in `work`; settings come from experiments/recipes/mac_*.toml.
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
from torch import Tensor

from sordino import data
from sordino.accounting import account
from sordino.accounting.events import Release, compose_events
from sordino.audit.mac import audit_mac
from sordino.mac import printed
from sordino.mac.bounds import Radii, sensitivities
from sordino.mac.coefficients import Expansion, layer_terms
from sordino.mac.network import ACTIVATIONS, Layer, Network, chain, loss
from sordino.mac.optimise import WSteps
from sordino.mac.recipe import MacRecipe, read
from sordino.mac.run import Sets, prepare_sets, released_projection, test_metrics
from sordino.mac.taylor import Terms, expand
from sordino.mac.thresholds import PrivateThresholds
from sordino.mac.training import Mac, train_mac, train_mac_without_privacy
from sordino.mac.zsteps import ZSteps, into_ball
from sordino.plan import Plan
from sordino.randomness import RandomSource
from sordino.recipe import Recipe
from sordino.run import environment
from sordino.steps import plan_batches
from sordino.train import train

RECIPES = Path(__file__).parent / "recipes"
MNIST = {"0.5": "mac_mnist_eps05", "2": "mac_mnist_eps2", "8": "mac_mnist_eps8"}
USPS = "mac_usps_autoencoder"
SEEDS = (0, 1, 2)
PAPER_Z = ZSteps(30, 0.003)
DPSGD_CLIP = {"mnist": 1.0, "usps": 0.1}  # chosen on held-out images, as was everything
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
    """What every private run says of itself."""
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
    """Other settings at the same ε: their own plan, calibrated with whatever statistics they release."""
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
    """DP-SGD (Adam) on the same network, records, sampling and budget, with the noise that it needs."""
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
    """Back-propagation (mac=None) or MAC, Adam, no clipping, no noise: NOT private."""
    sets, network, count = sets_of(made), made.network(), steps or made.plan.steps
    plan = replace(made.plan, steps=count)
    settings = replace(made.settings, scheduler=None, eval_every=max(1, count // 5))
    evaluate = partial(test_metrics, sets=sets, autoencoder=made.autoencoder)
    key, began = "test_error" if made.autoencoder else "test_accuracy", time.monotonic()
    if mac is not None:
        free = replace(mac, w=WSteps("adam", lr))
        rows = train_mac_without_privacy(network, sets.train, plan, free, settings=settings, evaluate=evaluate)
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
    """Median gradient norm of each layer of the USPS autoencoder at public initial weights, for ways to find Z.

    Measured on test images, which are public here: no budget is spent on it.
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


def ascended(layer: Layer, radius: float, part: Callable[[Terms], Tensor]) -> float:
    """The largest norm that projected gradient ascent from 256 random records finds."""
    generator = torch.Generator().manual_seed(0)
    units, inputs = layer.weight.shape
    z = torch.randn(256, inputs, generator=generator, dtype=torch.float64)
    goal = torch.randn(256, units, generator=generator, dtype=torch.float64)
    best = 0.0
    for _ in range(200):
        inside = into_ball(goal, radius) if layer.output is None else goal.clamp(0, 1)
        z, goal = into_ball(z, radius).detach().requires_grad_(), inside.detach().requires_grad_()
        size = part(expand(layer, z, goal))
        best = max(best, float(size.detach().max()))
        slopes = torch.autograd.grad(size.sum(), (z, goal), allow_unused=True)
        with torch.no_grad():
            z, goal = (
                t if g is None else t + 0.1 * radius * g / g.norm(dim=1, keepdim=True).clamp_min(1e-12)
                for t, g in zip((z, goal), slopes, strict=True)
            )
    return best


def sensitivity_table() -> Row:
    """Our bounds, the printed ones and what an adversary attains, for T = 2t, softplus 60-300 and sigmoid 300-10."""
    rows = []
    for radius in (0.1, 1.0, 5.0):
        generator = torch.Generator().manual_seed(0)
        hidden = Layer(
            torch.randn(300, 60, generator=generator, dtype=torch.float64) / 60**0.5, None, ACTIVATIONS["softplus"]
        )
        last = Layer(
            torch.randn(10, 300, generator=generator, dtype=torch.float64) / 300**0.5, None, ACTIVATIONS["linear"],
            "sigmoid",
        )  # fmt: skip
        ours, output = sensitivities(hidden, Radii(radius, radius)), sensitivities(last, Radii(radius, radius))

        def b_norm(terms: Terms) -> Tensor:
            return (terms.slope - terms.curvature * terms.pre).norm(dim=1) * terms.inputs.norm(dim=1)  # type: ignore[no-any-return]

        for name, layer, factor, bound, paper, part in (
            ("T", hidden, 2, ours.value, printed.hidden_value(hidden.weight, radius), lambda t: t.value),
            ("∂T", hidden, 2, ours.gradient, printed.hidden_gradient(hidden.weight, radius), Terms.gradient_norms),
            ("b", hidden, 2, ours.b, printed.hidden_b(hidden.weight, radius), b_norm),
            ("C", hidden, 2, ours.curvature, printed.hidden_curvature(hidden.weight, radius),
             lambda t: t.curvature_norms("full")),
            ("b, output", last, 1, output.b, printed.output_b(last.weight, radius), b_norm),
            ("C, output", last, 1, output.curvature, printed.output_curvature(last.weight, radius),
             lambda t: t.curvature_norms("full")),
        ):  # fmt: skip
            found = factor * ascended(layer, radius, part)
            rows.append({"coefficient": name, "radius": radius, "attained": found, "ours": factor * bound} | {
                "printed": paper, "printed_is_exceeded": found > paper * (1 + 1e-9)
            })  # fmt: skip
    return {"rows": rows}


def paper_noise() -> Row:
    """The ε of the noise that Table 2 prints for the classifier, DP-PCA included, by composition (PLD)."""
    rows = []
    for epsilon, sigma, batch, epochs, pca in (
        (0.5, 8.0, 500, 10, 16.0), (0.5, 4.4, 500, 10, 16.0), (2.0, 2.8, 1000, 30, 8.0), (8.0, 1.0, 1000, 30, 4.0)
    ):  # fmt: skip
        steps = epochs * 60_000 // batch
        event = compose_events([(Release("gaussian", sigma, batch / 60_000), steps), (Release("gaussian", pca), 1)])
        found = account(event, 1e-5, "add-remove", "pld").epsilon
        rows.append({"claimed": epsilon, "sigma": sigma, "batch": batch, "epochs": epochs, "sigma_pca": pca} | {
            "epsilon": found
        })  # fmt: skip
    return {"delta": 1e-5, "relation": "add-remove", "rows": rows}


def audited(seed: int, noise_scale: float) -> Row:
    """The claim of 20 full-batch steps at ε = 2, with 5000 canaries in the coefficient vector."""
    from sordino.methods import dp_mac

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network([60, 300, 10], "relu", "sigmoid")
        x, y = torch.rand(200, 60), torch.nn.functional.one_hot(torch.arange(200) % 10, 10).float()
    mac = Mac(ZSteps(3, 0.003, start="backward", rate=0.1))
    plan = dp_mac.plan(parts=2, epsilon=2.0, delta=1e-5, records=200, expected_batch=200, steps=20)
    found = audit_mac(plan, network, (x, y), mac, seed=seed, noise_scale=noise_scale)
    return {"seed": seed, "noise_scale": noise_scale, **found.to_dict()}


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
    """ε = 8, one seed: the paper's algorithm, and what each remedy adds."""
    w, mac = made.mac.w, made.mac
    paper = Mac(ZSteps(30, 0.001), Expansion(), WSteps("adam", 0.003), {"gradient": 0.001})
    return {
        "paper (forward, 30 Z-steps, bound 0.001)": lambda: variant(made, paper, 8.0, made.plan.steps // 2),
        "backward start, one bound 0.001": lambda: variant(made, Mac(mac.z, Expansion(), w, {"gradient": 1e-3}), 8.0),
        "backward start, normalised": lambda: variant(made, Mac(mac.z, Expansion(bounding="normalise"), w), 8.0),
        "backward start, private thresholds": lambda: variant(
            made, Mac(mac.z, Expansion(split="sqrt-dim"), w, private=PrivateThresholds(3.0, made.plan.steps // 4)), 8.0
        ),
        "backward start and 3 Z-steps, normalised, sqrt-dim": lambda: variant(
            made, replace(mac, z=replace(mac.z, steps=3, lr=1e-4)), 8.0
        ),
    }


def _softplus(made: Recipe) -> Recipe:
    return replace(made, model=replace(made.model, options={**made.model.options, "activation": "softplus"}))


def work() -> dict[str, dict[str, Callable[[], Row]]]:
    """Every section and its runs, in the order of their making."""
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
    """Mean and spread over the seeds of every setting that has several."""
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
    document["command"] = "python experiments/mac.py --out experiments/results/mac.json"
    for section, runs in work().items():
        if arguments.only and section not in arguments.only:
            continue
        for name, run in runs.items():
            if name in document.setdefault(section, {}):
                continue
            document[section][name] = run()
            document |= {"summary": summary(document), "environment": environment()}
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            row = document[section][name]
            result = row.get("test_accuracy", row.get("test_error", "done"))
            print(f"{section}: {name}: {result} ({row.get('seconds', '–')} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
