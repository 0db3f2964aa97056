"""Real processes: trace and results of virtual time, and what becomes of a run when a participant is killed."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

import pytest
import torch
from fitted_models import cores
from replicas.small_tasks import regression

from graphs.errors import RankError
from placement.fitting.fit import participants_of
from placement.fitting.log import CurvePoint, FitLog, FitRun, Stop, tell_no_one
from placement.fitting.methods import FitMethod
from placement.fitting.participants import AllGather, AllReduce, Participant, Updated, name_of
from placement.fitting.real import engine as engine_module
from placement.fitting.real.engine import RealEngine, _Watch
from placement.fitting.real.exchanging import fields_of, head_of
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import Speeds
from placement.processes.starting import ENDED

RATE = 0.05
STOP = Stop(updates=8, every=4)


def real(method: str, workers: int = 2, stop: Stop = STOP, delay_s: Any = lambda *_: 0.0) -> FitRun:
    task = regression()
    return RealEngine(task, workers, participants_of(FitMethod.parse(method), task, workers, RATE), delay_s).run(
        method, stop
    )


def virtual(method: str, workers: int = 2, stop: Stop = STOP, step_s: Any = lambda *_: 1e-3) -> FitRun:
    task = regression()
    participants = participants_of(FitMethod.parse(method), task, workers, RATE)
    speeds = Speeds(range(len(participants)), step_s, lambda _: 1e-6)
    return VirtualEngine(task, cores(len(participants)), workers, participants, speeds).run(method, stop)


def test_the_versions_of_a_scripted_run_are_those_of_virtual_time() -> None:
    def delay_s(worker: int, step: int) -> float:  # updates are 0.15 s apart or more, so that their order is certain
        return 0.75 if (worker, step) == (1, 0) else 0.3

    stop = Stop(updates=6, every=6)
    there = virtual("downpour", stop=stop, step_s=lambda worker, step, samples: delay_s(worker, step))
    for _ in range(3):  # on a busy machine a process may wait for its core longer than updates are apart
        here = real("downpour", stop=stop, delay_s=delay_s)
        if here.trace[2:7] == there.trace[2:7]:
            break
    assert set(here.trace[:2]) == set(there.trace[:2])  # both begin at once
    assert here.trace[2:7] == there.trace[2:7]
    # The last update, which is one version late, ends the run and may or may not be counted.
    without_last = (there.staleness * stop.updates - 1) / (stop.updates - 1)
    assert here.staleness in (pytest.approx(there.staleness), pytest.approx(without_last))
    assert here.seconds == pytest.approx(there.seconds, rel=0.5)


@pytest.mark.parametrize("method", ["sync", "local_sgd:period=4", "qsgd:s=16", "parameter_server"])
def test_synchronous_methods_have_the_results_of_virtual_time(method: str) -> None:
    stop = Stop(updates=24, every=8)  # long enough that the bytes of the last update, counted or not, are few
    there, here = virtual(method, stop=stop), real(method, stop=stop)
    assert [point.updates for point in here.points] == [point.updates for point in there.points]
    assert [point.loss for point in here.points] == pytest.approx([point.loss for point in there.points], rel=1e-4)
    assert here.staleness == there.staleness
    # The participants are asked for their bytes at slightly different moments.
    assert here.bytes == pytest.approx(there.bytes, rel=0.3)


def test_the_largest_batch_is_that_of_virtual_time() -> None:
    stop = Stop(updates=20, every=1)  # processes tell their gradients as often as there is an evaluation
    there, here = virtual("sync", stop=stop), real("sync", stop=stop)
    assert here.largest_batch == pytest.approx(there.largest_batch, rel=0.1)


class Killing:
    """Told of points of the curve; sends a participant a signal at the first one after the start."""

    def __init__(self, number: int, sign: signal.Signals) -> None:
        self.engine: RealEngine | None = None
        self._number, self._sign, self._told = number, sign, 0

    def __call__(self, point: CurvePoint) -> None:
        self._told += 1
        if self._told == 2:
            assert self.engine is not None
            os.kill(self.engine.pids[self._number], self._sign)


def killed(method: str, number: int, workers: int = 2, sign: signal.Signals = signal.SIGKILL) -> FitRun:
    task, killing = regression(), Killing(number, sign)
    participants = participants_of(FitMethod.parse(method), task, workers, RATE)
    killing.engine = RealEngine(task, workers, participants, lambda *_: 0.01)
    return killing.engine.run(method, Stop(updates=60, every=5), killing)


@pytest.mark.parametrize(
    ("method", "number"),
    [
        *(("sync", 1), ("parameter_server", 0), ("parameter_server", 2), ("downpour", 2), ("elastic:period=1", 2)),
        *(("local_sgd:period=2", 0), ("sandblaster", 2), ("sandblaster", 3)),
    ],
)
def test_a_synchronous_run_ends_with_the_reason(method: str, number: int) -> None:
    who = name_of(number, workers=2)
    with pytest.raises(RankError, match=rf"^{who} was killed by SIGKILL, and this method"):
        killed(method, number)


@pytest.mark.parametrize("method", ["downpour", "elastic:period=1", "gossip:topology=random"])
@pytest.mark.parametrize("number", [0, 1])
def test_an_asynchronous_run_goes_on_without_a_worker(method: str, number: int) -> None:
    found = killed(method, number)
    assert found.updates >= 60
    assert found.points[-1].loss < found.points[0].loss


def test_who_was_lost_stands_in_the_note() -> None:
    log = FitLog(Stop(), lambda weights: 1.0, tell_no_one)
    log.evaluate(torch.zeros(1), 0, 0.0, 0)
    _Watch(log, ["worker 0", "worker 1"]).heard(1, ENDED, -signal.SIGKILL)
    note = log.run("downpour", 1.0, 0).note
    assert re.fullmatch(r"went on without worker 1, which was killed by SIGKILL after \S+ s", note)


def test_a_stopped_worker_is_as_good_as_lost() -> None:
    with pytest.raises(RankError, match=r"^worker 1 was killed by SIGKILL, and this method"):
        killed("sync", 1, sign=signal.SIGSTOP)
    assert killed("elastic:period=1", 1, sign=signal.SIGSTOP).updates >= 60


@pytest.mark.parametrize("hanging", [1, 2])
def test_processes_that_do_not_meet_are_started_once_more(hanging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    started, process_main, tries = RealEngine._started, RealEngine._process_main, [0]

    def counted(self: RealEngine, *args: Any) -> Any:
        tries[0] += 1
        return started(self, *args)

    def hung(self: RealEngine, *args: Any) -> None:
        if tries[0] <= hanging:
            signal.pause()
        process_main(self, *args)

    monkeypatch.setattr(RealEngine, "_started", counted)
    monkeypatch.setattr(RealEngine, "_process_main", hung)
    monkeypatch.setattr(engine_module, "MEETING_S", (1.0, 60.0 if hanging == 1 else 1.0))
    if hanging == 1:
        assert real("sync").points[-1].updates == STOP.updates
    else:
        with pytest.raises(RankError, match="2 processes did not meet within 1 s; start fewer workers"):
            real("sync")
    assert tries == [2]


def test_a_run_of_which_all_have_ended_does_not_wait() -> None:
    def ending() -> Participant:
        yield Updated(1)

    engine = RealEngine(regression(), 1, [ending()], lambda *_: 0.0)
    assert engine.run("m", Stop(updates=5, seconds=1.0)).seconds == 1.0


def gathering(number: int) -> Participant:
    mine = (torch.full((2 + number,), float(number)), torch.tensor([number], dtype=torch.uint8), torch.empty(0))
    gathered = yield AllGather(mine, (0, 1, 2))
    summed = yield AllReduce((torch.full((3,), 1.0 + number),), (0, 1, 2))
    right = all(
        torch.equal(each[0], torch.full((2 + k,), float(k))) and each[1].item() == k and not each[2].numel()
        for k, each in enumerate(gathered)
    )
    weights = regression().weights()
    yield Updated(1, weights=weights if right and summed[0].tolist() == [6.0] * 3 else None)


def test_collectives_of_unequal_shapes() -> None:
    engine = RealEngine(regression(), 3, [gathering(number) for number in range(3)], lambda *_: 0.0)
    found = engine.run("m", Stop(updates=1, seconds=30.0), tell_no_one)
    assert len(found.points) == 2


def test_a_head_says_what_comes_after_it() -> None:
    fields, tensors = fields_of(head_of([torch.zeros(2, 3), torch.zeros(0, dtype=torch.int64)], tag="t", version=4))
    assert (fields["tag"], fields["version"]) == ("t", 4)
    assert [(each.shape, each.dtype) for each in tensors] == [((2, 3), torch.float32), ((0,), torch.int64)]
