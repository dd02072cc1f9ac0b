"""How many faulty models and engines are refused, over seeds and batch sizes: a cheaper check must not refuse fewer.

    python experiments/refusals.py --json before.json       on the code before a change
    python experiments/refusals.py --against before.json    after it: names what is refused later or no more
    python experiments/refusals.py --movement               writes results/refusals.json: of every run that is not
                                                            refused, how far one record moves the sum in its batches

The models are those of tests/gradients that must be refused: records that interact, state that is kept, values that are
read, sizes that matter, rows that are written unseen. The engines are this one with a fault in it: rows given to the
wrong records, gradients that are too small or not there. Weights, data and the run's own randomness depend on the seed.
Each run ends where it is refused; of a model that behaves well in most batches some runs are never refused, and a size
that matters may be padded away. `--movement` tells these from runs in which a fault was missed: of every batch of such
a run a few records are removed one by one, also the extreme one, and the engine sums without its checks (but with its
padding). A run in which that moves the sum by more than one clip norm (and the margin of 2^-10) is *missed*.
"""

# mypy: disable-error-code="misc, no-any-return, no-untyped-call, operator, assignment"

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "gradients")]

import sordino  # noqa: E402
from gradients import test_assurance, test_attacks, test_leaving, test_unseen  # type: ignore # noqa: E402
from provenance import origin  # noqa: E402
from sordino.clipping import FlatClip  # noqa: E402
from sordino.gradients.checks.assurance import Assurance  # noqa: E402
from sordino.gradients.sums.contributions import Dense, Outer  # noqa: E402
from sordino.gradients.sums.single import Single  # noqa: E402
from sordino.gradients.tape.layout import Frame  # noqa: E402
from sordino.sampling import LogicalBatch  # noqa: E402

RECORDS, SIZES = 260, (6, 12, 24, 40, 90)
CLIP, EXTREME, REMOVED = 0.5, 100, 4  # the clip norm, the record that is extreme, records removed from every batch
TARGET = ROOT / "experiments" / "results" / "refusals.json"
Case = tuple[Callable[[], tuple[nn.Module, Any]], int, bool]
"""(the model and its loss, the features of a row, whether it is in double precision)."""


def models() -> dict[str, Case]:
    ce = test_assurance.ce
    found: dict[str, Case] = {}
    for name, make in (test_assurance.INTERACTING | test_assurance.LARGER).items():
        found[f"interaction: {name}"] = make, 8, False
    for how in ("buf.data", "a reassigned buffer", "a frozen parameter", "numpy", "a queue"):
        found[f"kept: {how}"] = lambda how=how: (test_assurance.Keeping(how), ce), 8, False
    found["kept: the loss"] = lambda: (test_assurance.Keeping(""), test_assurance.KeepingLoss()), 8, False
    for name, ask in ASKED_SIZES.items():
        found[f"size: {name}"] = lambda ask=ask: (test_leaving.net(test_leaving._asked(ask)), ce), 8, False
    for forward in test_leaving.READS:
        found[f"read:{forward.__name__.replace('_', ' ')}"] = lambda f=forward: (test_leaving.net(f), ce), 8, False
    for name, forward in ASKED.items():
        found[f"asked: {name}"] = lambda f=forward: (test_leaving.net(f), ce), 8, False
    for name, make in test_attacks.MIXING.items():
        found[f"label: {name}"] = lambda make=make: (make().double(), test_attacks.squared), 4, True
    for name, forward in (test_unseen.WRITES | test_unseen.HOOKS | test_unseen.ACROSS | test_unseen.KNOWN).items():
        found[f"unseen: {name}"] = lambda f=forward: (test_unseen.net(f), test_unseen.losses), 4, True
    return found


def _asked(s: Any, x: Tensor, answer: bool, few: bool = False) -> Tensor:
    """Scaled where the answer is yes: all rows, or those with a large first value."""
    scale = torch.where(x[:, :1] > 1.5, 0.1, 1.0) if few else 0.1
    return test_leaving.plain(s, x) * (scale if answer else 1.0)


# sizes that occur, of which the first are not padded to others
ASKED_SIZES: dict[str, Callable[[Tensor], bool]] = {
    "len": lambda x: len(x) in (12, 25, 48, 96),
    "a remainder": lambda x: x.shape[0] % 11 == 1,
    "elements": lambda x: x.numel() > 30 * 8,
    "the size of its storage": lambda x: x.clone().untyped_storage().nbytes() in (13 * 32, 24 * 32, 42 * 32, 96 * 32),
    "pieces": lambda x: len(x.split(10)) == 4,
}

