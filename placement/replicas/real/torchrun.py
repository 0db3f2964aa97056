"""`Ranks`: a real run among the processes that ``torchrun`` has started, a process of a participant beside each.

Rank 0 watches and evaluates as `placement.replicas.real.engine` does on one host. Each of them lives in a fork of
its rank, so that the rank outlives it, and torchrun does not end a run that goes on without it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from functools import cache, partial
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, TypeVar

from torch.distributed.rendezvous import rendezvous

from graphs.errors import FitError, PlacementError, RankError
from placement.processes.processes import begin_worker, forking
from placement.processes.starting import Parent, Workers
from placement.processes.stopped import StoppedProcesses
from placement.runtime.ranks.meeting import START, fresh_store

if TYPE_CHECKING:
    from placement.replicas.fit_result import FitRun

Made = TypeVar("Made")
Life = Callable[[Parent], None]  # of a process
_ADDRESS = "fit"
_LOOK_S = 0.25
_ASK_S, _ASKED, _SILENCE_S = 5, 3, 20  # between two questions whether an end is there; so many; without an answer
_NO_RANK_0 = "rank 0 has ended or is not reached any more; start the run again."
_HERE = ("127.0.0.1", "localhost", "::1")


class Ranks:
    """The processes of this start, each of which makes the same calls.

    Attributes:
        rank, size: of this process, of all.
        host: of rank 0, where participants meet.
    """

    def __init__(self) -> None:
        """Meet the others.

        Raises:
            RankError: they do not come.
        """
        try:
            store, self.rank, self.size = next(iter(rendezvous("env://", timeout=START)))
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise RankError(f"cannot meet the other processes of torchrun: {reason}") from None
        address = os.environ["MASTER_ADDR"]
        self.host = _HERE[0] if address in _HERE else address
        self._store = fresh_store(store, self.rank, self.size, START)  # kept, for the others may still read it
        self._others: list[Connection] = []
        if self.rank == 0:
            self._key = secrets.token_bytes(32)
            self._listener = Listener((self.host, 0), authkey=self._key, backlog=2 * self.size)
            self._port = self._listener.address[1]
            self._store.set(_ADDRESS, json.dumps([self._port, self._key.hex()]))
            met = self._met(self.size - 1)
            self._others = [met[rank] for rank in sorted(met)]
        else:
            self._port, key = json.loads(self._store.get(_ADDRESS))
            self._key = bytes.fromhex(key)
            self._first = self._connected()

    def _connected(self) -> Connection:
        pipe = Client((self.host, self._port), authkey=self._key)
        pipe.send(self.rank)
        return _watched(pipe)

    def _met(self, count: int) -> dict[int, Connection]:
        """Connections of so many others, by their rank."""
        found = {}
        for _ in range(count):
            one = self._listener.accept()
            found[one.recv()] = _watched(one)
        return found

    def shared(self, make: Callable[[], Made]) -> Made:
        """What rank 0 makes, on all ranks, which make the same call.

        Raises:
            PlacementError: what rank 0 ran into, on all ranks.
            RankError: a rank has ended.
        """
        found: Made | PlacementError
        if self.rank:
            try:
                found = self._first.recv()
            except (EOFError, OSError):
                raise RankError(_NO_RANK_0) from None
        else:
            try:
                found = make()
            except PlacementError as error:
                found = error
            self.tell(found)
        if isinstance(found, PlacementError):
            raise found
        return found

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def begin(self, fingerprint: str, order: Sequence[int], life: Life) -> Workers:
        """The processes of a run, this rank's own and those of the others, who `take_part`.

        Args:
            fingerprint: of weights and samples, which are those of all ranks.
            order: the rank beside which each process lives, 0 first.
            life: of the first process.

        Raises:
            FitError: a rank has other weights or samples.
            RankError: a rank has ended.
        """
        try:
            differs = [rank for rank, other in enumerate(self._others, start=1) if other.recv() != fingerprint]
            for other in self._others:
                other.send(not differs)
        except (EOFError, OSError):
            raise RankError("a process of torchrun has ended before the run began; start it again.") from None
        if differs:
            raise FitError(_differs(differs[0]))
        workers = Workers.forked([life])
        met = self._met(len(order) - 1)
        for rank in order[1:]:
            workers.add(met[rank])
        return workers

    def tell(self, found: object) -> None:
        """Tell the others what something has come to."""
        for other in self._others:
            try:
                other.send(found)
            except OSError:  # it has ended
                continue

    # -- the others -------------------------------------------------------------------------------------------------

    def take_part(self, fingerprint: str, life: Life | None) -> FitRun:
        """Let the process of this rank live, if there is one, until rank 0 says what the run has come to.

        Raises:
            FitError: as of `begin`.
            RankError: the run has failed, or rank 0 has ended.
        """
        child, stopped = None, None
        try:
            self._first.send(fingerprint)
            is_alike = self._first.recv()
            if not is_alike:
                raise FitError(_differs(self.rank))
            if life is not None:
                child = multiprocessing.get_context("fork").Process(
                    target=partial(self._live, life, os.getpid()), daemon=True
                )
                with forking():
                    child.start()
                stopped = StoppedProcesses([child.pid or 0])
            while not self._first.poll(_LOOK_S):
                if child is not None and stopped is not None and stopped.look() is not None:
                    child.kill()
            found: FitRun | RankError = self._first.recv()
        except (EOFError, OSError):
            raise RankError(_NO_RANK_0) from None
        finally:
            if child is not None:
                child.kill()
                child.join()
        if isinstance(found, RankError):
            raise found
        return found

    def _live(self, life: Life, parent: int) -> None:
        begin_worker(parent)
        life(Parent(self._connected()))


def _watched(pipe: Connection) -> Connection:
    """The connection, which fails when its other end is not reached for a time, as where a cable was pulled out."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; elsewhere the system asks in its own time, some hours
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKED)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)
    return pipe


def _differs(rank: int) -> str:
    return (
        f"rank {rank} has other weights or samples than rank 0; make model and data alike on all, by "
        "torch.manual_seed before they are made, say."
    )


@cache
def ranks() -> Ranks | None:
    """The processes that ``torchrun`` has started, None where it has not, or only one.

    Raises:
        RankError: they do not meet.
    """
    started = os.environ.get("WORLD_SIZE", "1") != "1" and "MASTER_ADDR" in os.environ and "RANK" in os.environ
    return Ranks() if started else None


def is_first() -> bool:
    """Whether this process is to print and write: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"
