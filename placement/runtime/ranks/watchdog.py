"""`Watchdog`: the processes of one run watch each other; one that dies or stalls ends the run within seconds.

Every process tells the others twice a second what it does. A process is busy as long as it uses a processor or waits
for one, so that a step may take as long as it takes; one that is in an op and does neither, is stopped or is gone ends
the run.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from graphs.formatting import show_line
from placement.processes.processes import ProcessId, busy_s, condition, queued_s, this_process

if TYPE_CHECKING:
    from placement.runtime.program.routines import Routine

BEAT_S = 0.5
SILENCE_S = 4.0  # in an op without using a processor, without a sign of life, or waiting for what nobody sends
PATIENCE_S = 60.0  # outside of a step without using a processor, while another one waits
TELL_S = 1.0  # for the others to be told why a run has failed
GRACE_S = 2.0  # from the end of a run until the process is ended, for its own clean end
_LEAST_SHARE = 0.02  # of a processor, that a process which computes gets
_FAILURE, _NONE = "placement/failure", "-"


@dataclass(eq=False)
class Activity:
    """The current activity of a process; written by the thread that runs the model, read by the watchdog.

    Attributes:
        progress: grows with everything that is done.
        waits_for: the rank whose transfer, or the ranks whose part in a collective is waited for; empty for none.
        is_near: whether that would be here as soon as it is sent.
        wanted: what that is, as `Channel.what`.
        routine: what is being run, None outside of a step.
        thread: the thread that runs it.
        op_names: of the graph it is from.
    """

    progress: int = 0
    waits_for: tuple[int, ...] = ()
    is_near: bool = False
    wanted: str = ""
    routine: Routine | None = None
    thread: int = 0
    op_names: tuple[str, ...] = ()

    def op(self) -> str:
        """Name of the op that is being run, as far as it can be told; empty for none."""
        routine, frame = self.routine, sys._current_frames().get(self.thread)
        if routine is None:
            return ""
        code = type(routine.module).forward.__code__
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        return "" if frame is None else op_at(routine, self.op_names, frame.f_lineno)


def op_at(routine: Routine, op_names: tuple[str, ...], line: int) -> str:
    """Name of the op that a line of a routine's code belongs to; empty for the lines after the last one."""
    # One op a line; views and the like belong to the op after them.
    if routine not in _ops_by_line:
        _ops_by_line[routine] = _by_line(routine)
    first = type(routine.module).forward.__code__.co_firstlineno
    after = _ops_by_line[routine][line - first :] if line >= first else []
    found = next((op for op in after if op >= 0), -1)
    return op_names[found] if found >= 0 else ""


# Every process asks twice a second, while it computes.
_ops_by_line: weakref.WeakKeyDictionary[Routine, list[int]] = weakref.WeakKeyDictionary()


def _by_line(routine: Routine) -> list[int]:
    """The op of each line of a routine's code from ``def forward`` on, -1 for lines without."""
    lines = str(routine.module.code).splitlines()
    op_of = {node.name: int(node.meta["op"]) for node in routine.module.graph.nodes if "op" in node.meta}
    first = next(i for i, text in enumerate(lines) if text.startswith("def forward"))
    return [op_of.get(text.split("=")[0].split(":")[0].strip(), -1) for text in lines[first:]]


@dataclass(frozen=True)
class Beat:
    """A sign of life that a process gives the others.

    Attributes:
        number: how often it has told.
        process: which it is.
        state: ``"op"``, ``"wait"``, ``"outside"`` of a step, or ``"left"``: it has ended as planned.
        what: the op it is in, empty for none; or what it waits for.
        still_s: for how long it has done nothing.
        waits_for: the rank that it waits for, where nothing of that can be on its way; else -1.
    """

    number: int
    process: ProcessId
    state: str
    what: str
    still_s: float
    waits_for: int = -1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Beat:
        fields = json.loads(text)
        system, number, started = (fields["process"][name] for name in ("system", "number", "started"))
        return cls(**{**fields, "process": ProcessId(system, int(number), started)})  # the number goes into paths

    def doing(self) -> str:
        """E.g. ``in op 'layer.0.linear'``."""
        if self.state == "wait":
            return f"waiting for {self.what}"
        return f"in {self.what}" if self.what else "in a step" if self.state == "op" else "outside of a step"


