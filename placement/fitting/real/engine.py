"""`RealEngine`: participants in processes of this host, one for each; this process watches them and evaluates."""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from env.gym.named import LOCAL
from graphs.disk import temporary_folder
from graphs.errors import FitError, RankError
from graphs.formatting import counted
from placement.fitting.log import CurvePoint, FitLog, FitRun, Stop, tell_no_one
from placement.fitting.participants import Participant, Updated, name_of
from placement.fitting.real.exchanging import file_store
from placement.fitting.real.participant_main import (
    COMPUTED,
    READ,
    READY,
    UPDATED,
    ParticipantSettings,
    WorkerGroup,
    follow,
    participant_main,
)
from placement.fitting.task import CPU, FitTask
from placement.processes.processes import StoppedProcesses, how_ended, keep_to_loopback, orderly_end
from placement.processes.starting import ENDED, FAILURE, SILENT, Parent, WorkerEndedError, Workers
from placement.processes.threads import single_threaded

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.fitting.real.torchrun import Ranks
    from placement.fitting.virtual.speeds import Assignment, Stragglers
    from placement.runtime.torch_runner.setup import Setup

ItemT = TypeVar("ItemT")
_GPU = "gpu"  # as kind of a device


def check_real(cluster: Cluster, devices: int) -> None:
    """Refuse what does not run in processes of this machine.

    Args:
        devices: how many of the cluster's devices workers are on, the first ones.

    Raises:
        FitError: they are neither CPU cores nor GPUs that are here, or this process has begun to use a GPU.
    """
    kinds = [cluster.devices[d].kind for d in cluster.compute_devices.tolist()[:devices]]
    other = next((kind for kind in kinds if kind not in ("cpu", _GPU)), None)
    if other is not None:
        raise FitError(
            f"a real run takes workers on CPU cores or GPUs, and cluster {cluster.name!r} has devices of kind "
            f"{other!r}; take the cluster local, or leave out real."
        )
    needed, there = (_of_this_host(kinds) or kinds).count(_GPU), torch.cuda.device_count()
    if needed > there:
        raise FitError(
            f"the workers of a real run on cluster {cluster.name!r} take {counted(needed, 'GPU')}, and this machine "
            f"has {there}; take the cluster local, or leave out real."
        )
    if needed and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise FitError(
            "this process uses a GPU already, so that no process of a worker can be forked from it; leave model and "
            "data on the CPU, from which fit takes them to the GPUs."
        )


def kinds_of(cluster: Cluster, assignment: Assignment) -> tuple[str, ...]:
    """Kind of device of each process of a run: those of each worker, and then servers, which need no GPU."""
    workers = [cluster.devices[device].kind for own in assignment.workers for device in own]
    return (*workers, *["cpu"] * len(assignment.servers))


def place_of(kinds: Sequence[str], number: int) -> torch.device:
    """Device on which a process computes, by the kinds of all; the GPUs of each host are counted from ``cuda:0``."""
    if kinds[number] != _GPU:
        return CPU
    here = _of_this_host(range(len(kinds))) or range(number)
    return torch.device("cuda", sum(kinds[other] == _GPU for other in here if other < number))


def setups_of(
    task: FitTask,
    graph: OpGraph,
    cluster: Cluster,
    assignment: Assignment,
    strategy: Strategy,
    ranks: Ranks | None = None,
) -> list[Setup]:
    """How each worker's processes, one for each device, run the strategy; empty where each worker is one device.

    Ranks of torchrun go by what the first of them has worked out: each may have measured another cluster.

    Raises:
        StrategyError: graph or devices do not allow the strategy.
        MismatchError: torch cannot run it.
        FitError: this process has a process group.
    """
    if strategy.devices == 1:
        return []
    if dist.is_initialized():
        raise FitError(
            "this process has a process group, which forks of it would have, too, and the processes of a worker become "
            "one of their own; fit before init_process_group, or after destroy_process_group."
        )
    from env.resizing import part_of
    from placement.results.result import Result
    from placement.runtime.setups.facts_of import setup_of
    from placement.solving.strategy_row import strategy_row

    parts = [part_of(cluster, np.array(own, dtype=np.int64)) for own in assignment.workers]

    def results() -> list[str]:
        return [strategy_row(graph, part, strategy).result.to_json() for part in parts]

    found = results() if ranks is None else ranks.shared(results)
    return [setup_of(Result.from_json(text), graph, task.model) for text in found]


def _of_this_host(by_process: Sequence[ItemT]) -> list[ItemT] | None:
    """Those of processes, by number, that ``torchrun`` has started on this host; None where it has only one."""
    known = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(known):
        return None
    rank, size, local_rank, local_size = map(int, known)
    first = rank - local_rank
    return None if local_size >= size else list(by_process[first : first + local_size])


