"""What pages state: figures are those of the result files, tests that are named exist, every name is covered."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import sordino
from sordino.methods import METHODS

ROOT = Path(__file__).parents[2]
WHICH = (ROOT / "docs" / "which_method.md").read_text(encoding="utf8")
OPACUS = (ROOT / "docs" / "coming_from_opacus.md").read_text(encoding="utf8")


def result(name: str) -> Any:
    return json.loads((ROOT / "experiments" / "results" / f"{name}.json").read_text(encoding="utf8"))


def mean(rows: list[dict[str, Any]], key: str = "mean", **wanted: Any) -> float:
    """The value of the one row of a result's table that has these entries, in per cent."""
    (found,) = [row for row in rows if all(row[name] == value for name, value in wanted.items())]
    return 100 * float(found[key])


def line(start: str) -> str:
    (found,) = [row for row in WHICH.splitlines() if row.startswith(f"| {start}")]
    return found


class TestWhichMethod:
    def test_public_features(self) -> None:
        rows, own = result("compare_cifar10_frozen")["table"], "EfficientNet-Lite0 features, linear"
        private = [mean(rows, method=own, epsilon=epsilon) for epsilon in (1.0, 3.0)]
        plain = mean(rows, method=f"without privacy, {own}")
        assert f"{private[0]:.2f}, {private[1]:.2f}, {plain:.2f} |" in line("a public network")

    def test_fixed_features(self) -> None:
        names = {"compare_fashion_mnist": "Fashion-MNIST", "compare_cifar10": "CIFAR-10", "compare_imdb": "IMDb"}
        for file, name in names.items():
            rows = result(file)["table"]
            own = next(row["method"] for row in rows)
            private = [mean(rows, method=own, epsilon=epsilon) for epsilon in (1.0, 3.0)]
            plain = mean(rows, method=f"without privacy, {own}")
            assert f"{name} {private[0]:.2f}, {private[1]:.2f}, {plain:.2f}" in line("small images or texts")

    def test_public_rows(self) -> None:
        rows = result("coupling_mnist_redrawn")["table"]
        private, mixed, alone = (
            mean(rows, column=column, share=0.05) for column in ("OnlyPriv+", "Coupling+", "OnlyPub+")
        )
        everything = mean(rows, column="FullPriv")
        text = line("some public rows")
        assert f"ε = 2: {private:.2f} for private rows after a warm-up on the public ones, {mixed:.2f} with" in text
        assert f"against {everything:.2f} for DP-SGD on all rows and {alone:.2f} for as many" in text

    def test_normalised_networks(self) -> None:
        cifar, imdb = result("clipping_bias_cifar10")["table"], result("clipping_bias_imdb")["table"]
        before, after = (mean(cifar, column=column, target_epsilon=8.0) for column in ("original", "enhanced"))
        text = line("no public data,")
        assert f"gained {after - before:.1f} points on CIFAR-10" in text
        assert f"ε = 8: {before:.1f} → {after:.1f}" in text
        before, after = (mean(imdb, column=column, target_epsilon=4.0) for column in ("original", "enhanced"))
        assert f"and {after - before:.1f} on IMDb (ε = 4: {before:.1f} → {after:.1f})" in text

    def test_hidden_state(self) -> None:
        rows = [row for row in result("hidden_state")["rows"] if row["dataset"] == "fashion-mnist"]
        at = {row["row"]: 100 * row["mean_test_accuracy"] for row in rows if row["target_epsilon"] == 3.0}
        (composition,) = [value for name, value in at.items() if name.startswith("composition (")]
        text = line("a linear model")
        assert f"(replace-one): {at['hidden state']:.2f}, against {composition:.2f} for DP-SGD" in text
        assert (
            f"{at['objective perturbation']:.2f} for objective and {at['output perturbation']:.2f} for output" in text
        )

    def test_methods_for_study(self) -> None:
        rows = result("modelmix")["table"]
        for epsilon in (0.2, 0.6, 1.0):
            mixed, plain = (mean(rows, arm=arm, target_epsilon=epsilon) for arm in ("modelmix", "dpsgd"))
            assert f"{mixed:.2f} against {plain:.2f} at ε = {epsilon:g}" in line("an interest in ModelMix")
        summary = result("mac")["summary"]["mnist"]
        for epsilon in (0.5, 2.0, 8.0):
            mac, sgd = (100 * summary[f"eps={epsilon:g}, {name}"]["mean"] for name in ("dp-mac", "dp-sgd"))
            assert f"{mac:.2f} against {sgd:.2f} at ε = {epsilon:g}" in line("an interest in layer")

    def test_correlated_noise(self) -> None:
        table = result("correlated_again")["table"]["rows"]
        rows = [row for row in table if (row["batches"], row["epochs"]) == (200, 1)]
        gains = {
            (row["task"], row["epsilon"]): pair["measured"]
            for row in rows
            for pair in row["pairs"]
            if pair["ways"] == ["allocation", "correlated"] and pair["standard_errors"] > 2.5
        }
        assert (len({task for task, _ in gains}), len({row["task"] for row in rows})) == (2, 4)
        least, most = min(gains.values()), max(gains.values())
        words = f"gained {least:.1f} to {most:.1f} points over random allocation on two of four tasks"
        assert words in " ".join(WHICH.split())

    def test_every_method_has_a_sentence(self) -> None:
        sentences = WHICH.partition("In a sentence each:")[2]
        names = {"dpsgd": "DP-SGD", "dp-mac": "DP-MAC", "modelmix": "ModelMix", "correlated": "Correlated noise"}
        for name in METHODS:
            assert f"- **{names.get(name, name.replace('-', ' ').capitalize())}** is for" in sentences, name

    def test_it_is_linked_from_the_first_screen_and_from_the_help(self) -> None:
        from sordino.cli import _parser

        first_screen = (ROOT / "README.md").read_text(encoding="utf8").splitlines()[:60]
        assert any("docs/which_method.md" in row for row in first_screen)
        assert any("docs/coming_from_opacus.md" in row for row in first_screen)
        train = next(a for a in _parser()._actions if isinstance(a.choices, dict)).choices["train"]
        assert "docs/which_method.md" in train.format_help().replace("\n", "")


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", OPACUS)
    assert len(named) > 15
    for path, test in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf8"))
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{path}::{test}"


def test_every_public_name_is_in_the_reference_once() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf8")
    documented = re.findall(r"^\.\. auto(?:class|function):: sordino\.(\w+)$", page, re.M)
    assert sorted(documented) == sorted(sordino.__all__)
    assert all(getattr(sordino, name).__doc__ for name in documented)


def test_papers_are_cited_by_name_and_not_by_number() -> None:
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        assert not re.search(r"papers? \d{3}\b", page.read_text(encoding="utf8")), page.name
