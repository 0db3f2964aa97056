"""Tensors in memory that processes share: unchanged, in order, whatever else happens, and no memory lost."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.capture.trace import Layout, TensorInfo
from graphs.errors import RankError
from placement.runtime.ranks.endpoint import RankEndpoint
from placement.runtime.transport import mailbox
from placement.runtime.transport.channels import Channel, PeerEndedError, Transport
from placement.runtime.transport.mailbox import Coming, Mailbox, MailTransport
from placement.runtime.transport.packing import Packing

pytestmark = pytest.mark.skipif(not Mailbox.is_possible(), reason="needs memory that processes can share")

SIZES = [0, 1, 63, 64, 65, 4096, 100_000]
JOIN_S = 60


@contextmanager
def mailboxes(size: int, check: Callable[[], None] = lambda: None) -> Iterator[list[Mailbox]]:
    """That many in this process, each connected to all others."""
    boxes = [Mailbox(rank, check) for rank in range(size)]
    for box in boxes:
        for rank, other in enumerate(boxes):
            assert other is box or box.connect(rank, other.address)
    yield boxes
    for box in boxes:
        box.close()


def content(number: int, size: int) -> torch.Tensor:
    return ((torch.arange(size) + number) % 251).to(torch.uint8)


def post(box: Mailbox, target: int, tag: int, tensor: torch.Tensor) -> None:
    block = box.block(len(tensor))
    block.memory[: len(tensor)] = tensor
    box.post(target, tag, block, len(tensor))


def received(box: Mailbox, coming: Coming, size: int) -> torch.Tensor:
    return box.receive(coming, size).clone()


def memory_bytes(box: Mailbox) -> int:
    """Of all tensors of a mailbox that are or have been on their way."""
    return os.fstat(json.loads(box.address)[1]).st_size


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- in order, unchanged ---------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Lane:
    """What one mailbox sends another one under one tag: the n-th that is expected is the n-th that is sent."""

    n_sent: int = 0
    sizes: list[int] = field(default_factory=list)
    expected: list[Coming | None] = field(default_factory=list)  # None: it has been received or dropped

    def receivable(self) -> list[int]:
        return [n for n, coming in enumerate(self.expected[: self.n_sent]) if coming is not None]


class Schedule:
    """Mailboxes, what they have been told to do, and what must come of it."""

    def __init__(self, boxes: list[Mailbox]) -> None:
        self.boxes = boxes
        self.lanes: dict[tuple[int, int, int], Lane] = {}

    def act(self, kind: str, source: int, target: int, tag: int, number: int) -> None:
        """Do something, or give back what has been received where it is said of a mailbox alone."""
        if source == target:
            self.boxes[source].settle()
            return
        lane = self.lanes.setdefault((source, target, tag), Lane())
        box = self.boxes[target]
        if kind == "post":
            lane.sizes.append(SIZES[number % len(SIZES)])
            post(self.boxes[source], target, tag, content(97 * tag + lane.n_sent, lane.sizes[-1]))
            lane.n_sent += 1
        elif kind == "expect":
            lane.expected.append(box.expect(source, tag))
        elif kind == "receive" and lane.receivable():
            n = lane.receivable()[number % len(lane.receivable())]
            assert torch.equal(received(box, self._taken(lane, n), lane.sizes[n]), content(97 * tag + n, lane.sizes[n]))
        elif kind == "drop" and (open_ := [n for n, coming in enumerate(lane.expected) if coming is not None]):
            box.drop(self._taken(lane, open_[number % len(open_)]))

    def finish(self) -> None:
        """Let everything that was sent be received, and everything that was expected come."""
        for (source, target, tag), lane in list(self.lanes.items()):
            while lane.n_sent < len(lane.expected):
                self.act("post", source, target, tag, lane.n_sent)
            while lane.n_sent > len(lane.expected):
                self.act("expect", source, target, tag, 0)
            while lane.receivable():
                self.act("receive", source, target, tag, 0)

    @staticmethod
    def _taken(lane: Lane, n: int) -> Coming:
        coming, lane.expected[n] = lane.expected[n], None
        assert coming is not None
        return coming


rank, few = st.integers(0, 2), st.integers(0, 1)
acts = st.tuples(st.sampled_from(["post", "post", "expect", "receive", "drop"]), rank, rank, few, st.integers(0, 99))


@given(st.lists(acts, max_size=80))
def test_everything_arrives_unchanged_and_in_order(plan: list[tuple[str, int, int, int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patched, mailboxes(3) as boxes:
        patched.setattr(mailbox, "SEGMENT_BYTES", 8192)  # so that there are many
        schedule = Schedule(boxes)
        for _ in range(3):  # in memory that has been used before, too
            for act in plan:
                schedule.act(*act)
            schedule.finish()


def test_one_that_asks_late_and_one_that_asks_early_get_their_own() -> None:
    with mailboxes(2) as (one, other):
        post(one, 1, 5, content(1, 10))
        post(one, 1, 6, content(2, 20))
        first, second, third = other.expect(0, 5), other.expect(0, 5), other.expect(0, 6)
        post(one, 1, 5, content(3, 30))
        other.drop(first)
        assert torch.equal(received(other, third, 20), content(2, 20))
        assert torch.equal(received(other, second, 30), content(3, 30))


def test_another_length_is_refused() -> None:
    with mailboxes(2) as (one, other):
        post(one, 1, 0, content(1, 10))
        with pytest.raises(RankError, match="rank 0 sent 10 bytes where 12 were expected"):
            received(other, other.expect(0, 0), 12)


COMPLEX = torch.arange(12).reshape(3, 4) + 1j


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(4.0).reshape(1, 4).expand(3, 4),
        torch.arange(24).reshape(4, 6)[1:3, ::2].transpose(0, 1),
        torch.arange(8.0).unfold(0, 4, 2),
        torch.arange(10) % 3 == 0,
        torch.tensor(True),
        torch.arange(7.0).to(torch.bfloat16),
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        torch._neg_view(torch.arange(6.0)),
        COMPLEX.to(torch.complex128).t().conj(),
        torch.arange(4.0).requires_grad_(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}"[6:],
)
def test_tensors_arrive_as_they_are_by_either_way(tensor: torch.Tensor) -> None:
    packing = Packing.of(TensorInfo(Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype), 0, 0))
    with mailboxes(2) as (one, other):
        links = linked([one, other], {0: Channel(packing, 0, 1, 0, "op")})
        links[1].expect(0)
        links[0].send(0, tensor)
        arrived = links[1].receive(0)
    assert torch.equal(arrived, tensor)
    assert not arrived.requires_grad
    # What gloo sends is the memory as it is.
    sent = torch.frombuffer(bytearray(packing.packed(tensor.detach()).view(torch.uint8).numpy()), dtype=tensor.dtype)
    assert torch.equal(packing.unpacked(sent), tensor)


def test_memory_serves_inference_and_training_by_turns() -> None:
    with mailboxes(2) as (one, other):
        for number in range(4):
            with torch.inference_mode(number % 2 == 0):
                post(one, 1, 0, content(number, 100))
                assert torch.equal(received(other, other.expect(0, 0), 100), content(number, 100))
                other.settle()


# -- memory and files ------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "SEGMENT_BYTES", 8192)
    sizes = torch.randint(1, 20_000, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    held = []
    with mailboxes(2) as boxes:
        for _ in range(100):
            for source, target in ((0, 1), (1, 0)):
                coming = [boxes[target].expect(source, tag) for tag in range(len(sizes))]
                for tag, size in enumerate(sizes):
                    post(boxes[source], target, tag, content(tag, size))
                for tag, size in reversed(list(enumerate(sizes))):
                    if tag % 4 == 1:
                        boxes[target].drop(coming[tag])
                    else:
                        received(boxes[target], coming[tag], size)
            for box in boxes:
                box.settle()
            held.append([memory_bytes(box) for box in boxes])
    assert held[2] == held[-1]
    assert max(held[-1]) < 4 * sum(sizes)


def test_memory_is_not_used_again_before_it_has_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "SEGMENT_BYTES", 8192)  # which 64 such tensors fill
    with mailboxes(2) as (one, other):
        coming = [other.expect(0, 0) for _ in range(600)]
        for number in range(300):
            post(one, 1, 0, content(number, 80))
        for number in range(300):
            assert torch.equal(received(other, coming[number], 80), content(number, 80))
            post(one, 1, 0, content(300 + number, 80))
        for number in range(300, 600):
            assert torch.equal(received(other, coming[number], 80), content(number, 80))


def test_many_large_tensors_are_given_back_while_none_is_waited_for() -> None:
    with mailboxes(2) as (one, other):
        for number in range(40):
            coming = other.expect(0, 0)
            post(one, 1, 0, content(number, 1 << 20))
            received(other, coming, 1 << 20)
        assert memory_bytes(one) <= (16 << 20) + 4096


def test_tensors_that_are_a_little_smaller_go_where_larger_ones_were() -> None:
    with mailboxes(2) as (one, other):
        held = []
        for size in (40 << 20, 30 << 20, 12 << 20):  # of three powers of two
            coming = other.expect(0, 0)
            post(one, 1, 0, content(0, size))
            received(other, coming, size)
            other.settle()
            held.append(memory_bytes(one))
        assert held[0] == held[-1]


def test_closed_mailboxes_leave_no_files() -> None:
    with mailboxes(2) as boxes:  # whatever is opened once only
        post(boxes[0], 1, 0, content(0, 10))
    gc.collect()
    before = open_files()
    for _ in range(3):
        with mailboxes(3) as boxes:
            post(boxes[0], 1, 0, content(0, 100))
            received(boxes[1], boxes[1].expect(0, 0), 100)
    gc.collect()
    assert open_files() == before


@pytest.mark.parametrize("wrong", ["token", "process", "file", "device"])
def test_a_process_of_another_host_is_refused(wrong: str) -> None:
    """Its numbers may mean another process here, or none, or one's own."""
    ours, theirs = socket.socketpair()
    with mailboxes(2) as (one, other), ours, theirs, open("/dev/zero", "rb") as device:
        process, memory, inbox, token = json.loads(other.address)
        address = {
            "token": [process, memory, inbox, "00" * (len(token) // 2)],
            "process": [2**30, memory, inbox, token],
            "file": [process, ours.fileno(), inbox, token],
            "device": [process, device.fileno(), inbox, token],
        }[wrong]
        before = open_files()
        assert not one.connect(7, json.dumps(address))
        assert open_files() == before


@pytest.mark.parametrize("why", ["switched off", "forbidden", "another system"])
def test_where_it_is_not_possible_nobody_tries(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    def forbidden(name: str) -> int:
        raise PermissionError(name)

    if why == "switched off":
        monkeypatch.setenv("PLACEMENT_SHARED_MEMORY", "0")
    elif why == "forbidden":
        monkeypatch.setattr(os, "memfd_create", forbidden)
    else:
        monkeypatch.delattr(os, "memfd_create")
    assert not Mailbox.is_possible()


# -- links -----------------------------------------------------------------------------------------------------------


class OneHost:
    """What a `RankEndpoint` needs of a `ProcessGroup` of this host."""

    def __init__(self, box: Mailbox, rank: int) -> None:
        self.rank, self._mail = rank, MailTransport(box)

    def transport_to(self, rank: int) -> MailTransport:
        return self._mail

    def send(self, transport: Transport, channel: Channel, tensor: torch.Tensor) -> None:
        transport.send(channel, tensor)

    def expect(self, transport: Transport, channel: Channel) -> Any:
        return transport.expect(channel)

    def receive(self, transport: Transport, channel: Channel, coming: Any) -> torch.Tensor:
        return transport.receive(channel, coming)

    def drop(self, transport: Transport, channel: Channel, coming: Any) -> None:
        transport.drop(channel, coming)


def linked(boxes: list[Mailbox], channels: dict[int, Channel]) -> list[RankEndpoint]:
    """Each end for one pass."""
    groups: list[Any] = [OneHost(box, rank) for rank, box in enumerate(boxes)]
    return [RankEndpoint(group, channels, torch.device("cpu"), {}) for group in groups]


def test_a_pass_that_is_given_up_takes_nothing_from_the_next_one() -> None:
    packing = Packing.of(TensorInfo(Layout((3,), (1,), torch.float32), 0, 0))
    channels = {tag: Channel(packing, 0, 1, tag, "op") for tag in range(2)}
    with mailboxes(2) as boxes:
        for given_up in (False, True, True, False, False):
            start, end = linked(boxes, channels)
            for tag in (0, 1):
                end.expect(tag)
            for tag in (1, 0):
                start.send(tag, torch.full((3,), 10.0 * tag + given_up))
            if given_up:
                del end
            else:
                assert [end.receive(tag).tolist() for tag in (0, 1)] == [[0.0] * 3, [10.0] * 3]


def test_what_is_collected_by_another_thread_is_dropped_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector runs in whatever thread and wherever it likes."""
    monkeypatch.setattr(mailbox, "SEGMENT_BYTES", 4096)
    n = 2000
    to_drop: deque[Coming] = deque()
    with mailboxes(2) as (one, other):
        wanted, unwanted = ([other.expect(0, tag) for _ in range(n)] for tag in (0, 1))
        to_drop.extend(unwanted)

        def drop_all() -> None:
            while to_drop:
                other.drop(to_drop.popleft())

        thread = threading.Thread(target=drop_all)
        thread.start()
        for number in range(n):
            post(one, 1, 0, content(number, 16))
            post(one, 1, 1, content(number, 16))
            assert torch.equal(received(other, wanted[number], 16), content(number, 16))
            other.settle()
        thread.join()
        post(one, 1, 2, content(0, 16))
        received(other, other.expect(0, 2), 16)
        other.settle()
        before = memory_bytes(one)
        for number in range(before // 64 - 64):  # as many as there are, but those of the first page; all are free again
            post(one, 1, 3, content(number, 16))
        assert memory_bytes(one) == before


# -- waiting ---------------------------------------------------------------------------------------------------------


def test_two_that_both_send_more_than_a_pipe_holds_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIPE_BYTES", 4096)
    n, wrong = 1000, []

    def talk(box: Mailbox, other: int) -> None:
        coming, blocks = [box.expect(other, 0) for _ in range(n)], [box.block(100) for _ in range(n)]
        for number, block in enumerate(blocks):
            block.memory[:100] = content(number, 100)
            box.post(other, 0, block, 100)
        wrong.extend(i for i in range(n) if not torch.equal(received(box, coming[i], 100), content(i, 100)))
        box.settle()

    with mailboxes(2) as boxes:
        threads = [threading.Thread(target=talk, args=(box, 1 - i), daemon=True) for i, box in enumerate(boxes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(JOIN_S)
        assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_what_cannot_be_given_back_now_is_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIPE_BYTES", 4096)
    monkeypatch.setattr(mailbox, "SEGMENT_BYTES", 4096)
    n = 192  # more than the smallest pipe holds; blocks that fill three segments
    with mailboxes(2) as (one, other):
        for number in range(n):
            post_and_receive(one, other, number)
        for _ in range(4):
            other.settle()
            one.block(4096)  # of a size that is not there: it looks into its mailbox
        before = memory_bytes(one)
        for number in range(n):
            post_and_receive(one, other, number)
        assert memory_bytes(one) == before


def test_what_is_received_stays_as_it_is_while_it_is_used() -> None:
    with mailboxes(2) as (one, other):
        held = []
        for number in range(100):
            coming = other.expect(0, 0)
            post(one, 1, 0, content(number, 60))
            held.append(other.receive(coming, 60)[3:])
        other.settle()
        assert all(torch.equal(tensor, content(number, 60)[3:]) for number, tensor in enumerate(held))
        held.clear()
        other.settle()
        before = memory_bytes(one)
        for number in range(100):
            post_and_receive(one, other, number)
        assert memory_bytes(one) == before


def post_and_receive(one: Mailbox, other: Mailbox, number: int) -> None:
    coming = other.expect(0, 0)
    post(one, 1, 0, content(number, 60))
    assert torch.equal(received(other, coming, 60), content(number, 60))


def post_many(box: Mailbox) -> None:
    """More than the smallest pipe holds."""
    for number in range(200):
        post(box, 1, 0, content(number, 10))


def test_a_run_that_has_failed_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIPE_BYTES", 4096)

    def failed() -> None:
        raise RankError("rank 1 is tired")

    with mailboxes(2, failed) as (one, other):
        with pytest.raises(RankError, match="tired"):
            received(other, other.expect(0, 0), 10)
        with pytest.raises(RankError, match="tired"):
            post_many(one)


# -- two processes ---------------------------------------------------------------------------------------------------


@contextmanager
def forked(work: Callable[[Mailbox, Connection], None]) -> Iterator[tuple[Mailbox, Connection, BaseProcess]]:
    """Rank 1 in a process of its own; this one is rank 0. It ends with the block."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def life() -> None:
        torch.set_num_threads(1)
        box = Mailbox(1)
        theirs.send(box.address)
        assert box.connect(0, theirs.recv())
        work(box, theirs)

    process = context.Process(target=life, daemon=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    end = time.monotonic() + JOIN_S

    def in_time() -> None:
        assert time.monotonic() < end

    box = Mailbox(0, in_time)
    try:
        assert ours.poll(JOIN_S)
        assert box.connect(1, ours.recv())
        ours.send(box.address)
        yield box, ours, process
    finally:
        process.kill()
        process.join()
        box.close()
        ours.close()
        theirs.close()


def _echo(box: Mailbox, _: Connection) -> None:
    """Send back what comes, each with one added, the tags the other way round."""
    for _ in range(50):
        coming = [box.expect(0, tag) for tag in range(len(SIZES))]
        found = [received(box, one, size) for one, size in zip(coming, SIZES, strict=True)]
        for tag in reversed(range(len(SIZES))):
            post(box, 0, tag, found[tag] + 1)


def test_tensors_go_to_another_process_and_back() -> None:
    with forked(_echo) as (box, _, _):
        for step in range(50):
            coming = [box.expect(1, tag) for tag in range(len(SIZES))]
            for tag in reversed(range(len(SIZES))):
                post(box, 1, tag, content(step + tag, SIZES[tag]))
            for tag, size in enumerate(SIZES):
                assert torch.equal(received(box, coming[tag], size), content(step + tag, size) + 1)
        assert memory_bytes(box) <= (16 << 20) + 4096


def _send_and_die(box: Mailbox, pipe: Connection) -> None:
    for number in range(3):
        post(box, 0, 0, content(number, 5000))
    pipe.send("sent")
    if pipe.recv() == "send one more":
        post(box, 0, 0, content(3, 5000))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("last", ["die", "send one more"])
def test_what_a_process_sent_before_its_end_arrives_and_no_more(monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    with forked(_send_and_die) as (box, pipe, process):
        assert pipe.poll(JOIN_S)
        assert pipe.recv() == "sent"
        n_sent = 4 if last == "send one more" else 3
        coming = [box.expect(1, 0) for _ in range(n_sent + 1)]
        for number in range(3):
            assert torch.equal(received(box, coming[number], 5000), content(number, 5000))

        def while_waiting() -> None:
            """It ends between two looks into the mailbox."""
            if process.is_alive():
                pipe.send(last)
                process.join(JOIN_S)

        monkeypatch.setattr(box, "_check", while_waiting)
        if n_sent == 4:
            assert torch.equal(received(box, coming[3], 5000), content(3, 5000))
        with pytest.raises(PeerEndedError):
            received(box, coming[n_sent], 5000)
        box.settle()
        with pytest.raises(PeerEndedError):
            post(box, 1, 0, content(0, 10))


def _die_with_a_child(box: Mailbox, pipe: Connection) -> None:
    """The child keeps this process's end of the pipe open, as a worker of a data loader would."""
    child = os.fork()
    if not child:
        signal.pause()
    pipe.send(child)
    pipe.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_end_of_a_process_whose_mailbox_is_full_and_still_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "PIPE_BYTES", 4096)
    with forked(_die_with_a_child) as (box, pipe, _):
        assert pipe.poll(JOIN_S)
        child = pipe.recv()
        try:
            pipe.send("die")
            with pytest.raises(PeerEndedError):
                post_many(box)
        finally:
            os.kill(child, signal.SIGKILL)
