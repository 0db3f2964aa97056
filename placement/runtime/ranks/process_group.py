"""`Crew`: the processes that run one model together, one for each device, as one of them sees them."""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from graphs.errors import MismatchError, PlacementError, RankError
from placement.processes.repeats import UNDERWAY, Underway
from placement.runtime.program.routines import Routine
from placement.runtime.ranks.watchdog import Activity, Watch, op_at, what_of
from placement.runtime.transport import nccl as direct
from placement.runtime.transport.gloo import gloo_group
from placement.runtime.transport.mailbox import Block, Coming, Mailbox, PeerEndedError

_START = timedelta(seconds=300)  # until all processes are there
_TALK = (1 << 30) + 1  # the tag of messages, beyond those of parcels
_GLOO_ADVICE = " This is typically caused"
_crew: Crew | None = None


class Crew:
    """This process as one of several.

    Attributes:
        rank: its number, that of its device.
        size: how many there are.
        group: their gloo connections, no part of the caller's own process groups.
        near: the ranks that tensors go to by mail: those on this host.
        activity: what this process is doing.
        waited_s: how long it has waited for others in all.
    """

    def __init__(self, store: Any, rank: int, size: int, is_quiet: bool = False) -> None:
        self.rank, self.size, self.activity = rank, size, Activity()
        self.waited_s = 0.0
        self._store = store
        self.group = _connect(PrefixStore("placement", store), rank, size)
        self._watch = Watch(store.clone(), rank, size, self.activity, is_quiet)
        self.group.barrier().wait()  # every watch has given its first sign of life
        self._watch.start()
        self._before = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        self._process = os.getpid()
        self._underway: deque[tuple[Any, torch.Tensor, int, str]] = deque()
        self.near: frozenset[int] = frozenset()
        self._mailbox: Mailbox | None = None
        self._mailbox = self._opened()
        self._pairs: dict[tuple[str, ...], dict[int, direct.Pair]] = {}

    @classmethod
    def start(cls, store: Any, rank: int, size: int, is_quiet: bool = False) -> Crew:
        """Meet the others through a store; a process is in one crew only.

        Args:
            is_quiet: leave it to whoever started the process to say why a run has failed.

        Raises:
            RankError: they cannot reach each other.
        """
        global _crew
        _crew = cls(store, rank, size, is_quiet)
        return _crew

    # -- transfers --------------------------------------------------------------------------------------------

    def send(self, memory: torch.Tensor, target: int, tag: int, op: str) -> None:
        """Begin to send one-dimensional memory, which must stay as it is until `drain`.

        Raises:
            RankError: the run has failed.
        """
        self.activity.progress += 1
        self._raise_failure()
        try:
            work = self.group.send([memory], target, tag)
        except RuntimeError as error:
            self._lost(target, op, error)
        self.keep(work, memory, target, op)

    def begin_receive(self, memory: torch.Tensor, source: int, tag: int, op: str) -> Any:
        """Let one-dimensional memory be filled by what that rank sends under that tag, in the order it sends it."""
        self._raise_failure()
        try:
            return self.group.recv([memory], source, tag)
        except RuntimeError as error:
            self._lost(source, op, error)

    def wait(self, work: Any, rank: int, op: str) -> None:
        """Wait for a transfer from or to a rank; ``op``: name of the op whose result it is, empty for a message.

        Raises:
            RankError: the run has failed.
        """
        with self._waiting(rank, op):
            work.wait(direct.ALWAYS)

    @contextmanager
    def _waiting(self, rank: int, op: str, is_near: bool = False) -> Iterator[None]:
        """While a transfer from or to a rank is waited for."""
        activity = self.activity
        activity.wanted, activity.is_near, activity.waits_for = op, is_near, rank
        began = time.perf_counter()
        try:
            yield
        except (RuntimeError, PeerEndedError) as error:
            self._lost(rank, op, error)
        finally:
            activity.waits_for = -1
            activity.progress += 1
            self.waited_s += time.perf_counter() - began

    def block(self, n_bytes: int) -> Block:
        """Memory that `post` sends."""
        assert self._mailbox is not None
        return self._mailbox.block(n_bytes)

    def post(self, block: Block, n_bytes: int, target: int, tag: int, op: str) -> None:
        """Send what is in a block to a rank of this host.

        Raises:
            RankError: the run has failed.
        """
        assert self._mailbox is not None
        activity = self.activity
        activity.progress += 1
        self._raise_failure()
        activity.wanted, activity.is_near, activity.waits_for = op, False, target  # should its mailbox be full
        try:
            self._mailbox.post(target, tag, block, n_bytes)
        except PeerEndedError as error:
            self._lost(target, op, error)
        finally:
            activity.waits_for = -1

    def expect(self, source: int, tag: int) -> Coming:
        """Ask for the next tensor that a rank of this host sends under that tag; `fetch` or `drop` it."""
        assert self._mailbox is not None
        return self._mailbox.expect(source, tag)

    def fetch(self, coming: Coming, n_bytes: int, op: str) -> torch.Tensor:
        """Wait for a tensor of a rank of this host; its bytes.

        Raises:
            RankError: the run has failed.
        """
        assert self._mailbox is not None
        with self._waiting(coming.source, op, is_near=True):
            return self._mailbox.receive(coming, n_bytes)

    def drop(self, coming: Coming) -> None:
        """Do without a tensor of a rank of this host; like `keep`, by any thread in the middle of anything."""
        assert self._mailbox is not None
        self._mailbox.drop(coming)

    def keep(self, work: Any, memory: torch.Tensor, rank: int, op: str) -> None:
        """Keep the memory of a transfer until `drain`."""
        self._underway.append((work, memory, rank, op))

    @property
    def is_sending(self) -> bool:
        """Whether memory of this process's own is still being sent or received."""
        return bool(self._underway)

    def drain(self, memory: set[int] | None = None) -> None:
        """Wait for the transfers that nobody waits for; with ``memory``: those in the storages at these addresses."""
        for _ in range(len(self._underway)):
            item = self._underway.popleft()
            if memory is not None and item[1].untyped_storage().data_ptr() not in memory:
                self._underway.append(item)
            else:
                self.wait(item[0], item[2], item[3])
        if self._mailbox is not None:
            self._mailbox.settle()

    def exchange(self, text: str) -> list[str]:
        """What each rank gives here, by rank; all of them call it."""
        own = torch.frombuffer(bytearray(text.encode() + b" "), dtype=torch.uint8)  # never empty
        size = torch.tensor([own.numel()], device="cpu")
        for rank in range(self.size):
            if rank != self.rank:
                self.send(size, rank, _TALK, "")
                self.send(own, rank, _TALK, "")
        found = [self._heard(rank) if rank != self.rank else text for rank in range(self.size)]
        self.drain()
        return found

    def _heard(self, rank: int) -> str:
        size = torch.zeros(1, dtype=torch.int64, device="cpu")
        self.wait(self.begin_receive(size, rank, _TALK, ""), rank, "")
        memory = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        self.wait(self.begin_receive(memory, rank, _TALK, ""), rank, "")
        return bytes(memory.numpy()[:-1]).decode()

    def _opened(self) -> Mailbox | None:
        """A mailbox that all ranks of this host have opened."""
        mailbox = Mailbox(self.rank, self._raise_failure) if Mailbox.is_possible() else None
        addresses = self.exchange(mailbox.address if mailbox is not None else "")
        reached = {
            rank
            for rank, address in enumerate(addresses)
            if mailbox is not None and address and rank != self.rank and mailbox.connect(rank, address)
        }
        reaching = [set(json.loads(text)) for text in self.exchange(json.dumps(sorted(reached)))]
        self.near = frozenset(rank for rank in reached if self.rank in reaching[rank])
        if mailbox is not None and not self.near:
            mailbox.close()
            return None
        return mailbox

    def pairs(self, place: torch.device) -> dict[int, direct.Pair]:
        """The ranks that tensors go to and come from GPU to GPU, where this rank's are in that place; all call it."""
        identities = tuple(self.exchange(direct.identity(place)))
        if identities not in self._pairs:
            store = PrefixStore(f"placement/direct/{len(self._pairs)}", self._store)
            self._pairs[identities] = direct.connect(store, self.rank, identities, place)
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
        activity.routine = routine
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            name = _failed_op(routine, op_names, error.__traceback__)
            what = f"op {name!r}" if name else "a step"
            sentence = f"rank {self.rank} failed in {what}: {type(error).__name__}: {_first_line(error)}"
            raise RankError(self._watch.claim(sentence)) from error
        finally:
            activity.routine = None
            activity.progress += 1

    def leave(self) -> None:
        """End as planned: what was sent arrives, and nobody takes the end of this process for a failure."""
        with suppress(RankError):
            self.drain()
        for pairs in self._pairs.values():
            direct.close(pairs)
        self._watch.leave()

    def fail(self, sentence: str) -> str:
        """End the run of all for a reason; returns the reason that was given first."""
        return self._watch.claim(sentence)

    def report(self, underway: Underway) -> None:
        """Tell whoever started the processes how far they are; the first one speaks for all."""
        if self.rank == 0:
            self._store.set(UNDERWAY, json.dumps(asdict(underway)))

    def _raise_failure(self) -> None:
        if self._watch.failure:
            raise RankError(self._watch.failure)

    def _lost(self, rank: int, op: str, error: RuntimeError | PeerEndedError) -> NoReturn:
        """The connection to a rank has ended."""
        beat = self._watch.last_heard(rank)
        last = f" {beat.doing()}" if beat is not None and beat.state in ("op", "wait") else ""
        if beat is not None and beat.state == "left":
            sentence = f"rank {rank} has ended while rank {self.rank} needs {what_of(op)} of it."
        else:
            sentence = (
                f"rank {rank} has died{last} while rank {self.rank} waited for {what_of(op)}: {_first_line(error)}"
            )
        raise RankError(self._watch.claim(sentence)) from None

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """What ends this process ends the run, and the others say why."""
        if not self._watch.failure and isinstance(error, Exception) and self._is_here():
            what = "" if isinstance(error, RankError) else f" failed outside of a step: {kind.__name__}"
            self._watch.claim(f"rank {self.rank}{what}: {_first_line(error)}")
        self._before(kind, error, trace)

    def _is_here(self) -> bool:
        """Whether this is the process of this rank, and not one that it has forked."""
        return os.getpid() == self._process

    def _at_exit(self) -> None:
        if not self._is_here():
            return
        if self._watch.failure:
            # A clean end would wait for connections to processes that are not there any more.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self.leave()


