"""`Inbox`: what has arrived for a participant and was not taken yet, the same in virtual time and in processes."""

from __future__ import annotations

from collections import deque

from placement.replicas.requests import LOST, Message, ParticipantLost, Receive


class Inbox:
    """Messages in the order of their arrival, and who is known to be lost."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self._gone: set[int] = set()

    def put(self, message: Message) -> None:
        """A message has arrived; one with the tag `LOST` is the last of its sender."""
        self._messages.append(message)
        if message.tag == LOST:
            self._gone.add(message.sender)

    def take(self, wanted: Receive) -> Message | ParticipantLost | None:
        """The first message that is wanted, or that it will never come; None: not yet."""
        for place, message in enumerate(self._messages):
            if message.tag == LOST:
                is_wanted = wanted.sender is None
            else:
                is_wanted = wanted.tag in (None, message.tag) and wanted.sender in (None, message.sender)
            if is_wanted:
                del self._messages[place]
                return message
        return ParticipantLost(wanted.sender) if wanted.sender is not None and wanted.sender in self._gone else None

    def lost_of(self, group: tuple[int, ...]) -> int | None:
        """One of a group that is known to be lost; None where there is none."""
        return min(self._gone.intersection(group), default=None)
