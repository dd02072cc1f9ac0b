"""The ledger never says less than was released: kills, torn lines, full disks, two processes, replays."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import random
import resource
import threading
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sordino.errors import InputError, SordinoError
from sordino.randomness import RandomSource
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger, read_ledger
from sordino.release.ledger_lines import OWN_KEYS

HEADER = {"records": 100, "sampling": {"name": "poisson", "sampling_rate": 0.1}, "delta": 1e-5}


def entry(step: int, *, secure: bool = False, purpose: str = "gradient", **other: Any) -> dict[str, Any]:
    return {"purpose": purpose, "step": step, "noise_multiplier": 1.1, "secure": secure, **other}


def fill(path: Path, steps: int, *, secure: bool = False) -> None:
    with Ledger.open(path, HEADER) as ledger:
        for step in range(steps):
            ledger.record(entry(step, secure=secure))


def as_before_hashes(path: Path, steps: int) -> None:
    """A ledger of format 1, whose lines carry no hashes."""
    fill(path, steps)
    header, entries = read_ledger(path)
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, *entries)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_a_new_ledger_begins_with_the_plan_and_keeps_each_release_on_a_line(path: Path) -> None:
    fill(path, 3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert {k: v for k, v in lines[0].items() if k not in OWN_KEYS} == {"kind": "plan", **HEADER}
    assert lines[0]["format"] == 2
    assert [(line["kind"], line["step"]) for line in lines[1:]] == [("release", 0), ("release", 1), ("release", 2)]
    assert all(len(line["time"]) == len("2026-11-17") for line in lines[1:])  # the day alone: times tell batch sizes
    header, entries = read_ledger(path)
    assert header == {"kind": "plan", **HEADER}
    assert list(entries) == [{k: v for k, v in line.items() if k != "hash"} for line in lines[1:]]


def test_it_goes_on_where_it_stopped(path: Path) -> None:
    fill(path, 3)
    with Ledger.open(path, HEADER) as ledger:
        assert ledger.last_step("gradient") == 2
        assert ledger.last_step("statistics") == -1
        ledger.record(entry(3))
        ledger.record(entry(0, purpose="statistics"))
        assert [e["step"] for e in ledger.entries] == [0, 1, 2, 3, 0]
    assert len(read_ledger(path)[1]) == 5


def test_in_memory_it_behaves_alike() -> None:
    with Ledger.open(None, HEADER) as ledger:
        ledger.record(entry(0, secure=True))
        assert ledger.last_step("gradient") == 0
        with pytest.raises(SordinoError, match="already released"):
            ledger.record(entry(0, secure=True))
        assert len(ledger.entries) == 1
    with pytest.raises(SordinoError, match="closed"):
        ledger.record(entry(1))


@given(st.floats(allow_nan=False, allow_infinity=False), st.text(max_size=30))
@settings(deadline=None, max_examples=50)
def test_numbers_and_texts_come_back_exactly(number: float, text: str) -> None:
    with Ledger.open(None, {**HEADER, "x": number, "y": text}) as ledger:
        ledger.record(entry(0, sensitivity=number, note=text))
        assert ledger.header["x"] == number
        assert ledger.header["y"] == text
        assert ledger.entries[0]["sensitivity"] == number
        assert ledger.entries[0]["note"] == text


# Replays


def test_a_replay_of_an_insecure_release_is_accepted_and_not_written_twice(path: Path) -> None:
    fill(path, 3)
    before = path.read_bytes()
    time.sleep(0.002)  # the replay's time differs, and does not count
    fill(path, 3)
    assert path.read_bytes() == before


def test_a_second_release_with_fresh_noise_is_refused(path: Path) -> None:
    fill(path, 3, secure=True)
    before = path.read_bytes()
    with Ledger.open(path, HEADER) as ledger:
        with pytest.raises(SordinoError, match="step 1 of 'gradient' was already released") as error:
            ledger.record(entry(1, secure=True))
        assert "after step 2" in str(error.value)
        with pytest.raises(SordinoError, match="already released"):  # one secure side is enough
            ledger.record(entry(1, secure=False))
        ledger.record(entry(3, secure=True))  # the refusal does not end the run
    assert path.read_bytes().startswith(before)


def test_an_insecure_release_with_other_settings_is_no_replay(path: Path) -> None:
    fill(path, 1)
    with (
        Ledger.open(path, HEADER) as ledger,
        pytest.raises(SordinoError, match=r"noise_multiplier is 1\.1 there and 0\.5"),
    ):
        ledger.record({**entry(0), "noise_multiplier": 0.5})


# Damage


@given(st.integers(2, 200))
@settings(deadline=None, max_examples=40)
def test_a_torn_last_line_is_cut_off(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "ledger.jsonl"
    fill(path, 3)
    whole = path.read_bytes()
    last = whole.rfind(b"\n", 0, -1) + 1
    path.write_bytes(whole[: max(last, len(whole) - cut)])
    assert [e["step"] for e in read_ledger(path)[1]] == [0, 1]
    with Ledger.open(path, HEADER) as ledger:
        assert ledger.last_step("gradient") == 1
        ledger.record(entry(2))
    assert [e["step"] for e in read_ledger(path)[1]] == [0, 1, 2]


def test_a_header_torn_at_any_byte_is_written_again(path: Path) -> None:
    fill(path, 0)
    header = path.read_bytes()
    for length in range(len(header)):
        path.write_bytes(header[:length])
        fill(path, 0)
        assert read_ledger(path) == ({"kind": "plan", **HEADER}, ())
        assert path.read_bytes().count(b"\n") == 1


def test_a_foreign_file_is_never_overwritten(path: Path) -> None:
    for content in (b"my thesis, all of it", b"{}\n", b'{"kind": "release"}\n', b"[1]\n", b"\xff\xfe\n", b"\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"ledger\.jsonl"):
            Ledger.open(path, HEADER)
        assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"kind": "rel', "not JSON"),
        (b"\x00\x00\x00", "not JSON"),
        (b"7", "expected a JSON object"),
        (b'{"kind": "plan"}', "expected kind 'release'"),
        (b'{"kind": "release", "step": 1}', "a purpose"),
        (b'{"kind": "release", "purpose": "gradient", "step": -1}', "counts from 0"),
        (b'{"kind": "release", "purpose": "gradient", "step": 0}', "already on line 2"),
    ],
)
def test_a_damaged_line_in_the_middle_is_an_error_with_file_and_line(path: Path, line: bytes, message: str) -> None:
    as_before_hashes(path, 3)
    lines = path.read_bytes().split(b"\n")
    lines[2] = line
    path.write_bytes(b"\n".join(lines))
    for attempt in (lambda: read_ledger(path), lambda: Ledger.open(path, HEADER)):
        with pytest.raises(InputError, match=message) as error:
            attempt()
        assert f"{path}, line 3" in str(error.value)
    assert path.read_bytes() == b"\n".join(lines)


def test_another_plan_is_refused_with_the_keys_that_differ(path: Path) -> None:
    fill(path, 2)
    before = path.read_bytes()
    with pytest.raises(InputError, match="another plan") as error:
        Ledger.open(path, {**HEADER, "delta": 1e-6, "new": 1})
    assert "delta is 1e-05 there and 1e-06 here" in str(error.value)
    assert "new is '(absent)' there and 1 here" in str(error.value)
    assert "records" not in str(error.value)
    assert path.read_bytes() == before


def test_what_json_cannot_hold_is_refused_before_anything_is_written(path: Path) -> None:
    for value in (float("nan"), float("inf"), object()):
        with pytest.raises(InputError, match="JSON"):
            Ledger.open(path, {"x": value})
        assert not path.exists()
    with Ledger.open(path, HEADER) as ledger:
        for bad in ({"x": float("nan")}, {"step": "1"}, {"step": True}, {"purpose": ""}, {"kind": "plan"}):
            with pytest.raises(InputError):
                ledger.record({**entry(0), **bad})
    assert read_ledger(path)[1] == ()


def test_a_missing_file_and_a_missing_directory_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be read"):
        read_ledger(tmp_path / "no.jsonl")
    with pytest.raises(InputError, match="No such file or directory"):
        Ledger.open(tmp_path / "no" / "ledger.jsonl", HEADER)
    with pytest.raises(InputError, match="not a regular file"):
        Ledger.open(Path("/dev/null"), HEADER)


# The disk


def test_a_full_disk_is_an_error_and_stays_one(path: Path) -> None:
    with Ledger.open(path, HEADER) as ledger:
        ledger.record(entry(0))
        assert ledger._descriptor is not None
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, ledger._descriptor)  # from now on every write meets ENOSPC
        os.close(full)
        with pytest.raises(SordinoError, match="No space left on device"):
            ledger.record(entry(1))
        with pytest.raises(SordinoError, match="nothing more is released"):
            ledger.record(entry(2))
        assert ledger.last_step("gradient") == 0


def test_a_line_that_fits_only_in_part_is_taken_back(path: Path) -> None:
    fill(path, 1)
    before = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Ledger.open(path, HEADER) as ledger:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limit[1]))
        try:
            with pytest.raises(SordinoError, match="File too large"):
                ledger.record(entry(1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert path.read_bytes() == before


def test_a_record_is_fsynced_before_it_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int]] = []
    real_write, real_sync = os.write, os.fsync
    monkeypatch.setattr(os, "write", lambda fd, data: calls.append(("write", fd)) or real_write(fd, data))
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(("fsync", fd)) or real_sync(fd))
    with Ledger.open(path, HEADER) as ledger:
        file = ledger._descriptor
        assert calls[0][0] == "fsync"  # the directory: the name must survive as well
        assert calls[1:] == [("write", file), ("fsync", file)]
        calls.clear()
        ledger.record(entry(0))
        assert calls == [("write", file), ("fsync", file)]


# Two processes, and kills


def release_forever(path: Path, pipe: int) -> None:
    """The child: release step after step with fresh noise, and say so only after the value was there."""
    with Ledger.open(path, HEADER) as ledger:
        for step in itertools.count(ledger.last_step("gradient") + 1):
            release(
                {"w": torch.zeros(50)},
                sensitivity=1.0,
                norm="l2",
                noise=Gaussian(1.0),
                source=RandomSource.from_os(),
                ledger=ledger,
                entry=Entry("gradient", step, {"name": "poisson", "sampling_rate": 0.1}, "add-remove"),
            )
            os.write(pipe, f"{step}\n".encode())


def start_child(path: Path) -> tuple[BaseProcess, BinaryIO]:
    reading, writing = os.pipe()
    child = multiprocessing.get_context("fork").Process(target=release_forever, args=(path, writing))
    child.start()
    os.close(writing)
    return child, os.fdopen(reading, "rb")


def test_a_process_killed_at_any_moment_leaves_a_ledger_that_says_at_least_what_it_released(path: Path) -> None:
    moments = random.Random(0)
    expected = 0
    for _ in range(12):
        child, said = start_child(path)
        first = said.readline()  # it runs; the kill then falls somewhere into the loop
        time.sleep(moments.uniform(0.0, 0.05))
        child.kill()
        printed = [int(x) for x in (first + said.read()).splitlines()]
        child.join()
        said.close()
        assert printed[0] == expected  # no step is released twice
        steps = [e["step"] for e in read_ledger(path)[1]]
        assert steps == list(range(len(steps)))
        assert steps[-1] >= printed[-1]
        assert steps[-1] <= printed[-1] + 1  # and at most the one whose value was lost
        with Ledger.open(path, HEADER) as ledger:  # the lock died with the process
            expected = ledger.last_step("gradient") + 1


def test_a_ledger_in_use_cannot_be_opened_by_another_process_or_twice(path: Path) -> None:
    child, said = start_child(path)
    try:
        said.readline()
        with pytest.raises(SordinoError, match="in use by another run"):
            Ledger.open(path, HEADER)
        assert read_ledger(path)[1]  # reading a live ledger is fine
    finally:
        child.kill()
        child.join()
        said.close()
    with Ledger.open(path, HEADER), pytest.raises(SordinoError, match="open twice"):
        Ledger.open(path, HEADER)


@pytest.mark.parametrize("how", ["deleted", "emptied", "longer", "exchanged"])
def test_nothing_is_recorded_in_a_file_that_was_changed_meanwhile(how: str, tmp_path: Path) -> None:
    """The entries would be gone with the file, and the value would leave all the same."""
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, HEADER) as ledger:
        ledger.record(entry(0))
        if how == "deleted":
            path.unlink()
        elif how == "emptied":
            os.truncate(path, 0)
        elif how == "exchanged":
            path.rename(tmp_path / "aside")
            path.write_bytes((tmp_path / "aside").read_bytes())
        else:
            path.write_bytes(path.read_bytes() + b"{}\n")
        for step in (1, 2):
            with pytest.raises(SordinoError, match="during the run"):
                ledger.record(entry(step))


def test_a_run_directory_may_be_renamed_while_it_is_at_work(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with Ledger.open(tmp_path / "a" / "ledger.jsonl", HEADER) as ledger:
        ledger.record(entry(0))
        (tmp_path / "a").rename(tmp_path / "b")
        ledger.record(entry(1))
    assert len(read_ledger(tmp_path / "b" / "ledger.jsonl")[1]) == 2


def test_threads_that_record_one_step_at_once_do_not_both_release_it(path: Path) -> None:
    """The second would find the step missing while the first waits for the disk."""
    outcomes: list[str] = []

    def record(ledger: Ledger, start: threading.Barrier, step: int) -> None:
        start.wait()
        try:
            ledger.record(entry(step, secure=True))
            outcomes.append("released")
        except SordinoError:
            outcomes.append("refused")

    with Ledger.open(path, HEADER) as ledger:
        for step in range(20):
            start = threading.Barrier(4)
            threads = [threading.Thread(target=record, args=(ledger, start, step)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    assert outcomes.count("released") == 20
    assert len(read_ledger(path)[1]) == 20
