"""`Mailbox`: tensors between the processes of one host, through memory that sender and receiver both have.

Sending is a copy and a few bytes into a pipe; what is received is used where it lies. No thread carries anything, so
that nothing takes turns with the ops on a core that is a device of its own: what sockets cost there is more than many
ops take. Linux only: elsewhere, and between hosts, tensors go by gloo.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import secrets
import select
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from graphs.errors import RankError
from placement.runtime.transport.channels import Channel, PeerEndedError

# Source, tag, start and bytes of the segment, offset in it, bytes. So short a message goes into a pipe as a whole.
_MESSAGE = struct.Struct("<qqqqqq")
_FREE = -1  # the tag of what says that a block may be used again
_TOKEN_BYTES = 16
_INODE = struct.Struct("<Q")  # of the way in, which the memory names after the token
_NAME = "placement"  # of the memory
_PAGE = mmap.PAGESIZE
SEGMENT_BYTES = 16 << 20
PIPE_BYTES = 1 << 20
# Asking again and again is the fastest way to hear, and spares the sender the time to wake this process.
# Then the core is left to others.
_SPIN_S = 2e-3
_NAP_MS = 50  # between two looks at whether the run has failed
# Tensors that a receiver takes before it gives back those it is done with.
_MOST_RECEIVED, _MOST_RECEIVED_BYTES = 64, 8 << 20


@dataclass(frozen=True)
class SharedBlock:
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

    source: int
    segment: int
    segment_bytes: int
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class _Neighbour:
    """Another process: its memory and the way into its mailbox; ``process`` is readable once it has ended."""

    memory: int
    inbox: int
    process: int | None


@dataclass(eq=False)
class Coming:
    """A tensor that is expected of another process.

    Attributes:
        source: its rank.
        arrival: where the tensor is, once it has come.
    """

    source: int
    arrival: _Arrival | None = None


class Mailbox:
    """This process's own, and the ways into those of the others.

    Args:
        rank: the number by which the others know this process.
        check: called while waiting; raises what ends the wait.
    """

    def __init__(self, rank: int, check: Callable[[], None] = lambda: None) -> None:
        self._rank, self._check = rank, check
        self._memory, self._size = os.memfd_create(_NAME), _PAGE
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        os.ftruncate(self._memory, _PAGE)
        self._inbox, self._entrance = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        os.pwrite(self._memory, self._token + _INODE.pack(os.fstat(self._entrance).st_ino), 0)
        _widen(self._entrance)
        self._peers: dict[int, _Neighbour] = {}
        self._segments: dict[tuple[int, int], mmap.mmap] = {}  # (rank, start) -> memory
        self._open: tuple[int, int, int] = (0, 0, 0)  # own segment that blocks are cut from: start, bytes, used
        self._free: dict[int, list[SharedBlock]] = {}  # by size
        self._lent: dict[tuple[int, int], SharedBlock] = {}
        self._expected: dict[tuple[int, int], deque[Coming]] = {}  # (source, tag) -> what has not come
        self._arrived: dict[tuple[int, int], deque[_Arrival]] = {}  # what nobody has expected
        self._dropped: deque[Coming] = deque()
        self._owed: deque[_Arrival] = deque()
        self._n_received = self._received_bytes = 0  # since it was last given back

    @staticmethod
    def is_possible() -> bool:
        """Whether this system has what a mailbox is made of, and nobody has switched it off."""
        if os.environ.get("PLACEMENT_SHARED_MEMORY", "1") == "0":
            return False
        try:
            os.close(os.memfd_create(_NAME))
        except (OSError, AttributeError):  # another system, or a container that forbids it
            return False
        return True

    @property
    def address(self) -> str:
        """The text with which another process of this host can `connect`."""
        return json.dumps([os.getpid(), self._memory, self._entrance, self._token.hex()])

    def connect(self, rank: int, address: str) -> bool:
        """Open the way to a process; False where it is on another host, or closed to this process.

        An address that leads to anything but a mailbox is refused: other files of this user are not to be written to.
        """
        process, memory, inbox, token = json.loads(address)
        opened = []
        try:
            # On another host that number may be anything: opening it must neither wait nor take a terminal.
            carefully = os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            if not os.readlink(f"/proc/{process:d}/fd/{memory:d}").startswith(f"/memfd:{_NAME}"):
                raise OSError("this is no memory of a mailbox")
            opened.append(os.open(f"/proc/{process:d}/fd/{memory:d}", os.O_RDWR | carefully))
            found = os.pread(opened[0], _TOKEN_BYTES + _INODE.size, 0)
            if found[:_TOKEN_BYTES] != bytes.fromhex(token):
                raise OSError("the process of that number on this host is another one")
            opened.append(os.open(f"/proc/{process:d}/fd/{inbox:d}", os.O_WRONLY | carefully))
            if _INODE.pack(os.fstat(opened[1]).st_ino) != found[_TOKEN_BYTES:]:
                raise OSError("this is not the way in that the memory names")
        except OSError:
            for number in opened:
                os.close(number)
            return False
        watched = None
        with suppress(OSError, AttributeError):  # an old kernel: the watchdog sees the end of a process too
            watched = os.pidfd_open(process)
        self._peers[rank] = _Neighbour(opened[0], opened[1], watched)
        return True

    def close(self) -> None:
        """Give everything back; the memory lives on while a receiver has it."""
        for peer in self._peers.values():
            for number in (peer.memory, peer.inbox, peer.process):
                if number is not None:
                    os.close(number)
        for number in (self._memory, self._inbox, self._entrance):
            os.close(number)
        for held in (self._peers, self._segments, self._free, self._lent):
            held.clear()

    # -- sending ----------------------------------------------------------------------------------------------

    def block(self, n_bytes: int) -> SharedBlock:
        """Memory for a tensor of that many bytes, at the start of it; `post` sends it."""
        size = max(64, 1 << (n_bytes - 1).bit_length())  # few sizes, so that what comes back fits what is needed
        if not self._free.get(size):
            self._collect()
        for found in (size, 2 * size, 4 * size):  # before more memory is taken, one that is too large
            if self._free.get(found):
                return self._free[found].pop()
        return self._cut(size)

    def post(self, target: int, tag: int, block: SharedBlock, n_bytes: int) -> None:
        """Send a block with that many bytes in it.

        Raises:
            PeerEndedError: its receiver has ended.
        """
        self._lent[block.segment, block.offset] = block
        self._tell(target, tag, block.segment, block.segment_bytes, block.offset, n_bytes)

    def _cut(self, size: int) -> SharedBlock:
        start, length, used = self._open
        is_new = used + size > length
        if is_new:
            start, length, used = self._size, max(SEGMENT_BYTES, -(-size // _PAGE) * _PAGE), 0
            self._size += length
            os.ftruncate(self._memory, self._size)
        segment = self._segment(self._rank, self._memory, start, length)
        if not is_new or size < length:  # else what is left of the segment before still serves
            self._open = start, length, used + size
        # Made where the caller infers, it could not be written to where the caller trains.
        with torch.inference_mode(False):
            memory = torch.frombuffer(segment, dtype=torch.uint8, count=size, offset=used)
        return SharedBlock(start, length, used, memory)

    def _segment(self, rank: int, file: int, start: int, length: int) -> mmap.mmap:
        if (rank, start) not in self._segments:
            self._segments[rank, start] = mmap.mmap(file, length, offset=start)
        return self._segments[rank, start]

    def _tell(self, target: int, *message: int) -> None:
        peer = self._peers[target]
        while not self._told(peer, *message):  # its mailbox is full; it reads when it receives or sends
            self._check()
            self._collect()  # for that one may be waiting for this one
            if self._sleep(peer, is_full=True):
                raise PeerEndedError("its process has ended.")

    def _told(self, peer: _Neighbour, *message: int) -> bool:
        """Whether a message found room."""
        try:
            os.write(peer.inbox, _MESSAGE.pack(self._rank, *message))
        except BlockingIOError:
            return False
        except BrokenPipeError:
            raise PeerEndedError("its process has ended.") from None
        return True

    # -- receiving --------------------------------------------------------------------------------------------

    def expect(self, source: int, tag: int) -> Coming:
        """Ask for the next tensor that a process sends under that tag; `receive` or `drop` what is returned."""
        key, coming = (source, tag), Coming(source)
        if self._arrived.get(key):
            coming.arrival = self._arrived[key].popleft()
        else:
            self._expected.setdefault(key, deque()).append(coming)
        return coming

    def receive(self, coming: Coming, n_bytes: int) -> torch.Tensor:
        """Wait for a tensor of that many bytes.

        Returns:
            uint8 [n_bytes], where it lies: its sender gets the memory back once nothing refers to it here.

        Raises:
            PeerEndedError: its sender has ended and has not sent it.
            RankError: what came is of another length, or the run has failed.
        """
        self._n_received, self._received_bytes = self._n_received + 1, self._received_bytes + n_bytes
        if self._n_received > _MOST_RECEIVED or self._received_bytes > _MOST_RECEIVED_BYTES:
            self.settle()
        if coming.arrival is None:
            self._collect()
        arrival = coming.arrival or self._awaited(coming)
        if arrival.n_bytes != n_bytes:
            raise RankError(
                f"rank {arrival.source} sent {arrival.n_bytes} bytes where {n_bytes} were expected; all processes must "
                "make the same calls, with arguments of the same shapes."
            )
        if not n_bytes:  # torch takes no memory of no length
            self._owed.append(arrival)
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        file = self._peers[arrival.source].memory
        segment = self._segment(arrival.source, file, arrival.segment, arrival.segment_bytes)
        buffer = (ctypes.c_ubyte * n_bytes).from_buffer(segment, arrival.offset)
        weakref.finalize(buffer, self._owed.append, arrival).atexit = False  # by any thread, in the middle of anything
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def drop(self, coming: Coming) -> None:
        """Discard a tensor that will still arrive. Safe to call from any thread and from finalizers."""
        self._dropped.append(coming)

    def settle(self) -> None:
        """Give back what has been received and is not used any more, as far as the others' mailboxes have room."""
        self._n_received = self._received_bytes = 0
        for _ in range(len(self._dropped)):
            coming = self._dropped.popleft()
            if coming.arrival is None:
                self._dropped.append(coming)
            else:
                self._owed.append(coming.arrival)
        for _ in range(len(self._owed)):
            arrival = self._owed.popleft()
            with suppress(PeerEndedError):
                place = arrival.segment, arrival.segment_bytes, arrival.offset
                if not self._told(self._peers[arrival.source], _FREE, *place, 0):
                    self._owed.append(arrival)

    def _awaited(self, coming: Coming) -> _Arrival:
        self.settle()
        end, has_ended = time.perf_counter() + _SPIN_S, False
        while coming.arrival is None:
            if has_ended:
                raise PeerEndedError("its process has ended.")
            if time.perf_counter() > end:
                self._check()
                has_ended = self._sleep(self._peers[coming.source])
            else:
                os.sched_yield()  # the sender may have to compute on this core
            self._collect()  # once more after its end: it may have sent it before
        return coming.arrival

    def _sleep(self, peer: _Neighbour, is_full: bool = False) -> bool:
        """Wait a moment for a message, or for room in a full mailbox; returns whether the other process has ended."""
        poll = select.poll()
        poll.register(self._inbox, select.POLLIN)
        if peer.process is not None:
            poll.register(peer.process, select.POLLIN)
        if is_full:
            poll.register(peer.inbox, select.POLLOUT)
        return any(number == peer.process for number, _ in poll.poll(_NAP_MS))

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
                arrival, key = _Arrival(source, segment, segment_bytes, offset, n_bytes), (source, tag)
                if self._expected.get(key):
                    self._expected[key].popleft().arrival = arrival
                else:
                    self._arrived.setdefault(key, deque()).append(arrival)


