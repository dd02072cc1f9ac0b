"""The versions that pyproject.toml allows are those that the workflow tests."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]


def pinned(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text("utf8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def workflow() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text("utf8"))
    return found


def version(text: str) -> list[int]:
    return [int(part) for part in text.split(".")]


def test_the_oldest_version_of_every_dependency_is_the_one_that_is_tested() -> None:
    allowed = dict(one.split(">=") for one in PROJECT["dependencies"])
    oldest = pinned("constraints-oldest.txt")
    assert set(oldest) == set(allowed)
    for name, floor in allowed.items():
        least, tested = version(floor), version(oldest[name])
        assert tested[: len(least)] == least, name
        assert not any(tested[len(least) :]), f"{name}: the floor is the first release of its series"


def test_every_version_of_python_that_is_promised_is_in_the_workflow() -> None:
    promised = {c.rsplit(" ", 1)[1] for c in PROJECT["classifiers"] if re.search(r"Python :: 3\.\d+$", c)}
    jobs = workflow()["jobs"]
    assert set(jobs["wheels"]["strategy"]["matrix"]["python"]) == promised
    rows = jobs["versions"]["strategy"]["matrix"]["include"]
    assert {jobs["test"]["steps"][1]["with"]["python-version"], *(row["python"] for row in rows)} == promised
    for row in rows:
        assert (ROOT / row["constraints"]).is_file()


def test_the_workflow_calls_targets_and_scripts_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf8"), re.MULTILINE))
    commands = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    called = re.findall(r"^\s*make ([a-z-]+)", "\n".join(commands), re.MULTILINE)
    assert called
    assert set(called) <= targets
    assert (ROOT / ".ci/run").is_file()


def test_the_index_of_torch_is_a_setting_and_no_address_in_a_file() -> None:
    text = (ROOT / ".github/workflows/test.yml").read_text("utf8")
    assert workflow()["env"]["TORCH_INDEX"] == "${{ vars.TORCH_INDEX }}"
    assert "://" not in text
    assert "://" not in (ROOT / "Makefile").read_text("utf8")
