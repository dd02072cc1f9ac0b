"""What a pass leaves outside of the model reaches no later batch: random generators, libraries, files, threads.

The record that comes in the batch before has 0.5 as its first value; it leaves something for the next batch, in which
it is not. Either the run is refused, or the next batch's sum is the same without that record.
"""

from __future__ import annotations

import builtins
import collections
import importlib
import mmap
import multiprocessing.shared_memory
import os
import pathlib
import random
import sqlite3
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sordino
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance

Act = Callable[[Any], Any]
HERE = pathlib.Path(tempfile.gettempdir()) / f"sordino-state-{os.getpid()}"


class Net(nn.Module):
    """keep(self) is called when the special record comes; got(self) is truthy in the passes after it, if it is seen."""

    def __init__(self, keep: Act, got: Act, **attributes: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 3)
        self.keep, self.got = keep, got
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        sign = -1.0 if self.got(self) else 1.0
        if bool((x[:, 0] == 0.5).any()):
            self.keep(self)
        return sign * self.b(torch.tanh(self.a(x)))  # type: ignore[no-any-return]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(1)


def last_sum(model: nn.Module, special: bool, rows: int = 24) -> Tensor:
    """The sum over the last of six batches; the special record may be in the one before it."""
    source = torch.Generator().manual_seed(5)
    x, y = torch.randn(144, 8, generator=source), torch.randn(144, 3, generator=source)
    assurance, sums = Assurance(), {}
    for step in range(6):
        some = slice(24 * step, 24 * step + (rows if step == 4 else 24))
        if step == 4 and special:
            x[24 * step, 0] = 0.5
        torch.manual_seed(1000 + step)
        sums = clipped_sum(model, loss, Rows(x[some], y[some]), FlatClip(1.0), assurance=assurance).sums
    return torch.cat([t.flatten() for t in sums.values()])


def carries(make: Callable[[], nn.Module], forget: Callable[[], Any] = lambda: None, rows: int = 24) -> bool:
    """Whether the last sum differs by the record that is in the batch before. Raises Refused if the run is refused."""
    found = []
    for special in (False, True):
        forget()
        found.append(last_sum(make(), special, rows))
    return not torch.equal(*found)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    own, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002
    HERE.unlink(missing_ok=True)
    yield
    HERE.unlink(missing_ok=True)
    random.setstate(own)
    np.random.set_state(numpys)  # noqa: NPY002
    for holder in (torch, torch.nn.Linear, nn.Module, builtins, np, collections.OrderedDict, sys.modules["torch.fx"]):
        if "sordino_top" in vars(holder):
            delattr(holder, "sordino_top")
    os.environ.pop("SORDINO_TOP", None)
    torch.nn.functional.relu.__dict__.pop("sordino_top", None)


# random generators


def _seeded() -> None:
    random.seed(3)
    np.random.seed(3)  # noqa: NPY002


GENERATORS: dict[str, tuple[Act, Act, Callable[[], dict[str, Any]]]] = {
    "random": (lambda s: random.seed(7), lambda s: random.random() > 0.5, dict),
    "random, draws": (lambda s: random.random(), lambda s: random.getstate()[1][-1] % 2, dict),
    "numpy": (lambda s: np.random.seed(7), lambda s: np.random.rand() > 0.5, dict),  # noqa: NPY002
    "numpy, draws": (lambda s: np.random.rand(), lambda s: np.random.get_state()[2] % 4 == 2, dict),  # type: ignore[index] # noqa: NPY002
    "Random": (lambda s: s.v.seed(7), lambda s: s.v.random() > 0.5, lambda: {"v": random.Random(3)}),
    "default_rng": (lambda s: s.v.random(), lambda s: s.v.random() > 0.5, lambda: {"v": np.random.default_rng(3)}),
    "RandomState": (lambda s: s.v.seed(7), lambda s: s.v.rand() > 0.5, lambda: {"v": np.random.RandomState(3)}),
    "in a list": (lambda s: s.v[0].random(), lambda s: s.v[0].random() > 0.5, lambda: {"v": [random.Random(3)]}),
    "a generator of torch": (
        lambda s: torch.rand(1, generator=s.v),
        lambda s: torch.rand((), generator=s.v).item() > 0.5,
        lambda: {"v": torch.Generator().manual_seed(3)},
    ),
    "global": (lambda s: OWN.seed(7), lambda s: OWN.random() > 0.5, dict),
    "deep in a global": (lambda s: DEEP["a"][0].seed(7), lambda s: DEEP["a"][0].random() > 0.5, dict),
}
OWN = random.Random(3)
DEEP = {"a": [random.Random(3)]}


