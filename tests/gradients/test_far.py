"""Nothing in the core assumes the CPU: the same norms, sums and weights on a device that refuses to meet it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils import backend_registration

if not hasattr(backend_registration, "_DummyBackendModule"):
    pytest.skip("this version of torch can't register a device from Python; later ones can", allow_module_level=True)

from gradients.far_cases import CLIPPINGS, FAMILIES


def test_layer_families_clippings_and_a_run_are_the_same_on_another_device() -> None:
    script = Path(__file__).with_name("far_cases.py")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(script.parents[1]), *sys.path]),
    }
    made = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout.splitlines()[-1])
    assert set(found) == {"refuses", "run", *FAMILIES, *map(str, CLIPPINGS)}
    assert {name: error for name, error in found.items() if error} == {}
