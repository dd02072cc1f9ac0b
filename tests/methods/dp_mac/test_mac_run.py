"""DP-MAC recipes from the command line's point of view: run, resume, refuse, report."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sordino.errors import InputError, Refused
from sordino.methods.dp_mac.recipe import read
from sordino.release.ledger import read_ledger
from sordino.report.pictures import grid, shown
from sordino.runs.recipe import Recipe
from sordino.runs.run import run_recipe

CLASSIFIER: dict[str, Any] = {
    "run": {"name": "small"},
    "data": {"name": "fashion-mnist-mini"},
    "features": {"name": "dp-pca", "components": 20, "noise_multiplier": 8.0, "whiten": 0.5, "multiply": 3.0},
    "model": {"name": "classifier", "hidden": [16]},
    "privacy": {"epsilon": 4.0, "delta": 1e-5, "insecure_seed": 0},
    "method": {"name": "dp-mac", "bound": 0.3, "z_start": "backward", "z_rate": 0.1, "z_steps": 1},
    "sampling": {"expected_batch": 1000},
    "train": {"steps": 24, "optimizer": "adam", "lr": 0.03, "eval_every": 8, "checkpoint_every": 5, "chunk": 4096},
}
AUTOENCODER: dict[str, Any] = CLASSIFIER | {
    "features": {"name": "none"},
    "model": {"name": "autoencoder", "hidden": [12]},
    "method": {"name": "dp-mac", "bounding": "normalise", "z_start": "backward", "z_rate": 0.01, "z_steps": 0},
    "train": {"steps": 6, "optimizer": "adam", "lr": 0.01, "eval_every": 3},
}


def changed(section: str, **changes: Any) -> Recipe:
    document = {**CLASSIFIER, section: {**CLASSIFIER.get(section, {}), **changes}}
    return Recipe.from_dict(document)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run of CLASSIFIER."""
    out = tmp_path_factory.mktemp("whole") / "run"
    run_recipe(Recipe.from_dict(CLASSIFIER), out, progress=False)
    return out


def test_a_classifier_is_trained_reported_and_not_made_twice(whole: Path) -> None:
    recipe, out = Recipe.from_dict(CLASSIFIER), whole
    result = json.loads((out / "result.json").read_text())
    assert result["test_accuracy"] > 0.5
    assert result["epsilon"] <= 4.0
    assert result["method"] == "dp-mac"
    _, entries = read_ledger(out / "ledger.jsonl")
    assert [e["purpose"] for e in entries] == ["dp-pca"] + ["gradient"] * 24
    page = (out / "report.html").read_text("utf8")
    assert "The ledger agrees with the plan" in page
    assert "Learned features" in page
    assert "data:image/png;base64," in page
    assert run_recipe(recipe, out, resume=True) == result
    with pytest.raises(InputError, match="already contains a run"):
        run_recipe(recipe, out)


def test_an_autoencoder_shows_what_it_rebuilds(tmp_path: Path) -> None:
    result = run_recipe(Recipe.from_dict(AUTOENCODER), tmp_path / "run", progress=False)
    assert result["test_accuracy"] is None
    assert 0 < result["test_error"] < 0.5
    page = (tmp_path / "run" / "report.html").read_text("utf8")
    assert "Reconstructions" in page
    assert "Test error, mean square per pixel" in page


