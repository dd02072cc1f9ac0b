"""The command line as its users run it: contracts, exit codes, help."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from small_recipes import small_toml
from sordino.cli import main

RECIPE = small_toml(
    run={"name": "small"},
    privacy={"epsilon": 3.0, "noise_multiplier": None, "insecure_seed": None},
    sampling={"expected_batch": 300},
    train={"steps": 6, "eval_every": 3},
)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return path


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    document = json.loads(capsys.readouterr().out)
    assert isinstance(document, dict)
    return document


def test_account_dpsgd_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    command = "account dpsgd --sampling-rate 0.01 --noise-multiplier 1.1 --steps 10000 --delta 1e-5 --json"
    assert main(command.split()) == 0
    found = printed(capsys)
    assert found["epsilon"] == pytest.approx(5.1926, abs=2e-3)
    assert (found["delta"], found["relation"], found["accountant"]) == (1e-5, "add-remove", "pld")
    assert "Poisson" in str(found["theorem"])


def test_calibrate_dpsgd_never_exceeds_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    command = "calibrate dpsgd --epsilon 3 --sampling-rate 0.01 --steps 10000 --delta 1e-5 --json"
    assert main(command.split()) == 0
    found = printed(capsys)
    assert found["noise_multiplier"] == pytest.approx(1.565, abs=2e-3)
    assert 3 - 1e-3 <= float(str(found["epsilon"])) <= 3


def test_train_writes_its_run_directory(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(out), "--json"]) == 0
    result = printed(capsys)
    written = json.loads((out / "result.json").read_text())
    assert {**written, "run": str(out)} == result
    for key in ("epsilon", "delta", "relation", "test_accuracy", "seconds", "seed", "method"):
        assert key in written
    assert written["method"] == "dpsgd"
    assert float(written["epsilon"]) <= 3
    files = {path.name for path in out.iterdir()}
    assert files >= {"recipe.toml", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "result.json", "report.html"}
    assert "clip_norm = 1.0" in (out / "recipe.toml").read_text(), "defaults are filled in"
    assert len((out / "ledger.jsonl").read_text().splitlines()) == 7, "a header and six releases"
    assert [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()] == [3, 6]
    capsys.readouterr()
    assert main(["train", str(out / "recipe.toml"), "--out", str(out), "--resume", "--json"]) == 0
    assert printed(capsys) == result, "a complete run is shown again, not made again"
    assert main(["report", str(out), "--json"]) == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["privacy.epsilom=1"], "did you mean 'epsilon'"),
        (["train.momentun=0.9"], "did you mean 'momentum'"),
        (["model.hiden=3"], "hiden"),
        (["clipping.gama=3"], "gama"),
        (["clipping.name=flatt"], "flat"),
        (["features.name=scatering"], "did you mean 'scattering'"),
        (["data.name=fashion-mnist-min"], "fashion-mnist-mini"),
        (["train.optimizer=sdg"], "did you mean 'sgd'"),
        (["train.scheduler=cosin"], "did you mean 'cosine'"),
        (["method.name=dpsdg"], "did you mean 'dpsgd'"),
        (["sampling.name=poison"], "poisson"),
        (["privacy.epsilon=-1"], "epsilon"),
        (["privacy.delta=1.5"], "delta"),
        (["privacy.epsilon=0.01", "privacy.norm_histogram=0.5"], "can't be reached"),
        (["sampling.expected_batch=20000"], "expected_batch"),
        (["train.chunk=0"], "chunk"),
        (["train.average=mean"], "mean"),
        (["sampling.name=partition", "privacy.relation=add-remove"], "replace-one"),
    ],
)
def test_wrong_input_exits_2_with_the_remedy_and_writes_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], message: str
) -> None:
    out = tmp_path / "run"
    flags = [word for override in overrides for word in ("--set", override)]
    assert main(["train", str(recipe), "--out", str(out), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_large_epsilon_does_not_pass_without_a_word(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set", "train.steps=1", "--set", "privacy.noise_multiplier=0.05", "--set", "privacy.epsilon="]
    assert main(["train", str(recipe), "--out", str(tmp_path / "run"), *flags]) == 0
    said = capsys.readouterr().err
    assert "accepts 1 % false accusations, can recognise at most" in said
    assert "is large" in said


def test_a_directory_with_other_things_in_it_is_left_alone(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "thesis.tex").write_text("precious")
    assert main(["train", str(recipe), "--out", str(out)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


def test_a_run_is_not_overwritten_nor_resumed_under_another_recipe(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(out)]) == 0
    before = (out / "result.json").read_bytes()
    assert main(["train", str(recipe), "--out", str(out)]) == 2
    assert main(["train", str(recipe), "--out", str(out), "--resume", "--set", "train.lr=0.25"]) == 2
    assert "is not the given recipe" in capsys.readouterr().err
    assert (out / "result.json").read_bytes() == before


def test_a_missing_dataset_says_where_it_looked(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--set", "data.name=cifar10", "--data-dir", str(tmp_path), "--out", str(tmp_path / "run")]
    assert main(["train", str(recipe), *flags]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path) in error
    assert "sordino data fetch cifar10" in error


def test_an_audit_exits_3_when_the_claim_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--seed", "1", "--json", "--out", str(tmp_path)]) == 0
    sound = printed(capsys)
    assert float(str(sound["epsilon_lower"])) <= float(str(sound["epsilon_claimed"]))
    assert json.loads((tmp_path / "audit.json").read_text()) == sound
    assert main(["audit", "--seed", "1", "--noise-scale", "0.5", "--json"]) == 3
    assert printed(capsys)["holds"] is False


def test_an_audit_of_another_recipe_is_not_put_into_a_runs_report(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(out)]) == 0
    assert main(["audit", str(recipe), "--set", "privacy.epsilon=2", "--out", str(out)]) == 2
    assert "another recipe" in capsys.readouterr().err
    assert main(["audit", "--out", str(out), "--canaries", "500"]) == 0
    assert main(["report", str(out)]) == 0
    assert "does not contradict" in (out / "report.html").read_text()


def test_data_list_and_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "list", "--data-dir", str(tmp_path), "--json"]) == 0
    here = {row["name"]: row["here"] for row in printed(capsys)["datasets"]}  # type: ignore[attr-defined]
    assert here["fashion-mnist-mini"] is True
    assert here["mnist"] is False
    assert main(["data", "verify", "fashion-mnist-mini"]) == 0
    assert main(["data", "verify", "mnist", "--data-dir", str(tmp_path)]) == 2


@pytest.mark.parametrize(
    "command", ["train", "demo", "account", "account dpsgd", "calibrate dpsgd", "audit", "report", "data", "data fetch"]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_no_command_and_an_unknown_command_exit_2() -> None:
    for words in ([], ["trian"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2


def test_it_is_installed_as_a_command() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("sordino"), "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout.startswith("sordino ")


def test_a_model_that_is_refused_on_the_first_batch_leaves_nothing_behind(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def coupled(*_: object, **__: object) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10), nn.BatchNorm1d(10))

    monkeypatch.setattr("sordino.nets.build", coupled)
    out = tmp_path / "run"
    assert main(["train", str(recipe), "--out", str(out)]) == 2
    assert "BatchNorm" in capsys.readouterr().err
    assert not out.exists()


def test_an_interrupt_that_a_library_turned_into_another_error_is_called_one(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def imported(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("_multiarray failed to import")  # noqa: B904

    monkeypatch.setattr("sordino.runs.run.run_recipe", imported)
    assert main(["train", str(recipe)]) == 1
    assert capsys.readouterr().err.startswith("sordino: interrupted")
