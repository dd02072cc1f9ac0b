"""Every line of a ledger fixes all lines before it: edits, gaps, exchanges, copies and lost ends are named."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sordino.errors import InputError, Refused
from sordino.release import Head, Ledger, adopt, read_chain, read_ledger
from sordino.release.ledger_lines import parse, sealed

HEADER = {"records": 100, "steps": 9, "delta": 1e-5, "insecure_seed": None}


def entry(step: int) -> dict[str, Any]:
    return {"purpose": "gradient", "step": step, "noise_multiplier": 1.1, "secure": True}


def fill(path: Path, steps: int, header: dict[str, Any] | None = None) -> Head:
    with Ledger.open(path, header or HEADER) as ledger:
        for step in range(ledger.last_step("gradient") + 1, steps):
            ledger.record(entry(step))
        return ledger.head


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


def test_each_line_carries_a_hash_over_itself_and_all_before(path: Path) -> None:
    head = fill(path, 3)
    chain = read_chain(path)
    assert (chain.format, chain.head) == (2, head)
    assert head.entries == 3
    assert json.loads(path.read_text().splitlines()[-1])["hash"] == head.hash
    assert chain.counts == (0, 1, 2, 3)
    assert fill(path, 3) == head, "an open without a release changes nothing"


LINES: list[tuple[str, Callable[[list[bytes]], list[bytes]]]] = [
    ("cut in the middle", lambda lines: lines[:2] + lines[3:]),
    ("cut at the start", lambda lines: lines[:1] + lines[2:]),
    ("exchanged", lambda lines: [*lines[:2], lines[3], lines[2], *lines[4:]]),
    ("doubled", lambda lines: [*lines[:2], lines[2], *lines[2:]]),
    ("noise edited", lambda lines: [line.replace(b"1.1", b"9.1") for line in lines]),
    ("one step edited", lambda lines: [*lines[:3], lines[3].replace(b'"step": 2', b'"step": 7'), *lines[4:]]),
    ("header edited", lambda lines: [lines[0].replace(b"100", b"900"), *lines[1:]]),
    ("hash taken off", lambda lines: [*lines[:2], lines[2][: lines[2].index(b', "hash"')] + b"}\n", *lines[3:]]),
    ("format taken off", lambda lines: [lines[0].replace(b'"format": 2, ', b""), *lines[1:]]),
    ("head without hash", lambda lines: [lines[0][: lines[0].index(b', "hash"')] + b"}\n", *lines[1:]]),
]


@pytest.mark.parametrize("bend", [bend for _, bend in LINES], ids=[name for name, _ in LINES])
def test_a_bent_ledger_is_named_with_its_line_and_left_as_it_is(path: Path, bend: Any) -> None:
    fill(path, 4)
    bent = b"".join(bend(path.read_bytes().splitlines(keepends=True)))
    path.write_bytes(bent)
    for attempt in (lambda: read_ledger(path), lambda: Ledger.open(path, HEADER), lambda: adopt(path)):
        with pytest.raises(InputError, match=r"ledger\.jsonl, line \d"):
            attempt()
    assert path.read_bytes() == bent


def test_no_byte_can_change_unnoticed(path: Path) -> None:
    """Every byte once, with a bit flipped, another value, taken out or put in: an error, or nothing is counted less."""
    fill(path, 3)
    whole, chance = path.read_bytes(), random.Random(0)
    for at in range(len(whole)):
        other = bytes([chance.choice([whole[at] ^ (1 << chance.randrange(8)), chance.randrange(256)])])
        for changed in (
            whole[:at] + other + whole[at + 1 :],
            whole[:at] + whole[at + 1 :],
            whole[:at] + b" " + whole[at:],
        ):
            if changed == whole:
                continue
            path.write_bytes(changed)
            try:
                chain = read_chain(path)
            except InputError:
                continue
            assert len(chain.entries) == 3, (at, changed[at : at + 1])
            assert chain.head == Head(3, json.loads(whole.splitlines()[-1])["hash"])


def test_a_whole_line_counts_whatever_became_of_its_newline(path: Path) -> None:
    fill(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(read_ledger(path)[1]) == 3
    assert fill(path, 4).entries == 4
    assert path.read_bytes().startswith(whole)
    path.write_bytes(whole[:-1] + b"\x0b")
    with pytest.raises(InputError, match="bytes after its hash"):
        read_ledger(path)


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_ledger_that_lost_its_end_is_refused_by_whoever_kept_its_head(path: Path, kept: int) -> None:
    head = fill(path, 4)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[: 1 + kept]))
    with Ledger.open(path, HEADER) as ledger, pytest.raises(InputError, match=f"holds {kept} release.*after 4"):
        ledger.require_reached(head, "the checkpoint")


def test_a_ledger_that_is_ahead_is_accepted_and_one_of_another_run_is_not(path: Path, tmp_path: Path) -> None:
    head = fill(path, 3)
    fill(path, 5)
    other = fill(tmp_path / "other.jsonl", 3)
    with Ledger.open(path, HEADER) as ledger:
        ledger.require_reached(head, "the checkpoint")
        with pytest.raises(InputError, match="not those that the checkpoint was written after"):
            ledger.require_reached(other, "the checkpoint")


def test_a_ledger_of_the_old_format_goes_on_and_is_chained_from_there(path: Path) -> None:
    lines = [{"kind": "plan", **HEADER}, {"kind": "release", **entry(0)}, {"kind": "release", **entry(1)}]
    old = "".join(json.dumps(line) + "\n" for line in lines)
    path.write_text(old)
    fill(path, 4)
    assert path.read_text().startswith(old)
    assert read_chain(path).format == 1
    assert len(read_ledger(path)[1]) == 4
    path.write_text(path.read_text().replace("1.1", "9.1", 1))  # a line without a hash, fixed by those after it
    with pytest.raises(InputError, match="line 4: the hash does not match"):
        read_ledger(path)


def test_a_ledger_of_a_later_format_asks_for_an_upgrade(path: Path) -> None:
    fill(path, 0)
    header = {**HEADER, "kind": "plan", "format": 3}
    path.write_text(json.dumps(header) + "\n")
    with pytest.raises(InputError, match=r"format 3.*upgrade"):
        read_ledger(path)


# Copies


def test_a_copy_is_refused_until_somebody_states_that_the_original_is_gone(path: Path, tmp_path: Path) -> None:
    fill(path, 3)
    copy = tmp_path / "copy.jsonl"
    shutil.copy2(path, copy)
    before = copy.read_bytes()
    with pytest.raises(Refused, match="--adopt"):
        Ledger.open(copy, HEADER)
    assert copy.read_bytes() == before
    assert adopt(copy)
    assert not adopt(copy), "once is enough"
    with Ledger.open(copy, HEADER) as ledger:
        assert (ledger.adoptions, ledger.head.entries) == (1, 3)
        ledger.record(entry(3))
    assert [e["step"] for e in read_ledger(copy)[1]] == [0, 1, 2, 3]
    fill(path, 4)  # the original goes on as before


def test_a_directory_that_is_renamed_is_no_copy_and_one_put_in_its_place_is(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    fill(first / "ledger.jsonl", 2)
    os.rename(first, second)
    fill(second / "ledger.jsonl", 3)
    shutil.copytree(second, first)
    shutil.rmtree(second)
    with pytest.raises(Refused, match="copied, moved"):
        fill(first / "ledger.jsonl", 4)


def test_a_copy_under_an_insecure_seed_repeats_its_values_and_is_no_second_release(path: Path, tmp_path: Path) -> None:
    seeded = {**HEADER, "insecure_seed": 7}
    fill(path, 3, seeded)
    shutil.copy2(path, tmp_path / "copy.jsonl")
    assert fill(tmp_path / "copy.jsonl", 4, seeded).entries == 4


def test_neither_a_plan_nor_a_release_may_use_the_files_own_keys(path: Path) -> None:
    with pytest.raises(InputError, match="reserved for the ledger"):
        Ledger.open(path, {**HEADER, "place": "here"})
    with Ledger.open(None, HEADER) as ledger, pytest.raises(InputError, match="the ledger file reserves it"):
        ledger.record({**entry(0), "hash": "0"})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"purpose": "gradient"', b'"purpose": "x", "purpose": "gradient"'),
        (b'"noise_multiplier": 3.0', b'"noise_multiplier": Infinity'),
        (b'"noise_multiplier": 3.0', b'"noise_multiplier": NaN'),
    ],
    ids=["a key twice", "infinity", "no number"],
)
def test_what_json_readers_disagree_on_is_no_line_of_a_ledger(tmp_path: Path, old: bytes, new: bytes) -> None:
    """Also where the hashes agree with it."""
    content, before = b"", b""
    bodies = [
        b'{"kind": "plan", "format": 2, "run": "r", "place": "p"}',
        b'{"kind": "release", "purpose": "gradient", "step": 0, "noise_multiplier": 3.0}'.replace(old, new),
    ]
    for body in bodies:
        line, before = sealed(body, before)
        content += line
    with pytest.raises(InputError, match="not JSON"):
        parse(content, tmp_path / "ledger.jsonl")