# questions about several rows whose answers matter in batches of some sizes only
ASKED: dict[str, Callable[..., Tensor]] = {
    "in large batches": lambda s, x: _asked(s, x, bool(x.max() > 1.9) and len(x) > 50),
    "in small batches": lambda s, x: _asked(s, x, bool(x.max() > 1.9) and len(x) < 20),
    "in batches of some sizes": lambda s, x: _asked(s, x, bool(x.max() > 1.9) and len(x) % 5 < 2),
    "without an effect beside the size": lambda s, x: _asked(s, x, bool(x.max() > -9) and len(x) % 7 == 3),
    "some rows in large batches": lambda s, x: _asked(s, x, bool(x.max() > -9) and len(x) > 50, few=True),
    "some rows in some batches": lambda s, x: _asked(s, x, bool(x.max() > 1.9) and len(x) % 5 < 2, few=True),
}


@contextmanager
def rolled() -> Iterator[None]:
    """Positions are given to the next record."""
    fold = Frame.fold
    with mock.patch.object(Frame, "fold", lambda self, t, *a, **k: fold(self, t, *a, **k).roll(1, 0)):
        yield


@contextmanager
def swapped() -> Iterator[None]:
    """The gradients of the last two records are exchanged, of those that arrive as such."""
    fold = Frame.fold

    def run(self: Frame, t: Tensor, features: int, gradient: bool = False) -> Tensor:
        found = fold(self, t, features, gradient)
        if not gradient or len(found) < 2:
            return found
        order = torch.arange(len(found))
        order[-2:] = order[-2:].flip(0)
        return found[order]

    with mock.patch.object(Frame, "fold", run):
        yield


@contextmanager
def without_last(kind: Any) -> Iterator[None]:
    """The last record is left out of sums."""
    add_to = kind.add_to

    def run(self: Any, total: Tensor, weight: Tensor) -> None:
        weight = weight.clone()
        weight[-1] = 0
        add_to(self, total, weight)

    with mock.patch.object(kind, "add_to", run):
        yield


ENGINES: dict[str, Callable[[], Any]] = {
    "the next record": rolled,
    "two records exchanged": swapped,
    "no last record, one position": lambda: without_last(Single),
    "no last record, biases": lambda: without_last(Dense),
    "no last record, several positions": lambda: without_last(Outer),
}