@pytest.mark.parametrize("name", GENERATORS)
def test_the_state_of_a_generator_carries_nothing_to_the_next_batch(name: str) -> None:
    keep, got, attributes = GENERATORS[name]

    def forget() -> None:
        _seeded()
        OWN.seed(3)
        DEEP["a"][0].seed(3)

    try:
        assert not carries(lambda: Net(keep, got, **attributes()), forget)
    except sordino.Refused:
        assert name == "deep in a global"


def test_the_state_of_torchs_generator_carries_nothing_to_the_next_chunk() -> None:
    """Three chunks: the first has the special record, and sets the state from which the next one draws."""
    crafted = torch.Generator().manual_seed(11).get_state()

    def keep(s: Any) -> None:
        state = crafted.clone()
        state[:8] = torch.get_rng_state()[:8]  # torch.initial_seed is the same
        torch.set_rng_state(state)

    seen: dict[int, Any] = {}  # a list that grows is refused
    source = torch.Generator().manual_seed(5)
    x, y = torch.randn(24, 8, generator=source), torch.randn(24, 3, generator=source)
    x[0, 0] = 0.5
    model = Net(keep, lambda s: False)
    torch.manual_seed(1)
    model.b.register_forward_pre_hook(lambda m, args: seen.update({len(seen): torch.get_rng_state()}))
    clipped_sum(model, loss, Rows(x, y), FlatClip(1.0), chunk=12)
    assert not torch.equal(seen[max(seen)][24:], crafted[24:])


def test_the_users_own_numbers_are_not_shifted_by_a_pass() -> None:
    def forward_draws(s: Any) -> bool:
        return random.random() + np.random.rand() > 5  # noqa: NPY002

    _seeded()
    expected = random.random(), np.random.rand()  # noqa: NPY002
    _seeded()
    last_sum(Net(lambda s: None, forward_draws), True)
    assert (random.random(), np.random.rand()) == expected  # noqa: NPY002


def test_numbers_of_python_differ_from_pass_to_pass_and_are_those_of_the_run() -> None:
    def drawn() -> list[Any]:
        found: dict[int, Any] = {}
        own = random.Random(4)
        drawn = lambda: torch.tensor([random.random(), np.random.rand(), own.random()])  # noqa: E731, NPY002
        model = Net(lambda s: None, lambda s: found.update({len(found): drawn()}))  # tensors are no values
        assurance = Assurance()
        for step in range(3):
            torch.manual_seed(step)
            clipped_sum(model, loss, Rows(torch.ones(4, 8), torch.ones(4, 3)), FlatClip(1.0), assurance=assurance)
        return [tuple(t.tolist()) for t in found.values()]

    first = drawn()
    assert len(set(first)) >= 3
    assert drawn() == first


def test_layers_that_are_dropped_by_pythons_and_numpys_numbers_are_accepted() -> None:
    def dropped(s: Any) -> bool:
        return random.random() < 0.3 or np.random.rand() < 0.3 or s.v.random() < 0.3  # noqa: NPY002

    last_sum(Net(lambda s: None, dropped, v=np.random.default_rng(1)), True)


# classes and modules of libraries

