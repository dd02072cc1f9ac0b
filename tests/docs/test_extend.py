"""docs/howto/extend.md, followed to the letter in a copy of the package: a dataset, a kind of file and a method."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/howto/extend.md").read_text("utf8")
BLOCKS = re.findall(r"```python\n# not run: (\S+), (.*?)\n(.*?)```", PAGE, re.S)
STATED = "385dcb25ff3edc2950ce8d11220490f32c675f04d45cee5bb764da003a7593e5"
TRAINED = {
    "model": {"name": "linear"},
    "privacy": {"epsilon": 3.0, "delta": 1e-5},
    "sampling": {"expected_batch": 100},
    "train": {"steps": 5, "lr": 1.0},
}


def added(text: str, where: str, block: str) -> str:
    """The file with the block where the page says that it belongs."""
    if where == "at the end of the imports":
        last = [found.end() for found in re.finditer(r"^from .* import .*\n", text, re.M)][-1]
        return text[:last] + block + text[last:]
    name = where.rsplit(" ", 1)[1]
    (table,) = re.finditer(rf"^{name}\b.*[({{]\n", text, re.M)
    if where.startswith("above "):
        return text[: table.start()] + block + text[table.start() :]
    assert where.startswith("at the end of ")
    end = table.end() + re.search(r"^[)}]\n", text[table.end() :], re.M).start()  # type: ignore[union-attr]
    return text[:end] + block + text[end:]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """src/sordino with the page's additions, our_steps.py, its metadata, and rows for both datasets."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "src", root / "src", ignore=shutil.ignore_patterns("__pycache__"))
    upright = np.random.default_rng(0).integers(0, 2, 500)
    x = np.zeros((500, 1, 8, 8), np.uint8)
    x[upright == 1, 0, :, ::2], x[upright == 0, 0, ::2, :] = 255, 255
    (root / "Stripes").mkdir()
    np.savez(root / "Stripes/stripes.npz", x=x, y=upright)
    digest = hashlib.sha256((root / "Stripes/stripes.npz").read_bytes()).hexdigest()
    (root / "rows.jsonl").write_text(
        "".join(json.dumps({"x": [float(y), 0.5], "label": ["no", "yes"][y]}) + "\n" for y in upright.tolist())
    )
    for path, where, block in BLOCKS:
        file = root / path if path.startswith("src/") else root / "src" / path
        if where == "a new file":
            assert not file.exists()
            file.write_text(block, "utf8")
        else:
            file.write_text(added(file.read_text("utf8"), where, block).replace(STATED, digest), "utf8")
    metadata = root / "src/our_steps-1.0.dist-info"  # what pip makes of the page's pyproject.toml
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: our-steps\nVersion: 1.0\n")
    (entry_point,) = re.findall(r'^our-steps = "(.*)"$', PAGE, re.M)
    (metadata / "entry_points.txt").write_text(f"[sordino.methods]\nour-steps = {entry_point}\n")
    return root


def sordino(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "sordino", *words]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=120)


def test_the_page_has_all_places() -> None:
    assert [path.rsplit("/", 1)[-1] for path, _, _ in BLOCKS] == (
        ["catalogue.py", "loading.py", "loading.py", "lines.py", "sources.py", "sources.py", "words.py", "our_steps.py"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"data": {"name": "stripes"}},
        {"data": {"name": "lines", "path": "rows.jsonl", "classes": ["no", "yes"], "width": 2, "records": 500}},
        {"data": {"name": "stripes"}, "method": {"name": "our-steps"}},
    ],
    ids=["dataset", "kind of file", "method"],
)
def test_what_the_page_adds_is_trained_and_verified(copy: Path, sections: dict[str, object], tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(tomli_w.dumps({**TRAINED, **sections}))
    out = tmp_path / "run"
    done = sordino(copy, "train", str(tmp_path / "recipe.toml"), "--data-dir", ".", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads((out / "result.json").read_text("utf8"))
    assert 2.99 < result["epsilon"] <= 3
    if "path" not in sections["data"]:  # type: ignore[operator]
        assert result["test_accuracy"] == 1
    assert sordino(copy, "verify", str(out)).returncode == 0
    assert sordino(copy, "report", str(out)).returncode == 0


@pytest.mark.slow
def test_the_new_names_are_known_and_checked(copy: Path, tmp_path: Path) -> None:
    assert sordino(copy, "data", "verify", "stripes", "--data-dir", ".").returncode == 0
    wrong = {"name": "lines", "path": "rows.jsonl", "classes": ["no", "yes"], "widht": 2, "records": 500}
    (tmp_path / "wrong.toml").write_text(tomli_w.dumps({**TRAINED, "data": wrong}))
    done = sordino(copy, "train", str(tmp_path / "wrong.toml"), "--out", str(tmp_path / "never"))
    assert done.returncode == 2
    assert "did you mean 'width'" in done.stderr
    assert not (tmp_path / "never").exists()
