"""Messages and collectives between the processes of a real run, over gloo or NCCL."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from graphs.errors import FitError
from placement.fitting.participants import LOST, AllGather, AllReduce, Inbox, Message, ParticipantLost, Post, Receive
from placement.fitting.task import CPU

NO_LIMIT = timedelta(days=7)  # a participant may compute for long before it says anything


def file_store(path: str) -> Any:
    """Where processes of this host meet: a file in a folder of this user, so that no port is open for it."""
    store: Any = dist.FileStore  # type: ignore[attr-defined]
    return store(path)


def gloo_group(store: Any, rank: int, size: int) -> Any:
    """A group of gloo, for tensors of the CPU; its processes alone meet in the store.

    Raises:
        RuntimeError: the processes do not meet.
    """
    return dist.ProcessGroupGloo(store, rank, size, NO_LIMIT)


def nccl_group(store: Any, rank: int, size: int, place: torch.device) -> Any:
    """A group of NCCL, for tensors of this process's GPU."""
    nccl: Any = dist.ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = NO_LIMIT
    with torch.cuda.device(place):
        return nccl(store, rank, size, options)


def gpu_identity(place: torch.device) -> str:
    """A text that tells a GPU from all others; empty where tensors cannot go by NCCL."""
    if place.type != "cuda" or not dist.is_nccl_available():
        return ""
    return str(torch.cuda.get_device_properties(place).uuid)


def settle(work: Any, place: torch.device) -> None:
    """Let the host wait for a collective of NCCL."""
    with torch.cuda.device(place):
        work.wait()
        torch.cuda.current_stream().synchronize()


_HEAD_BYTES = 2048
_HEAD, _BODY = 0, 1  # tags of gloo
_MOST_UNDER_WAY = 8  # messages to one receiver that may be on their way


