"""Notices a rank that is stopped or cut off: its connections stay open, so that every message would be waited for.

A thread of every rank exchanges a word with the leader every few seconds, beside the run's own messages. A rank whose
step, evaluation or checkpoint takes hours still answers; one that is stopped (SIGSTOP), hangs or has lost its machine
does not. After `SORDINO_RANK_TIMEOUT` seconds without an answer the process ends with one sentence, as if it had been
killed: a thread can't interrupt a message that another one waits for. What was released is in the ledger.

Seconds during which this process was itself stopped do not count.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from sordino.errors import InputError
from sordino.ranks.group import PATIENCE, Rank, current, lost
from sordino.ranks.run import heard, leading

VARIABLE, DEFAULT = "SORDINO_RANK_TIMEOUT", 300.0
_BEAT, _STOP = 1, 2
_EVERY = 5.0  # seconds between two words
_GRACE = 30.0  # seconds in which a follower should itself notice that its leader is gone


def rank_timeout() -> float:
    """Seconds without an answer after which a rank is given up.

    Raises:
        InputError: the environment variable is not a positive number.
    """
    given = os.environ.get(VARIABLE, "")
    try:
        seconds = float(given) if given else DEFAULT
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InputError(f"{VARIABLE} = {given!r}: give a positive number of seconds")
    return seconds


class Pulse:
    """The threads of one rank; all ranks of the process group create it together."""

    active = False  # in this process: a run inside another one uses its threads

    def __init__(self, rank: Rank, seconds: float) -> None:
        self.rank, self.seconds = rank, seconds
        self._every = min(_EVERY, seconds / 4)
        self._channel: Any = dist.new_group(backend="gloo", timeout=PATIENCE)
        self._silent = dict.fromkeys(range(1, rank.size) if rank.leads else [0], 0.0)
        self._done = threading.Event()
        talks = [(self._lead, (peer,)) for peer in self._silent] if rank.leads else [(self._follow, ())]
        self._talking = [self._start(function, *arguments) for function, arguments in talks]
        self._start(self._watch)

    def _start(self, function: Any, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(
            target=function, args=arguments, name=f"sordino-pulse{function.__name__}", daemon=True
        )
        thread.start()
        return thread

    def end(self) -> None:
        """Ends the threads here, and at the leader those of all ranks."""
        self._done.set()
        for thread in self._talking if self.rank.leads else ():
            thread.join(1.0)

    def _lead(self, peer: int) -> None:
        try:
            while not self._done.wait(self._every):
                self._send(_BEAT, peer)
                self._receive(peer)
                self._silent[peer] = 0.0
            self._send(_STOP, peer)
        except Exception:  # its connection is closed: it has ended, which the run's own messages report
            self._silent.pop(peer, None)

    def _follow(self) -> None:
        try:
            while self._receive(0) != _STOP:
                self._silent[0] = 0.0
                self._send(_BEAT, 0)
            self._silent.clear()
        except Exception:
            self._silent.clear()
            if not self._done.wait(_GRACE):  # it waits for a rank that does not know that the leader is gone
                self._give_up(str(lost(self.rank)))

    def _watch(self) -> None:
        tick = min(1.0, self._every)
        while not self._done.wait(tick):
            for peer in list(self._silent):
                self._silent[peer] = silent = self._silent.get(peer, 0.0) + tick
                if silent > self.seconds:
                    self._give_up(
                        f"rank {peer} of {self.rank.size} has not answered for {self.seconds:g} seconds: it is "
                        "stopped, or its machine can't be reached; everything that was released is in the ledger: "
                        f"continue with --resume, with any number of ranks (the time is {VARIABLE})"
                    )

    def _give_up(self, sentence: str) -> None:
        sys.stderr.write(f"sordino: {sentence}\n")
        sys.stderr.flush()
        os._exit(1)

    def _send(self, word: int, peer: int) -> None:
        self._channel.send([torch.tensor([word])], peer, 0).wait()

    def _receive(self, peer: int) -> int:
        word = torch.zeros(1, dtype=torch.int64)
        self._channel.recv([word], peer, 0).wait()
        return int(word)


@contextmanager
def watched(rank: Rank | None) -> Iterator[None]:
    """Ends this process if another rank stops answering while the block runs. All ranks enter it together."""
    if rank is None or Pulse.active:
        yield
        return
    with leading(rank):
        seconds = heard(rank, rank_timeout() if rank.leads else None)
    pulse = Pulse(rank, seconds)
    Pulse.active = True
    try:
        yield
    finally:
        Pulse.active = False
        pulse.end()


@contextmanager
def from_environment() -> Iterator[Rank | None]:
    """The group in which `torchrun` started this process, while the block runs; None outside torchrun.

    A group that the caller has initialised is used as it is. Messages go through gloo, also if parameters are on
    another device: messages are small, and sums in double precision are exact there.
    """
    began = "TORCHELASTIC_RUN_ID" in os.environ and dist.is_available() and not dist.is_initialized()
    if began:
        dist.init_process_group("gloo", timeout=PATIENCE)
    try:
        with watched(rank := current()):
            yield rank
    finally:
        if began:
            dist.destroy_process_group()
