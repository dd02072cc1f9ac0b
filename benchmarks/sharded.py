"""A model divided over ranks (fully_shard): does it train if one process has too little memory, and at what cost?

    python benchmarks/sharded.py --json benchmarks/results/sharded.json
    python benchmarks/sharded.py --only time --rounds 3 --json benchmarks/results/sharded_time.json
    python benchmarks/sharded.py --only bytes --json benchmarks/results/sharded_bytes.json

Memory: RLIMIT_DATA of every process is its use after importing torch plus a budget that is too small for the model, its
sums and its optimizer's state in one process. One process must fail; two must make their steps.

Time: the processor time (of the slowest rank) of a private step of the sharded model divided by that of a plain step of
the same sharded model with fully_shard's own gathering and reduction; the same ratio for one process. Bits: the weights
after the steps are compared for one process, for ranks that share chunks, and for shards.

Bytes: what the kernel says was sent in the timed steps, beside the formula of docs/howto/many_ranks.md for the chunks
of the same steps and for the checks of chunks with a new number of rows.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import wire
from sordino.plan import Plan
from sordino.ranks.layout import shard_blocks, whole_of
from sordino.records.chunks import stable_chunks
from sordino.runs.results import environment
from sordino.training import Settings, train
from sordino.training.steps import plan_batches

WORDS, LENGTH, CLASSES = 1000, 64, 10


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(self.one(x)).view(b, s, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, s, d)
        x = x + self.out(y)
        return x + self.down(torch.relu(self.up(self.two(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))  # type: ignore[no-any-return]


def _data(records: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randint(WORDS, (records, LENGTH), generator=generator),
        torch.randint(CLASSES, (records,), generator=generator),
    )


def _plan(records: int, batch: int, steps: int) -> Plan:
    return Plan.dpsgd(
        noise_multiplier=1.0, delta=1e-5, records=records, expected_batch=batch, steps=steps, clip_norm=1.0,
        insecure_seed=1,
    )  # fmt: skip


def _limited(rank: int, megabytes: int, width: int, blocks: int) -> dict[str, Any]:
    """A run with limited memory: the model is made shard by shard, so that no process ever has the whole model."""
    before = _private_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (before + (megabytes << 20), resource.RLIM_INFINITY))
    torch.manual_seed(0)
    with torch.device("meta"):
        net: nn.Module = Transformer(width, blocks)
    count = sum(p.numel() for p in net.parameters())
    if dist.is_initialized():
        shard_blocks(net)
    net.to_empty(device="cpu")
    with torch.no_grad():
        for name, p in net.named_parameters():
            local = p.to_local() if hasattr(p, "to_local") else p
            local.fill_(1.0) if ".weight" in name and p.ndim == 1 else local.normal_(0, 0.02)
    settings = Settings(chunk=4, checkpoint_every=0, progress=False)
    result = train(
        net,
        cross_entropy,
        (_data(64)[0][:, :16], _data(64)[1]),
        _plan(64, 8, 2),
        optimizer=torch.optim.Adam,
        lr=1e-3,
        settings=settings,
    )
    finite = all(bool(torch.isfinite(whole_of(p)).all()) for p in result.model.parameters())
    return {"steps": 2, "finite": finite, "parameters": count, "beyond_start": _private_bytes(peak=True) - before}


def _private_bytes(peak: bool = False) -> int:
    """The bytes that RLIMIT_DATA limits; with `peak`, the peak of the resident memory."""
    text = Path("/proc/self/status").read_text(encoding="utf8")
    return int(text.split("VmHWM:" if peak else "VmData:")[1].split()[0]) << 10


def _steps(rank: int, kind: str, size: Size) -> dict[str, Any]:
    """Seconds and sent bytes of each step of the second half, and a digest of the weights."""
    torch.manual_seed(0)
    net: nn.Module = Transformer(size.width, size.blocks)
    if kind.endswith("sharded"):
        shard_blocks(net)
    if kind.startswith("plain"):
        return _plain(net, size)
    seen: list[Moment] = []

    def note() -> None:
        seen.append(_now())

    def evaluate(_: nn.Module) -> dict[str, float]:
        if not dist.is_initialized():
            note()
        return {}

    settings = Settings(chunk=size.chunk, eval_every=1, checkpoint_every=0, progress=False)
    with wire.at_each_step(note):
        result = train(
            net, cross_entropy, _data(8 * size.batch), _plan(8 * size.batch, size.batch, size.steps), lr=0.1,
            settings=settings, evaluate=evaluate,
        )  # fmt: skip
    weights = b"".join(whole_of(p).detach().numpy().tobytes() for p in result.model.parameters())
    return {
        **_each(seen),
        "digest": hashlib.sha256(weights).hexdigest(),
    }


class Moment(NamedTuple):
    """Processor seconds of all threads, seconds by the clock, and bytes sent until now."""

    processor: float
    clock: float
    sent: int


def _now() -> Moment:
    return Moment(time.process_time(), time.perf_counter(), wire.sent())


def _each(seen: list[Moment]) -> dict[str, Any]:
    """Results for the second half of the steps, because chunks of new sizes are checked in the first half. Bytes are an
    average, because some of them are in the system's buffers between two steps."""
    last = seen[len(seen) // 2 :]
    return {
        "processor": statistics.median(b.processor - a.processor for a, b in itertools.pairwise(last)),
        "clock": statistics.median(b.clock - a.clock for a, b in itertools.pairwise(last)),
        "bytes": (last[-1].sent - last[0].sent) / (len(last) - 1),
    }


def _plain(net: nn.Module, size: Size) -> dict[str, Any]:
    """Plain training with the same number of records per step, divided over the ranks."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    x, y = _data(size.batch // ranks)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    seen = []
    for _ in range(size.steps + 1):
        seen.append(_now())
        for part in torch.split(torch.arange(len(x)), size.chunk):
            cross_entropy(net(x[part]), y[part], reduction="sum").backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return _each(seen)


def _process(number: int, size: int, place: str, function: Any, arguments: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    if size > 0:
        dist.init_process_group("gloo", f"file://{place}", rank=number, world_size=size)
    try:
        queue.put((number, function(number, *arguments)))
    except Exception as error:  # an error of one rank is reported, so that the others do not wait for it
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        queue.put((number, {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}))
    queue.close()
    queue.join_thread()
    os._exit(0)


def together(size: int, function: Any, *arguments: Any) -> list[dict[str, Any]]:
    """The results of `size` ranks; 0: one process without a group."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        made = [
            context.Process(target=_process, args=(number, size, f"{folder}/group", function, arguments, queue))
            for number in range(max(1, size))
        ]
        for process in made:
            process.start()
        found = dict(queue.get(timeout=900) for _ in made)
        for process in made:
            process.join()
    return [found[number] for number in sorted(found)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "sharded.json")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["memory", "time", "bytes"])
    chosen = parser.parse_args()
    import torch.distributed.fsdp  # noqa: F401 (before the ranks are forked)

    document: dict[str, Any] = {"command": " ".join(["python benchmarks/sharded.py", *sys.argv[1:]])}
    if chosen.only in (None, "memory"):
        model = chosen.megabytes, chosen.width, chosen.blocks
        memory = {f"{n} ranks" if n else "one process": together(n, _limited, *model) for n in (0, 2)}
        document["memory"] = {"megabytes": chosen.megabytes, **memory}
        print(json.dumps(document["memory"], indent=1))
    if chosen.only in (None, "time"):
        document["time"] = _timed(chosen.rounds)
        print(json.dumps(document["time"], indent=1))
    if chosen.only in (None, "bytes"):
        document["bytes"] = _sent_bytes()
        print(json.dumps(document["bytes"], indent=1))
    document["environment"] = environment()
    chosen.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf8")
    return 0