class Mail:
    """Messages that one participant sends and receives.

    Attributes:
        number: of the participant.
        sent_bytes: of the tensors that it has posted.
    """

    def __init__(self, store: Any, number: int, total: int) -> None:
        """Meets all the others, who do the same."""
        self.number, self.sent_bytes = number, 0
        self._inbox, self._changed = Inbox(), threading.Condition()
        self._sent = [0] * total
        self._under_way: list[deque[list[Any]]] = [deque() for _ in range(total)]
        # In ascending order of pairs, so that nobody waits for one who waits for him.
        pairs = {other: (min(number, other), max(number, other)) for other in range(total) if other != number}
        self._groups = {
            other: gloo_group(PrefixStore(f"pair{pair}", store), pair.index(number), 2) for other, pair in pairs.items()
        }
        for other in self._groups:
            threading.Thread(target=self._receive, args=(other,), daemon=True).start()

    def post(self, request: Post) -> None:
        """Begin to send; to one who is lost, in vain. Waits only where much is on its way there already."""
        tensors = [each.detach().contiguous().clone() for each in request.tensors]
        self.sent_bytes += sum(each.nbytes for each in tensors)
        self._sent[request.to] += 1
        head = head_of(tensors, tag=request.tag, version=request.version, number=self._sent[request.to])
        if request.to == self.number:
            self._arrived(Message(self.number, request.tag, tuple(tensors), request.version))
            return
        group, other, under_way = self._groups[request.to], int(self.number < request.to), self._under_way[request.to]
        try:
            works = [group.send([head], other, _HEAD)]
            works += [group.send([each.view(-1).view(torch.uint8)], other, _BODY) for each in tensors if each.numel()]
            under_way.append(works)  # which keep the tensors, too
            while len(under_way) > _MOST_UNDER_WAY:
                for work in under_way.popleft():
                    work.wait()
        except RuntimeError:  # its own thread finds out, too
            return

    def receive(self, wanted: Receive) -> Message | None:
        """The next message that is wanted.

        Raises:
            ParticipantLost: it will never come.
        """
        with self._changed:
            while (found := self._inbox.take(wanted)) is None and wanted.wait:
                self._changed.wait()
        if isinstance(found, ParticipantLost):
            raise found
        return found

    def wait(self, is_done: Callable[[], bool], group: tuple[int, ...], most_s: float | None = None) -> int | None:
        """Wait until something is done, of which `wake` tells, a member of the group is lost, or time is up.

        Returns:
            the lost member, if there is one and it is not done.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_done() or self._inbox.lost_of(group) is not None, most_s)
            return None if is_done() else self._inbox.lost_of(group)

    def wake(self, _: Any = None) -> None:
        """Something is done for which `wait` may wait."""
        with self._changed:
            self._changed.notify_all()

    def _receive(self, sender: int) -> None:
        """The life of the thread that receives from one sender, until that one is lost."""
        group, other, last = self._groups[sender], int(self.number < sender), 0
        try:
            while True:
                head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
                group.recv([head], other, _HEAD).wait()
                fields, tensors = fields_of(head)
                for each in tensors:
                    if each.numel():
                        group.recv([each.view(-1).view(torch.uint8)], other, _BODY).wait()
                if fields["number"] != last + 1:  # a second time, or one is missing: this sender cannot be trusted
                    break
                last += 1
                self._arrived(Message(sender, fields["tag"], tuple(tensors), fields["version"]))
        except RuntimeError:
            pass
        self._arrived(Message(sender, LOST, (), 0))

    def _arrived(self, message: Message) -> None:
        with self._changed:
            self._inbox.put(message)
            self._changed.notify_all()


def head_of(tensors: Sequence[Tensor], **fields: Any) -> Tensor:
    """uint8 [2048]: fields, and what memory the tensors take.

    Raises:
        FitError: too many tensors to be described.
    """
    shapes = [[str(each.dtype).removeprefix("torch."), *each.shape] for each in tensors]
    text = json.dumps({**fields, "tensors": shapes}).encode()
    if len(text) > _HEAD_BYTES:
        raise FitError(f"a message of {len(tensors)} tensors has no room for their shapes; send fewer at once.")
    return torch.frombuffer(bytearray(text.ljust(_HEAD_BYTES)), dtype=torch.uint8)


def fields_of(head: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    """The fields of a head, and tensors with room for what comes after it."""
    fields = json.loads(bytes(head.numpy()))
    return fields, [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, *shape in fields["tensors"]]


_LAST_WORDS_S = 2.0  # for the mail to find out who was lost


@dataclass(frozen=True)
class _Group:
    """Attributes:
    backend: the process group.
    gpu: of this member, where tensors are for NCCL; None for gloo.
    """

    backend: Any
    gpu: torch.device | None

    @property
    def place(self) -> torch.device:
        """Device of the tensors."""
        return CPU if self.gpu is None else self.gpu


class Gatherings:
    """The collectives of one participant.

    Args:
        store: where participants meet.
        place: where this one computes.

    Attributes:
        sent_bytes: what it has sent by them, as a ring sends it.
    """

    def __init__(self, store: Any, mail: Mail, place: torch.device) -> None:
        self.sent_bytes = 0
        self._store, self._mail, self._place = store, mail, place
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._left: list[Any] = []  # what nobody waits for any more, but is still written to
        store.set(_gpu_key(mail.number), gpu_identity(place))

    def all_reduce(self, request: AllReduce) -> tuple[Tensor, ...]:
        """The sums.

        Raises:
            ParticipantLost: a member is.
        """
        tensors, members = request.tensors, len(request.group)
        self.sent_bytes += 2 * (members - 1) * (sum(each.nbytes for each in tensors) // members)
        if members == 1:
            return tuple(each.detach().clone() for each in tensors)
        found: dict[int, Tensor] = {}
        group = self._group(request.group)
        for dtype in dict.fromkeys(each.dtype for each in tensors):  # all of a kind at once: starting one takes longest
            numbers = [number for number, each in enumerate(tensors) if each.dtype == dtype]
            flat = torch.cat([tensors[number].detach().reshape(-1) for number in numbers]).to(group.place)
            self._ended(group, partial(group.backend.allreduce, [flat]), request.group, flat)
            pieces = torch.split(flat.to(CPU), [tensors[number].numel() for number in numbers])
            found |= {n: piece.view(tensors[n].shape) for n, piece in zip(numbers, pieces, strict=True)}
        return tuple(found[number] for number in range(len(tensors)))

    def all_gather(self, request: AllGather) -> tuple[tuple[Tensor, ...], ...]:
        """Every member's tensors, by the order of the group.

        Raises:
            ParticipantLost: a member is.
        """
        tensors = tuple(each.detach().contiguous().clone() for each in request.tensors)
        members = len(request.group)
        self.sent_bytes += (members - 1) * sum(each.nbytes for each in tensors)
        if members == 1:
            return (tensors,)
        heads = self._gathered(head_of(tensors), request.group)
        found = [fields_of(head)[1] for head in heads]
        longest = max(sum(each.nbytes for each in own) for own in found)
        body = torch.zeros(longest, dtype=torch.uint8)
        packed = [each.view(-1).view(torch.uint8) for each in tensors if each.numel()]
        body[: sum(each.nbytes for each in tensors)] = torch.cat(packed) if packed else body[:0]
        for own, other in zip(found, self._gathered(body, request.group), strict=True):
            place = 0
            for each in own:
                if each.numel():
                    each.view(-1).view(torch.uint8).copy_(other[place : place + each.nbytes])
                place += each.nbytes
        return tuple(map(tuple, found))

    def _gathered(self, value: Tensor, members: tuple[int, ...]) -> list[Tensor]:
        group = self._group(members)
        own = value.to(group.place)
        outputs = [torch.empty_like(own) for _ in members]
        self._ended(group, lambda: group.backend.allgather([outputs], [own]), members, (outputs, own))
        return [each.to(CPU) for each in outputs]

    def _group(self, members: tuple[int, ...]) -> _Group:
        """The group of members, who meet when they first ask for it."""
        if members not in self._groups:
            met = self._apart(partial(self._met, members))
            self._wait(met.done, members)
            self._groups[members] = met.result()
        return self._groups[members]

    def _met(self, members: tuple[int, ...]) -> _Group:
        store, rank = PrefixStore(f"group{members}", self._store), members.index(self._mail.number)
        gpus = [self._store.get(_gpu_key(member)) for member in members]
        if not all(gpus) or len(set(gpus)) < len(gpus):
            return _Group(gloo_group(store, rank, len(members)), None)
        backend = nccl_group(store, rank, len(members), self._place)
        settle(backend.allreduce([torch.zeros(1, device=self._place)]), self._place)  # which is when they meet
        return _Group(backend, self._place)

    def _apart(self, do: Callable[[], Any]) -> Future[Any]:
        """Result of a call in a thread that is left alone where a member has died before."""
        found: Future[Any] = Future()

        def run() -> None:
            try:
                found.set_result(do())
            except RuntimeError as error:
                found.set_exception(error)

        found.add_done_callback(self._mail.wake)
        threading.Thread(target=run, daemon=True).start()
        return found

    def _ended(self, group: _Group, begin: Callable[[], Any], members: tuple[int, ...], memory: Any) -> None:
        """Begin a collective, and wait for its end."""
        try:
            work = begin()
            if group.gpu is None:
                future, end = work.get_future(), work.wait
                future.add_done_callback(self._mail.wake)
            else:
                future = self._apart(partial(settle, work, group.gpu))
                end = future.result
            try:
                self._wait(future.done, members)
            except ParticipantLost:
                self._left.append((work, memory))
                raise
            end()
        except RuntimeError:
            lost = self._mail.wait(lambda: False, members, _LAST_WORDS_S)
            if lost is None:
                raise
            raise ParticipantLost(lost) from None

    def _wait(self, is_done: Callable[[], bool], members: tuple[int, ...]) -> None:
        lost = self._mail.wait(is_done, members)
        if lost is not None:
            raise ParticipantLost(lost)


def _gpu_key(number: int) -> str:
    """Key of the store under which it has a participant's GPU."""
    return f"gpu{number}"