def is_here(cluster: Cluster, strategy: Strategy) -> bool:
    """Whether workers are cores of this machine, one each, which can be timed instead of simulated."""
    return cluster.name == LOCAL and strategy.is_none and all(device.kind == "cpu" for device in cluster.devices)


def delays_of(gradients_s: Sequence[float], stragglers: Stragglers) -> Callable[[int, int], float]:
    """(worker, step) -> seconds that a straggler sleeps, in proportion to the mean of measured gradients."""
    gradient_s = statistics.mean(gradients_s)
    return lambda worker, step: gradient_s * (stragglers.factor(worker, step) - 1)


_LOOK_S = 0.1
_LOOK_AT_PROCESSES_S = 0.25
_LAST_WORDS_S = 0.5  # until the end of a participant is seen that another one has told of
MEETING_S = (30.0, 120.0)  # for the first try, and the second
_MOST_WEIGHTS = 4  # whose gradients are kept, until all workers have told theirs


class RealEngine:
    """Runs participants until the end. Their processes are forked, and so have the user's model without a file.

    Args:
        delay_s: (worker, step) -> seconds by which a gradient takes longer than it does.
        ranks: of `placement.fitting.real.torchrun`, where participants live beside them; all make the same calls.
        setups: of each worker's step, where workers lie on several devices; each device is a process.
        kinds: of `placement.fitting.real.engine.kinds_of`; the CPU for all by default.
    """

    def __init__(
        self,
        task: FitTask,
        workers: int,
        participants: Sequence[Participant],
        delay_s: Callable[[int, int], float],
        ranks: Ranks | None = None,
        setups: Sequence[Setup] = (),
        kinds: Sequence[str] = (),
    ) -> None:
        self._task, self._workers, self._participants, self._delay_s = task, workers, participants, delay_s
        self._ranks, self._setups = ranks, setups
        self.pids: list[int] = []
        # (participant, which of its processes), so that those of a worker are neighbours: on one host, if that can be.
        sizes = [math.prod(setup.mesh.values()) for setup in setups] or [1] * workers
        sizes += [1] * (len(participants) - workers)
        self._processes = [(number, group_rank) for number, size in enumerate(sizes) for group_rank in range(size)]
        self._kinds = kinds or ["cpu"] * len(self._processes)

    def run(self, method: str, stop: Stop, tell: Callable[[CurvePoint], None] = tell_no_one) -> FitRun:
        """Run until the end; `tell` gets each point of the curve.

        Raises:
            RankError: a participant has died, or failed, and the others do not go on without it.
            FitError: the ranks have other weights or samples.
        """
        ranks = self._ranks
        if ranks is None:
            return self._watched(method, stop, tell)
        if ranks.rank:
            own = partial(self._process_main, stop, ranks.rank) if ranks.rank < len(self._processes) else None
            return ranks.take_part(self._task.fingerprint(), own)
        try:
            found = self._watched(method, stop, tell)
        except RankError as error:
            ranks.tell(error)
            raise
        ranks.tell(found)
        return found

    def _process_main(self, stop: Stop, process: int, parent: Parent) -> None:
        """Main function of a process, which is told the names of all stores: the common one, then groups'."""
        if self._ranks is None or self._ranks.is_one_host:
            keep_to_loopback()
        of_all, *of_groups = parent.hear()
        meet = file_store if self._ranks is None else self._ranks.met_store
        groups = tuple(
            WorkerGroup(self._task, worker, setup, partial(meet, name))
            for worker, (setup, name) in enumerate(zip(self._setups, of_groups, strict=True))
        )
        total, (number, group_rank) = len(self._participants), self._processes[process]
        place = place_of(self._kinds, process)
        if group_rank:
            follow(groups[number], group_rank, process, place, parent)
            return
        settings = ParticipantSettings(
            self._task, stop, self._workers, total, self._delay_s, meet(of_all), groups, place
        )
        participant_main(settings, number, self._participants[number], process, parent)

    def _started(self, stop: Stop) -> Workers:
        """Processes of participants by their numbers, and after them those that help them."""
        order = sorted(range(len(self._processes)), key=lambda process: self._processes[process][1] > 0)
        mains = [partial(self._process_main, stop, process) for process in order]
        if self._ranks is None:
            return Workers.forked(mains)
        return self._ranks.begin(self._task.fingerprint(), order, mains[0])

    def _watched(self, method: str, stop: Stop, tell: Callable[[CurvePoint], None]) -> FitRun:
        """Start the participants, and watch them."""
        log = FitLog(stop, self._task.held_out_loss, tell)
        log.evaluate(self._task.weights(), 0, 0.0, 0)
        total = len(self._participants)
        names = [name_of(number, self._workers) for number in range(total)]
        # Evaluating here takes no core from the participants.
        with orderly_end(), single_threaded(), temporary_folder() as folder:
            workers = self._met(stop, names, folder)
            try:
                self.pids = workers.pids
                watch, processes = _Watch(log, names), StoppedProcesses(workers.pids)
                began_s = looked_s = time.monotonic()
                workers.tell(began_s if self._ranks is None else None)  # clocks of hosts have nothing in common
                while not log.is_over:
                    for number, kind, content in workers.hear(_LOOK_S):
                        if number < total:  # if not, its worker finds out
                            watch.heard(number, kind, content)
                    watch.end_failed()
                    if time.monotonic() - looked_s > _LOOK_AT_PROCESSES_S:
                        looked_s = time.monotonic()
                        # A stopped participant is as good as lost: it is killed, which the others notice.
                        if (stopped := processes.look()) is not None:
                            os.kill(self.pids[stopped], signal.SIGKILL)
                    if time.monotonic() - began_s > stop.seconds:
                        watch.now_s = stop.seconds
                        log.end()
            finally:
                workers.end()
        watch.settle()
        return log.run(method, watch.now_s, watch.bytes_sent)

    def _met(self, stop: Stop, names: Sequence[str], folder: Path) -> Workers:
        """Processes that have met, by stores in a folder of this run: one of all, and one of each worker group.

        A fork of a process with threads may find a lock that no thread is left to open. So those that do not meet are
        started once more; beside ranks there is no second try, for they begin together.
        """
        for limit_s in MEETING_S if self._ranks is None else MEETING_S[-1:]:
            workers = self._started(stop)
            try:
                with suppress(WorkerEndedError):  # which is heard of below
                    workers.tell([str(folder / f"{limit_s:g}-{group}") for group in range(1 + len(self._setups))])
                if _meet(workers, names, len(self._processes), limit_s):
                    return workers
            except BaseException:
                workers.end()
                raise
            workers.end()
        raise RankError(f"{len(self._processes)} processes did not meet within {limit_s:g} s; start fewer workers.")


