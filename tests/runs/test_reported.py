"""What the first users of the library reported as wrong, in the order of their report: one test for each sentence.

Headings and tables on narrow screens are looked at in tests/report/test_report_browser.py.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forgeries import FORGERIES, edit_json
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import sordino
from small_recipes import small_recipe, small_toml
from sordino import report
from sordino.cli import _parser, main
from sordino.errors import InputError, Refused
from sordino.registry import names as method_names
from sordino.runs.run import run_recipe
from sordino.runs.verify import failed, verify

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
OWNER = torch.arange(60) // 2
NOISE: dict[str, Any] = {"insecure_seed": None, "noise_multiplier": 3.0}


def plan_of(records: int = 60, **options: Any) -> sordino.Plan:
    settings = {"noise_multiplier": 1.0, "delta": 1e-4, "expected_batch": 8, "steps": 1, **options}
    return sordino.dpsgd(records=records, **settings)


def train(dataset: Any, plan: sordino.Plan | None = None, model: nn.Module | None = None, **given: Any) -> Any:
    module = nn.Linear(4, 3) if model is None else model
    options = {"lr": 0.1, "settings": sordino.Settings(progress=False), **given}
    return sordino.train(module, cross_entropy, dataset, plan or plan_of(), **options)


class TestTheInterface:
    def test_the_record_of_a_row_is_not_ignored(self) -> None:
        with pytest.raises(InputError, match="another number"):
            train(sordino.Rows(X, Y, record=OWNER))
        assert train(sordino.Rows(X, Y, record=OWNER), plan_of(30)).guarantee.steps == 1

    def test_the_coefficient_of_a_row_is_not_ignored(self) -> None:
        """A coefficient of zero takes a row's gradient away: weights move by noise alone, which is seeded here."""

        def moved(factor: float) -> torch.Tensor:
            model = nn.Linear(4, 3)
            nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)  # type: ignore[func-returns-value]
            rows = sordino.Rows(X, Y, record=OWNER, coefficient=torch.full((60,), factor))
            plan = plan_of(30, noise_multiplier=1e-3, insecure_seed=1, expected_batch=30, delta=1e-3)
            train(rows, plan, model, lr=1.0)
            return model.weight.detach()

        assert moved(0.0).norm() < 1e-3 < 1e-2 < moved(1.0).norm()

    @pytest.mark.parametrize("dataset", [(X.numpy(), Y.numpy()), (X, Y), TensorDataset(X, Y)], ids=["np", "pt", "ds"])
    def test_no_error_tells_the_number_of_rows(self, dataset: Any) -> None:
        with pytest.raises(InputError, match="90 records, but the dataset has another number") as error:
            train(dataset, plan_of(90))
        assert not re.search(r"\b(2|60)\b", str(error.value)), "advice that measures the data"

    def test_arrays_are_rows_and_a_loader_is_refused(self) -> None:
        assert train((X.numpy(), Y.numpy())).guarantee.steps == 1
        with pytest.raises(Refused, match=r"loader\.dataset"):
            train(DataLoader(TensorDataset(X, Y)))

    def test_lengths_that_differ_are_an_error(self) -> None:
        with pytest.raises(InputError, match="their lengths differ"):
            train((X, Y[:-3]))

    def test_double_precision_is_no_raw_error(self) -> None:
        assert train((X.numpy().astype(np.float64), Y)).guarantee.steps == 1

    def test_labels_out_of_range_are_no_raw_error(self) -> None:
        for labels in (Y + 1, Y - 1):
            with pytest.raises(InputError, match="number the classes from 0"):
                train((X, labels))

    def test_bf16_is_no_raw_error(self) -> None:
        assert train((X.bfloat16(), Y)).guarantee.steps == 1
        with pytest.raises(Refused, match=r"model\.float\(\)"):
            train((X, Y), model=nn.Linear(4, 3).bfloat16())

    def test_an_optimizer_instance_is_no_raw_error(self) -> None:
        model = nn.Linear(4, 3)
        with pytest.raises(InputError, match="its class"):
            train((X, Y), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A small recipe in an empty working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("../recipe.toml").write_text(small_toml(privacy=NOISE))
    return "../recipe.toml"


def told(code: int, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with this code, in an empty directory that it leaves empty."""
    assert main(words) == code
    assert not list(Path().iterdir()), "exit code 2 leaves nothing behind"
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "one sentence"
    return said


class TestTheBudget:
    @pytest.mark.parametrize("delta", ["0.5", "1e-3", repr(1 / 12000)])
    def test_a_delta_of_one_over_n_is_refused(self, delta: str, recipe: str, capsys: Any) -> None:
        said = told(2, ["train", recipe, "--set", f"privacy.delta={delta}"], capsys)
        assert "is not below 1/12000" in said

    def test_a_large_epsilon_is_commented(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["privacy.noise_multiplier=", "privacy.epsilon=1000", "train.steps=1"]
        assert main(["train", recipe, *(word for flag in flags for word in ("--set", flag))]) == 0
        assert "is large" in capsys.readouterr().err

    @pytest.mark.parametrize("lr", ["nan", "inf", "-inf", "0", "-1"])
    def test_a_step_size_that_trains_nothing_spends_nothing(self, lr: str, recipe: str, capsys: Any) -> None:
        assert "train.lr = " in told(2, ["train", recipe, "--set", f"train.lr={lr}"], capsys)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two genuine runs of the same recipe."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        run_recipe(small_recipe(privacy=NOISE, train={"steps": 6}), folder / name, progress=False)
    return folder / "one", folder / "two"


@pytest.fixture
def forged(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    copied = tmp_path / "run"
    copied.mkdir()
    for path in runs[0].iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    return copied


class TestTheReviewer:
    def test_the_headline_is_not_what_result_json_says(self, forged: Path) -> None:
        true = verify(forged).epsilon
        edit_json(forged / "result.json", epsilon=0.001)
        page = report.write(forged).read_text("utf8")
        (headline,) = re.findall(r'class="big"><span>ε</span> = ([\d.]+)<', page)
        assert true is not None
        assert float(headline) >= true > 0.001
        assert "0.001" in page, "it says what the file stated"

    @pytest.mark.parametrize(
        "name",
        [
            "ε in result.json",
            "model of another run",
            "recipe",
            "sensitivity in each entry, new chain",
            "records × 100 in the header, new chain",
        ],
    )
    def test_what_was_edited_is_noticed(self, name: str, runs: tuple[Path, Path], forged: Path) -> None:
        assert verify(forged).genuine
        FORGERIES[name][0](forged, runs[1])
        assert main(["verify", str(forged)]) == 3
        assert FORGERIES[name][1] in [check.name for check in failed(verify(forged))]

    def test_one_evaluation_draws_no_line(self, forged: Path) -> None:
        page = (forged / "report.html").read_text("utf8")
        drawn = re.findall(r'class="line" d="([^"]+)"', page)
        assert drawn
        assert not any("L" in path for path in drawn)

    def test_no_axis_of_shares_passes_one_hundred_percent(self, forged: Path) -> None:
        page = (forged / "report.html").read_text("utf8")
        for plot in re.findall(r"<svg[^>]*class=\"plot.*?</svg>", page, re.S):
            if "accuracy" in plot:
                assert all(float(tick) <= 100 for tick in re.findall(r">(\d+(?:\.\d+)?)<", plot))

    def test_the_multiplier_is_not_called_sigma(self, forged: Path) -> None:
        page = (forged / "report.html").read_text("utf8")
        assert "σ =" not in page
        assert "3 × sensitivity" in page


class TestTheCommandLine:
    def test_a_file_in_the_place_of_a_directory(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        Path("../file").write_text("precious")
        for place in ("../file", "../file/run"):
            assert "is a file" in told(2, ["train", recipe, "--out", place], capsys)
        assert Path("../file").read_text() == "precious"

    @pytest.mark.parametrize("place", ["/proc/x", "/sys/x/y"])  # neither lets root make a directory
    def test_a_read_only_place(self, place: str, recipe: str, capsys: Any) -> None:
        assert "can't be created" in told(2, ["train", recipe, "--out", place], capsys)

    @pytest.mark.parametrize("name", ["../../evil", "/evil", "a/b", "..", ".hidden", "C:\\evil", ""])
    def test_a_name_is_not_a_path(self, name: str, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert "run.name" in told(2, ["train", recipe, "--set", f"run.name={json.dumps(name)}"], capsys)

    def test_the_lists_of_names_are_complete(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        said = told(2, ["train", recipe, "--set", "method.name=dp-pac"], capsys)
        assert "dp-mac" in said
        assert all(name in said for name in method_names())
        assert "dp-pca" in told(2, ["train", recipe, "--set", "features.name=dp-pc"], capsys)

    def test_words_as_vectors_are_not_verified_without_the_vectors(self, recipe: str, capsys: Any) -> None:
        assert main(["data", "verify", "imdb-glove", "--data-dir", "."]) == 2
        assert "GloVe" in capsys.readouterr().out

    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_no_example_of_a_help_text_breaks_inside_of_a_flag(self, width: int, monkeypatch: Any) -> None:
        monkeypatch.setenv("COLUMNS", str(width))
        parsers = [_parser()]
        while parsers:
            parser = parsers.pop()
            assert not re.search(r"(^|\s)--?[a-z-]*-$", parser.format_help(), re.MULTILINE)
            for action in parser._actions:
                if isinstance(action, argparse._SubParsersAction):
                    parsers += action.choices.values()

    def test_doctor_and_advise_agree(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["doctor", recipe, "--test-rows", "--rows", "60", "--steps", "2", "--json"]) == 0
        doctor = json.loads(capsys.readouterr().out)
        assert main(["advise", "clipping", recipe, "--public", "60", "--steps", "2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["findings"] == doctor["findings"]

    def test_a_key_can_be_unset(self, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
        flags = ["--set", "privacy.noise_multiplier=", "--set", "privacy.epsilon=3", "--set", "train.steps=1"]
        assert main(["train", recipe, "--out", "run", *flags, "--json"]) == 0
        assert 2.9 < json.loads(capsys.readouterr().out)["epsilon"] <= 3
        assert "noise_multiplier" not in Path("run/recipe.toml").read_text()


SOON = """
import sys
from sordino.cli import main
for wrong in sys.argv[2:]:
    assert main(["train", sys.argv[1], "--set", wrong, "--out", "never"]) == 2, wrong
    assert not {"torch", "scipy", "numpy", "dp_accounting"} & set(sys.modules), wrong
"""


def test_a_misspelling_or_a_wrong_number_loads_nothing_slow(recipe: str) -> None:
    names = ["model.name=linaer", "method.name=dpsdg", "privacy.epsilom=1", "train.lrr=1", "clipping.name=falt"]
    numbers = [
        "privacy.epsilon=-1", "privacy.noise_multiplier=0", "privacy.delta=0", "privacy.delta=1e-4",
        "sampling.expected_batch=20000", "sampling.expected_batch=0", "clipping.clip_norm=0", "train.steps=0",
        "train.epochs=-1", "train.lr=0", "train.chunk=0", "train.momentum=1", "data.records=0",
    ]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", SOON, recipe, *names, *numbers], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(names) + len(numbers)
    assert not list(Path().iterdir())
