"""`Ranks`: a real run among the processes that ``torchrun`` has started, a process of a participant beside each.

Rank 0 watches and evaluates as `placement.fitting.real.engine` does on one host. Each of them lives in a fork of
its rank, so that the rank outlives it, and torchrun does not end a run that goes on without it.
"""

from __future__ import annotations

import hmac
import json
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cache, partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from graphs.errors import FitError, PlacementError, RankError, StrategyError
from placement.fitting.log import CurvePoint, FitRun, ReadVersion
from placement.processes.processes import StoppedProcesses, begin_worker, forking, own_network
from placement.processes.starting import Parent, Workers

_ASK_S, _ASKED, _SILENCE_S = 5, 3, 20  # between two questions whether an end is there; so many; without an answer
_RANK_BYTES = 4
_CALL_S = 1.0  # for a caller to say who it is, which it does as soon as it is there
_ARRAY = "array of"


class PlainPipe:
    """A TCP connection, which fails when its other end is not reached for a time, as where a cable was pulled out."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # on Linux; elsewhere the system asks in its own time, some hours
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _ASK_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _ASK_S)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _ASKED)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _SILENCE_S)
        self._pipe = Connection(end.detach())

    def send(self, content: Any) -> None:
        """Send JSON values, and arrays of numbers anywhere among them.

        Raises:
            OSError: the other end has ended.
        """
        arrays: list[NDArray[Any]] = []

        def outlined(value: Any) -> dict[str, Any]:
            arrays.append(np.ascontiguousarray(value))
            return {_ARRAY: [value.dtype.str, value.shape]}

        self._pipe.send_bytes(json.dumps(content, default=outlined).encode())
        for each in arrays:
            self._pipe.send_bytes(each.tobytes())

    def recv(self) -> Any:
        """The next message; tuples come as lists.

        Raises:
            EOFError: the other end has ended.
            OSError: it is not reached any more, or what came is no message.
        """
        text = self._pipe.recv_bytes()
        try:
            return json.loads(text, object_hook=self._filled)
        except (ValueError, TypeError, RecursionError) as error:
            raise OSError(f"what came is no message: {error}") from None

    def _filled(self, value: dict[str, Any]) -> Any:
        if _ARRAY not in value:
            return value
        dtype, shape = value[_ARRAY]
        return np.frombuffer(bytearray(self._pipe.recv_bytes()), np.dtype(str(dtype))).reshape(shape)

    def poll(self, limit_s: float = 0.0) -> bool:
        """Whether a message comes within a time, or the end of the other end."""
        return self._pipe.poll(limit_s)

    def fileno(self) -> int:
        """The descriptor as of a file, so that several can be waited for."""
        return self._pipe.fileno()

    def close(self) -> None:
        """End the connection."""
        self._pipe.close()


def called(host: str, port: int, key: bytes, rank: int) -> PlainPipe:
    """A connection to where others are `met`, which says that this is a rank that knows the key.

    Raises:
        OSError: nobody is there.
    """
    end = socket.create_connection((host, port))
    end.sendall(key + rank.to_bytes(_RANK_BYTES))
    return PlainPipe(end)


def met(listener: socket.socket, key: bytes, ranks: Collection[int], limit_s: float) -> dict[int, PlainPipe]:
    """A connection of each of some ranks, which know the key. A caller that does not say it is sent away.

    Raises:
        RankError: too few came in time.
    """
    found: dict[int, PlainPipe] = {}
    end_s = time.monotonic() + limit_s
    while len(found) < len(ranks):
        listener.settimeout(max(0.0, end_s - time.monotonic()))
        try:
            caller, _ = listener.accept()
        except OSError:  # BlockingIOError where no time is left
            missing = min(set(ranks) - set(found))
            raise RankError(f"rank {missing} has not met rank 0 in {limit_s:g} s; start all processes.") from None
        said = _said(caller, len(key) + _RANK_BYTES)
        rank = int.from_bytes(said[len(key) :])
        if hmac.compare_digest(said[: len(key)], key) and rank in ranks and rank not in found:
            found[rank] = PlainPipe(caller)
        else:
            caller.close()
    return found


def _said(caller: socket.socket, size: int) -> bytes:
    """So many bytes that somebody says at once; fewer of who does not."""
    text, end_s = b"", time.monotonic() + _CALL_S
    with suppress(OSError):
        while len(text) < size and (left_s := end_s - time.monotonic()) > 0:
            caller.settimeout(left_s)
            if not (more := caller.recv(size - len(text))):
                break
            text += more
    return text


ProcessMain = Callable[[Parent], None]  # of a process
_START = timedelta(seconds=300)  # until all processes are there
_LOOPBACK = "127.0.0.1"
_ADDRESS = "fit"
_LOOK_S = 0.25
_NO_RANK_0 = "rank 0 has ended or is not reached any more; start the run again."
_ERRORS = {kind.__name__: kind for kind in (FitError, RankError, StrategyError)}
_ERROR, _RUN = "error", "run"  # of what rank 0 tells, beside what it is


class Ranks:
    """The processes of this start, each of which makes the same calls.

    Attributes:
        rank, size: of this process, of all.
        is_one_host: all are on this host.
    """

    def __init__(self) -> None:
        """Meet the others.

        Raises:
            RankError: they do not come.
        """
        try:
            found = next(iter(rendezvous("env://", timeout=_START)))
            self._store, self.rank, self.size = found  # the store is kept, for the others may still read it
            self._store.set(f"network/{self.rank}", own_network())
            self.is_one_host = len({self._store.get(f"network/{rank}") for rank in range(self.size)}) == 1
        except (RuntimeError, ValueError, OSError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            reason = str(error).partition("\n")[0].rstrip(".")
            raise RankError(f"cannot meet the other processes at {where}: {reason:.200}; start all of them.") from None
        self._others: list[PlainPipe] = []
        if self.rank == 0:
            host, self._key = _LOOPBACK if self.is_one_host else os.environ["MASTER_ADDR"], secrets.token_bytes(32)
            self._listener = socket.create_server((host, 0), backlog=2 * self.size)
            self._address = host, self._listener.getsockname()[1]
            self._store.set(_ADDRESS, json.dumps([*self._address, self._key.hex()]))
            others = range(1, self.size)
            pipes = self._met(others)
            self._others = [pipes[rank] for rank in others]
        else:
            host, port, key = json.loads(self._store.get(_ADDRESS))
            self._address, self._key = (host, port), bytes.fromhex(key)
            self._first = self._connected()

    def met_store(self, name: str) -> Any:
        """A connection of its own to a part of torchrun's store, where the participants of a run meet."""
        return PrefixStore(name, self._store.clone())

    def _connected(self) -> PlainPipe:
        try:
            return called(*self._address, self._key, self.rank)
        except OSError:
            raise RankError(_NO_RANK_0) from None

    def _met(self, ranks: Sequence[int]) -> dict[int, PlainPipe]:
        """A connection of each of some others."""
        return met(self._listener, self._key, ranks, _START.total_seconds())

    def shared(self, make: Callable[[], list[str]]) -> list[str]:
        """The texts that rank 0 makes, on all ranks, which make the same call.

        Raises:
            PlacementError: what rank 0 ran into, on all ranks.
            RankError: a rank has ended.
        """
        if self.rank:
            try:
                told = self._first.recv()
            except (EOFError, OSError):
                raise RankError(_NO_RANK_0) from None
            _raise_told(told)
            return [str(each) for each in told]
        try:
            found = make()
        except PlacementError as error:
            self.tell(error)
            raise
        self._tell(found)
        return found

    # -- rank 0 -----------------------------------------------------------------------------------------------------

    def begin(self, fingerprint: str, order: Sequence[int], main: ProcessMain) -> Workers:
        """The processes of a run, this rank's own and those of the others, who `take_part`.

        Args:
            fingerprint: of weights and samples, which are those of all ranks.
            order: the rank beside which each process lives, 0 first.
            main: of the first process.

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
        workers = Workers.forked([main])
        found = self._met(order[1:])
        for rank in order[1:]:
            workers.add(found[rank])
        return workers

    def tell(self, found: FitRun | PlacementError) -> None:
        """Tell the others what something has come to."""
        if isinstance(found, PlacementError):
            self._tell({_ERROR: [type(found).__name__, str(found)]})
        else:
            self._tell({_RUN: asdict(found)})

    def _tell(self, content: Any) -> None:
        for other in self._others:
            try:
                other.send(content)
            except OSError:  # it has ended
                continue

    # -- the others -------------------------------------------------------------------------------------------------

    def take_part(self, fingerprint: str, main: ProcessMain | None) -> FitRun:
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
            if main is not None:
                child = multiprocessing.get_context("fork").Process(
                    target=partial(self._run_main, main, os.getpid()), daemon=True
                )
                with forking():
                    child.start()
                stopped = StoppedProcesses([child.pid or 0])
            while not self._first.poll(_LOOK_S):
                if child is not None and stopped is not None and stopped.look() is not None:
                    child.kill()
            told = self._first.recv()
        except (EOFError, OSError):
            raise RankError(_NO_RANK_0) from None
        finally:
            if child is not None:
                child.kill()
                child.join()
        _raise_told(told)
        points, trace = (told[_RUN].pop(name) for name in ("points", "trace"))
        return FitRun(
            **told[_RUN],
            points=tuple(CurvePoint(**each) for each in points),
            trace=tuple(ReadVersion(**each) for each in trace),
        )

    def _run_main(self, main: ProcessMain, parent: int) -> None:
        begin_worker(parent)
        main(Parent(self._connected()))


def _raise_told(told: Any) -> None:
    """Raises: PlacementError: rank 0 tells of one."""
    if isinstance(told, dict) and _ERROR in told:
        name, sentence = told[_ERROR]
        raise _ERRORS.get(name, RankError)(str(sentence))


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
