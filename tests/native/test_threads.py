"""Work that is shared by threads: each piece once, nothing left running, and noise that does not depend on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from sordino.native.boxmuller import BLOCK
from sordino.native.kernels import Kernels, compiled
from sordino.native.parts import Parts
from sordino.native.threads import share, workers
from sordino.randomness import RandomSource
from sordino.randomness import rounded_sum as randomness
from sordino.release import Entry, Gaussian, release
from sordino.release.ledger import Ledger


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sordino-")]


def with_threads(count: int, seed: int, values: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(count)
    result = values.clone()
    RandomSource.seeded(seed).stream("sum", 0).rounded_sum(result, 100.3, 0.5)
    return result


def test_there_are_as_many_threads_as_torch_has_and_as_there_is_work() -> None:
    torch.set_num_threads(3)
    assert [workers(n) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, 3]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_piece_is_done_once(count: int) -> None:
    torch.set_num_threads(count)
    done: list[int] = []
    made: list[int] = []

    def make() -> Callable[[int], None]:
        made.append(threading.get_ident())
        return done.append

    share(make, 40)
    assert sorted(done) == list(range(40))
    assert len(made) == count
    share(make, 0)
    assert len(done) == 40


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("here", [True, False])
def test_an_exception_in_any_thread_ends_all_and_is_raised(kind: type[BaseException], here: bool) -> None:
    torch.set_num_threads(4)
    caller, failed, done = threading.get_ident(), threading.Event(), []

    def work(piece: int) -> None:
        if (threading.get_ident() == caller) == here:
            failed.set()
            raise kind(f"piece {piece}")
        assert failed.wait(200)  # however late the failing thread gets its turn
        time.sleep(0.002)
        done.append(piece)

    with pytest.raises(kind, match="piece"):
        share(lambda: work, 10_000)
    assert len(done) < 5_000  # seconds after the failure, where they should be microseconds


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [8 * BLOCK, 8 * BLOCK + 1, 20 * BLOCK - 3, 33 * BLOCK + 77])
def test_noise_is_bit_identical_in_any_number_of_threads(n: int, dtype: torch.dtype) -> None:
    values = torch.linspace(-50, 50, n, dtype=dtype)
    alone = with_threads(1, 3, values)
    for count in (2, 3, 7):
        assert torch.equal(with_threads(count, 3, values), alone)


def test_a_stream_goes_on_behind_the_noise_wherever_it_was_made() -> None:
    def after(count: int, before: int) -> tuple[torch.Tensor, list[int]]:
        torch.set_num_threads(count)
        stream, values = RandomSource.seeded(5).stream("s", 0), torch.zeros(17 * BLOCK + 5)
        stream.bits64(before)
        stream.rounded_sum(values, 64.0)
        return values, stream.bits64(3).tolist()

    for before in (0, 1, 2):  # an odd number of words: the noise begins in the middle of a block of AES
        values, words = after(1, before)
        again, same = after(4, before)
        assert torch.equal(values, again)
        assert words == same


def test_a_failure_in_a_thread_releases_nothing_and_the_entry_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiled() is None:
        pytest.skip("no compiled loops here")
    torch.set_num_threads(2)
    calls, loop = [], Kernels.rounded_sum

    def broken(self: Kernels, parts: Parts, results: Parts, start: int, *rest: object) -> int:
        calls.append(start)
        if len(calls) == 5:
            raise MemoryError("no room")
        return loop(self, parts, results, start, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Kernels, "rounded_sum", broken)
    ledger, entry = Ledger.open(None, {"kind": "plan"}), Entry("gradient", 0, {"name": "poisson"}, "add-remove")
    values = {"w": torch.zeros(40 * BLOCK)}
    with pytest.raises(MemoryError, match="no room"):
        release(
            values,
            sensitivity=1.0,
            norm="l2",
            noise=Gaussian(1.0),
            source=RandomSource.from_os(),
            ledger=ledger,
            entry=entry,
        )
    assert len(ledger.entries) == 1, "the entry was written before any noise was made"
    assert not values["w"].any()


def test_the_noise_of_a_small_model_takes_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(4)
    seen: list[int] = []
    monkeypatch.setattr(randomness, "share", lambda make, pieces: (seen.append(pieces), share(make, pieces))[1])
    values = np.zeros(8 * BLOCK, np.float32)
    RandomSource.seeded(0).stream("s", 0).rounded_sum_of(Parts.of([values]), Parts.of([values]), 64.0, 1.0)
    assert seen in ([1], [])
