"""fetch, against a server on this machine: resumes, checks, moves in whole, and says what to do without a network."""

from __future__ import annotations

import hashlib
import io
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sordino.data import catalogue, entry, fetch
from sordino.data.catalogue import Content, Entry, Remote
from sordino.data.download import download, fetch_entry, unpack
from sordino.errors import SordinoError

CONTENT = bytes(range(256)) * 400  # 102,400 bytes
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Server:
    """Serves `files`; cuts the first `cuts` answers after `cut_at` bytes; knows Range unless told otherwise."""

    files: dict[str, bytes]
    ranges: bool = True
    cuts: int = 0
    cut_at: int = 30_000
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    address: str = ""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    state = Server({"/file": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            return

        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.requests.append((self.path, asked))
            content = state.files.get(self.path)
            if content is None:
                return self.send_error(404)
            start = 0
            if asked and state.ranges:
                match = re.fullmatch(r"bytes=(\d+)-", asked)
                assert match is not None
                start = int(match[1])
                if start >= len(content):
                    return self.send_error(416)
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            body = content[start:]
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if state.cuts:
                state.cuts -= 1
                body = body[: state.cut_at]
            self.wfile.write(body)
            return None

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()


def known(
    server: Server, *, sha256: str = SHA256, paths: tuple[str, ...] = ("/file",), members: str | None = None
) -> Entry:
    remote = Remote("set/file.bin", tuple(server.address + path for path in paths), sha256, len(CONTENT), members)
    return replace(entry("mnist"), layouts=((Content("set/file.bin", SHA256),),), remotes=(remote,))


def ranges(server: Server) -> list[str | None]:
    return [asked for _, asked in server.requests]


def test_a_file_is_downloaded_checked_and_moved_in(server: Server, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    findings = fetch_entry(known(server), tmp_path, lambda *args: seen.append(args))
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT
    assert [f.status for f in findings] == ["ok"]
    assert seen[-1] == ("set/file.bin", len(CONTENT), len(CONTENT))
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["file.bin"]


def test_what_is_there_and_right_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        fetch_entry(known(server), tmp_path)
    assert len(server.requests) == 1


def test_a_wrong_file_is_replaced(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin").write_bytes(b"truncated")
    assert [f.status for f in fetch_entry(known(server), tmp_path)] == ["ok"]


def test_a_cut_connection_is_taken_up_where_it_stopped(server: Server, tmp_path: Path) -> None:
    server.cuts = 2
    fetch_entry(known(server), tmp_path)
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT
    assert ranges(server) == [None, "bytes=30000-", "bytes=60000-"]


def test_the_next_call_takes_up_what_the_last_one_left(server: Server, tmp_path: Path) -> None:
    server.cuts, server.cut_at = 4, 10_000
    with pytest.raises(SordinoError, match=r"interrupted at 40,000 bytes.*40,000 bytes are kept"):
        fetch_entry(known(server), tmp_path)
    assert not (tmp_path / "set" / "file.bin").exists()
    fetch_entry(known(server), tmp_path)
    assert ranges(server)[-1] == "bytes=40000-"
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT


def test_a_server_without_range_is_read_from_the_start(server: Server, tmp_path: Path) -> None:
    server.cuts, server.ranges = 1, False
    fetch_entry(known(server), tmp_path)
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT
    assert len(server.requests) == 2


def test_a_part_that_is_already_whole_is_only_checked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin.part").write_bytes(CONTENT)
    fetch_entry(known(server), tmp_path)
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT


def test_a_foreign_part_is_thrown_away_and_read_anew(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin.part").write_bytes(b"x" * 500)
    fetch_entry(known(server), tmp_path)
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT
    assert ranges(server) == ["bytes=500-", None]


def test_a_wrong_checksum_leaves_nothing_behind(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SordinoError, match=f"SHA-256 is {SHA256}, expected {'0' * 64}"):
        fetch_entry(known(server, sha256="0" * 64), tmp_path)
    assert list((tmp_path / "set").iterdir()) == []


def test_a_404_goes_on_to_the_next_address(server: Server, tmp_path: Path) -> None:
    fetch_entry(known(server, paths=("/gone", "/file")), tmp_path)
    assert [path for path, _ in server.requests] == ["/gone", "/file"]
    assert (tmp_path / "set" / "file.bin").read_bytes() == CONTENT


def test_a_404_everywhere_says_which_file_to_put_where(server: Server, tmp_path: Path) -> None:
    with pytest.raises(SordinoError) as caught:
        fetch_entry(known(server, paths=("/gone",)), tmp_path)
    message = str(caught.value)
    assert "HTTP 404" in message
    assert f"put it at {tmp_path / 'set' / 'file.bin'}" in message
    assert "sordino data verify mnist" in message
    assert "SORDINO_DATA" in message


def test_without_a_network_the_message_says_what_to_do(tmp_path: Path, server: Server) -> None:
    unreachable = replace(server, address="http://127.0.0.1:9")  # the discard port: refused
    with pytest.raises(SordinoError, match=r"could not be downloaded.*refused.*Without a network: get http.*SHA-256"):
        fetch_entry(known(unreachable), tmp_path)


def test_a_folder_that_cannot_be_made_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "set").write_text("a file in the way")
    one = known(server)
    with pytest.raises(SordinoError, match=f"{tmp_path / 'set'}: can't be created"):
        download(one, one.remotes[0], tmp_path)


def test_the_embedded_set_needs_no_fetching() -> None:
    assert {finding.status for finding in fetch("fashion-mnist-mini")} == {"ok"}


def tar(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_an_archive_is_unpacked_into_its_folder_and_removed(server: Server, tmp_path: Path) -> None:
    archive = tar({"set/file.bin": CONTENT, "set/unsup/1.txt": b"not needed", "other/x": b"not asked for"})
    server.files["/archive"] = archive
    one = known(server)
    remote = Remote("a.tar.gz", (f"{server.address}/archive",), hashlib.sha256(archive).hexdigest(), None, "set")
    findings = fetch_entry(replace(one, remotes=(remote,)), tmp_path)
    assert [f.status for f in findings] == ["ok"]
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")) == ["set", "set/file.bin"]


def test_an_archive_cannot_write_outside_its_folder(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    archive = root / "a.tar.gz"
    archive.write_bytes(tar({"set/../../escaped": b"x", "/set/absolute": b"x", "set/fine": b"x"}))
    unpack(archive, "set", root)
    assert not (tmp_path / "escaped").exists()
    assert [path.name for path in (root / "set").iterdir()] == ["fine"]


def test_unpacking_into_a_folder_that_is_there_replaces_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "fine").write_bytes(b"old")
    (tmp_path / "set" / "mine").write_bytes(b"kept")
    (tmp_path / "a.tar.gz").write_bytes(tar({"set/fine": b"new", "set/deep/er": b"new"}))
    unpack(tmp_path / "a.tar.gz", "set", tmp_path)
    assert {p.name: p.read_bytes() for p in (tmp_path / "set").rglob("*") if p.is_file()} == {
        "fine": b"new",
        "mine": b"kept",
        "er": b"new",
    }


def test_a_torn_archive_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").write_bytes(tar({"set/fine": CONTENT})[:300])
    with pytest.raises(SordinoError, match=r"a\.tar\.gz: truncated"):
        unpack(tmp_path / "a.tar.gz", "set", tmp_path)
    assert not (tmp_path / "set").exists()


def test_every_remote_lies_below_the_data_folder() -> None:
    for one in catalogue():
        for remote in one.remotes:
            assert not Path(remote.path).is_absolute()
            assert ".." not in Path(remote.path).parts