def join(size: int) -> Crew:
    """The crew of this process, which ``torchrun``, `placement.runtime.ranks.launch` or the caller's own
    ``init_process_group`` made one of several.

    Args:
        size: how many processes are needed.

    Raises:
        MismatchError: there are fewer or more.
        RankError: they cannot reach each other.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise RankError("this build of PyTorch has no gloo, by which processes reach each other; install one that has.")
    if _crew is None:
        store, rank, found = _meeting_point(size)
        check_size(found, size)
        return Crew.start(store, rank, found)
    check_size(_crew.size, size)
    return _crew


def check_size(found: int, needed: int) -> None:
    """Raises: MismatchError: another number of processes than devices."""
    if found != needed:
        raise MismatchError(
            f"every device of a placement is a process, and there are devices: {needed}, processes: {found}; start it "
            f"with torchrun --nproc-per-node={needed}, or on several hosts with --nnodes so that it is {needed} in all."
        )


def _meeting_point(size: int) -> tuple[Any, int, int]:
    """(store, rank, number of processes)."""
    if dist.is_initialized():
        return dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size()
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise MismatchError(
            f"{missing[0]} is not set: a placement on several processes is started by torchrun, which sets it."
        )
    check_size(int(os.environ["WORLD_SIZE"]), size)
    if os.environ["MASTER_PORT"] == "0":
        raise MismatchError("MASTER_PORT is 0; start torchrun with --standalone, or give it a --master-port.")
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, rank, found = next(iter(rendezvous("env://", timeout=_START)))
    except (RuntimeError, ValueError) as error:
        if "EADDRINUSE" in str(error):
            raise RankError(f"{where} is in use by another process; take another MASTER_PORT.") from None
        raise RankError(f"cannot meet the other processes at {where}: {_first_line(error)}") from None
    return store, rank, found


def _connect(store: Any, rank: int, size: int) -> Any:
    """A group of all ranks."""
    name, address = os.environ.get("GLOO_SOCKET_IFNAME"), os.environ.get("MASTER_ADDR", "")
    where = {"hostname": address} if address in ("127.0.0.1", "localhost", "::1") else {}
    if name:
        where = {"interface": name.split(",")[0]}
    try:
        group = gloo_group(store, rank, size, _START, where)
        group.barrier().wait()
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} cannot connect to the others by gloo: {_first_line(error)}; GLOO_SOCKET_IFNAME names the "
            "network interface to use."
        ) from None
    return group


def _first_line(error: BaseException) -> str:
    if isinstance(error, PlacementError):
        return str(error)
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip())  # gloo's source line
    text = text.partition(_GLOO_ADVICE)[0].partition("\n")[0].removesuffix(".")
    return text[:200] + "." if text else "no reason given."


def _failed_op(routine: Routine, op_names: tuple[str, ...], trace: TracebackType | None) -> str:
    """Name of the op in whose line of a routine an error arose; empty for none."""
    code, line = type(routine.module).forward.__code__, 0
    while trace is not None:
        if trace.tb_frame.f_code is code:
            line = trace.tb_lineno
        trace = trace.tb_next
    return op_at(routine, op_names, line)