@dataclass(eq=False)
class _PeerState:
    """Knowledge of another process."""

    beat: Beat
    heard_s: float  # when its beat last changed
    busy_s: float = 0.0  # for how long it had computed then, or waited for a processor
    ended_s: float = 0.0  # when it was first seen to have ended, 0 for not yet


@dataclass(eq=False)
class _Self:
    """When this process last did something."""

    progress: int = -1
    busy_s: float = 0.0
    checked_s: float = 0.0
    still_since_s: float = 0.0


@dataclass(eq=False)
class _StoreContent:
    """The store's content when it was last read."""

    read_s: float
    failure: str = ""
    beats: dict[int, Beat] = field(default_factory=dict)


class Watchdog(threading.Thread):
    """Tells the others what this process does, and ends it when the run has failed.

    Args:
        store: through which all processes of the run see each other; the watchdog's own connection to it.
        rank, size: which of them this is.
        activity: what this process does.
        is_quiet: leave telling the reason to whoever started the process.

    Attributes:
        failure: why the run has failed; empty as long as it has not.
        has_told: whether stderr has the reason.
    """

    def __init__(self, store: Any, rank: int, size: int, activity: Activity, is_quiet: bool) -> None:
        super().__init__(name="watchdog", daemon=True)
        self.failure = ""
        self.has_told = False
        self._telling = threading.Lock()
        self._stderr = sys.stderr  # while a model is captured, what is printed goes elsewhere
        self._store, self._rank, self._size, self._activity = store, rank, size, activity
        self._is_quiet, self._process = is_quiet, this_process()
        self._ended = threading.Event()
        self._own = _Self()
        self._peers: dict[int, _PeerState] = {}
        self._last_read = _StoreContent(time.monotonic())
        self._n_beats = 0
        self._courier_s = 0.0  # processor time of the courier
        store.set(beat_key(rank), self._beat().to_json())
        store.compare_set(_FAILURE, "", _NONE)
        # Reading and writing may hang with the store, judging must not.
        self._courier = threading.Thread(target=self._exchange, name="watchdog store", daemon=True)

    def start(self) -> None:
        """Begin to watch; every process of the run has been made."""
        super().start()
        self._courier.start()

    def claim(self, sentence: str) -> str:
        """Give the reason why the run has failed; returns the one that was given first."""
        if not self.failure:
            # A store whose host is gone does not answer, and this process must end all the same.
            telling = threading.Thread(target=self._tell, args=(sentence,), name="watchdog claim", daemon=True)
            telling.start()
            telling.join(TELL_S)
            self.failure = self.failure or sentence
        return self.failure

    def _tell(self, sentence: str) -> None:
        with suppress(Exception):  # whatever a store without its server raises
            self.failure = self._store.compare_set(_FAILURE, _NONE, sentence).decode()

    def tell(self, sentence: str) -> None:
        """Print why the run has failed, unless stderr has a reason already; empty where a traceback says it."""
        with self._telling:
            if not self.has_told and not self._is_quiet and sentence:
                text = f"{show_line(sentence)}\n"
                print(text, end="", file=self._stderr, flush=True)  # in one go: other ranks write too
            self.has_told = True

    def leave(self) -> None:
        """This process ends as planned."""
        if not self._ended.is_set():
            self._ended.set()
            try:
                self._store.set(beat_key(self._rank), Beat(-1, self._process, "left", "", 0.0).to_json())
            except Exception:  # the store's server has left before
                return

    def last_heard(self, rank: int) -> Beat | None:
        """The last beat of another process."""
        return self._last_read.beats.get(rank)

    # -- telling ----------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        keys = [_FAILURE, *(beat_key(rank) for rank in range(self._size))]
        while not self._ended.wait(BEAT_S):
            try:
                self._store.set(beat_key(self._rank), self._beat().to_json())
                failure, *beats = self._store.multi_get(keys)
            except Exception:  # its server is gone: the watchdog sees that nothing was read
                continue
            self._courier_s = time.thread_time()
            failed = failure.decode()
            heard = {rank: Beat.from_json(text) for rank, text in enumerate(beats)}
            self._last_read = _StoreContent(time.monotonic(), "" if failed == _NONE else failed, heard)

    def _beat(self) -> Beat:
        now, own, activity = time.monotonic(), self._own, self._activity
        self._n_beats += 1
        still_s = now - own.still_since_s if own.still_since_s else 0.0
        if activity.waits_for:
            near = activity.waits_for[0] if activity.is_near else -1
            return Beat(self._n_beats, self._process, "wait", activity.wanted, still_s, near)
        state = "outside" if activity.routine is None else "op"
        name = activity.op()
        return Beat(self._n_beats, self._process, state, f"op {name!r}" if name else "", still_s)

    # -- judging ----------------------------------------------------------------------------------------------

    def run(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(BEAT_S):
            now = time.monotonic()
            if now - before > 2 * BEAT_S + 1:
                self._forgive(now)  # this process was stopped itself, and has seen nothing meanwhile
            before = now
            sentence = self._last_read.failure or self.failure
            if not sentence and (found := self._own_trouble(now) or self._peers_trouble(now)):
                sentence = self.claim(found)
            if sentence:
                self._end(sentence)
                return

    def _own_trouble(self, now: float) -> str:
        own, activity = self._own, self._activity
        # One that gets no processor, where others keep them all busy, has not stalled; watching is no work.
        watching_s = time.thread_time() + self._courier_s
        busy = time.process_time() - watching_s + queued_s(self._process.number)
        span_s = now - own.checked_s
        is_busy = busy - own.busy_s > _LEAST_SHARE * span_s
        if activity.progress != own.progress or is_busy or not own.still_since_s:
            own.still_since_s = now
        own.progress, own.busy_s, own.checked_s = activity.progress, busy, now
        is_in_op = activity.routine is not None and not activity.waits_for
        if is_in_op and now - own.still_since_s > SILENCE_S:
            return f"rank {self._rank} has stalled {self._beat().doing()}: it has computed nothing for {SILENCE_S:g} s."
        return ""

    def _peers_trouble(self, now: float) -> str:
        known, waits_for = self._last_read, self._activity.waits_for
        if now - known.read_s > SILENCE_S + BEAT_S:
            if not waits_for:
                return ""
            return (
                f"rank {self._rank} has lost the run's store, and with it whoever keeps it, while it waited for "
                f"{self._activity.wanted} of {named(waits_for)}."
            )
        # A rank that waits is to blame last.
        for rank, beat in sorted(known.beats.items(), key=lambda item: item[1].state == "wait"):
            peer = self._peers.setdefault(rank, _PeerState(beat, now))
            if beat != peer.beat:
                peer.beat, peer.heard_s, peer.busy_s = beat, now, busy_s(beat.process)
            if rank != self._rank and (reason := self._trouble_of(rank, peer, now)):
                return reason
        return self._deadlock()

    def _deadlock(self) -> str:
        """Whether this process waits for others that wait for it, and nothing is on its way."""
        if not self._activity.waits_for:
            return ""
        own = self._beat()
        waiting = self._cycle(own) or self._all_waiting(own)
        if not waiting or min(beat.still_s for beat in waiting.values()) < SILENCE_S:
            return ""
        of = {rank: f" of rank {beat.waits_for}" if beat.waits_for >= 0 else "" for rank, beat in waiting.items()}
        chain = ", ".join(f"rank {rank} is {beat.doing()}{of[rank]}" for rank, beat in waiting.items())
        return f"{chain}: all processes must make the same calls of the model, in the same order."

    def _cycle(self, own: Beat) -> dict[int, Beat]:
        """The processes from this one on of which each waits for the next one, and the last for the first."""
        waiting, rank = {self._rank: own}, own.waits_for
        while rank >= 0 and rank != self._rank:
            beat = self._last_read.beats.get(rank)
            if beat is None or rank in waiting or beat.state != "wait":
                return {}
            waiting[rank], rank = beat, beat.waits_for
        return waiting if rank >= 0 else {}

    def _all_waiting(self, own: Beat) -> dict[int, Beat]:
        """All processes, where all wait on one host, on which nothing is on its way for seconds."""
        beats = {**self._last_read.beats, self._rank: own}
        here = {rank: beat for rank, beat in sorted(beats.items()) if beat.state != "left"}
        is_one_host = {beat.process.system for beat in beats.values()} == {own.process.system} != {""}
        is_all = is_one_host and len(beats) == self._size and all(beat.state == "wait" for beat in here.values())
        return here if is_all else {}

    def _trouble_of(self, rank: int, peer: _PeerState, now: float) -> str:
        activity, beat = self._activity, peer.beat
        mine = f"; rank {self._rank} is {self._beat().doing()}"
        is_awaited = rank in activity.waits_for
        of_it = " of it" if activity.waits_for == (rank,) else " with it" if is_awaited else ""
        if beat.state == "left":
            peer.ended_s = peer.ended_s or now
            # Its last message may be here, and this process has not had a core yet to take it.
            if is_awaited and now - max(peer.ended_s, self._own.still_since_s) > SILENCE_S:
                return f"rank {rank} has ended{mine}{of_it}: every process must call the model equally often."
            return ""
        silent_s, found = now - peer.heard_s, condition(beat.process)
        if found == "ended":
            peer.ended_s = peer.ended_s or now
            if self._last_read.read_s < peer.ended_s and now - peer.ended_s < TELL_S:
                return ""  # it may have said that it leaves
            return f"rank {rank} has died{_last(beat)}{mine}{of_it}."
        is_busy = found == "running" and busy_s(beat.process) - peer.busy_s > _LEAST_SHARE * silent_s
        if silent_s > (PATIENCE_S if is_busy else SILENCE_S):
            what = "has been stopped" if found == "stopped" else "has given no sign of life"
            return f"rank {rank} {what}{_last(beat)}, for {silent_s:.0f} s{mine}{of_it}."
        # One that waits itself may be waiting for one that computes.
        still = [beat, *(self._last_read.beats.values() if beat.state == "wait" else ())]
        still_s = min(each.still_s for each in still if each.state != "left")
        if is_awaited and min(still_s, now - self._own.still_since_s) > PATIENCE_S:
            return f"rank {rank} has been {beat.doing()} for {beat.still_s:.0f} s{mine}{of_it}."
        return ""

    def _forgive(self, now: float) -> None:
        self._own.still_since_s = now
        self._last_read.read_s = now
        for peer in self._peers.values():
            peer.heard_s = now

    def _end(self, sentence: str) -> None:
        """End this process: by itself where it can, else by force."""
        self.failure = sentence
        self.tell(sentence)
        # Where it waits, only the end of the others wakes it up; where it does not, it sees the failure at its next op.
        if not self._ended.wait(GRACE_S):
            os._exit(1)


def _last(beat: Beat) -> str:
    """The last activity of a process that gives no more signs; it may have begun a step since."""
    return f" {beat.doing()}" if beat.state != "outside" else ""


def named(ranks: Iterable[int]) -> str:
    """E.g. ``rank 1 and rank 2``."""
    return " and ".join(f"rank {rank}" for rank in ranks)


def beat_key(rank: int) -> str:
    """Where the store has the last beat of a process."""
    return f"placement/beat/{rank}"


def failure_of(store: Any) -> str:
    """The reason why a run has failed; empty as long as it has not."""
    found = store.get(_FAILURE).decode() if store.check([_FAILURE]) else _NONE
    return "" if found == _NONE else str(found)
