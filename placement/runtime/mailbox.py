"""`Mailbox`: tensors between the processes of one host, through memory that sender and receiver both have.

Sending is a copy and a few bytes into a pipe. No thread carries anything, so that nothing takes turns with the ops on a
core that is a device of its own: what sockets cost there, several tenths of a millisecond a tensor, is more than many
ops take. Linux only: elsewhere, and between hosts, tensors go by gloo.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import select
import struct
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from graphs.errors import RankError

_MESSAGE = struct.Struct("<qqqqqq")  # source, tag, start and bytes of the segment, offset in it, bytes
_FREE = -1  # the tag of what says that a block may be used again
_TOKEN_BYTES = 16
_PAGE = mmap.PAGESIZE
_SEGMENT_BYTES = 16 << 20
_PIPE_BYTES = 1 << 20
_SPIN_S = 1e-4  # asking again and again is the fastest way to hear; then the core is left to others
_NAP_MS = 50  # between two looks at whether the run has failed
_MOST_OWED = 256  # blocks that a receiver keeps before it gives them back
_MOST_OWED_BYTES = 8 << 20


@dataclass(frozen=True)
class Block:
    """A piece of memory that its owner lends to the receiver of a tensor.

    Attributes:
        segment: start of the segment that it lies in.
        segment_bytes: its length.
        offset: of the block in it.
        memory: uint8, the block.
    """

    segment: int
    segment_bytes: int
    offset: int
    memory: torch.Tensor


@dataclass(frozen=True)
class _Arrival:
    """A block of another process with a tensor in it."""

    segment: int
    segment_bytes: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class _Peer:
    """Another process: its memory and the way into its mailbox; ``process`` is readable once it has ended."""

    memory: int
    inbox: int
    process: int | None


class PeerEndedError(Exception):
    """Another process has ended, and what is waited for will not come."""


class Mailbox:
    """This process's own, and the ways into those of the others.

    Args:
        rank: the number by which the others know this process.
        check: called while waiting; raises what ends the wait.
    """

    def __init__(self, rank: int, check: Callable[[], None] = lambda: None) -> None:
        self._rank, self._check = rank, check
        self._memory, self._size = os.memfd_create("placement"), _PAGE
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        os.ftruncate(self._memory, _PAGE)
        os.pwrite(self._memory, self._token, 0)
        self._inbox, self._entrance = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        _widen(self._entrance)
        self._peers: dict[int, _Peer] = {}
        self._segments: dict[tuple[int, int], torch.Tensor] = {}  # (rank, start) -> memory
        self._open: tuple[int, int, int] = (0, 0, 0)  # own segment that blocks are cut from: start, bytes, used
        self._free: dict[int, list[Block]] = {}  # by size
        self._lent: dict[tuple[int, int], Block] = {}
        self._arrived: dict[tuple[int, int], deque[_Arrival]] = {}
        self._unwanted: dict[tuple[int, int], int] = {}
        self._owed: list[tuple[int, _Arrival]] = []
        self._owed_bytes = 0

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has what a mailbox is made of, and nobody has switched it off."""
        return hasattr(os, "memfd_create") and os.environ.get("PLACEMENT_SHARED_MEMORY", "1") != "0"

    @property
    def address(self) -> str:
        """What another process of this host needs to `connect`."""
        return json.dumps([os.getpid(), self._memory, self._entrance, self._token.hex()])

    def connect(self, rank: int, address: str) -> bool:
        """Open the way to a process; False where it is on another host, or closed to this process."""
        process, memory, inbox, token = json.loads(address)
        opened = []
        try:
            opened.append(os.open(f"/proc/{process}/fd/{memory}", os.O_RDWR | os.O_CLOEXEC))
            if os.pread(opened[0], _TOKEN_BYTES, 0) != bytes.fromhex(token):
                raise OSError("another process of another host")
            opened.append(os.open(f"/proc/{process}/fd/{inbox}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        except OSError:
            for number in opened:
                os.close(number)
            return False
        watched = None
        with suppress(OSError, AttributeError):  # an old kernel: the watch sees the end of a process too
            watched = os.pidfd_open(process)
        self._peers[rank] = _Peer(opened[0], opened[1], watched)
        return True

    def close(self) -> None:
        """Give everything back; the memory lives on while a receiver has it."""
        self._segments.clear()
        for peer in self._peers.values():
            for number in (peer.memory, peer.inbox, peer.process):
                if number is not None:
                    os.close(number)
        for number in (self._memory, self._inbox, self._entrance):
            os.close(number)
        self._peers.clear()

    # -- sending ----------------------------------------------------------------------------------------------

    def block(self, n_bytes: int) -> Block:
        """Memory for a tensor of that many bytes, at the start of it; `post` sends it."""
        size = max(64, 1 << (n_bytes - 1).bit_length())  # few sizes, so that what comes back fits what is needed
        if not self._free.get(size):
            self._collect()
        return self._free[size].pop() if self._free.get(size) else self._cut(size)

    def post(self, target: int, tag: int, block: Block, n_bytes: int) -> None:
        """Send a block with that many bytes in it.

        Raises:
            PeerEndedError: its receiver has ended.
        """
        self._lent[block.segment, block.offset] = block
        self._tell(target, tag, block.segment, block.segment_bytes, block.offset, n_bytes)

    def _cut(self, size: int) -> Block:
        start, length, used = self._open
        if used + size > length:
            start, length, used = self._size, max(_SEGMENT_BYTES, -(-size // _PAGE) * _PAGE), 0
            self._size += length
            os.ftruncate(self._memory, self._size)
        memory = self._segment(self._rank, self._memory, start, length)
        self._open = start, length, used + size
        return Block(start, length, used, memory[used : used + size])

    def _segment(self, rank: int, file: int, start: int, length: int) -> torch.Tensor:
        if (rank, start) not in self._segments:
            self._segments[rank, start] = torch.frombuffer(mmap.mmap(file, length, offset=start), dtype=torch.uint8)
        return self._segments[rank, start]

    def _tell(self, target: int, *message: int) -> None:
        text = _MESSAGE.pack(self._rank, *message)
        while True:
            try:
                os.write(self._peers[target].inbox, text)
                return
            except BlockingIOError:  # it is full: its owner reads when it receives or sends
                self._check()
                self._collect()  # for that one may be waiting for this one
                select.select([], [self._peers[target].inbox], [], _NAP_MS / 1e3)
            except BrokenPipeError:
                raise PeerEndedError("its process has ended.") from None

    # -- receiving --------------------------------------------------------------------------------------------

    def receive(self, source: int, tag: int, into: torch.Tensor) -> None:
        """Wait for what a process sends under that tag, in the order it sends it, and copy it.

        Args:
            into: uint8, one-dimensional, as long as what is sent.

        Raises:
            PeerEndedError: it has ended and has not sent it.
            RankError: what came is of another length, or the run has failed.
        """
        key = source, tag
        if not self._arrived.get(key):
            self._collect()
            if not self._arrived.get(key):
                self._wait(key)
        arrival = self._arrived[key].popleft()
        if arrival.n_bytes != into.numel():
            raise RankError(f"rank {source} sent {arrival.n_bytes} bytes where {into.numel()} were expected.")
        memory = self._segment(source, self._peers[source].memory, arrival.segment, arrival.segment_bytes)
        into.copy_(memory[arrival.offset : arrival.offset + arrival.n_bytes])
        self._owe(source, arrival)
        if len(self._owed) >= _MOST_OWED or self._owed_bytes >= _MOST_OWED_BYTES:
            self.settle()

    def drop(self, source: int, tag: int) -> None:
        """Forget what a process has sent under that tag, or will send."""
        key = source, tag
        if self._arrived.get(key):
            self._owe(source, self._arrived[key].popleft())
        else:
            self._unwanted[key] = self._unwanted.get(key, 0) + 1

    def settle(self) -> None:
        """Give back what has been received."""
        owed, self._owed, self._owed_bytes = self._owed, [], 0
        for source, arrival in owed:
            with suppress(PeerEndedError):
                self._tell(source, _FREE, arrival.segment, arrival.segment_bytes, arrival.offset, 0)

    def _owe(self, source: int, arrival: _Arrival) -> None:
        self._owed.append((source, arrival))
        self._owed_bytes += arrival.n_bytes

    def _wait(self, key: tuple[int, int]) -> None:
        self.settle()
        end = time.perf_counter() + _SPIN_S
        while time.perf_counter() < end:
            self._collect()
            if self._arrived.get(key):
                return
        poll, watched = select.poll(), self._peers[key[0]].process
        poll.register(self._inbox, select.POLLIN)
        if watched is not None:
            poll.register(watched, select.POLLIN)
        while True:
            self._check()
            ready = {number for number, _ in poll.poll(_NAP_MS)}
            self._collect()
            if self._arrived.get(key):
                return
            if watched in ready:
                raise PeerEndedError("its process has ended.")

    def _collect(self) -> None:
        """Read the mailbox."""
        while True:
            try:
                text = os.read(self._inbox, _MESSAGE.size * 64)
            except BlockingIOError:
                return
            for source, tag, segment, segment_bytes, offset, n_bytes in _MESSAGE.iter_unpack(text):
                if tag == _FREE:
                    block = self._lent.pop((segment, offset))
                    self._free.setdefault(block.memory.numel(), []).append(block)
                    continue
                arrival, key = _Arrival(segment, segment_bytes, offset, n_bytes), (source, tag)
                if self._unwanted.get(key):
                    self._unwanted[key] -= 1
                    self._owe(source, arrival)
                else:
                    self._arrived.setdefault(key, deque()).append(arrival)


def _widen(pipe: int) -> None:
    """Let a pipe hold more, where the system allows it."""
    import fcntl

    with suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
