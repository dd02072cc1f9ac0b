"""sordino doctor: judges a recipe's clipping threshold, batch and step size by the instruments.

`sordino advise clipping` is its former name for the threshold: it runs the doctor on test rows, so that there is one
answer.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sordino.console import Commands, add_code, add_json, finite
from sordino.errors import InputError, Refused

if TYPE_CHECKING:
    from torch import nn

    from sordino.diagnostics.doctor import Diagnosis
    from sordino.plan import Plan
    from sordino.runs.prepared import Prepared
    from sordino.runs.recipe import Recipe


def add(commands: Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="how clipping and noise will affect a recipe's training, and what to change",
        description="Measures sampling noise, norms and direction of the gradients on PUBLIC rows at initial weights, "
        "tries a few steps with the recipe's clipping and size of noise, and advises on clip_norm, batch and lr, "
        "with the theorem behind each. Measures the time of a step as well, for `sordino plan --minutes`. The rows are "
        "those that [public] declares; without that section say which may be used: --test-rows, or --not-private for "
        "the training rows of a public benchmark. Nothing is released.",
        epilog="example: sordino doctor src/sordino/recipes/demo.toml --not-private",
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps of the trial (default: 20)")
    parser.add_argument("--rows", type=int, default=500, metavar="N", help="rows to measure on (default: 500)")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--test-rows", action="store_true", help="use the test split, if its rows are public")
    whose.add_argument(
        "--not-private",
        action="store_true",
        help="use the training split of a public benchmark: its rows are not secret",
    )
    add_code(parser)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are (default: $SORDINO_DATA)")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="a model.safetensors (default: initial weights)")
    add_json(parser)
    parser.set_defaults(run=_doctor)
    advise = commands.add_parser("advise", help="the same as doctor --test-rows")
    clipping = advise.add_subparsers(title="topics", metavar="TOPIC", required=True).add_parser(
        "clipping",
        help="the same as doctor --test-rows",
        description="Runs `sordino doctor RECIPE.toml --test-rows --rows N`; the threshold is one of its topics.",
        epilog="example: sordino advise clipping src/sordino/recipes/demo.toml --public 500",
    )
    clipping.add_argument("recipe", type=Path, metavar="RECIPE.toml")
    clipping.add_argument("--public", dest="rows", type=int, default=500, metavar="N", help="test rows (default: 500)")
    clipping.add_argument("--steps", type=int, default=20, metavar="N", help="steps of the trial (default: 20)")
    add_code(clipping)
    clipping.add_argument("--weights", type=Path, metavar="FILE", help="a model.safetensors (default: initial weights)")
    clipping.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a key")
    clipping.add_argument("--data-dir", type=Path, metavar="DIR", help="where the datasets are")
    add_json(clipping)
    clipping.set_defaults(run=_doctor, test_rows=True, not_private=False)


def _doctor(arguments: argparse.Namespace) -> int:
    from sordino.runs.recipe import Recipe

    recipe = Recipe.read(arguments.recipe, arguments.set, allow_code=arguments.allow_code)
    for name, least in (("steps", 1), ("rows", 2)):
        if getattr(arguments, name) < least:
            raise InputError(f"--{name} must be at least {least}, got {getattr(arguments, name)}")
    found = examine(recipe, arguments)
    if arguments.json:
        import json

        print(json.dumps(finite({"recipe": str(arguments.recipe), **found.to_dict()}), ensure_ascii=False))
        return 0
    _show(found)
    return 0


def examine(recipe: Recipe, arguments: argparse.Namespace) -> Diagnosis:
    """Checks which rows may be used before any data are read, then diagnoses."""
    from sordino import data
    from sordino.diagnostics.doctor import diagnose
    from sordino.methods.speed import speed_of
    from sordino.runs.build import clipping_of, method_of, plan_from
    from sordino.runs.prepared import prepare
    from sordino.training.progress import working

    caveats = _check(recipe, arguments)
    bare = replace(recipe, instruments=type(recipe.instruments)())  # [instruments] is for runs: the doctor has its own
    prepared = prepare(bare, arguments.data_dir)
    origin, split = _rows(prepared, arguments)
    rows, others = (data.Split(split.inputs[part], split.targets[part]) for part in _parts(len(split), arguments.rows))
    section, plan = recipe.train, prepared.plan
    model = _model(prepared, arguments.weights)
    lr = section.lr if method_of(recipe).rehearsed else None
    if method_of(recipe).rehearsed and (prepared.optimizer is None or lr is None):
        raise InputError("the doctor tries steps of an optimizer: give [train] optimizer and lr")
    options = (
        {}
        if prepared.optimizer is None
        else {"optimizer": partial(prepared.optimizer, **prepared.settings.optimizer_options)}
    )

    @cache
    def epsilon() -> float:
        return recipe.privacy.epsilon or plan.guarantee().epsilon

    def larger(batch: float) -> Plan:
        sampling = replace(bare.sampling, expected_batch=round(batch))
        privacy = replace(bare.privacy, epsilon=epsilon(), noise_multiplier=None)
        again = replace(bare, sampling=sampling, privacy=privacy, train=replace(section, steps=plan.steps, epochs=None))
        return plan_from(again, clipping_of(again), plan.records)

    with working("examining", None) as say:
        import torch

        found = diagnose(
            model, torch.nn.functional.cross_entropy, rows, plan, lr=lr, **options,
            averaging=prepared.settings.averaging, pool=others, steps=arguments.steps, larger=larger, public=origin,
            not_private=origin is None, seed=recipe.run.seed, say=say,
        )  # fmt: skip
        speed = None
        if lr is not None and prepared.optimizer is not None:
            say("timing a step")
            most = max(64, round(plan.expected_batch))
            speed = speed_of(
                model, torch.nn.functional.cross_entropy, data.Split(others.inputs[:most], others.targets[:most]), plan,
                lr=lr, optimizer=prepared.optimizer, settings=prepared.settings,
            )  # fmt: skip
    rows_from = found.origin if origin is not None else f"the training split of {recipe.data.name}, a public benchmark"
    return replace(found, origin=rows_from, caveats=caveats, speed=speed)


def _parts(count: int, rows: int) -> tuple[slice, slice]:
    """The rows to measure on, and the rows of the trial: different ones if there are enough."""
    return slice(0, rows), slice(rows, count) if count >= 2 * rows else slice(0, rows)


def _check(recipe: Recipe, arguments: argparse.Namespace) -> tuple[str, ...]:
    """Refuses what the doctor can't judge, and returns the caveats of its advice."""
    from sordino import data
    from sordino.runs.build import method_of

    method = method_of(recipe)
    if method.publishes is not None or method.trained_by is not None:
        raise InputError(
            f"the method {recipe.method.name} does not clip gradients of records, so it has no threshold for the "
            "doctor to judge; its page says how its bound is chosen"
        )
    if recipe.features.private is not None:
        raise InputError("[features] private needs the private records, which the doctor does not use: leave it out")
    if not (recipe.public.given or arguments.test_rows or arguments.not_private):
        raise Refused(
            "the doctor measures single records' gradients without noise, and the recipe declares no public rows: "
            "declare some in [public], or give --test-rows if the test split is public, or --not-private if the "
            "training split is that of a public benchmark"
        )
    if arguments.not_private and recipe.data.name not in {entry.name for entry in data.catalogue()}:
        raise Refused(f"{recipe.data.name} is not known as a public benchmark: its records must not be used for this")
    caveats = []
    if not method.rehearsed:
        caveats.append(
            f"Steps of the method {recipe.method.name} are not tried: measurements are at the given weights only, lr "
            "is not judged, and noise that the method adds to the plan's is not counted."
        )
    if any(key.startswith("inner") or key.startswith("record_momentum") for key in recipe.method.options):
        caveats.append("The trial has no momentum of single records: measurements are of single gradients.")
    if recipe.train.scheduler != "constant":
        caveats.append(f"The trial keeps the initial lr: the schedule {recipe.train.scheduler} is not followed.")
    return tuple(caveats)


