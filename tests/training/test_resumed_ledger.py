"""A resume is honest: ledger, checkpoint and records are those of the run, or it is refused with what to do."""

from __future__ import annotations

import random
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from sordino.errors import InputError, Refused, SordinoError
from sordino.plan import Plan
from sordino.records.digest import keyed_digest
from sordino.release import adopt, read_ledger
from sordino.training import Settings, train
from sordino.training.job import Result
from sordino.training.sealed import Damaged, read_sealed, sealed
from sordino.training.state import TrainState

Records = tuple[Tensor, Tensor]
STEPS, SAVED = 12, 5


class Killed(BaseException):
    """Stands for a kill: no handler of the library sees it."""


def plan(**changes: Any) -> Plan:
    return Plan.dpsgd(
        **{"noise_multiplier": 3.0, "delta": 1e-5, "records": 200, "expected_batch": 40, "steps": STEPS, **changes}
    )


def run(records: Any, out: Path, *, killed_at: int | None = None, resume: bool = False, **changes: Any) -> Result:
    """A run that is killed in the evaluation after that many steps, beyond its last checkpoint."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        if killed_at is not None and len(read_ledger(out / "ledger.jsonl")[1]) >= killed_at:
            raise Killed
        return {}

    settings = Settings(eval_every=1, checkpoint_every=SAVED, progress=False)
    model, loss = nn.Linear(6, 3), nn.functional.cross_entropy
    return train(
        model, loss, records, plan(**changes), lr=1.0, settings=settings, evaluate=evaluate, out=out, resume=resume
    )


@pytest.fixture
def killed(records: Records, tmp_path: Path) -> Path:
    """Eight steps in the ledger, the checkpoint after five."""
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(records, out, killed_at=8)
    return out


def lines(out: Path) -> list[bytes]:
    return (out / "ledger.jsonl").read_bytes().splitlines(keepends=True)


def test_a_ledger_ahead_of_its_checkpoint_is_what_a_kill_leaves(records: Records, killed: Path) -> None:
    result = run(records, killed, resume=True)
    assert result.skipped_steps == 3
    assert [e["step"] for e in read_ledger(killed / "ledger.jsonl")[1]] == list(range(STEPS))


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (None, "not the ledger that this run started with"),  # lost
        (0, "not the ledger that this run started with"),  # emptied
        (1, "holds 0 releases, but the checkpoint of step 5 was written after 5"),
        (4, "holds 3 releases, but the checkpoint of step 5 was written after 5"),  # rolled back
    ],
)
def test_a_ledger_behind_its_checkpoint_is_refused_and_nothing_changes(
    records: Records, killed: Path, kept: int | None, message: str
) -> None:
    ledger, metrics = killed / "ledger.jsonl", (killed / "metrics.jsonl").read_bytes()
    if kept is None:
        ledger.unlink()
    else:
        ledger.write_bytes(b"".join(lines(killed)[:kept]))
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            run(records, killed, resume=True)
    assert (killed / "metrics.jsonl").read_bytes() == metrics
    assert read_ledger(ledger)[1] == () or kept == 4


def test_a_ledger_lost_before_the_first_checkpoint_is_refused(records: Records, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Killed):
        run(records, out, killed_at=2)
    assert not list((out / "checkpoint").glob("step-*"))
    (out / "ledger.jsonl").unlink()
    with pytest.raises(InputError, match="lost, emptied or replaced"):
        run(records, out, resume=True)


def test_steps_that_are_missing_in_an_old_ledger_are_named(records: Records, killed: Path) -> None:
    """Without hashes (format 1) the steps themselves must be without gaps, and the checkpoint covered."""
    import json

    header, entries = read_ledger(killed / "ledger.jsonl")
    (killed / "checkpoint" / "run.json").unlink()
    text = [json.dumps(line) + "\n" for line in (header, *entries)]
    (killed / "ledger.jsonl").write_text("".join(text[:3] + text[4:]))
    with pytest.raises(InputError, match="step 2 is missing or out of order"):
        run(records, killed, resume=True)


def test_two_copies_of_a_run_can_not_both_go_on_unless_somebody_lies(records: Records, killed: Path) -> None:
    copy = killed.with_name("copy")
    shutil.copytree(killed, copy)
    run(records, killed, resume=True)
    with pytest.raises(Refused, match="--adopt"):
        run(records, copy, resume=True)
    assert len(read_ledger(copy / "ledger.jsonl")[1]) == 8
    adopt(copy / "ledger.jsonl")
    assert run(records, copy, resume=True).skipped_steps == 3


# The records


def test_other_records_of_equal_number_are_refused(records: Records, killed: Path) -> None:
    other = (records[0].clone(), records[1])
    other[0][17, 3] += 1e-3
    with pytest.raises(InputError, match="not the records that the run"):
        run(other, killed, resume=True)
    assert len(read_ledger(killed / "ledger.jsonl")[1]) == 8
    run((records[0].clone(), records[1].clone()), killed, resume=True)


def test_the_key_of_the_digest_is_for_the_owner_only(killed: Path) -> None:
    path = killed / "checkpoint" / "run.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "key" not in (killed / "ledger.jsonl").read_text()


class Streamed(Dataset[tuple[Tensor, Tensor]]):
    """Records one by one, as from a disk; `jitter` draws for each reading, `counts` makes each reading another."""

    def __init__(self, records: Records, jitter: bool = False, counts: bool = False) -> None:
        self.records, self.jitter, self.counts, self.read = records, jitter, counts, 0

    def __len__(self) -> int:
        return len(self.records[1])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = self.records[0][index], self.records[1][index]
        self.read += self.counts
        return (x + torch.rand(()) if self.jitter else x) + self.read, y


def test_the_digest_reads_what_is_streamed_and_depends_on_key_content_order_and_type(records: Records) -> None:
    inputs, targets = records
    key, other = b"k" * 32, b"l" * 32
    found = keyed_digest(Streamed(records), key)
    assert found is not None
    assert keyed_digest(Streamed((inputs.clone(), targets)), key) == found
    order = torch.arange(len(targets)).flip(0)
    changed = [keyed_digest(Streamed((inputs[order], targets[order])), key), keyed_digest(Streamed(records), other)]
    changed.append(keyed_digest(Streamed((inputs, 1 + targets)), key))
    pairs = [(inputs.double(), targets), ({"x": inputs.bfloat16()}, targets)]
    digests = [found, *changed, *(keyed_digest(pair, key) for pair in pairs)]
    assert len(set(digests)) == len(digests)
    drawn = keyed_digest(Streamed(records, jitter=True), key)
    torch.rand(7)
    assert drawn == keyed_digest(Streamed(records, jitter=True), key), "each record has draws of its own"
    assert drawn not in (None, found)
    assert keyed_digest(Streamed(records, counts=True), key) is None, "reading it twice gives different records"


# Checkpoints


def test_no_byte_of_a_sealed_file_can_change_unnoticed(tmp_path: Path) -> None:
    path, chance = tmp_path / "a.safetensors", random.Random(1)
    whole = sealed({"w": torch.arange(12.0), "b": torch.zeros(3, dtype=torch.int64)}, {"step": 3, "name": "ε"})
    path.write_bytes(whole)
    tensors, document = read_sealed(path)
    assert torch.equal(tensors["w"], torch.arange(12.0))
    assert document == {"format": 2, "step": 3, "name": "ε"}
    for at in range(len(whole)):
        other = bytes([whole[at] ^ (1 << chance.randrange(8))])
        for changed in (whole[:at] + other + whole[at + 1 :], whole[:at], whole[:at] + whole[at + 1 :]):
            path.write_bytes(changed)
            with pytest.raises(Damaged):
                read_sealed(path)


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(records: Records, tmp_path: Path) -> None:
    for step in (1, 2):
        TrainState(step, {"w": torch.full((100,), float(step))}, {}).save(tmp_path, "run")
    path = tmp_path / "step-000000002.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # one bit of one weight
    path.write_bytes(content)
    with pytest.warns(UserWarning, match=r"step-000000002\.safetensors.*checksum"):
        state = TrainState.load(tmp_path, "run")
    assert state is not None
    assert state.step == 1
    (tmp_path / "step-000000001.safetensors").unlink()
    with pytest.raises(SordinoError, match=r"no checkpoint.*can be read"):
        TrainState.load(tmp_path, "run")