class MailTransport:
    """`placement.runtime.transport.channels.Transport` between processes of one host, by a mailbox."""

    is_near = True

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        """Copy a tensor to shared memory and tell its receiver."""
        self.send_filled(channel, lambda memory: channel.packing.fill(memory, tensor))

    def send_filled(self, channel: Channel, fill: Callable[[torch.Tensor], None]) -> None:
        """Let shared memory be filled, uint8 of at least as many bytes as the channel has, and tell its receiver."""
        block = self._mailbox.block(channel.n_bytes)
        fill(block.memory)
        self._mailbox.post(channel.target, channel.tag, block, channel.n_bytes)

    def expect(self, channel: Channel) -> Coming:
        """As of any transport."""
        return self._mailbox.expect(channel.source, channel.tag)

    def receive(self, channel: Channel, coming: Coming) -> torch.Tensor:
        """Wait for a tensor; the shared memory it is in."""
        return self._mailbox.receive(coming, channel.n_bytes).view(channel.packing.layout.dtype)

    def drop(self, channel: Channel, coming: Coming) -> None:
        """As of any transport."""
        self._mailbox.drop(coming)


def _widen(pipe: int) -> None:
    """Let a pipe hold more, where the system allows it."""
    import fcntl

    with suppress(OSError, AttributeError):
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