def _model(prepared: Prepared, weights: Path | None) -> nn.Module:
    """The recipe's network, with initial weights or those of a file."""
    from safetensors.torch import load_file

    from sordino.training.state import load_model

    model = prepared.model()
    if weights is not None:
        if not weights.is_file():
            raise InputError(f"there is no file {weights}")
        load_model(model, load_file(weights))
    return model


def _rows(prepared: Prepared, arguments: argparse.Namespace) -> tuple[str | None, Any]:
    """(origin, rows); the origin is None for rows that are not private by the user's statement."""
    from sordino.runs.build import public_origin

    recipe = prepared.recipe
    if arguments.not_private:
        return None, prepared.dataset.train
    if arguments.test_rows:
        return f"the test split of {recipe.data.name}, declared public", prepared.dataset.test
    if prepared.public is None:
        raise InputError("the recipe declares no public rows: say which in [public]")
    return public_origin(recipe), prepared.public


def _show(found: Diagnosis) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 110)
    first = found.readings[0]
    if found.not_private:
        console.print(
            "[bold red]NOT PRIVATE:[/] these are training rows of a public benchmark, measured without noise. For "
            "records that need protection, no guarantee would cover these numbers or a choice based on them."
        )
    console.print(f"[dim]{first.rows} rows: {escape(found.origin)}; {found.parameters:,} parameters[/]")
    table = Table(box=None, pad_edge=False, show_header=True, header_style="dim")
    for title in ("", "at the start", *(["after the trial"] if len(found.readings) > 1 else [])):
        table.add_column(title)
    for name, value in _FIGURES.items():
        table.add_row(name, *(value(*pair) for pair in zip(found.readings, found.signals, strict=True)))
    console.print(table)
    tail = found.tail
    console.print(
        f"[dim]Thm 3.2 of Xiao, Wan & Devadas 2022 proves progress from c = 4·κ·log 10 = {tail.threshold:.4g} on "
        f"(κ ≈ {tail.kappa:.4g}). This suffices, and is seldom necessary: the advice below uses measured alignment.[/]"
    )
    for finding in found.findings:
        mark = {"fine": "[green]✓[/]", "watch": "[yellow]![/]"}.get(finding.verdict, "[red]→[/]")
        head = finding.topic if finding.verdict == "fine" else f"{finding.topic}: {finding.verdict}"
        value = f" (about {finding.value:.3g})" if finding.value is not None else ""
        sentence, theorem = escape(finding.sentence), escape(finding.theorem)
        console.print(f"\n{mark} [bold]{head}{value}[/]\n{sentence} [dim]{theorem}[/]", highlight=False)
    if found.speed is not None:
        console.print(
            f"\nTime of a step on this machine: {found.speed}. What fits a given time: sordino plan --records N "
            f"--epsilon ε --delta δ --minutes M {found.speed.options()}",
            highlight=False,
        )
    for caveat in found.caveats:
        console.print(f"\n[dim]{caveat}[/]")


_FIGURES: dict[str, Any] = {
    "sampling noise τ": lambda reading, signal: f"{reading.tau:.4g}",
    "norms, 25 / 50 / 75 %": lambda reading, signal: " / ".join(
        f"{reading.norm_quantiles[q]:.3g}" for q in ("0.25", "0.5", "0.75")
    ),
    "‖mean gradient‖": lambda reading, signal: f"{reading.gradient_norm:.4g}",
    "‖clipped mean‖": lambda reading, signal: f"{signal.gradient:.4g}",
    "rows clipped": lambda reading, signal: f"{reading.clipped_share:.0%}",
    "cosine clipped, true": lambda reading, signal: "–" if reading.cosine is None else f"{reading.cosine:.3f}",
    "noise, length": lambda reading, signal: f"{signal.noise:.4g}",
    "alignment": lambda reading, signal: f"{signal.alignment:.3f}",
}
