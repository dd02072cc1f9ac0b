"""The tables of experiments/mac.py without data: sensitivities found by an adversary, the paper's noise, audits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sordino.accounting import account
from sordino.accounting.events import Release, compose_events
from sordino.methods import dp_mac
from sordino.methods.dp_mac import printed
from sordino.methods.dp_mac.audit import audit_mac
from sordino.methods.dp_mac.bounds import Radii, sensitivities
from sordino.methods.dp_mac.network import ACTIVATIONS, Layer, Network
from sordino.methods.dp_mac.taylor import Terms, expand
from sordino.methods.dp_mac.training import Mac
from sordino.methods.dp_mac.zsteps import ZSteps, into_ball

Row = dict[str, Any]


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
    """Our bounds, the paper's, and the norms that an adversary reaches; T = 2t, softplus 60-300 and sigmoid 300-10."""
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
    """The ε of the noise that Table 2 of the paper prints for the classifier, including DP-PCA, composed by PLD."""
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
    """An audit of 20 full-batch steps at ε = 2, with 5000 canaries in the coefficient vector."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = Network([60, 300, 10], "relu", "sigmoid")
        x, y = torch.rand(200, 60), torch.nn.functional.one_hot(torch.arange(200) % 10, 10).float()
    mac = Mac(ZSteps(3, 0.003, start="backward", rate=0.1))
    plan = dp_mac.plan(parts=2, epsilon=2.0, delta=1e-5, records=200, expected_batch=200, steps=20)
    found = audit_mac(plan, network, (x, y), mac, seed=seed, noise_scale=noise_scale)
    return {"seed": seed, "noise_scale": noise_scale, **found.to_dict()}
