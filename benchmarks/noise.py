"""The time of noise, releases, ledger entries and samples on one thread, and of a large release on several threads.

    python benchmarks/noise.py [--json FILE] [--repeat N]
    python benchmarks/noise.py --threads 1 2 --coordinates 100 --repeat 5          only a sum of 100 million
    python benchmarks/noise.py --beside 2 --coordinates 20 --repeat 5              noise while gradients are computed

Each figure is the best of N runs: the wall-clock time, and the processor time, which depends less on other load (an
fsync takes none of it). For comparison there are torch.randn (a Mersenne twister: neither secure nor exact) and Opacus'
secure mode, which adds four Gaussians to make one (Holohan and Braghin, 2021) and draws them from torchcsprng. That
package is no longer maintained, so the four draws are timed with torch.randn: a lower bound on the time of the secure
mode.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from sordino.randomness import RandomSource, keystream
from sordino.randomness import rounded_sum as randomness
from sordino.release import Entry, Gaussian, Laplace, release
from sordino.release import requests as releasing
from sordino.release.ledger import Ledger
from sordino.sampling import Partition, Poisson, Sampling, WithoutReplacement, batches

MILLION = 1_000_000


class Figure(NamedTuple):
    wall: float  # ms
    cpu: float  # ms


def best(action: Callable[[], object], repeat: int, warm: bool = True) -> Figure:
    """The least wall-clock time and the least processor time of the runs, after one warm-up run if `warm`."""
    if warm:
        action()
    wall, cpu = [], []
    for _ in range(repeat):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - begin_cpu)
    return Figure(1e3 * min(wall), 1e3 * min(cpu))


def opacus_secure_mode() -> torch.Tensor:
    total = torch.zeros(MILLION)
    for _ in range(4):
        total += torch.randn(MILLION)
    return total / 2


def noise(source: RandomSource, repeat: int) -> dict[str, Figure]:
    return {
        "normal, 1M float32": best(lambda: source.stream("bench", 0).normal((MILLION,)), repeat),
        "normal, 1M float64": best(lambda: source.stream("bench", 0).normal((MILLION,), torch.float64), repeat),
        "laplace, 1M float32": best(lambda: source.stream("bench", 0).laplace((MILLION,)), repeat),
        "torch.randn, 1M float32 (not secure)": best(lambda: torch.randn(MILLION), repeat),
        "torch.randn, 1M float64 (not secure)": best(lambda: torch.randn(MILLION, dtype=torch.float64), repeat),
        "four torch.randn, 1M float32 (Opacus' secure mode, at least)": best(opacus_secure_mode, repeat),
    }


@contextmanager
def by_numpy() -> Iterator[None]:
    """Inside the block the C kernels are not used, as on a machine without a compiler."""
    with ExitStack() as stack:
        for module in (randomness, keystream, releasing):
            stack.enter_context(patch.object(module, "compiled", lambda: None))
        yield


def releases(source: RandomSource, directory: Path, repeat: int) -> dict[str, Figure]:
    steps = count()
    sampling = {"name": "poisson", "sampling_rate": 0.01}
    one, many = {"w": torch.randn(MILLION)}, {str(i): torch.randn(2_500) for i in range(400)}
    small = {"weight": torch.randn(10, 4_096), "bias": torch.randn(10)}
    middle = {str(i): torch.randn(n) for i, n in enumerate((200_000, 256, 38_000, 254))}

    with Ledger.open(directory / "ledger.jsonl", {"records": MILLION}) as ledger:

        def send(values: dict[str, torch.Tensor]) -> object:
            entry = Entry("gradient", next(steps), sampling, "add-remove")
            return release(
                values, sensitivity=1.0, norm="l2", noise=Gaussian(1.0), source=source, ledger=ledger, entry=entry
            )

        def send_l1() -> object:
            entry = Entry("gradient", next(steps), sampling, "add-remove")
            return release(
                one, sensitivity=1.0, norm="l1", noise=Laplace(1.0), source=source, ledger=ledger, entry=entry
            )

        sizes = {
            "40,970 float32 in 2 tensors": small,
            "238,510 float32 in 4 tensors": middle,
            "1M float32 in 1 tensor": one,
            "1M float32 in 400 tensors": many,
        }
        found = {}
        for size, values in sizes.items():
            found[f"release, {size}"] = best(partial(send, values), repeat)
            with by_numpy():
                found[f"release, {size}, without the compiled loops"] = best(partial(send, values), repeat)
        return found | {
            "release, Laplace, 1M float32": best(send_l1, repeat),
            "ledger entry with fsync": best(
                lambda: ledger.record({"purpose": "x", "step": next(steps), "secure": True}), repeat
            ),
        }


def shared(source: RandomSource, millions: int, threads: Sequence[int], repeat: int) -> dict[str, Figure]:
    """One large rounded sum in place; the numbers of threads take turns, so that all see the same load."""
    values = torch.zeros(millions * MILLION)
    found: dict[int, list[Figure]] = {number: [] for number in threads}
    before = torch.get_num_threads()
    for _ in range(repeat):
        for number in threads:
            torch.set_num_threads(number)
            stream = source.stream("bench", 0)
            found[number].append(best(partial(stream.rounded_sum, values, 100.0), 1, warm=False))
    torch.set_num_threads(before)
    title = f"rounded sum, {millions}M float32, threads: "
    return {f"{title}{n}": Figure(min(f.wall for f in fs), min(f.cpu for f in fs)) for n, fs in found.items()}


def beside(source: RandomSource, millions: int, threads: int, repeat: int) -> dict[str, Figure]:
    """Matrix products and the noise of a release, one after the other or at the same time, in `threads` threads each.

    If the noise is drawn early, it must be stored until the sum is known, which takes additional time that is not
    measured: the result is an upper bound on the gain.
    """
    torch.set_num_threads(threads)
    values, matrix = torch.zeros(millions * MILLION), torch.randn(1024, 1024)

    def draw() -> None:
        source.stream("bench", 0).rounded_sum(values, 100.0)

    def multiply(number: int) -> None:
        for _ in range(number):
            matrix @ matrix

    products = max(1, round(10 * best(draw, 2).wall / best(partial(multiply, 10), 2).wall))  # as long as the noise

    def at_once() -> None:
        other = threading.Thread(target=draw)
        other.start()
        multiply(products)
        other.join()

    def in_turn() -> None:
        multiply(products)
        draw()

    found: dict[str, list[Figure]] = {"in turn": [], "at once": []}
    for _ in range(repeat):
        found["in turn"].append(best(in_turn, 1, warm=False))
        found["at once"].append(best(at_once, 1, warm=False))
    title = f"{products} products and the noise of {millions}M, {threads} threads each, "
    return {title + name: Figure(min(f.wall for f in fs), min(f.cpu for f in fs)) for name, fs in found.items()}


def samples(source: RandomSource, repeat: int) -> dict[str, Figure]:
    def one(sampling: Sampling, records: int) -> Callable[[], object]:
        return lambda: next(batches(sampling, records=records, steps=1, source=source, chunk=512))

    return {
        "poisson, 60k records, q = 0.03": best(one(Poisson(0.03), 60_000), repeat),
        "poisson, 10M records, q = 1e-5": best(one(Poisson(1e-5), 10 * MILLION), repeat),
        "poisson, 10M records, q = 0.01": best(one(Poisson(0.01), 10 * MILLION), repeat),
        "without replacement, 1000 of 10M": best(one(WithoutReplacement(1_000), 10 * MILLION), repeat),
        "partition, 1M records (once a run)": best(one(Partition(1_000), MILLION), repeat),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of noise, releases and samples on one thread.")
    parser.add_argument("--json", type=Path, help="write the figures to this file as well")
    parser.add_argument("--repeat", type=int, default=30, help="runs of each measurement; the best counts")
    parser.add_argument("--threads", type=int, nargs="+", help="only a large sum, with these numbers of threads")
    parser.add_argument("--coordinates", type=int, default=100, help="millions of coordinates of that sum")
    parser.add_argument("--beside", type=int, metavar="THREADS", help="only noise drawn during matrix products")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = RandomSource.from_os()
    figures: dict[str, Figure] = {}
    if options.beside:
        figures = beside(source, options.coordinates, options.beside, options.repeat)
    elif options.threads:
        figures = shared(source, options.coordinates, options.threads, options.repeat)
    else:
        with tempfile.TemporaryDirectory() as directory:
            figures = {
                **noise(source, options.repeat),
                **releases(source, Path(directory), options.repeat),
                **samples(source, options.repeat),
            }
    width = max(map(len, figures))
    print(f"{'best of ' + str(options.repeat):{width}s} {'wall':>11s} {'processor':>11s}")
    for name, figure in figures.items():
        print(f"{name:{width}s} {figure.wall:8.2f} ms {figure.cpu:8.2f} ms")
    report = {
        "unit": "ms",
        "threads": options.threads or options.beside or 1,
        "repeat": options.repeat,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "figures": {name: {"wall": round(f.wall, 4), "cpu": round(f.cpu, 4)} for name, f in figures.items()},
    }
    print(json.dumps(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
