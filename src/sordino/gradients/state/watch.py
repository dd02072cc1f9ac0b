"""Files, processes, connections and threads: what a pass does outside of its process's objects.

One audit hook (Python's ``sys.addaudithook``) is installed when the first pass of a user's model begins; it can't be
removed, and does nothing outside of such a pass. It receives the opening of files, databases and connections, changes
of folders and of the environment, and the start of processes and threads: those of the thread that runs the pass, and
of threads that are started in it. Two events are missing in Python 3.11 or in torch, and are added: the start of a
thread, and the file of ``torch.save``, which is opened by compiled code. Writes to files that are already open are no
events; `OpenFiles` compares those files.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sordino.native.threads import share

_ACTS = {
    "sqlite3.connect": "opens a database",
    "subprocess.Popen": "starts a process",
    "socket.connect": "opens a connection",
    "socket.bind": "opens a connection",
    "socket.sendto": "sends data",
    "socket.sendmsg": "sends data",
    "mmap.__new__": "maps memory",
    "syslog.syslog": "writes to the system's log",
    "winreg.SetValue": "writes to the registry",
}
_OS = """
    putenv unsetenv system exec fork forkpty posix_spawn spawn startfile mkdir rmdir remove rename link symlink truncate
    chmod chown chflags utime setxattr removexattr mkfifo mknod chdir lockf
"""
_ACTS |= {f"os.{name}": f"calls os.{name}" for name in _OS.split()}
_ACTS |= {f"shutil.{name}": f"calls shutil.{name}" for name in ("copyfile", "copymode", "copystat", "move", "rmtree")}
_THREADS = frozenset(("_thread.start_new_thread", "_thread.start_joinable_thread"))
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Seen:
    """What one pass did. acts: sentences without values. threads: it started one."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.threads = False
        self._thread = threading.get_ident()
        self._others: frozenset[int] = frozenset()  # threads that ran before the pass started its first one

    def event(self, event: str, args: tuple[Any, ...]) -> None:
        here = threading.get_ident()
        if here != self._thread and (not self.threads or here in self._others):
            return
        if event in _THREADS:
            if _by_us():
                return
            if not self.threads:
                self._others = frozenset(sys._current_frames())
            self.threads = True
        elif event == "open":
            if _is_write(*args) and not _by_python():
                self.acts.append("opens a file for writing")
        elif event in _ACTS and not _by_python():
            self.acts.append(_ACTS[event])


_active: list[Seen] = []


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _active and (event == "open" or event in _ACTS or event in _THREADS):
        for seen in list(_active):
            seen.event(event, args)


@functools.cache
def _install() -> None:
    sys.addaudithook(_hook)
    if sys.version_info < (3, 12):
        _announce(threading, "_start_new_thread", "_thread.start_new_thread", lambda *given: given)
    _announce(torch.serialization, "_open_zipfile_writer", "open", lambda file: (file, "w", 0))


def _announce(module: Any, name: str, event: str, of: Callable[..., tuple[Any, ...]]) -> None:
    """A function of a module raises an audit event from now on; otherwise it does what it did."""
    function = getattr(module, name, None)
    if function is None:
        return

    @functools.wraps(function)
    def announced(*args: Any, **kwargs: Any) -> Any:
        sys.audit(event, *of(*args))
        return function(*args, **kwargs)

    setattr(module, name, announced)


@contextmanager
def watching() -> Iterator[Seen]:
    """Runs a pass and yields what it does outside."""
    _install()
    seen = Seen()
    _active.append(seen)
    try:
        yield seen
    finally:
        _active.remove(seen)


def _is_write(path: Any, mode: Any, flags: Any) -> bool:
    if path == os.devnull:
        return False
    if isinstance(mode, str):
        return not _MODES.isdisjoint(mode)
    return isinstance(flags, int) and bool(flags & _WRITES)


_MODES = frozenset("wax+")


def _by_python() -> bool:
    """Does an import do it: the files of compiled code that it leaves, variables that a library sets when it is
    loaded?"""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def _by_us() -> bool:
    """Does the engine divide one of its own loops between threads (``native/threads.py``)? These run nothing else."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in (__name__, "threading"):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == share.__module__


# names of functions that change files which are already open; the system does not count what the second ones change
WRITING = frozenset(["write", "writelines", "pwrite", "writev", "pwritev", "sendfile", "copy_file_range"])
UNCOUNTED = frozenset(["truncate", "ftruncate", "splice"])


class OpenFiles:
    """The size and the time of the last change of every file that the process has open for writing, except its own
    output; nothing where the system has no list of them.

    Another process may write to the same files (the log of a parent process): a change counts only if this process has
    written something in the meantime.
    """

    def __init__(self) -> None:
        self.uncounted = False  # whether the pass may change files in a way that the system does not count
        self._written = _written()
        self._states = _states()

    def changed(self) -> bool:
        own = self.uncounted or self._written is None or self._written != _written()
        return own and self._states != _states()


def _states() -> dict[int, tuple[int, int]]:
    try:
        numbers = os.listdir("/proc/self/fd")
    except OSError:
        return {}
    found = {number: state for number in map(int, numbers) if (state := _state(number)) is not None}
    shown = {(state.st_dev, state.st_ino) for number, state in found.items() if number <= 2}
    return {
        number: (state.st_size, state.st_mtime_ns)
        for number, state in found.items()
        if stat.S_ISREG(state.st_mode) and (state.st_dev, state.st_ino) not in shown and _writable(number)
    }


def _state(number: int) -> os.stat_result | None:
    try:
        return os.fstat(number)
    except OSError:  # it was closed in the meantime
        return None


def _writable(number: int) -> bool:
    try:
        with open(f"/proc/self/fdinfo/{number}") as lines:
            flags = next(int(line.split()[1], 8) for line in lines if line.startswith("flags:"))
    except (OSError, StopIteration):
        return True
    return flags & os.O_ACCMODE != os.O_RDONLY


def _written() -> str | None:
    """What the system says of the bytes that all threads of this process have written; None where it says nothing."""
    try:
        with open("/proc/self/io") as lines:
            return next(line for line in lines if line.startswith("wchar:"))
    except (OSError, StopIteration):
        return None
