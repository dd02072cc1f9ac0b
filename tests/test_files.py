"""Directories and files that can't be used are one sentence; what is private is readable by its owner alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from sordino import files
from sordino.errors import InputError, SordinoError


def refused_places(folder: Path) -> dict[str, Path]:
    (folder / "file").write_text("precious")
    (folder / "dangling").symlink_to(folder / "nowhere")
    (folder / "read-only").mkdir(mode=0o500)
    return {
        "a file": folder / "file",
        "below a file": folder / "file" / "run",
        "dangling": folder / "dangling",
        "below a dangling link": folder / "dangling" / "run",
        "too long a name": folder / ("n" * 300),
        "too long a path": folder.joinpath(*["n" * 200] * 25),
        "of the kernel": Path("/proc/x"),
        "of the kernel, deeper": Path("/proc/self/x/y"),
        "nul": folder / "a\0b",
    }


def test_a_place_that_is_no_directory_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for what, place in refused_places(tmp_path).items():
        before = sorted(tmp_path.rglob("*"))
        if not what.startswith("of the kernel") or os.geteuid():
            with pytest.raises(InputError):
                files.usable_folder(place)
        with pytest.raises(InputError):
            files.make_folder(place)
        assert sorted(tmp_path.rglob("*")) == before, what


def test_the_parents_of_a_directory_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    made = files.make_folder(tmp_path / "a" / "b" / "c")
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]
    assert made == [tmp_path / "a" / "b" / "c", tmp_path / "a" / "b", tmp_path / "a"]
    files.remove_empty(made)
    assert not list(tmp_path.iterdir())


def test_a_private_file_is_never_readable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "not_private.json"
        path.with_name(path.name + files.PARTIAL).write_text("left by a kill")
        files.write_atomically(path, b"{}", private=True)
        files.make_folder(tmp_path / "apart", private=True)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "apart").stat().st_mode) == 0o700


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"result\.json, the result, is damaged"):
        files.read_json(path, "the result")


def test_what_an_error_found_in_the_records_is_not_in_its_message() -> None:
    error = InputError("a label is no class", private="line 7: 'HIV positive'").within("patients.csv")
    assert str(error) == "patients.csv: a label is no class"
    assert error.private == "line 7: 'HIV positive'"
    assert isinstance(error, SordinoError)


def test_a_link_in_the_place_of_a_file_that_is_being_written_leads_nowhere_else(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / "result.json.partial").symlink_to(other)
    with pytest.raises(SordinoError, match="can't be written"):
        files.write_atomically(tmp_path / "result.json", b"{}")
    assert other.read_text() == "not ours"
