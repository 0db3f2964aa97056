"""Workers of several devices in real runs: each device a process, one gradient for the worker."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from fitted_models import classifier, cores

import placement
from graphs.errors import RankError
from graphs.transforms.strategy import Strategy
from placement.fitting.fit import FitComparison, checked_stop, participants_of
from placement.fitting.log import CurvePoint, FitRun
from placement.fitting.methods import FitMethod
from placement.fitting.real.engine import RealEngine, setups_of
from placement.fitting.task import fit_task_of
from placement.fitting.virtual.speeds import Assignment


def fitted(methods: Any, strategy: str, workers: int, **options: Any) -> FitComparison:
    model, data = classifier()
    given = {"batch": 8, "lr": 0.3, "updates": 10, "every": 5} | options
    return placement.fit(model, data, cores(4), methods, strategy=strategy, workers=workers, **given)


@pytest.mark.parametrize(("strategy", "workers"), [("tp2", 2), ("pp2 1f1b mb2", 1), ("dp2 zero3", 1)])
def test_workers_of_several_devices_learn_as_in_virtual_time(strategy: str, workers: int) -> None:
    there, here = (fitted("sync", strategy, workers, real=is_real).runs[0] for is_real in (False, True))
    assert [point.updates for point in here.points] == [0, 5, 10]
    assert [point.loss for point in here.points] == pytest.approx([point.loss for point in there.points], rel=1e-4)


def killed(method: str, number: int) -> FitRun:
    """Two workers of two devices; a process, workers' own ones first, is killed at the first point of the curve."""
    from graphs.capture import capture

    model, data = classifier()
    task = fit_task_of(model, data, batch=8, loss=None, seed=0)
    graph = capture(model, tuple(each[:8] for each in data), train=True, loss=task.loss, optimizer="sgd")
    strategy = Strategy.parse("tp2")
    servers = FitMethod.parse(method).exchange.servers(2)
    setups = setups_of(task, graph, cores(4), Assignment.of(cores(4), 2, 2, servers), strategy)
    participants = participants_of(FitMethod.parse(method), task, 2, 0.3)
    engine = RealEngine(task, 2, participants, lambda *_: 0.01, setups=setups)

    def tell(point: CurvePoint) -> None:
        if point.updates == 5:
            os.kill(engine.pids[number], signal.SIGKILL)

    return engine.run(method, checked_stop(None, 40, None, 5), tell)


def test_a_worker_is_lost_with_any_of_its_processes() -> None:
    with pytest.raises(RankError, match=r"^worker 1 ended with exit code 1, and this method"):
        killed("sync", 3)
    assert killed("downpour", 4).updates >= 40


def test_what_workers_of_several_devices_cannot_do_is_one_sentence() -> None:
    with pytest.raises(RankError, match="computes gradients of 8 samples, and the method asks for"):
        fitted("sandblaster", "tp2", 2, real=True)
