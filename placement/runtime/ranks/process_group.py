"""`ProcessGroup`: the processes that run one model together, one for each device, as one of them sees them."""

from __future__ import annotations

import atexit
import copy
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import permutations
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from graphs.errors import MismatchError, PlacementError, RankError
from graphs.formatting import show_line
from placement.processes.processes import condition
from placement.runtime.ranks.failures import failed_op, first_line, is_out_of_memory
from placement.runtime.ranks.meeting import START, check_size, connect, fresh_store, meeting_point
from placement.runtime.ranks.watchdog import TELL_S, Activity, Watchdog, named
from placement.runtime.transport import nccl
from placement.runtime.transport.channels import ALWAYS, Channel, PeerEndedError, Pending, Transport
from placement.runtime.transport.gloo import GlooTransport
from placement.runtime.transport.mailbox import Mailbox, MailTransport
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.processes.progress import StepProgress
    from placement.processes.starting import Parent
    from placement.runtime.program.routines import Routine

_TALK = (1 << 30) + 1  # the tag of messages, beyond those of transfers
_END, _HERE = "\0", "that it is here"  # of what a message is about; what it is about otherwise
_LAST_WORDS_S = 3.0  # for the watchdog to find out why this process is to end
_joined: ProcessGroup | None = None


class ProcessGroup:
    """This process as one of several.

    Attributes:
        rank: its number, that of its device.
        size: how many there are.
        gloo: carries tensors to any rank, by connections that are no part of the caller's own process groups.
        same_host: the ranks that tensors go to in shared memory: those on this host.
        activity: what this process is doing.
        waited_s: how long it has waited for others in all.
    """

    def __init__(self, store: Any, rank: int, size: int, is_quiet: bool = False, parent: Parent | None = None) -> None:
        self.rank, self.size, self.activity = rank, size, Activity()
        self.waited_s = 0.0
        self._store, self._parent = store, parent
        connections = connect(PrefixStore("placement", store), rank, size)
        self.gloo = GlooTransport(connections)
        self._watchdog = Watchdog(store.clone(), rank, size, self.activity, is_quiet)
        connections.barrier().wait()  # every watchdog has given its first sign of life
        self._watchdog.start()
        self._before = sys.excepthook
        sys.excepthook = self._on_exception
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if is_free and not is_quiet and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._on_sigterm)
        atexit.register(self._at_exit)
        self._process = os.getpid()
        self._pending: deque[tuple[Pending, int, str]] = deque()  # with the rank at the other end, and what it is
        self.same_host: frozenset[int] = frozenset()
        self._ways: set[tuple[int, int]] = set()  # pairs of ranks that share memory
        self._mailbox: Mailbox | None = None
        self._mailbox = self._opened()
        self._mail = None if self._mailbox is None else MailTransport(self._mailbox)
        self._pairs: dict[tuple[str, ...], dict[int, nccl.Pair]] = {}
        self._backends: dict[tuple[tuple[int, ...], str], Any] = {}
        self._has_run: weakref.WeakSet[Routine] = weakref.WeakSet()

    @classmethod
    def start(
        cls, store: Any, rank: int, size: int, is_quiet: bool = False, parent: Parent | None = None
    ) -> ProcessGroup:
        """Meet the others through a store; a process is in one group only.

        Args:
            is_quiet: leave it to whoever started the process to say why a run has failed.
            parent: who is told how far the process is.

        Raises:
            RankError: they cannot reach each other.
        """
        global _joined
        _joined = cls(store, rank, size, is_quiet, parent)
        return _joined

    def of_first(self, size: int) -> ProcessGroup:
        """The first processes of this group, of which this is one, by the same connections; the others rest."""
        found = copy.copy(self)
        found.size = size
        return found

    # -- transfers --------------------------------------------------------------------------------------------

    def transport_to(self, rank: int) -> Transport:
        """Shared memory on this host, gloo to others."""
        return self._mail if self._mail is not None and rank in self.same_host else self.gloo

    def send(self, transport: Transport, channel: Channel, tensor: torch.Tensor) -> None:
        """Begin to send a tensor, which must stay as it is until `drain`.

        Raises:
            RankError: the run has failed.
        """
        with self._sending(channel):
            pending = transport.send(channel, tensor)
        if pending is not None:
            self._pending.append((pending, channel.target, channel.what))

    def send_filled(self, channel: Channel, fill: Callable[[torch.Tensor], None]) -> None:
        """Send to a rank of this host what `fill` writes to shared memory; nothing of it is needed afterwards.

        Raises:
            RankError: the run has failed.
        """
        assert self._mail is not None, f"rank {channel.target} is on another host"
        with self._sending(channel):
            self._mail.send_filled(channel, fill)

    @contextmanager
    def _sending(self, channel: Channel) -> Iterator[None]:
        activity = self.activity
        activity.progress += 1
        self._raise_failure()
        # Should its mailbox be full.
        activity.wanted, activity.is_near, activity.waits_for = channel.what, False, (channel.target,)
        try:
            yield
        except PeerEndedError as error:
            self._lost((channel.target,), channel.what, error)
        finally:
            activity.waits_for = ()

    def expect(self, transport: Transport, channel: Channel) -> Any:
        """Let a tensor come in as soon as it is sent; `receive` or `drop` what is returned."""
        self._raise_failure()
        try:
            return transport.expect(channel)
        except PeerEndedError as error:
            self._lost((channel.source,), channel.what, error)

    def receive(self, transport: Transport, channel: Channel, coming: Any) -> torch.Tensor:
        """Wait for a tensor; the memory it is in.

        Raises:
            RankError: the run has failed.
        """
        with self.waiting((channel.source,), channel.what, transport.is_near):
            return transport.receive(channel, coming)

    def drop(self, transport: Transport, channel: Channel, coming: Any) -> None:
        """Discard a tensor that will still arrive. Safe to call from any thread and from finalizers."""
        pending = transport.drop(channel, coming)
        if pending is not None:
            self._pending.append((pending, channel.source, channel.what))

    @contextmanager
    def waiting(self, ranks: tuple[int, ...], what: str, is_near: bool = False) -> Iterator[None]:
        """While something is waited for that these other ranks take part in.

        Raises:
            RankError: one of them has ended, or the run has failed.
        """
        activity = self.activity
        activity.wanted, activity.is_near, activity.waits_for = what, is_near, ranks
        began = time.perf_counter()
        try:
            yield
        except PeerEndedError as error:
            self._lost(ranks, what, error)
        finally:
            activity.waits_for = ()
            activity.progress += 1
            self.waited_s += time.perf_counter() - began

    def drain(self) -> None:
        """Wait for the transfers that nobody waits for."""
        for _ in range(len(self._pending)):
            pending, rank, what = self._pending.popleft()
            with self.waiting((rank,), what):
                pending.wait()
        self.settle()

    def settle(self) -> None:
        """Give back to the others the shared memory of what has been received and is not used any more."""
        if self._mailbox is not None:
            self._mailbox.settle()

    def all_gather(self, text: str, about: str = "") -> list[str]:
        """The text of each rank, by rank; all ranks call it.

        Args:
            about: what it is, for the message if other ranks tell of something else.

        Raises:
            MismatchError: they do.
        """
        content = f"{about}{_END}{text}"
        own = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
        size = torch.tensor([own.numel()], device="cpu")
        for rank in range(self.size):
            if rank != self.rank:
                for message in (size, own):
                    packing = Packing.flat(message.numel(), message.dtype)
                    self.send(self.gloo, Channel(packing, self.rank, rank, _TALK), message)
        heard = [self._heard(rank) if rank != self.rank else content for rank in range(self.size)]
        self.drain()
        found = [each.partition(_END) for each in heard]
        rank, other = next(((r, each) for r, (each, _, _) in enumerate(found) if each != about), (0, about))
        if other != about:
            raise MismatchError(
                f"rank {self.rank} tells {about or _HERE}, rank {rank} tells {other or _HERE}: all processes must make "
                "the same calls of the model, in the same order."
            )
        return [told for _, _, told in found]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_gather("")

    def _heard(self, rank: int) -> str:
        size = self._received(rank, 1, torch.int64)
        return bytes(self._received(rank, int(size), torch.uint8).numpy()).decode()

    def _received(self, rank: int, n_elements: int, dtype: torch.dtype) -> torch.Tensor:
        channel = Channel(Packing.flat(n_elements, dtype), rank, self.rank, _TALK)
        return self.receive(self.gloo, channel, self.expect(self.gloo, channel))

    def _opened(self) -> Mailbox | None:
        """A mailbox that all ranks of this host have opened."""
        mailbox = Mailbox(self.rank, self._raise_failure) if Mailbox.is_possible() else None
        addresses = self.all_gather(mailbox.address if mailbox is not None else "")
        reached = {
            rank
            for rank, address in enumerate(addresses)
            if mailbox is not None and address and rank != self.rank and mailbox.connect(rank, address)
        }
        reaching = [set(json.loads(text)) for text in self.all_gather(json.dumps(sorted(reached)))]
        self._ways = {(a, b) for a, found in enumerate(reaching) for b in found if a in reaching[b]}
        self.same_host = frozenset(rank for rank in reached if self.rank in reaching[rank])
        if mailbox is not None and not self.same_host:
            mailbox.close()
            return None
        return mailbox

    def share_memory(self, ranks: tuple[int, ...]) -> bool:
        """Whether tensors go in shared memory between any two of these ranks; the same answer on all ranks."""
        return self._ways.issuperset(permutations(ranks, 2))

    def backend_among(self, ranks: tuple[int, ...], place: torch.device) -> Any:
        """A process group of torch.distributed of some ranks, which all of them ask for in the same order.

        Args:
            place: where the tensors are: NCCL for a GPU, gloo for the CPU.

        Raises:
            RankError: the ranks cannot reach each other.
        """
        key = ranks, place.type
        if key not in self._backends:
            name = f"placement/collectives/{place.type}/{'-'.join(map(str, ranks))}"
            store, number, size = PrefixStore(name, self._store), ranks.index(self.rank), len(ranks)
            with self.waiting(tuple(rank for rank in ranks if rank != self.rank), "the first collective"):
                if place.type == "cuda":
                    self._backends[key] = nccl.new_group(store, number, place, size)
                else:
                    self._backends[key] = connect(store, number, size)
                    self._backends[key]._set_default_timeout(ALWAYS)
        return self._backends[key]

    def pairs(self, place: torch.device) -> dict[int, nccl.Pair]:
        """The ranks that tensors go to and come from GPU to GPU, where this rank's are in that place; all call it."""
        identities = tuple(self.all_gather(nccl.identity(place)))
        if identities not in self._pairs:
            store = PrefixStore(f"placement/nccl/{len(self._pairs)}", self._store)
            self._pairs[identities] = nccl.connect(store, self.rank, identities, place)
        return self._pairs[identities]

    # -- failures ---------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, routine: Routine, op_names: tuple[str, ...]) -> Iterator[None]:
        """While a routine runs; what it raises ends the run of all.

        Raises:
            RankError: the routine failed, or the run has.
        """
        activity = self.activity
        activity.op_names, activity.thread = op_names, threading.get_ident()
        activity.progress += 1
        # While parts of it are compiled this process waits for a compiler, which is no stalling.
        activity.routine = None if routine.is_compiled and routine not in self._has_run else routine
        try:
            yield
            self._has_run.add(routine)
        except RankError:
            raise
        except Exception as error:
            name = failed_op(routine, op_names, error.__traceback__)
            what = f"op {name!r}" if name else "a step"
            if is_out_of_memory(error):
                sentence = f"rank {self.rank} ran out of memory in {what}: {first_line(error)}"
                raise RankError(self._watchdog.claim(sentence)) from None
            sentence = f"rank {self.rank} failed in {what}: {type(error).__name__}: {first_line(error)}"
            raise RankError(self._watchdog.claim(sentence)) from error
        finally:
            activity.routine = None
            activity.progress += 1

    def leave(self) -> None:
        """End as planned: what was sent arrives, and nobody takes the end of this process for a failure."""
        with suppress(RankError):
            self.drain()
        for pairs in self._pairs.values():
            nccl.close(pairs)
        for (_, kind), backend in self._backends.items():
            if kind == "cuda":
                backend.shutdown()
        self._watchdog.leave()

    def fail(self, sentence: str) -> str:
        """End the run of all for a reason; returns the reason that was given first."""
        return self._watchdog.claim(sentence)

    def report(self, progress: StepProgress) -> None:
        """Tell `launch`, if that started the processes, how far they are; the first one speaks for all."""
        if self.rank == 0 and self._parent is not None:
            self._parent.report(progress)

    def _raise_failure(self) -> None:
        if self._watchdog.failure:
            raise RankError(self._watchdog.failure)

    def _lost(self, ranks: tuple[int, ...], what: str, error: PeerEndedError) -> NoReturn:
        """The connection to one of these ranks has ended."""
        dead = self._ended(ranks)
        beat = self._watchdog.last_heard(dead[0]) if len(dead) == 1 else None
        last = f" {beat.doing()}" if beat is not None and beat.state in ("op", "wait") else ""
        if beat is not None and beat.state == "left":
            sentence = f"{named(dead)} has ended while rank {self.rank} needs {what} of it."
        else:
            who = named(dead) if len(dead) == 1 else f"one of {named(dead)}"
            sentence = f"{who} has died{last} while rank {self.rank} waited for {what}: {first_line(error)}"
        raise RankError(self._watchdog.claim(sentence)) from None

    def _ended(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """The rank among these that has ended; all of them where that cannot be told."""
        found, end = ranks, time.monotonic() + TELL_S
        # Its connections close before it is gone, and what it said last is read within that time.
        while time.monotonic() < end and not self._watchdog.failure:
            for rank in ranks:
                beat = self._watchdog.last_heard(rank)
                if beat is not None and beat.state == "left":
                    return (rank,)
                if beat is not None and condition(beat.process) == "ended":
                    found = (rank,)
            time.sleep(0.02)
        return found

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """An error that ends this process ends the run, and the others say why; stderr has it once."""
        if not isinstance(error, Exception) or not self._is_here():
            self._before(kind, error, trace)
            return
        is_sentence = isinstance(error, PlacementError) and error.__cause__ is None
        self._watchdog.tell(str(error) if is_sentence else "")
        if not self._watchdog.failure:
            what = ":" if isinstance(error, PlacementError) else f" failed outside of a step: {kind.__name__}:"
            self._watchdog.claim(f"rank {self.rank}{what} {first_line(error)}")
        if not is_sentence:
            self._before(kind, error, trace)

    def _on_sigterm(self, number: int, frame: object) -> None:
        """``torchrun`` ends all processes as soon as one has ended: this one still says what it knows of that one."""
        end = time.monotonic() + _LAST_WORDS_S
        while time.monotonic() < end and not self._watchdog.has_told:
            time.sleep(0.02)
        if self._is_here():
            self._watchdog.tell(f"rank {self.rank} was ended by SIGTERM, as torchrun does when another rank has ended.")
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _is_here(self) -> bool:
        """Whether this is the process of this rank, and not one that it has forked."""
        return os.getpid() == self._process

    def _at_exit(self) -> None:
        if not self._is_here():
            return
        if self._watchdog.failure:
            # A clean end would wait for connections to processes that are not there any more.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self.leave()


class LoneProcess(ProcessGroup):
    """A process that has no others, and so no connections and nobody who watches it."""

    def __init__(self) -> None:
        self.rank, self.size, self.activity = 0, 1, Activity()
        self.waited_s, self.same_host = 0.0, frozenset()
        self._parent = self._mailbox = self._mail = None
        self._pending, self._ways = deque(), set()

    @contextmanager
    def running(self, routine: Routine, op_names: tuple[str, ...]) -> Iterator[None]:
        """An error in a routine is the caller's."""
        yield

    def pairs(self, place: torch.device) -> dict[int, nccl.Pair]:
        """As of any group; none."""
        return {}

    def leave(self) -> None:
        """As of any group."""


def join(size: int) -> ProcessGroup:
    """The group of this process, which ``torchrun``, `placement.runtime.ranks.launch` or the caller's own
    ``init_process_group`` made one of several; alone where one is enough and nothing of the kind has been done.

    Args:
        size: how many processes are needed.

    Raises:
        MismatchError: there are fewer or more.
        RankError: they cannot reach each other.
    """
    if size == 1 and _joined is None and "WORLD_SIZE" not in os.environ and not _is_initialised():
        return LoneProcess()
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _sentences_alone
    if not dist.is_available() or not dist.is_gloo_available():
        raise RankError("this build of PyTorch has no gloo, by which processes reach each other; install one that has.")
    if _joined is None:
        store, rank, found = meeting_point(size)
        check_size(found, size)
        return ProcessGroup.start(fresh_store(store, rank, found, START), rank, found)
    check_size(_joined.size, size)
    return _joined


def _is_initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _sentences_alone(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """On each of many processes the sentence of an error is enough."""
    if isinstance(error, PlacementError) and error.__cause__ is None:
        print(f"{show_line(str(error))}\n", end="", file=sys.stderr, flush=True)  # in one go: other ranks write too
    else:
        sys.__excepthook__(kind, error, trace)
