"""Ranks as threads of one process: what `ProcessGroup` does for messages and tensors, without its connections."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import torch

from placement.runtime.transport.channels import Channel

LIMIT_S = 60.0


class _Board:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.texts = [""] * size
        self.queues: dict[tuple[int, int], SimpleQueue[Any]] = {
            (source, target): SimpleQueue() for source in range(size) for target in range(size)
        }


class ThreadGroup:
    """One rank of threads."""

    gloo = None

    def __init__(self, board: _Board, rank: int, size: int) -> None:
        self.rank, self.size, self._board = rank, size, board
        self.n_sent = 0

    def all_gather(self, text: str, about: str = "") -> list[str]:
        self._board.texts[self.rank] = text
        self._board.barrier.wait()
        found = list(self._board.texts)
        self._board.barrier.wait()
        return found

    def send(self, transport: None, channel: Channel, tensor: torch.Tensor) -> None:
        assert (tensor.dim(), tensor.numel()) == (1, channel.packing.n_elements)
        self.n_sent += 1
        self._board.queues[self.rank, channel.target].put((channel.tag, channel.what, tensor.clone()))

    def expect(self, transport: None, channel: Channel) -> None:
        return None

    def receive(self, transport: None, channel: Channel, coming: None) -> torch.Tensor:
        tag, what, tensor = self._board.queues[channel.source, self.rank].get(timeout=LIMIT_S)
        assert (tag, what) == (channel.tag, channel.what)
        assert tensor.dtype == channel.packing.layout.dtype
        assert tensor.numel() == channel.packing.n_elements
        return tensor

    def drain(self) -> None: ...

    def abort(self) -> None:
        self._board.barrier.abort()


def on_ranks(size: int, work: Callable[[Any], Any]) -> list[Any]:
    """What each rank returns, or the error that it raised."""
    board = _Board(size)

    def run(rank: int) -> Any:
        group = ThreadGroup(board, rank, size)
        try:
            return work(group)
        except Exception as error:
            if isinstance(error, AssertionError):
                group.abort()
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
