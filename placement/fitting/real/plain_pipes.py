"""`PlainPipe`: messages of plain data and arrays between hosts. Nothing that comes is run, unpickled or imported."""

from __future__ import annotations

import hmac
import json
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.errors import RankError

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
