"""`ThreadCollectives`: the exchanges of a step between threads of one process, each of which plays a rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from graphs.errors import RankError
from placement.runtime.exchanging.collectives import Handle
from placement.runtime.exchanging.exchanges import Exchange, Packet


class Board:
    """Where threads leave pieces for each other."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self._failure = ""

    def put(self, number: int, source: int, target: int, memory: torch.Tensor) -> None:
        """Leave a piece of an exchange."""
        with self._changed:
            self._pieces.setdefault((number, source, target), []).append(memory)
            self._changed.notify_all()

    def take(self, number: int, source: int, target: int, what: str) -> torch.Tensor:
        """Wait for the next piece of an exchange.

        Raises:
            RankError: a thread has failed.
        """
        key = number, source, target
        with self._changed:
            self._changed.wait_for(lambda: self._pieces.get(key) or self._failure)
            if not self._pieces.get(key):
                raise RankError(f"rank {target} waited for {what}: {self._failure}")
            return self._pieces[key].pop(0)

    def fail(self, sentence: str) -> None:
        """End all waiting: a thread will not go on."""
        with self._changed:
            self._failure = self._failure or sentence
            self._changed.notify_all()


class ThreadCollectives:
    """As `placement.runtime.exchanging.collectives.Collectives`, for one of several threads.

    Args:
        board: that all of them share.
        rank: which of them this is.
        exchanges: of all ranks, or of this one alone.
    """

    def __init__(self, board: Board, rank: int, exchanges: Sequence[Exchange]) -> None:
        self._board, self._rank = board, rank
        self._exchanges = {exchange.number: exchange for exchange in exchanges if rank in exchange.ranks}

    def start(self, number: int, tensors: tuple[torch.Tensor, ...]) -> Handle:
        """As of `Collectives`."""
        exchange = self._exchanges[number]
        place = exchange.ranks.index(self._rank)
        exchange.check(place, tensors)
        for target, rank in enumerate(exchange.ranks):
            if target != place:
                packet = Packet.of(exchange.members, place, target)
                memory = torch.empty(packet.n_bytes, dtype=torch.uint8)
                packet.fill(memory, tensors)
                self._board.put(number, self._rank, rank, memory)
        return Handle(number, exchange.kept(place, tensors))

    def finish(self, handle: Handle) -> tuple[torch.Tensor, ...]:
        """As of `Collectives`."""
        exchange = self._exchanges[handle.number]
        place = exchange.ranks.index(self._rank)
        arrived = {
            source: Packet.of(exchange.members, source, place).pieces(
                self._board.take(handle.number, rank, self._rank, exchange.what)
            )
            for source, rank in enumerate(exchange.ranks)
            if source != place
        }
        return exchange.combined(place, handle.tensors, arrived)


def run_threads(size: int, work: Callable[[int, Board], object]) -> list[object]:
    """Run `work(rank, board)` in a thread for each rank; what they returned.

    The first error that one of them raised ends the waiting of the others, and is raised.
    """
    board, found, errors = Board(), [None] * size, []

    def run(rank: int) -> None:
        try:
            found[rank] = work(rank, board)  # type: ignore[call-overload]
        except BaseException as error:  # whatever it is, the others must not wait
            errors.append(error)
            board.fail(f"rank {rank} failed: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return list(found)
