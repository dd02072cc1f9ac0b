"""The files of a finished run, whether a recipe or `sordino.train` made it.

model.safetensors  the published weights; its metadata say what they are and under which guarantee
result.json        the guarantee and the metrics
histogram.json     a released histogram of norms, if the plan has one
report.html        the report for a reviewer
not_private.json   for the data's owner only; no guarantee covers it
"""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sordino import __version__, report
from sordino.errors import SordinoError
from sordino.files import json_bytes, write_atomically
from sordino.plan.core import Plan
from sordino.runs.closing import write_closed
from sordino.runs.stated import stated_in_model
from sordino.training.job import Result
from sordino.training.state import model_tensors

NOT_PRIVATE = "computed from the private records without noise; no guarantee covers this file: do not publish it"


@dataclass(frozen=True)
class Described:
    """What is public about a run besides its plan. `inputs`: the model's inputs (shape, type, classes, labels)."""

    name: str
    seed: int = 0
    inputs: Mapping[str, Any] = field(default_factory=dict)
    further: Mapping[str, Any] = field(default_factory=dict)


def write_results(
    out: Path, plan: Plan, result: Result, described: Described, noise_free: Result | None = None
) -> dict[str, Any]:
    """Writes the histogram, model and result (`closing`), and the report, in this order; then removes checkpoints."""
    document = result_document(plan, result, described, noise_free)
    if result.histogram is not None:
        write_atomically(out / "histogram.json", json_bytes(result.histogram.to_dict()))
    write_atomically(out / "not_private.json", json_bytes({"warning": NOT_PRIVATE, **result.not_private}), private=True)
    document = write_closed(out, document, model_tensors(result.model), _stated(document, described))
    report.write(out)
    if result.stopped_at is None:  # a stopped run may be continued
        shutil.rmtree(out / "checkpoint", ignore_errors=True)
    return document


def result_document(plan: Plan, result: Result, described: Described, noise_free: Result | None) -> dict[str, Any]:
    """The content of result.json."""
    guarantee, last = result.guarantee, result.metrics[-1]
    if guarantee is None:
        raise SordinoError("a run without a guarantee has no results to write")
    plain = noise_free.metrics[-1] if noise_free else None
    return {
        "name": described.name,
        "method": plan.method.name,
        **{key: getattr(guarantee, key) for key in ("epsilon", "delta", "relation", "sampler", "accountant")},
        **guarantee.beside,
        "theorem": guarantee.theorem,
        "secure": guarantee.secure,
        "guarantee": {"sentence": str(guarantee), **guarantee.to_dict()},
        "test_accuracy": last.get("test_accuracy"),
        "noise_free_accuracy": (plain or {}).get("test_accuracy"),
        "seconds": round(result.seconds, 3),
        "seed": described.seed,
        "insecure_seed": plan.insecure_seed,
        "steps": plan.steps,
        "skipped_steps": result.skipped_steps,
        "records": plan.records,
        "public": plan.public.to_dict() if plan.public is not None else None,
        "expected_batch": plan.expected_batch,
        "noise_multiplier": plan.noise.noise_multiplier,
        "parameters": sum(p.numel() for p in result.model.parameters() if p.requires_grad),
        "environment": environment(),
        **plan.method.result_entries(last, plain),
        **described.further,
    }


def _stated(document: Mapping[str, Any], described: Described) -> dict[str, Any]:
    """What the model file says about itself, wherever it is copied to."""
    return {**stated_in_model(document, __version__), "inputs": dict(described.inputs)}


def environment() -> dict[str, str | int]:
    """The versions and the machine with which the metrics were measured."""
    return {
        "sordino": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