def network(positions: int) -> tuple[nn.Module, Any]:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = nn.functional.cross_entropy(outputs.mean(1), targets, reduction="none")
        return found

    return nn.Sequential(nn.Unflatten(1, (positions, -1)), nn.Linear(8 // positions, 50), nn.Linear(50, 3)), loss


def given(case: Case, seed: int) -> tuple[nn.Module, Any, tuple[Tensor, Tensor]]:
    """The model, its loss and its records."""
    make, features, double = case
    torch.manual_seed(seed)
    model, loss = make()
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=source, dtype=p.dtype)
    x = torch.randn(RECORDS, features, generator=source, dtype=torch.float64 if double else torch.float32).clamp(-2, 2)
    x[EXTREME, 0] = 5.5
    targets = torch.randint(3, (RECORDS,), generator=source)
    return model, loss, (x, targets.double() if double and loss is test_attacks.squared else targets)


def batches(size: int) -> list[Tensor]:
    """The records of every batch."""
    plan = [(0, size), (20, size - 2), (50, size), (0, size + 1), (60, size + 5), (3, size), (0, 2 * size + 3)]
    return [torch.arange(first, min(first + rows, RECORDS)) for first, rows in plan]


def refused(case: Case, seed: int, size: int) -> int | None:
    """The number of the batch that is refused; None: none of them."""
    model, loss, data = given(case, seed)
    torch.manual_seed(1000 + seed)
    sums = sordino.record_gradients(model, loss, data, FlatClip(CLIP))
    for step, records in enumerate(batches(size)):
        try:
            sums(LogicalBatch(step, records, RECORDS))
        except sordino.Refused:
            return step
        except (RuntimeError, IndexError, ValueError):
            return -1  # a model for one size
    return None


def movement(case: Case, seed: int, size: int) -> float:
    """How far a record moves the sum in the batches of a run, at most, in clip norms; NaN if the model fails."""

    def total(records: Tensor, step: int) -> Tensor:
        model, loss, data = given(case, seed)
        torch.manual_seed(1000 + seed)
        sums = sordino.record_gradients(model, loss, data, FlatClip(CLIP))
        found = sums(LogicalBatch(step, records, RECORDS)).sums
        return torch.cat([value.double().flatten() for value in found.values()])

    largest, source = 0.0, torch.Generator().manual_seed(seed)
    with mock.patch.object(Assurance, "examine", return_value=None):
        for step, records in enumerate(batches(size)):
            chosen = {*torch.randint(len(records), (REMOVED,), generator=source).tolist(), 0, len(records) - 1}
            chosen |= {int(place) for place in (records == EXTREME).nonzero()}
            try:
                whole = total(records, step)
                for place in chosen:
                    others = torch.cat([records[:place], records[place + 1 :]])
                    largest = max(largest, float((whole - total(others, step)).norm()) / CLIP)
            except (RuntimeError, IndexError, ValueError):
                return float("nan")
    return largest


def cases() -> dict[str, tuple[Case, Any]]:
    """All models, and all engines with a fault, by name."""
    found: dict[str, tuple[Case, Any]] = {name: (case, nullcontext) for name, case in models().items()}
    for name, fault in ENGINES.items():
        for positions in (1, 2):
            make: Case = lambda p=positions: network(p), 8, False
            found[f"engine: {name}, {positions}"] = make, fault
    return found


def movements(found: dict[str, list[int | None]]) -> dict[str, Any]:
    """Of every run that is not refused: harmless, failing, or missed, by name."""
    counts = {"harmless": 0, "failing": 0, "missed": 0}
    missed: dict[str, list[Any]] = {}
    largest: dict[str, float] = {}
    for name, (case, fault) in cases().items():
        for place, step in enumerate(found[name]):
            if step is not None and step >= 0:
                continue
            seed, size = divmod(place, len(SIZES))
            with fault():
                moved = movement(case, seed, SIZES[size]) if step is None else float("nan")
            kind = "failing" if moved != moved else "missed" if moved > 1 + 2**-10 else "harmless"
            counts[kind] += 1
            if kind == "missed":
                missed.setdefault(name, []).append({"seed": seed, "rows": SIZES[size], "moved": round(moved, 3)})
            elif kind == "harmless":
                largest[name] = max(largest.get(name, 0.0), round(moved, 4))
    return {"not refused": counts, "missed": missed, "harmless: largest movement": largest}


def count(seeds: int) -> dict[str, list[int | None]]:
    found: dict[str, list[int | None]] = {}
    for name, (case, fault) in cases().items():
        found[name] = []
        for seed in range(seeds):
            for size in SIZES:
                with fault():
                    found[name].append(refused(case, seed, size))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--against", type=Path, help="a file of --json to compare with")
    parser.add_argument("--movement", action="store_true", help="of runs that are not refused; writes the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    began = time.process_time()
    found = count(options.seeds)
    runs = sum(map(len, found.values()))
    stopped = sum(one is not None and one >= 0 for each in found.values() for one in each)
    print(f"{stopped} of {runs} runs of {len(found)} cases refused, {time.process_time() - began:.0f} s")
    if options.movement:
        measured = movements(found)
        print(json.dumps({key: measured[key] for key in ("not refused", "missed")}, indent=1))
        document = {
            **origin(f"python experiments/refusals.py --seeds {options.seeds} --movement"),
            "runs": runs,
            "refused": stopped,
            **measured,
        }
        TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf8")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.against:
        compare(json.loads(options.against.read_text()), found)


def compare(before: dict[str, list[int | None]], after: dict[str, list[int | None]]) -> None:
    """Prints every run that is refused later than before, or no more."""
    fewer = later = earlier = 0
    for name, each in before.items():
        for place, (was, now) in enumerate(zip(each, after[name], strict=True)):
            if was is None or was < 0:
                earlier += was is None and now is not None
                continue
            gone, late = now is None or now < 0, now is not None and now > was
            fewer, later, earlier = fewer + gone, later + late, earlier + (not gone and not late and now != was)
            if gone or late:
                seed, size = divmod(place, len(SIZES))
                print(f"{name}: seed {seed}, {SIZES[size]} rows: refused at batch {was} before, now {now}")
    print(f"{fewer} no more refused, {later} later, {earlier} earlier or only now")


if __name__ == "__main__":
    main()
