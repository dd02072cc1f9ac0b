"""The reviewer's command: a genuine run is told from a forged one, whatever was forged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from forgeries import FORGERIES, edit_json
from safetensors.torch import load_file

import sordino
from small_recipes import small_recipe
from sordino import report
from sordino.cli import main
from sordino.errors import InputError, SordinoError
from sordino.release.ledger import read_chain
from sordino.runs import verify as verifying
from sordino.runs.closing import file_digest, result_digest
from sordino.runs.run import run_recipe
from sordino.runs.signing import private_key, sign
from sordino.runs.stated import stated_in_model
from sordino.runs.verify import failed, verify
from sordino.training.sealed import sealed

CHANGES: dict[str, Any] = {"privacy": {"insecure_seed": None, "noise_multiplier": 3.0}, "train": {"steps": 6}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two genuine runs of the same recipe."""
    folder = tmp_path_factory.mktemp("runs")
    for name in ("one", "two"):
        run_recipe(small_recipe(**CHANGES), folder / name, progress=False)
    return folder / "one", folder / "two"


@pytest.fixture
def forged(runs: tuple[Path, Path], tmp_path: Path) -> Path:
    shutil.copytree(runs[0], tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def cheap_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same guarantees, computed once: thirty forgeries share a handful of plans."""
    known: dict[str, Any] = {}
    guarantee = verifying.Plan.guarantee

    def once(plan: Any, delta: float | None = None) -> Any:
        key = repr((plan, delta))
        if key not in known:
            known[key] = guarantee(plan, delta)
        return known[key]

    monkeypatch.setattr(verifying.Plan, "guarantee", once)


def test_a_genuine_run_is_genuine_and_its_epsilon_is_the_ledgers(runs: tuple[Path, Path]) -> None:
    verdict = verify(runs[0])
    assert list(failed(verdict)) == []
    result = json.loads((runs[0] / "result.json").read_text("utf8"))
    assert verdict.genuine
    assert verdict.epsilon == pytest.approx(result["epsilon"], rel=1e-9)
    assert (verdict.delta, verdict.relation, verdict.secure) == (1e-5, "add-remove", True)
    head = read_chain(runs[0] / "ledger.jsonl").head
    assert result["ledger"] == {"format": 2, "entries": 6, "hash": head.hash}
    assert head.hash in (runs[0] / "report.html").read_text("utf8")
    assert not (runs[0] / "checkpoint").exists(), "the key of the data's digest goes with the checkpoints"


@pytest.mark.usefixtures("cheap_plans")
@pytest.mark.parametrize("name", FORGERIES)
def test_a_forgery_is_caught_and_named(name: str, runs: tuple[Path, Path], forged: Path) -> None:
    forge, named = FORGERIES[name]
    forge(forged, runs[1])
    verdict = verify(forged)
    assert not verdict.genuine
    wrong = {check.name: check.why for check in failed(verdict)}
    assert named in wrong, wrong


def test_there_are_more_than_twenty_forgeries() -> None:
    assert len(FORGERIES) >= 20


def test_the_command_says_so_by_its_exit_code_and_as_json(
    runs: tuple[Path, Path], forged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(runs[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"genuine", "epsilon", "delta", "relation", "checks"} <= set(found)
    assert found["genuine"] is True
    assert all(set(check) == {"name", "ok", "why"} for check in found["checks"])
    edit_json(forged / "result.json", epsilon=0.1)
    assert main(["verify", str(forged)]) == 3
    out = capsys.readouterr().out
    assert "NOT GENUINE" in out
    assert "states ε = 0.1" in out
    for nothing in (tmp_path / "nowhere", tmp_path):
        assert main(["verify", str(nothing)]) == 2


@pytest.mark.parametrize("name", ["ledger.jsonl", "model.safetensors", "result.json", "report.html", "recipe.toml"])
def test_a_file_that_is_missing_or_empty_is_named_without_a_traceback(forged: Path, name: str) -> None:
    (forged / name).write_bytes(b"")
    assert not verify(forged).genuine
    (forged / name).unlink()
    verdict = verify(forged)
    assert name in next(check.why for check in verdict.checks if check.name == "files")


def test_what_only_a_signature_tells(runs: tuple[Path, Path], forged: Path, tmp_path: Path) -> None:
    """A forger who rewrites result, model and page together is consistent, and does not have the owner's key."""
    secret, public = tmp_path / "owner.pem", tmp_path / "owner.pub"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", secret], check=True, capture_output=True)
    subprocess.run(["openssl", "pkey", "-in", secret, "-pubout", "-out", public], check=True, capture_output=True)
    key = private_key(secret)
    assert not verify(forged, public).genuine, "not signed"
    sign(forged, key)
    assert verify(forged, public).genuine
    _rewritten(forged, runs[1])
    assert verify(forged).genuine, "everything agrees"
    (wrong,) = failed(verify(forged, public))
    assert wrong.name == "signature"
    with pytest.raises(InputError, match="not a public key"):
        verify(forged, forged / "recipe.toml")
    with pytest.raises(InputError, match="not a private key"):
        private_key(public)


def _rewritten(folder: Path, other: Path) -> None:
    """Another run's weights, with model, result and page made anew to agree."""
    result = json.loads((folder / "result.json").read_text("utf8"))
    about = stated_in_model(result, result["environment"]["sordino"]) | {"result": result_digest(result)}
    about["ledger"] = {key: result["ledger"][key] for key in ("entries", "hash")}
    (folder / "model.safetensors").write_bytes(sealed(load_file(other / "model.safetensors"), about))
    result["files"]["model.safetensors"] = file_digest(folder / "model.safetensors")
    (folder / "result.json").write_text(json.dumps(result, indent=2), "utf8")
    report.write(folder)


@pytest.mark.usefixtures("cheap_plans")
def test_the_pages_headline_is_the_larger_epsilon_and_says_so(forged: Path) -> None:
    honest = json.loads((forged / "result.json").read_text("utf8"))["epsilon"]
    for stated, larger in ((0.001, honest), (50.0, 50.0)):
        edit_json(forged / "result.json", epsilon=stated)
        page = report.write(forged).read_text("utf8")
        headline = page[page.index('class="big"') :][:80]
        assert report.numbers.epsilon(larger) in headline
        assert "the larger one is shown" in page


def test_what_was_added_after_the_run_is_named_as_not_covered(forged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An audit is made later, by whoever has the directory: no hash of the run vouches for it."""
    audit = {"epsilon_lower": 0.0, "epsilon_claimed": 0.01, "confidence": 0.95, "holds": True, "steps": 6}
    (forged / "audit.json").write_text(json.dumps(audit), "utf8")
    (forged / "guarantee.txt").write_text("ε = 0.001, certified", "utf8")
    (forged / "hf").mkdir()
    (forged / "hf" / "adapter_model.safetensors").write_bytes(b"other weights")
    verdict = verify(forged)
    assert verdict.genuine, "the page was made before the audit"
    report.write(forged)
    verdict = verify(forged)
    assert verdict.genuine
    assert {"audit.json", "guarantee.txt", "hf/"} <= set(verdict.not_covered)
    assert "model.safetensors" not in verdict.not_covered
    assert "not covered: audit.json" in next(check.why for check in verdict.checks if check.name == "report")
    assert main(["verify", str(forged)]) == 0
    assert "guarantee.txt" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl", "model.safetensors", "report.html", "audit.json"])
def test_a_pipe_or_a_device_in_the_directory_is_refused_before_it_is_read(forged: Path, name: str) -> None:
    (forged / name).unlink(missing_ok=True)
    os.mkfifo(forged / name)
    with pytest.raises(InputError, match="pipe"):
        verify(forged)
    with pytest.raises(InputError, match="pipe"):
        sordino.load(forged)
    (forged / name).unlink()
    (forged / name).symlink_to("/dev/zero")
    with pytest.raises(InputError, match="device"):
        verify(forged)


@pytest.mark.parametrize("name", ["ledger.jsonl", "recipe.toml", "metrics.jsonl", "result.json", "report.html"])
def test_a_document_of_gigabytes_is_refused_before_it_is_read(forged: Path, name: str) -> None:
    os.truncate(forged / name, 30 << 30)
    with pytest.raises(InputError, match="larger than a gigabyte"):
        verify(forged)
    with pytest.raises(InputError, match="larger than a gigabyte"):
        sordino.load(forged)


def test_a_model_that_is_longer_than_its_header_says_is_not_read(forged: Path) -> None:
    os.truncate(forged / "model.safetensors", 30 << 30)
    verdict = verify(forged, only=("ledger", "result", "model"))
    assert [check.name for check in failed(verdict)] == ["model"]
    with pytest.raises(SordinoError, match="longer than its header says"):
        sordino.load(forged)


@pytest.mark.parametrize("name", ["model of another run", "weights of another run", "ε in result.json"])
def test_a_model_is_not_loaded_under_the_guarantee_of_another_run(
    name: str, runs: tuple[Path, Path], forged: Path
) -> None:
    def loaded() -> sordino.Trained:
        own = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
        return sordino.load(forged, model=own if name == "weights of another run" else None)

    loaded()
    FORGERIES[name][0](forged, runs[1])
    with pytest.raises(InputError, match="not of the same run"):
        loaded()