@dataclass(frozen=True)
class Size:
    """The sizes of the timed model and batches."""

    width: int = 128
    blocks: int = 4
    batch: int = 64
    chunk: int = 16
    steps: int = 14


KINDS = {"plain": 0, "private": 0, "plain sharded": 2, "private sharded": 2, "private ranks": 2}


def _timed(rounds: int) -> dict[str, Any]:
    """Runs every kind once in each round, so that other load on the machine affects all of them."""
    size = Size()
    rows: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    for _ in range(rounds):
        for kind, ranks in KINDS.items():
            rows[kind].append(together(ranks, _steps, kind, size))
    slowest = {
        by: {kind: [max(one[by] for one in found) for found in made] for kind, made in rows.items()}
        for by in ("processor", "clock")
    }
    digests = {one["digest"] for made in rows.values() for found in made for one in found if "digest" in one}
    return {
        **vars(size), "parameters": _count(size), "chunks": _chunks(size).mean, "rounds": rounds,
        "seconds_of_the_slowest_rank": slowest,
        "over_plain": {
            by: {
                "one process": _ratios(found["private"], found["plain"]),
                "two ranks, sharded": _ratios(found["private sharded"], found["plain sharded"]),
            }
            for by, found in slowest.items()
        },
        "same_bits": len(digests) == 1,
    }  # fmt: skip