def _meet(workers: Workers, names: Sequence[str], total: int, limit_s: float) -> bool:
    """Wait until all processes have met, participants by name and those that help them; False: it took too long."""
    there, end_s = 0, time.monotonic() + limit_s
    while there < total:
        for number, kind, content in workers.hear(_LOOK_S):
            if kind in (ENDED, FAILURE, SILENT) or content[0] != READY:
                name = names[number] if number < len(names) else "a process of a worker's strategy"
                why = how_ended(content) if kind == ENDED else content
                raise RankError(f"{name} did not begin ({why}); run again.")
            there += 1
        if time.monotonic() > end_s:
            return False
    return True


class _Watch:
    """Messages of the participants on their way to the log.

    Attributes:
        now_s: of the run, at the last update.
    """

    def __init__(self, log: FitLog, names: Sequence[str]) -> None:
        self._began_s = time.monotonic()
        self._log, self._names, self._sent_bytes, self.now_s = log, names, [0] * len(names), 0.0
        self._ended: dict[int, Any] = {}
        self._failure: tuple[str, float] | None = None  # what a participant has said last, and when
        self._gradients: dict[tuple[str, int], list[torch.Tensor]] = {}  # by weights and number of samples

    @property
    def bytes_sent(self) -> int:
        """Sent by all participants together."""
        return sum(self._sent_bytes)

    def end_failed(self) -> None:
        """End a run that a participant does not go on with.

        Raises:
            RankError: there is one; the message says why, and how others have ended, which is seen a little later.
        """
        if self._failure is None:
            return
        said, since_s = self._failure
        died = {self._names[other]: code for other, code in self._ended.items() if code}
        if died or time.monotonic() - since_s > _LAST_WORDS_S:
            for name, code in died.items():
                said = said.replace(f"{name} was lost", f"{name} {how_ended(code)}", 1)
            raise RankError(said)

    def settle(self) -> None:
        """Take into account what workers have told of their gradients."""
        for at in list(self._gradients):
            self._settle(at)

    def _settle(self, at: tuple[str, int]) -> None:
        self._log.computed_together(self._gradients.pop(at), at[1])

    def heard(self, number: int, kind: str, content: Any) -> None:
        """One thing that a participant has said, or that it has ended.

        Raises:
            RankError: the run does not go on.
        """
        if self._log.is_over or (self._failure is not None and kind != ENDED):
            return
        if kind == FAILURE:
            self._failure = str(content), time.monotonic()
            return
        if kind == SILENT:
            raise RankError(
                f"{self._names[number]} is not reached any more: its host or the network is down; start the run again."
            )
        if kind == ENDED:
            self._ended[number] = content
            after_s = time.monotonic() - self._began_s
            self._log.lost(f"{self._names[number]}, which {how_ended(content)} after {after_s:.3g} s")
            if len(self._ended) == len(self._sent_bytes) and self._failure is None:
                ends = ", ".join(f"{self._names[other]} {how_ended(code)}" for other, code in self._ended.items())
                raise RankError(f"all participants have ended before the run was over ({ends}); run again.")
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
