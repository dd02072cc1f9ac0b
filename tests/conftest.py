"""Shared by all tests: one thread per process (the suite runs on all cores), small data, markers."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

from small_recipes import shorten_test_rows
from sordino.data import files, loading

torch.set_num_threads(1)

# The same examples in every run and no wall-clock limits, so that results do not depend on the load. To search for new
# examples: pytest --hypothesis-profile=search.
TIMED = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("same", derandomize=True, deadline=None, database=None, suppress_health_check=TIMED)
settings.register_profile("search", deadline=None, suppress_health_check=TIMED)
settings.load_profile("same")

HERE = Path(__file__).parent
SLOW = HERE / "slow.json"
"""Tests with their seconds of processor time, measured by `pytest --measure` on one process (see CONTRIBUTING.md)."""
LIMIT = 1.0  # seconds; `make unit` leaves out a test function that takes at least this, over all its parameters
MARKED = {"models/": "models", "hf/": "models", "report/test_report_browser.py": "browser"}
_SPENT = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--measure", action="store_true", help=f"measure the tests that run, and update {SLOW.name}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = json.loads(SLOW.read_text(encoding="utf8"))
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        for start, marker in MARKED.items():
            if place.startswith(start):
                item.add_marker(marker)
        if function_of(item) in slow:
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Every test starts with the same global random state, independent of earlier tests in its process."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global state is what libraries draw from
    torch.manual_seed(0)


def function_of(item: pytest.Item) -> str:
    """The name of a test without its parameters, relative to the folder of the tests."""
    return item.nodeid.split("[")[0].removeprefix("tests/")


def spent() -> float:
    """Processor time of this process and of the children that it has waited for."""
    return math.fsum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    start = spent()
    found = yield
    times = item.config.stash.setdefault(_SPENT, {})
    times[function_of(item)] = times.get(function_of(item), 0.0) + spent() - start
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--measure"):
        times = session.config.stash.get(_SPENT, {})
        known = {name: t for name, t in json.loads(SLOW.read_text(encoding="utf8")).items() if name not in times}
        known |= {name: round(seconds, 1) for name, seconds in times.items() if seconds >= LIMIT}
        SLOW.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf8")


@lru_cache
def _unpacked(path: Path, changed: int) -> bytes:
    return files.read_bytes(path)


@pytest.fixture(autouse=True, scope="session")
def _embedded_data_are_unpacked_once() -> Iterator[None]:
    """Nearly every run reads them, and unpacking would take half of a small run's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "read_bytes", lambda path: _unpacked(path, path.stat().st_mtime_ns))
        yield


@pytest.fixture
def few_test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes evaluate on 100 test rows: with a convolutional net, thousands of rows take longer than the steps."""
    shorten_test_rows(monkeypatch)


@pytest.fixture
def records() -> tuple[Tensor, Tensor]:
    """Two hundred records of three classes that a linear layer can separate."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(200) % 3
    inputs = nn.functional.one_hot(targets, 6) * 2.0 + torch.randn(200, 6, generator=generator)
    return inputs, targets


@pytest.fixture
def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)
