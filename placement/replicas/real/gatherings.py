"""`Gatherings`: collectives among participants, each group by a gloo group of its own, that end when a member dies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from placement.replicas.real.mail import NO_LIMIT, fields_of, head_of
from placement.replicas.requests import AllGather, AllReduce, ParticipantLost
from placement.runtime.transport.gloo import gloo_group

if TYPE_CHECKING:
    from torch import Tensor

    from placement.replicas.real.mail import Mail

_LAST_WORDS_S = 2.0  # for the mail to find out who was lost


class Gatherings:
    """The collectives of one participant.

    Attributes:
        sent_bytes: what it has sent by them, as a ring sends it.
    """

    def __init__(self, store: Any, mail: Mail, where: dict[str, str]) -> None:
        self.sent_bytes = 0
        self._store, self._mail, self._where = store, mail, where
        self._groups: dict[tuple[int, ...], Any] = {}
        self._left: list[Any] = []  # what nobody waits for any more, but gloo may still write to

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
            flat = torch.cat([tensors[number].detach().reshape(-1) for number in numbers])
            self._ended(partial(group.allreduce, [flat]), request.group, flat)
            pieces = torch.split(flat, [tensors[number].numel() for number in numbers])
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
        group, outputs = self._group(members), [torch.empty_like(value) for _ in members]
        self._ended(lambda: group.allgather([outputs], [value]), members, (outputs, value))
        return outputs

    def _group(self, members: tuple[int, ...]) -> Any:
        """The group of members, who meet when they first ask for it."""
        if members not in self._groups:
            store, rank = PrefixStore(f"group{members}", self._store), members.index(self._mail.number)
            met: Future[Any] = Future()

            def meet() -> None:
                try:
                    met.set_result(gloo_group(store, rank, len(members), NO_LIMIT, self._where))
                except RuntimeError as error:
                    met.set_exception(error)

            # In a thread that is left alone where a member has died before.
            threading.Thread(target=meet, daemon=True).start()
            met.add_done_callback(self._mail.wake)
            self._wait(met.done, members)
            self._groups[members] = met.result()
        return self._groups[members]

    def _ended(self, begin: Callable[[], Any], members: tuple[int, ...], memory: Any) -> None:
        """Begin a collective, and wait for its end."""
        try:
            work = begin()
            future = work.get_future()
            future.add_done_callback(self._mail.wake)
            try:
                self._wait(future.done, members)
            except ParticipantLost:
                self._left.append((work, memory))
                raise
            work.wait()
        except RuntimeError:
            lost = self._mail.wait(lambda: False, members, _LAST_WORDS_S)
            if lost is None:
                raise
            raise ParticipantLost(lost) from None

    def _wait(self, is_done: Callable[[], bool], members: tuple[int, ...]) -> None:
        lost = self._mail.wait(is_done, members)
        if lost is not None:
            raise ParticipantLost(lost)
