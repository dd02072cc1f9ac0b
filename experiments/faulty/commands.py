"""Command lines of `plan`, `account` and `calibrate` with wrong, extreme and contradictory values."""

from __future__ import annotations

import random
from pathlib import Path

from faulty.outcome import Tally, tried
from sordino.cli import main

VALUES = [
    "0", "1", "-1", "2", "10", "100", "60000", "1e-5", "1e-300", "1e300", "0.5", "0.999999", "1.0000001", "-0.5", "nan",
    "inf", "-inf", "9" * 400, "-" + "9" * 400, "9" * 5000, "1e400", "0x10", "", " ", "ten", "1,5", "½", "²", "1_000",
    str(2**31), str(2**53), str(2**63), "1e-17", "3.14159", "true",
]  # fmt: skip
LINES: tuple[tuple[str, dict[str, str], dict[str, tuple[str, ...]]], ...] = (
    (
        "plan",
        {"records": "600", "features": "20", "classes": "3", "epsilon": "3", "delta": "1e-5", "feature-norm": "1",
         "curvature": "0.5", "slope": "1.4", "weight-norm": "30", "max-epochs": "20"},
        {},
    ),
    (
        "account dpsgd",
        {"noise-multiplier": "1.1", "steps": "20", "delta": "1e-5", "sampling-rate": "0.01", "records": "1000",
         "batch": "10", "cap": "20"},
        {"sampling": ("poisson", "truncated-poisson", "partition", "without-replacement"),
         "relation": ("add-remove", "replace-one"), "accountant": ("pld", "rdp"), "mechanism": ("gaussian", "laplace")},
    ),
    (
        "calibrate dpsgd",
        {"epsilon": "3", "steps": "20", "delta": "1e-5", "sampling-rate": "0.01", "records": "1000", "batch": "10"},
        {"sampling": ("poisson", "partition", "without-replacement"), "relation": ("add-remove", "replace-one"),
         "accountant": ("pld", "rdp")},
    ),
    (
        "account hidden-state",
        {"records": "600", "batch": "60", "epochs": "5", "steps": "20", "lr": "0.5", "lr-final": "0.1",
         "noise-final": "0.5", "strong-convexity": "0.02", "smoothness": "1.02", "delta": "1e-5",
         "noise-multiplier": "3", "statistic": "5"},
        {"sampling": ("partition", "full", "without-replacement")},
    ),
    (
        "calibrate hidden-state",
        {"records": "600", "batch": "60", "epochs": "5", "lr": "0.5", "strong-convexity": "0.02", "smoothness": "1.02",
         "delta": "1e-5", "epsilon": "3"},
        {"sampling": ("partition", "full")},
    ),
    (
        "account modelmix",
        {"noise-multiplier": "0.37", "tau-over-lr": "0.3", "sampling-rate": "0.02", "clip-norm": "20",
         "expected-batch": "1000", "linf-p": "100", "steps": "20", "delta": "1e-5"},
        {"mechanism": ("gaussian", "laplace")},
    ),
    (
        "calibrate modelmix",
        {"epsilon": "3", "tau-over-lr": "0.3", "sampling-rate": "0.02", "clip-norm": "20", "expected-batch": "1000",
         "linf-p": "100", "steps": "20", "delta": "1e-5"},
        {},
    ),
)  # fmt: skip


def fuzz(seed: int, tally: Tally, folder: Path) -> None:
    """One command line: some flags left out, one to three with another value."""
    draw = random.Random(seed)
    command, flags, choices = LINES[draw.randrange(len(LINES))]
    words = command.split()
    changed = set(draw.sample(sorted(flags), k=min(len(flags), draw.choice([1, 1, 2, 3]))))
    for name, usual in flags.items():
        if draw.random() < (0.3 if name in ("sampling-rate", "records", "batch", "cap", "epochs", "steps") else 0.03):
            continue
        words += [f"--{name}={draw.choice(VALUES) if name in changed else usual}"]
    words += [f"--{name}={draw.choice(some)}" for name, some in choices.items() if draw.random() < 0.5]
    words += ["--json"] if draw.random() < 0.5 else []
    tally.add(tried(lambda: main(words)), " ".join(words))
