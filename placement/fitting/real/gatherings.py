"""`Gatherings`: collectives among participants, which end when a member dies.

Each group of participants has a process group of its own: of NCCL where all have a GPU each, else of gloo.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from placement.fitting.real import groups
from placement.fitting.real.mail import Mail, fields_of, head_of
from placement.fitting.requests import AllGather, AllReduce, ParticipantLost
from placement.fitting.task import CPU

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
        store.set(_gpu_key(mail.number), groups.gpu_identity(place))

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
            return _Group(groups.gloo_group(store, rank, len(members)), None)
        backend = groups.nccl_group(store, rank, len(members), self._place)
        groups.settle(backend.allreduce([torch.zeros(1, device=self._place)]), self._place)  # which is when they meet
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
                future = self._apart(partial(groups.settle, work, group.gpu))
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