def _sent_bytes() -> dict[str, Any]:
    """Bytes of a step, measured and by the formula; no time is measured, so other load does no harm."""
    size = Size()
    chunks = _chunks(size)
    kinds = ("plain sharded", "private sharded", "private ranks")
    sent = {kind: sum(one["bytes"] for one in together(KINDS[kind], _steps, kind, size)) for kind in kinds}
    return {
        **vars(size), "parameters": _count(size), "chunks": chunks.mean, "new_numbers_of_rows": chunks.new,
        "a_step": {
            kind: {"measured": value, "formula": formula(kind, size, chunks.mean, checks=chunks.new)}
            for kind, value in sent.items()
        },
    }  # fmt: skip


def _ratios(private: list[float], plain: list[float]) -> dict[str, float]:
    """The ratio of the medians over all rounds, and the smallest and largest ratio of single rounds."""
    single = [a / b for a, b in zip(private, plain, strict=True)]
    return {
        "median": statistics.median(private) / statistics.median(plain), "least": min(single), "most": max(single)
    }  # fmt: skip


def _count(size: Size) -> int:
    return sum(p.numel() for p in Transformer(size.width, size.blocks).parameters())


def formula(kind: str, size: Size, chunks: float, ranks: int = 2, checks: float = 0.0) -> float | None:
    """Bytes that all ranks send in a step (docs/howto/many_ranks.md), all parameters trained, single precision.

    checks: the number of chunks of a step that have a number of rows that is new to their rank.
    """
    count = _count(size)
    if kind == "private ranks":  # for two ranks
        return 4 * count + 16 * count + 8 * size.batch
    if kind != "private sharded":
        return None
    block = sum(p.numel() for p in Block(size.width).parameters())
    turns = 2 * chunks - ranks  # of each rank's passes: from forward to backward, and to the next chunk's forward
    passes = chunks * (8 * count + 8 * count) - turns * 4 * block
    return (ranks - 1) / ranks * (passes + checks * 4 * count)


class Chunks(NamedTuple):
    """Over the timed steps: the mean number of a batch's chunks, and of those with rows that are new in number."""

    mean: float
    new: float


def _chunks(size: Size, ranks: int = 2) -> Chunks:
    """The chunks of the timed steps, from the beginning of the first to that of the last; cut by records' numbers."""
    plan = _plan(8 * size.batch, size.batch, size.steps)
    drawn = plan_batches(plan, records=8 * size.batch, source=plan.source(), chunk=size.chunk)
    cut = [[len(part) for part in stable_chunks(batch)] for batch in drawn][:-1]
    seen: list[set[int]] = [set() for _ in range(ranks)]
    new = []
    for rows in cut:
        new.append(sum(len(set(rows[k::ranks]) - seen[k]) for k in range(ranks)))
        for k in range(ranks):
            seen[k].update(rows[k::ranks])
    first = size.steps // 2
    return Chunks(statistics.mean(map(len, cut[first:])), statistics.mean(new[first:]))


if __name__ == "__main__":
    raise SystemExit(main())
