"""Whether the audit detects broken mixing, in four settings and over several seeds; one JSON file.

python experiments/modelmix_audit.py
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn

from provenance import origin
from sordino.audit import audit_plan
from sordino.files import write_atomically
from sordino.methods import modelmix

RECORDS, SEEDS, SCALES = 64, (0, 1, 2), (1.0, 0.5, 0.25, 0.0)
SETTINGS = ((4.0, 64.0, 40), (8.0, 64.0, 40), (2.0, 32.0, 20), (1.0, 16.0, 10))  # noise, width (clip norms), steps
TARGET = Path(__file__).parent / "results" / "modelmix_audit.json"


def main() -> int:
    torch.manual_seed(0)
    model = nn.Linear(784, 10)
    rows = torch.randn(RECORDS, 784), torch.randint(0, 10, (RECORDS,))
    runs = []
    for sigma, width, steps in SETTINGS:
        plan = modelmix.plan(
            noise_multiplier=sigma, tau_over_lr=width / RECORDS, lr=0.1, delta=1e-5, records=RECORDS,
            expected_batch=RECORDS, steps=steps,
        )  # fmt: skip
        for scale in SCALES:
            for seed in SEEDS:
                found = audit_plan(plan, model, nn.functional.cross_entropy, rows, seed=seed, width_scale=scale)
                named = {"noise_multiplier": sigma, "width": width, "width_scale": scale, "seed": seed}
                runs.append({**named, **found.to_dict()})
                print(f"{named}: {found.sentence} p = {found.noise_p_value:.2g}", flush=True)
                document = {**origin("python experiments/modelmix_audit.py"), "runs": runs}
                write_atomically(TARGET, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
