"""A recipe's whole pipeline as a function from records to releases and outputs: it can be run on other records."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sordino.audit.tap import Call, watched
from sordino.errors import Refused
from sordino.plan.core import Plan
from sordino.sampling import Sampling
from sordino.split import Split
from sordino.training.state import model_tensors

if TYPE_CHECKING:
    from sordino.runs.work import Work

TIMES = ("seconds",)  # keys of a row of metrics that are not compared
# parts of names of files that are not compared: a ledger contains dates, and metrics are compared row by row
NOT_PUBLISHED = ("ledger.jsonl", "metrics.jsonl", "not_private")


@dataclass(frozen=True, eq=False)
class Trace:
    """The releases of a run, the batches of its steps, and all of its outputs."""

    calls: tuple[Call, ...]
    batches: Mapping[int, Tensor]
    outputs: Mapping[str, Any]


def trace(work: Work, split: Split | None = None, forced: Sequence[Call] | None = None) -> Trace:
    """Trains by the recipe and records its releases, batches and outputs.

    Args:
        work: The recipe's data, model and plan.
        split: Records to train on instead of the recipe's.
        forced: Releases of another run, whose results replace those of this run.

    Returns:
        What was recorded.
    """
    if split is not None:
        work = work.changed(work.plan, replace(work.dataset, train=split))
    with tempfile.TemporaryDirectory(prefix="sordino-attack-") as folder:
        out = Path(folder) / "run"
        out.mkdir()
        with watched(forced) as seen:
            result = work.train(out, resume=False)
        outputs: dict[str, Any] = {
            f"weights {name}": hashlib.sha256(value.detach().contiguous().view(-1).numpy().tobytes()).hexdigest()
            for name, value in model_tensors(result.model).items()
        }
        for row in result.metrics:
            outputs[f"metrics at step {row.get('step')}"] = {k: v for k, v in row.items() if k not in TIMES}
        outputs["guarantee"] = result.guarantee.to_dict() if result.guarantee is not None else None
        outputs["histogram"] = result.histogram.to_dict() if result.histogram is not None else None
        outputs |= {f"file {name}": digest for name, digest in _files(out).items()}
    return Trace(tuple(seen.calls), dict(seen.batches), outputs)


def _files(out: Path) -> dict[str, str]:
    """Digests of the files of a run directory, except checkpoints and the files of `NOT_PUBLISHED`."""
    found = {}
    for path in sorted(out.rglob("*")):
        name = str(path.relative_to(out))
        if path.is_file() and "checkpoint" not in name and not any(part in name for part in NOT_PUBLISHED):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def small(work: Work, records: int, steps: int, dtype: torch.dtype | None = None) -> Work:
    """The same pipeline with the first few records, all of them in every step, and few public test rows."""
    plan, data = work.plan, work.dataset
    train = Split(data.train.inputs[:records].clone(), data.train.targets[:records].clone())
    if dtype is not None:
        train = Split(train.inputs.to(dtype), train.targets)
    rows = min(32, len(data.test))
    test = Split(data.test.inputs[:rows], data.test.targets[:rows])
    changes: dict[str, Any] = {
        "records": records, "sampling": everyone(plan.sampling, records), "steps": min(steps, plan.steps),
        "statistics": tuple(replace(statistic, sampling_rate=1.0) for statistic in plan.statistics),
        "insecure_seed": 7,
    }  # fmt: skip
    try:
        made = replace(plan, **changes)
    except Refused:  # a method whose step is the mean over its batch
        made = replace(plan, **changes, divisor=float(records))
    return work.changed(made, replace(data, train=train, test=test))


def short(work: Work, steps: int, *, seed: int | None) -> Work:
    """The first steps of the plan at its full size; few public test rows."""
    plan: Plan = replace(work.plan, steps=min(steps, work.plan.steps), insecure_seed=seed)
    rows = min(32, len(work.dataset.test))
    test = Split(work.dataset.test.inputs[:rows], work.dataset.test.targets[:rows])
    return work.changed(plan, replace(work.dataset, test=test))


def everyone(sampling: Sampling, records: int) -> Sampling:
    """The same sampler, set to draw every record in every step as far as it can."""
    known = {field.name for field in fields(sampling)}
    wanted: dict[str, Any] = {"sampling_rate": 1.0, "batch": records, "batches": 1, "cap": max(records, 1)}
    return replace(sampling, **{name: value for name, value in wanted.items() if name in known})


def differing_arguments(ours: Trace, theirs: Trace) -> str | None:
    """Arguments of the releases that depend on the records; None if there are none."""
    if len(ours.calls) != len(theirs.calls):
        return f"{len(ours.calls)} releases on one dataset, {len(theirs.calls)} on its neighbour"
    for mine, yours in zip(ours.calls, theirs.calls, strict=True):
        a, b = mine.public_arguments(), yours.public_arguments()
        different = [name for name in a if a[name] != b[name]]
        if mine.widths is not None and yours.widths is not None and not torch.equal(mine.widths, yours.widths):
            different.append("widths")
        if different:
            name = different[0]
            where = f"{mine.purpose!r}, step {mine.step}"
            return f"the {name} of {where} depends on the records: {a.get(name)}, {b.get(name)}"
    return None


def leaked(ours: Trace, theirs: Trace) -> str | None:
    """Outputs that the releases do not explain: they differ between runs with the same releases."""
    names = set(ours.outputs) | set(theirs.outputs)
    wrong = sorted(name for name in names if ours.outputs.get(name) != theirs.outputs.get(name))
    return f"with the same releases, other records change {', '.join(wrong[:3])}" if wrong else None


def moved(ours: Trace, theirs: Trace) -> list[tuple[Call, float]]:
    """The distance between the values of each release, as a share of what is allowed."""
    return [
        (mine, float(torch.linalg.vector_norm(mine.values - yours.values, mine.norm_order)) / mine.allowed)
        for mine, yours in zip(ours.calls, theirs.calls, strict=False)
        if mine.values.shape == yours.values.shape
    ]
