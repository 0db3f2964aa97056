"""No run of one host has a port beyond the loopback interface, and what comes by a socket is read, not run."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rank_failures import listening

from graphs.errors import RankError
from placement.fitting.real.torchrun import PlainPipe, called, met
from placement.runtime.ranks.launch import launch

KEY, WRONG_KEY = b"k" * 32, b"w" * 32
LOOPBACK = "0100007F"
needs_proc = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="sockets are looked up in /proc")


# -- ports -----------------------------------------------------------------------------------------------------------


@needs_proc
def test_ranks_of_one_host_listen_on_its_loopback_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())  # of another start
    found = launch("rank_failures:doors", None, ["cpu", "cpu"], limit_s=240)
    assert [set(rank["own"]) for rank in found] == [{LOOPBACK}] * 2  # gloo's
    assert not set(found[0]["parent"]) - set(listening(os.getpid()))


@needs_proc
def test_a_store_that_rank_0_keeps_for_one_host_is_on_its_loopback_interface() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script = (
            "import os; from rank_failures import listening\n"
            "from placement.runtime.ranks.group import environment_store\n"
            "try:\n    environment_store()\nexcept Exception as error: print(error)\n"
            "os.environ['MASTER_PORT'] = os.environ['FREE']; kept = environment_store()[0]; kept.set('a', 'b')\n"
            "print(listening(os.getpid()), kept.get('a'))"
        )
        with socket.create_server(("127.0.0.1", 0)) as other:
            free = other.getsockname()[1]
        given = {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "FREE": str(free),
        }
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, **given, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.splitlines() == [
        f"localhost:{port} is in use by another process; take another MASTER_PORT.",
        f"['{LOOPBACK}'] b'b'",
    ]


# -- callers ---------------------------------------------------------------------------------------------------------


@contextmanager
def meeting(ranks: tuple[int, ...], limit_s: float = 60.0) -> Iterator[tuple[int, Any]]:
    """A port where ranks are met, and what will have come of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        yield listener.getsockname()[1], pool.submit(met, listener, KEY, ranks, limit_s)


def test_callers_that_do_not_know_the_key_keep_nobody() -> None:
    strangers = []
    with meeting((7, 300)) as (port, found):
        for said in (b"", b"GET / HTTP/1.0\r\n\r\n", WRONG_KEY + bytes(4), KEY + bytes(4), KEY[:-1], b"\xff" * 4096):
            strangers.append(socket.create_connection(("127.0.0.1", port)))
            strangers[-1].sendall(said)
        ranks = [called("127.0.0.1", port, KEY, rank) for rank in (7, 300)]
        ours = found.result(timeout=60)
        for pipe, rank in zip(ranks, (7, 300), strict=True):
            pipe.send(rank)
            assert ours[rank].recv() == rank
        assert sorted(ours) == [7, 300]
    for each in (*strangers, *ranks, *ours.values()):
        each.close()


def test_who_does_not_come_is_missed_in_time() -> None:
    with meeting((1, 2), 0.2) as (port, found):
        called("127.0.0.1", port, KEY, 1).close()
        with pytest.raises(RankError, match="rank 2 has not met rank 0 in"):
            found.result(timeout=60)


@contextmanager
def pipes() -> Iterator[tuple[PlainPipe, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours = PlainPipe(listener.accept()[0])
        with theirs:
            yield ours, theirs
        ours.close()


def test_messages_are_plain_data_and_arrays() -> None:
    with pipes() as (ours, end):
        theirs = PlainPipe(end)
        array = np.arange(6, dtype=np.float32).reshape(3, 2).T
        theirs.send(("said", 1, float("nan"), None, {"deep": [array, np.zeros((0, 3))]}))
        word, one, nan, nothing, deep = ours.recv()
        assert (word, one, nothing, nan != nan) == ("said", 1, None, True)
        assert np.array_equal(deep["deep"][0], array)
        assert deep["deep"][0].dtype == np.float32
        assert deep["deep"][1].shape == (0, 3)
        deep["deep"][0][0] = 1.0  # one's own
        theirs.close()
        with pytest.raises(EOFError):
            ours.recv()


class Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_that_comes_is_run(tmp_path: Path) -> None:
    messages = [
        pickle.dumps(Touch(tmp_path / "ran")),
        b"[" * 100_000,
        b"{",
        b'{"array of": 1}',
        b'{"array of": ["O", []]}',
    ]
    for message in messages:
        with pipes() as (ours, end):
            end.sendall(struct.pack("!i", len(message)) + message)
            end.sendall(struct.pack("!i", 8) + bytes(8))
            with pytest.raises(OSError, match="what came is no message"):
                ours.recv()
    assert not (tmp_path / "ran").exists()
