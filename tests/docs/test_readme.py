"""The README's Python examples run as they are printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import sordino

README = Path(__file__).parents[2] / "README.md"


def test_the_examples_run_and_print_epsilon_with_its_assumptions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf8"), re.S)
    assert len(blocks) == 2
    namespace: dict[str, object] = {}
    for block in blocks:
        assert len([line for line in block.splitlines() if line.strip()]) <= 15, "fifteen lines were promised"
        exec(compile(block, "README.md", "exec"), namespace)
    printed = capsys.readouterr().out
    (shown,) = re.findall(r"<!-- prints -->\n```text\n(.*?)```", README.read_text(encoding="utf8"), re.S)
    assert printed.split() == shown.split(), "the first screen shows what the code prints"
    assert "ε = 3" in printed or "ε = 2.99" in printed
    assert "It assumes" in printed
    assert len((tmp_path / "ledger.jsonl").read_text().splitlines()) == 1 + 196


def test_random_allocation_needs_as_much_less_noise_as_it_says() -> None:
    text = README.read_text(encoding="utf8")
    (call,) = set(re.findall(r"sordino\.dpsgd\((.*?)\)", text))
    options = {key: float(value) for key, value in re.findall(r"(\w+)=([\d._e-]+)", call)}
    counts = {key: int(options.pop(key)) for key in ("records", "expected_batch", "epochs")}
    poisson, allocation = (sordino.dpsgd(**options, **counts, **own) for own in ({}, {"sampling": "allocation"}))
    shown = f"multiplier of {allocation.noise.noise_multiplier:.2f} instead of {poisson.noise.noise_multiplier:.2f}"
    assert shown in " ".join(text.split())


def test_the_speeds_are_those_of_the_benchmark_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(README.parent / "benchmarks"))
    from peers import tables

    results = json.loads((README.parent / "benchmarks/results/engine.json").read_text())
    printed = README.read_text(encoding="utf8"), (README.parent / "docs/benchmarks.md").read_text(encoding="utf8")
    assert f"{tables.SHORT_BEGIN}\n{tables.summary(results)}\n{tables.SHORT_END}" in printed[0]
    assert f"{tables.BEGIN}\n{tables.tables(results)}\n{tables.END}" in printed[1]


def result(name: str) -> Any:
    path = README.parent / "experiments" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf8"))


def mean(rows: list[dict[str, Any]], **wanted: Any) -> float:
    """The mean of the one row of a result's table that has these entries."""
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return float(found["mean"])


class TestOtherMethods:
    """The sentences under "The other methods" say what the result files say."""

    SAID = " ".join(README.read_text(encoding="utf8").partition("- **The other methods**")[2].split())

    def test_modelmix(self) -> None:
        rows = result("modelmix_table1")["table"]

        def gain(over: str, epsilon: float) -> float:
            return mean(rows, arm="modelmix", target_epsilon=epsilon) - mean(rows, arm=over, target_epsilon=epsilon)

        assert min(gain("dpsgd", 0.2), gain("dpsgd", 0.4)) > 0 > max(gain("dpsgd", 0.8), gain("dpsgd", 1.0))
        assert abs(gain("dpsgd", 0.6)) < 0.4
        assert "ahead of DP-SGD at ε = 0.2 and 0.4, within 0.4 points of it at 0.6 and behind at 0.8 and 1" in self.SAID
        at = sorted(row["target_epsilon"] for row in rows if row["arm"] == "modelmix")
        behind = [-gain("averaging", epsilon) for epsilon in at]
        listed = ", ".join(f"{epsilon:g}" for epsilon in at[:-1]) + f" and {at[-1]:g}"
        assert f"is {min(behind):.1f} to {max(behind):.1f} points ahead of it at ε = {listed}" in self.SAID

    def test_hidden_state(self) -> None:
        rows = result("hidden_table1")["table"]
        control, dynamics = (
            mean(rows, dataset="fashion-mnist", column=column)
            for column in ("DP-SGD, clipped gradients, replace-one", "dynamics")
        )
        moved = result("hidden_transfer")["table"]
        transfer = mean(moved, arm="DP-SGD, replace-one") - mean(moved, arm="dynamics")
        said = (
            f"{100 * (control - dynamics):.0f} points behind its control on Fashion-MNIST and {100 * transfer:.0f} in"
        )
        assert said in self.SAID

    def test_clipping_bias(self) -> None:
        imdb, cifar = result("clipping_bias_imdb")["table"], result("clipping_bias_cifar10")["table"]

        def gain(column: str, epsilon: float) -> float:
            own, base = (mean(imdb, column=c, target_epsilon=epsilon) for c in (column, "original"))
            return 100 * (own - base)

        assert f"gain {gain('enhanced', 4.0):.1f} points on IMDb" in self.SAID
        gates = [gain("standardised projections only", epsilon) for epsilon in (4.0, 8.0)]
        assert f"gains {gates[0]:.1f} points there, and {gates[1]:.1f} at ε = 8" in self.SAID
        both = [100 * mean(cifar, column=column, target_epsilon=8.0) for column in ("enhanced", "original")]
        assert f"On CIFAR-10 they gain {both[0] - both[1]:.0f} points" in self.SAID

    def test_coupling(self) -> None:
        runs = [run for run in result("coupling_cifar10_redrawn")["runs"].values() if run["share"] == 0.2]
        own, control = (
            {run["seed"]: run["accuracy"] for run in runs if run["column"] == column and not run["held_out"]}
            for column in ("Coupling", "OnlyPriv+")
        )
        gains = [100 * (own[seed] - control[seed]) for seed in own]
        assert f"{min(gains):.1f} to {max(gains):.1f} points over that control with a fifth" in self.SAID


def test_every_link_of_the_documentation_leads_somewhere() -> None:
    pages = [README, *README.parent.glob("docs/**/*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
