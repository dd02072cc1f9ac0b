"""A function in several processes that form a gloo group: forked, so that torch is loaded once."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def in_ranks(size: int, folder: Path, function: Callable[..., Any], *arguments: Any, seconds: float = 600) -> list[Any]:
    """What `function(rank, *arguments)` returned at each rank, an exception as itself, None for a rank that died."""
    context = multiprocessing.get_context("fork")
    place, queue = folder / f"group-{os.urandom(4).hex()}", context.Queue()
    ranks = [
        context.Process(target=_rank, args=(number, size, place, function, arguments, queue)) for number in range(size)
    ]
    for process in ranks:
        process.start()
    results: dict[int, Any] = {}
    try:
        while (len(results) < size and any(p.is_alive() for p in ranks)) or not queue.empty():
            try:
                number, value = queue.get(timeout=0.2)
                results[number] = value
            except Exception:
                seconds -= 0.2
                if seconds < 0:
                    raise TimeoutError(f"ranks {sorted(set(range(size)) - set(results))} did not end") from None
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [results.get(number) for number in range(size)]


def _rank(number: int, size: int, place: Path, function: Any, arguments: Any, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{place}", rank=number, world_size=size, timeout=timedelta(seconds=500))
    try:
        found = function(number, *arguments)
    except Exception as error:
        traceback.print_exc()
        found = error
    queue.put((number, found))
    queue.close()
    queue.join_thread()
    os._exit(0)