LIBRARIES: dict[str, tuple[Act, Act]] = {
    "a class of torch": (lambda s: setattr(torch.nn.Linear, "sordino_top", 1), lambda s: hasattr(s.a, "sordino_top")),
    "nn.Module": (
        lambda s: setattr(type(s).__mro__[1], "sordino_top", 1),
        lambda s: hasattr(nn.Identity, "sordino_top"),
    ),
    "torch": (lambda s: setattr(torch, "sordino_top", 1), lambda s: hasattr(torch, "sordino_top")),
    "numpy": (lambda s: np.__dict__.update(sordino_top=1), lambda s: hasattr(np, "sordino_top")),
    "builtins": (lambda s: setattr(builtins, "sordino_top", 1), lambda s: hasattr(builtins, "sordino_top")),
    "the environment": (lambda s: os.environ.update(SORDINO_TOP="1"), lambda s: "SORDINO_TOP" in os.environ),
    "putenv": (lambda s: os.putenv("SORDINO_TOP", "1"), lambda s: False),
    "sys.modules": (
        lambda s: setattr(sys.modules["torch.fx"], "sordino_top", 1),
        lambda s: hasattr(sys.modules["torch.fx"], "sordino_top"),
    ),
    "an imported module": (
        lambda s: setattr(importlib.import_module("torch.fx"), "sordino_top", 1),
        lambda s: hasattr(importlib.import_module("torch.fx"), "sordino_top"),
    ),
    "a class of Python": (
        lambda s: _set_on_counter(),
        lambda s: hasattr(collections.Counter, "sordino_top"),
    ),
    "a function of torch": (
        lambda s: setattr(torch.nn.functional.relu, "sordino_top", 1),
        lambda s: hasattr(torch.nn.functional.relu, "sordino_top"),
    ),
}


def _set_on_counter() -> None:
    collections.Counter.sordino_top = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LIBRARIES)
