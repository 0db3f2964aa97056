"""`RealEngine`: participants in processes of this host, one for each; this process watches them and evaluates."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from graphs.errors import RankError
from placement.processes.processes import orderly_end
from placement.processes.starting import ENDED, FAILURE, SILENT, Workers
from placement.processes.stopped import StoppedProcesses
from placement.processes.threads import single_threaded
from placement.replicas.fit_log import FitLog, Stop, tell_no_one
from placement.replicas.real.crew import CrewPlan, follow
from placement.replicas.real.life import COMPUTED, READ, READY, UPDATED, LifePlan, life
from placement.replicas.requests import Updated, name_of
from placement.runtime.ranks.launch import new_store

if TYPE_CHECKING:
    from placement.processes.starting import Parent
    from placement.replicas.fit_result import CurvePoint, FitRun
    from placement.replicas.fit_task import FitTask
    from placement.replicas.real.torchrun import Ranks
    from placement.replicas.requests import Participant
    from placement.runtime.sharded.plan import StrategyPlan

_LOOK_S = 0.1
_LOOK_AT_PROCESSES_S = 0.25
_MEETING_S = 120.0
_MOST_WEIGHTS = 4  # whose gradients are kept, until all workers have told theirs


class RealEngine:
    """Runs participants until the end. Their processes are forked, and so have the user's model without a file.

    Args:
        delay_s: (worker, step) -> seconds by which a gradient takes longer than it does.
        ranks: of `placement.replicas.real.torchrun`, where participants live beside them; all make the same calls.
        plans: of each worker's step, where workers lie on several devices; each device is a process.
    """

    def __init__(
        self,
        task: FitTask,
        workers: int,
        participants: Sequence[Participant],
        delay_s: Callable[[int, int], float],
        ranks: Ranks | None = None,
        plans: Sequence[StrategyPlan] = (),
    ) -> None:
        self._task, self._workers, self._participants, self._delay_s = task, workers, participants, delay_s
        self._ranks, self._plans = ranks, plans
        self.pids: list[int] = []

    def run(self, method: str, stop: Stop, tell: Callable[[CurvePoint], None] = tell_no_one) -> FitRun:
        """Until the end; `tell` is told each point of the curve.

        Raises:
            RankError: a participant has died, or failed, and the others do not go on without it.
            FitError: the ranks have other weights or samples.
        """
        ranks = self._ranks
        if ranks is None:
            return self._watched(method, stop, tell)
        if ranks.rank:
            return ranks.take_part(self._task.fingerprint(), len(self._participants), partial(self._life, stop))
        try:
            found = self._watched(method, stop, tell)
        except RankError as error:
            ranks.tell(error)
            raise
        ranks.tell(found)
        return found

    def _life(self, stop: Stop, port: int, parent: Parent) -> None:
        """Of the participant beside this rank."""
        assert self._ranks is not None
        number, host = self._ranks.rank, self._ranks.host
        plan = LifePlan(self._task, stop, self._workers, len(self._participants), self._delay_s, port, host)
        life(plan, number, self._participants[number], parent)

    def _started(self, stop: Stop, store: Any) -> Workers:
        total, ranks = len(self._participants), self._ranks
        if ranks is not None:
            first = partial(self._life, stop, store.port)
            return ranks.begin(self._task.fingerprint(), store.port, total, first)
        # Each crew meets at a store of its own.
        self._stores = [new_store() for _ in self._plans]
        crews = tuple(
            CrewPlan(self._task, worker, plan, met.port)
            for worker, (plan, met) in enumerate(zip(self._plans, self._stores, strict=True))
        )
        plan = LifePlan(self._task, stop, self._workers, total, self._delay_s, store.port, crews=crews)
        lives = [partial(life, plan, number, each) for number, each in enumerate(self._participants)]
        lives += [
            partial(follow, crew, rank, plan.core(crew.worker, rank)) for crew in crews for rank in range(1, crew.size)
        ]
        return Workers.forked(lives)

    def _watched(self, method: str, stop: Stop, tell: Callable[[CurvePoint], None]) -> FitRun:
        """Start the participants, and watch them."""
        log = FitLog(stop, self._task.held_out_loss, tell)
        log.evaluate(self._task.weights(), 0, 0.0, 0)
        total = len(self._participants)
        names = [name_of(number, self._workers) for number in range(total)]
        with orderly_end(), single_threaded():  # what is evaluated here takes no core from the participants
            store = new_store() if self._ranks is None else new_store(host=self._ranks.host)
            workers = self._started(stop, store)
            try:
                self.pids = workers.pids
                _meet(workers, names)
                watch, processes = _Watch(log, names), StoppedProcesses(workers.pids)
                began_s = looked_s = time.monotonic()
                workers.tell(began_s)
                while not log.is_over:
                    for number, kind, content in workers.hear(_LOOK_S):
                        if number < total:  # if not, its worker finds out
                            watch.heard(number, kind, content)
                    if time.monotonic() - looked_s > _LOOK_AT_PROCESSES_S:
                        looked_s = time.monotonic()
                        self._end_stopped(processes)
                    if time.monotonic() - began_s > stop.seconds:
                        watch.now_s = stop.seconds
                        log.end()
            finally:
                workers.end()
        watch.settle()
        return log.run(method, watch.now_s, watch.bytes_sent)

    def _end_stopped(self, processes: StoppedProcesses) -> None:
        """A stopped participant is as good as lost: it is killed, which the others notice, and go on or end."""
        stopped = processes.look()
        if stopped is not None:
            os.kill(self.pids[stopped], signal.SIGKILL)


def _meet(workers: Workers, names: Sequence[str]) -> None:
    """Wait until all participants have met."""
    total, there, end_s = len(names), 0, time.monotonic() + _MEETING_S
    while there < total:
        for number, kind, content in workers.hear(_LOOK_S):
            if number >= total:
                raise RankError(f"a process of a worker's strategy did not begin ({content}); run again.")
            if kind in (ENDED, FAILURE, SILENT) or content[0] != READY:
                raise RankError(f"{names[number]} did not begin ({content}); run again.")
            there += 1
        if time.monotonic() > end_s:
            raise RankError(f"{total} processes did not meet within {_MEETING_S:g} s; start fewer workers.")


class _Watch:
    """What is heard of the participants, on its way to the log.

    Attributes:
        now_s: of the run, at the last update.
    """

    def __init__(self, log: FitLog, names: Sequence[str]) -> None:
        self._log, self._names, self._sent_bytes, self.now_s = log, names, [0] * len(names), 0.0
        self._ended: dict[int, Any] = {}
        self._gradients: dict[tuple[bytes, int], list[torch.Tensor]] = {}  # by weights and number of samples

    @property
    def bytes_sent(self) -> int:
        """Sent by all participants together."""
        return sum(self._sent_bytes)

    def settle(self) -> None:
        """Take into account what workers have told of their gradients."""
        for at in list(self._gradients):
            self._settle(at)

    def _settle(self, at: tuple[bytes, int]) -> None:
        self._log.computed_together(self._gradients.pop(at), at[1])

    def heard(self, number: int, kind: str, content: Any) -> None:
        """One thing that a participant has said, or that it has ended.

        Raises:
            RankError: the run does not go on.
        """
        if self._log.is_over:
            return
        if kind == FAILURE:
            how = "".join(f"; {self._names[other]} ended with code {code}" for other, code in self._ended.items())
            raise RankError(f"{content}{how}")
        if kind == SILENT:
            raise RankError(
                f"{self._names[number]} is not reached any more: its host or the network is down; start the run again."
            )
        if kind == ENDED:
            self._ended[number] = content
            if len(self._ended) == len(self._sent_bytes):
                raise RankError("all participants have ended before the run was over; run again.")
            return
        match content:
            case (word, _, step, version) if word == READ:
                self._log.read(number, step, version)
            case (word, weights, gradient, samples) if word == COMPUTED:
                self._gradients.setdefault((weights, samples), []).append(torch.from_numpy(gradient))
                if len(self._gradients) > _MOST_WEIGHTS:
                    self._settle(next(iter(self._gradients)))
            case (word, seconds, version, staleness, weights, sent_bytes) if word == UPDATED:
                self._sent_bytes[number], self.now_s = sent_bytes, max(self.now_s, seconds)
                told = None if weights is None else torch.from_numpy(weights)
                self._log.updated(Updated(version, staleness, told), self.now_s, self.bytes_sent)