def test_a_killed_run_is_resumed_to_the_same_weights(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe.from_dict(CLASSIFIER)
    import sordino.methods.dp_mac.run as module

    def dies(*arguments: Any) -> dict[str, float]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "test_metrics", dies)
        with pytest.raises(KeyboardInterrupt):
            run_recipe(recipe, tmp_path / "killed", progress=False)
    run_recipe(recipe, tmp_path / "killed", resume=True, progress=False)
    one, other = (load_file(folder / "model.safetensors") for folder in (whole, tmp_path / "killed"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_lost_projection_is_not_paid_for_twice(tmp_path: Path) -> None:
    """With secure noise the ledger's word counts: the release is spent, and its value gone."""
    from sordino.methods.dp_mac.run import PROJECTION, released_projection

    made = read(changed("privacy", insecure_seed=None, epsilon=4.0))
    images = torch.rand(200, 1, 28, 28)
    released_projection(made, images, tmp_path, made.plan.source())
    again = released_projection(made, images, tmp_path, made.plan.source())
    assert again is not None  # read from its file
    (tmp_path / PROJECTION).unlink()
    with pytest.raises(Refused, match="start again"):
        released_projection(made, images, tmp_path, made.plan.source())


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("method", {"z_stepz": 3}, "z_steps"),
        ("method", {"curvature_bound": 1.0}, "would be ignored"),
        ("method", {"thresholds_noise": 3.0}, "thresholds_every"),
        ("method", {"bounding": "analytic"}, "are for clipping"),
        ("features", {"name": "scattering"}, "dp-pca"),
        ("features", {"components": 0}, "components"),
        ("features", {"multiply": -1}, "multiply"),
        ("model", {"name": "resnet20"}, "classifier"),
        ("model", {"name": "autoencoder"}, "reconstructs its own inputs"),
        ("model", {"activation": "tanh"}, "softplus"),
        ("model", {"hidden": []}, "hidden"),
        ("clipping", {"clip_norm": 0.5}, "norm 1"),
        ("sampling", {"name": "partition"}, "Poisson"),
        ("privacy", {"relation": "replace-one"}, "Poisson"),
        ("privacy", {"norm_histogram": 8.0}, "norm_histogram"),
        ("train", {"epochs": 2}, "not both"),
        ("train", {"optimizer": "cg"}, "conjugate"),
        ("train", {"optimizer": "lion"}, "optimizer"),
        ("train", {"scheduler": "sin"}, "scheduler"),
        ("train", {"nesterov": True}, "nesterov"),
        ("data", {"records": 5000}, "the dataset has another number"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(
    tmp_path: Path, section: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        run_recipe(changed(section, **changes), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_thresholds_and_second_order_are_in_the_plan() -> None:
    made = read(changed("method", thresholds_noise=4.0, thresholds_every=10, order=2, curvature_bound=0.1))
    assert {s.purpose: s.count for s in made.plan.statistics} == {"dp-pca": 1, "mac-thresholds": 3}
    assert made.plan.method.to_dict() == {"name": "dp-mac", "parts": 4}
    assert made.plan.guarantee().epsilon <= 4.0


def test_the_experiments_recipes_are_valid() -> None:
    folder = Path(__file__).parents[3] / "experiments" / "recipes"
    widths = {path.stem: read(Recipe.read(path)).widths for path in sorted(folder.glob("mac_*.toml"))}
    assert widths["mac_usps_autoencoder"] == (256, 300, 100, 20, 100, 300, 256)
    assert widths["mac_mnist_eps2"] == (60, 300, 10)
    assert len(widths) >= 4


def test_a_grid_is_a_png_of_the_right_pixels() -> None:
    images = torch.stack([torch.zeros(3, 4), torch.ones(3, 4)])
    picture = grid(images, 2, "Two", "black, white", stretch=False)
    data = base64.b64decode(picture["png"])
    assert struct.unpack(">II", data[16:24]) == (picture["width"], picture["height"]) == (20, 6)
    length = struct.unpack(">I", data[33:37])[0]
    rows = zlib.decompress(data[41 : 41 + length])
    assert rows[:21] == b"\x00" + b"\x00" * 8 + b"\xff" * 12  # filter byte, black, gap and white
    assert shown({"pictures": [picture]})[0].uri.startswith("data:image/png;base64,iVBOR")


@pytest.mark.parametrize(
    "fault", [{"png": "<script>"}, {"png": "AAAA"}, {"heading": 3}, {"width": "9"}, {"height": -1}, {"png": None}]
)
def test_a_picture_that_is_none_is_left_out(fault: dict[str, Any]) -> None:
    good = grid(torch.zeros(1, 2, 2), 1, "a", "b")
    assert shown({"pictures": [{**good, **fault}, "text", good]}) == shown({"pictures": [good]})
    assert shown(None) == shown({"pictures": 3}) == []


def test_settings_that_fail_are_found_before_anything_is_paid_for(tmp_path: Path) -> None:
    """The W-step is rehearsed on copies before DP-PCA is released: an lr beyond float32 leaves nothing behind."""
    with pytest.raises(InputError, match="in a test before anything was released"):
        run_recipe(changed("train", lr=1e300), tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()