def test_an_attribute_that_is_set_on_a_library_is_refused(name: str) -> None:
    try:
        with pytest.raises(sordino.Refused, match=r"changes this variable|outside"):
            last_sum(Net(*LIBRARIES[name]), True)
    finally:
        if hasattr(collections.Counter, "sordino_top"):
            del collections.Counter.sordino_top


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "threads": (lambda: torch.set_num_threads(3), lambda: torch.set_num_threads(1)),
    "type": (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
    "recursion": (lambda: sys.setrecursionlimit(4321), lambda: sys.setrecursionlimit(1000)),
    "errors of numpy": (lambda: np.seterr(over="ignore"), lambda: np.seterr(over="warn")),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_that_a_pass_changes_is_refused(name: str) -> None:
    change, back = SETTINGS[name]
    before = torch.get_num_threads(), sys.getrecursionlimit()
    try:
        with pytest.raises(sordino.Refused, match="a setting of"):
            last_sum(Net(lambda s: change(), lambda s: False), True)
    finally:
        back()
        torch.set_num_threads(before[0])
        sys.setrecursionlimit(before[1])


# files


def _written() -> None:
    HERE.write_text("1")


def _database() -> None:
    with sqlite3.connect(HERE) as connection:
        connection.execute("create table top (value)")


def _low() -> None:
    handle = os.open(HERE, os.O_CREAT | os.O_WRONLY)
    os.write(handle, b"1")
    os.close(handle)


def _in_a_thread() -> None:
    worker = threading.Thread(target=_written)
    worker.start()
    worker.join()


FILES: dict[str, Callable[[], Any]] = {
    "open": _written,
    "os.open": _low,
    "numpy": lambda: np.save(HERE.open("wb"), np.ones(1)),
    "torch": lambda: torch.save(torch.ones(1), HERE),
    "a database": _database,
    "a folder": lambda: HERE.mkdir(),
    "a link": lambda: HERE.symlink_to("somewhere"),
    "a process": lambda: os.system(f"touch {HERE}"),
    "in a thread": _in_a_thread,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_written_in_a_pass_is_refused(name: str) -> None:
    try:
        with pytest.raises(sordino.Refused, match="outside"):
            last_sum(Net(lambda s: FILES[name](), lambda s: HERE.exists() or HERE.is_symlink()), True)
    finally:
        if HERE.is_dir():
            HERE.rmdir()


OPENED: dict[str, tuple[Callable[[], Any], Act]] = {
    "a file": (lambda: HERE.open("w"), lambda s: s.v.write("1")),
    "a file without a buffer": (lambda: HERE.open("wb", buffering=0), lambda s: s.v.write(b"1")),
    "its number": (lambda: os.open(HERE, os.O_CREAT | os.O_WRONLY), lambda s: os.write(s.v, b"1")),
    "its length": (lambda: HERE.open("wb", buffering=0), lambda s: s.v.truncate(7)),
    "its length, by number": (lambda: os.open(HERE, os.O_CREAT | os.O_WRONLY), lambda s: os.ftruncate(s.v, 7)),
    "a database": (lambda: _table(), lambda s: s.v.execute("insert into top values (1)")),
    "mapped memory": (lambda: mmap.mmap(-1, 8), lambda s: s.v.__setitem__(0, 1)),
    "shared memory": (lambda: _shared(), lambda s: s.v.buf.__setitem__(0, 1)),
    "a shared value": (lambda: multiprocessing.Value("d", 0.0), lambda s: setattr(s.v, "value", 1.0)),
}


def _table() -> Any:
    connection = sqlite3.connect(HERE)
    connection.execute("create table top (value)")
    return connection


def _shared() -> Any:
    return multiprocessing.shared_memory.SharedMemory(create=True, size=8)


@pytest.mark.parametrize("name", OPENED)
def test_a_file_that_was_opened_before_and_is_written_in_a_pass_is_refused(name: str) -> None:
    make, keep = OPENED[name]
    held = make()
    try:
        with pytest.raises(sordino.Refused, match=r"changes this variable|outside"):
            last_sum(Net(keep, lambda s: False, v=held), True)
    finally:
        if isinstance(held, multiprocessing.shared_memory.SharedMemory):
            held.close()
            held.unlink()
        elif isinstance(held, int):
            os.close(held)
        elif hasattr(held, "close"):
            held.close()


# a batch with one record


BOX: dict[str, float] = {}
ONE: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "a variable": (lambda: BOX.update(top=1.0), lambda: "top" in BOX),
    "a class": (lambda: setattr(nn.Linear, "sordino_top", 1), lambda: hasattr(nn.Linear, "sordino_top")),
    "a file": (_written, HERE.exists),
}


class Later(nn.Module):
    """What the special record left turns the outputs only when a second one comes."""

    def __init__(self, keep: Callable[[], Any], got: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.keep, self.got = nn.Linear(8, 3), keep, got

    def forward(self, x: Tensor) -> Tensor:
        if bool((x[:, 0] == 0.5).any()):
            self.keep()
        return -self.a(x) if bool((x[:, 0] == 0.75).any()) and self.got() else self.a(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ONE)
def test_a_batch_of_one_record_leaves_nothing_either(name: str) -> None:
    BOX.clear()
    with pytest.raises(sordino.Refused, match="outside"):
        last_sum(Later(*ONE[name]), True, rows=1)


# what is no state


def _sound(name: str) -> Any:
    if name == "lazy import":
        sys.modules.pop("colorsys", None)
        importlib.import_module("colorsys")
    elif name == "warning":
        warnings.warn("a model warns", stacklevel=1)
    elif name == "reads a file":
        pathlib.Path(__file__).read_text()
    elif name == "prints":
        sys.stdout.write(" ")
        sys.stdout.flush()
    elif name == "nowhere":
        with open(os.devnull, "w") as nowhere:
            nowhere.write("1")
    return False


@pytest.mark.parametrize("name", ["lazy import", "warning", "reads a file", "prints", "nowhere"])
@pytest.mark.filterwarnings("ignore:a model warns")
def test_what_keeps_nothing_of_the_data_is_accepted(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():  # the process's output is what it is without pytest
        last_sum(Net(lambda s: _sound(name), lambda s: _sound(name)), True)


def test_a_file_that_another_process_writes_is_not_the_models() -> None:
    """Such as the log of a parent process: it is open here too, and grows in every pass."""
    growing = "while True: file.write('1'); file.flush(); time.sleep(0.001)"
    with HERE.open("w") as held:
        other = subprocess.Popen([sys.executable, "-c", f"import time; file = open({str(HERE)!r}, 'a')\n{growing}"])
        try:
            while not HERE.stat().st_size:
                pass
            last_sum(Net(lambda s: None, lambda s: False if s is not None else held.write("1")), True)
        finally:
            other.kill()
            other.wait()


def test_a_model_that_reads_is_accepted_in_a_new_process() -> None:
    """There the first pass imports modules, which set variables of the environment and attributes of others."""
    program = """
import torch, sys
from torch import nn
from sordino.clipping import FlatClip
from sordino.gradients import Rows, clipped_sum
from sordino.gradients.checks.assurance import Assurance

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 3)

    def forward(self, x):
        if "torch" not in sys.modules or bool((x > 1e9).any()):
            raise ValueError
        return self.a(x)

clipped_sum(Net(), nn.CrossEntropyLoss(), Rows(torch.randn(9, 8), torch.arange(9) % 3), FlatClip(1.0),
            assurance=Assurance())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_that_others_write_at_the_same_time_are_not_the_models() -> None:
    stop = threading.Event()

    def log() -> None:
        while not stop.wait(0.001):
            _written()

    worker = threading.Thread(target=log)
    worker.start()
    try:
        last_sum(Net(lambda s: None, lambda s: False), True)
    finally:
        stop.set()
        worker.join()


# conditions on values that are missed in one grouping


@pytest.mark.parametrize("kind", ["losses", "gradients"])
@pytest.mark.parametrize("count", [11, 12])
def test_a_parity_of_the_batch_is_found(kind: str, count: int) -> None:
    """Where it is even it was missed half of the time, in two groups. The rows that count come in the second batch."""

    class Parity(Net):
        def forward(self, x: Tensor) -> Tensor:
            odd = int((x[:, 0] == 0.25).sum()) % 2
            h = torch.tanh(self.a(x))
            if kind == "gradients":
                return self.b(Scaled.apply(h, 1 - odd))  # type: ignore[no-any-return]
            return (1 - 2 * odd) * self.b(h)  # type: ignore[no-any-return]

    missed = 0
    for seed in range(20):
        source = torch.Generator().manual_seed(seed)
        x, y = torch.randn(48, 8, generator=source), torch.randn(48, 3, generator=source)
        x[24 : 24 + count, 0] = 0.25
        model, assurance = Parity(lambda s: None, lambda s: False), Assurance()
        for some in (slice(0, 24), slice(24, 48)):
            torch.manual_seed(100 * seed + some.stop)
            try:
                clipped_sum(model, loss, Rows(x[some], y[some]), FlatClip(1.0), assurance=assurance)
            except sordino.Refused:
                assert some.start
                break
        else:
            missed += 1
    assert missed == 0 if count % 2 else missed <= 2


class Scaled(torch.autograd.Function):
    """The gradient times a number."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


# threads that a library starts


def test_a_thread_that_a_library_starts_is_noticed() -> None:
    """The pool belongs to no variable of the model, and its name is in no function of the model."""
    made = vars(sys.modules["concurrent.futures"])["Thread" + "PoolExecutor"]
    assert made is ThreadPoolExecutor

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            turned = sys.modules["sordino_library"].any_special(x)  # type: ignore[attr-defined]
            return -self.a(x) if turned else self.a(x)  # type: ignore[no-any-return]

    library = type(sys)("sordino_library")
    library.any_special = _library_function(made)  # type: ignore[attr-defined]
    sys.modules["sordino_library"] = library
    try:
        with pytest.raises(sordino.Refused, match=r"interact|groups"):
            last_sum(Hidden(), True)
    finally:
        del sys.modules["sordino_library"]


def _library_function(made: Any) -> Callable[[Tensor], bool]:
    def any_special(x: Tensor) -> bool:
        with made(1) as pool:
            return next(iter(pool.map(lambda t: bool((t[:, 0] == 0.5).any()), [x])))  # type: ignore[no-any-return]

    any_special.__module__ = "torch.somewhere"
    return any_special
