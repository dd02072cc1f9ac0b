"""Bytes that a process has sent over TCP, as the kernel counts them (TCP_INFO): what gloo really sends."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from sordino.ranks import sharded, sums

_BYTES_ACKED = 120  # the offset of tcpi_bytes_acked, a u64 (linux/tcp.h)


def sent() -> int:
    """Bytes that the other ends of this process's TCP connections have acknowledged."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                    info = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    if len(info) >= _BYTES_ACKED + 8:
                        total += struct.unpack_from("=Q", info, _BYTES_ACKED)[0]
        except OSError:  # it was closed in the meantime, or is not a TCP connection
            continue
    return total


@contextmanager
def at_each_step(note: Callable[[], None]) -> Iterator[None]:
    """Calls `note` at every rank when it begins to sum its chunks of a batch."""
    whole = sums.own_chunks

    def noted(*arguments: Any) -> Any:
        note()
        return whole(*arguments)

    with patch.object(sums, "own_chunks", noted), patch.object(sharded, "own_chunks", noted):
        yield
