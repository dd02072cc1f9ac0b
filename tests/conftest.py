"""What all tests share: one thread per process (the suite runs on all cores), small data, markers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

torch.set_num_threads(1)

HERE = Path(__file__).parent
SLOW = (
    *("audit/", "benchmarks/", "bit_identity/", "experiments/", "methods/sixth/"),
    *("diagnostics/instruments/", "diagnostics/test_doctor.py"),
    *("gradients/test_attacks.py", "gradients/test_flow.py", "gradients/test_properties.py"),
    *("methods/hidden_state/test_hidden_recipe.py", "methods/hidden_state/test_hidden_training.py"),
    *("methods/hidden_state/test_last_iterate.py", "methods/hidden_state/test_comparison.py"),
    *("methods/dp_mac/test_mac_audit.py", "methods/dp_mac/test_mac_run.py", "methods/dp_mac/test_mac_training.py"),
    *("methods/modelmix/test_audit_modelmix.py", "methods/modelmix/test_mixed_training.py"),
    *("methods/modelmix/test_modelmix_recipes.py", "runs/test_batchclipping_recipes.py", "runs/test_sweep"),
    *("training/test_train.py", "training/test_training_peer_issues.py"),
)
"""Files and folders with whole runs, audits and searches. A test or a module may also mark itself."""
MARKED = {"models/": "models", "report/test_report_browser.py": "browser", **dict.fromkeys(SLOW, "slow")}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        place = item.path.relative_to(HERE).as_posix()
        for start, marker in MARKED.items():
            if place.startswith(start):
                item.add_marker(marker)


@pytest.fixture
def records() -> tuple[Tensor, Tensor]:
    """Two hundred records of three classes that a linear layer can tell apart."""
    generator = torch.Generator().manual_seed(0)
    targets = torch.arange(200) % 3
    inputs = nn.functional.one_hot(targets, 6) * 2.0 + torch.randn(200, 6, generator=generator)
    return inputs, targets


@pytest.fixture
def linear() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(6, 3)
