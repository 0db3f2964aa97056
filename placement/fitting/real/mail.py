"""`Mail`: messages between processes. Each pair has a gloo group of its own, so that a death breaks no other pair.

A message is a head of fixed size and then its tensors, one after the other. A thread for each sender receives them.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from graphs.errors import FitError
from placement.fitting.real.groups import gloo_group
from placement.fitting.requests import LOST, Inbox, Message, ParticipantLost, Post, Receive

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
