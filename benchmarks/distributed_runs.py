"""Runs of replicas in virtual time for the benchmarks of distributed training: each with a cluster and stragglers."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from env.cluster import Cluster
from env.device import both_ways
from placement.fitting.log import FitRun, Stop
from placement.fitting.methods import FitMethod
from placement.fitting.participants import Role
from placement.fitting.task import FitTask
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import Speeds, Stragglers

Row = dict[str, Any]
SAMPLE_S, UPDATE_S = 2e-3, 20e-6  # of a gradient per sample, of an update
BANDWIDTH_BYTES_PER_S, LATENCY_S = 125e6, 25e-6  # 1 Gbit/s and a switch
HELD_OUT = 512
_EVERY = 2  # updates between two evaluations of a run that ends at a loss


@dataclass(frozen=True)
class Case:
    """One run.

    Attributes:
        phenomenon: what it is for, a word.
        label: what it is called on the page.
        method: its text, with its learning rate.
        problem: "cnn" or "char_transformer" of examples/fit_models.py.
        workers, batch, updates, seed: as of the run.
        stragglers: as text.
        loss: where the run ends if it gets there; 0: nowhere.
    """

    phenomenon: str
    label: str
    method: str
    workers: int = 8
    batch: int = 32
    updates: int = 400
    problem: str = "cnn"
    stragglers: str = "none"
    loss: float = 0.0
    seed: int = 0


def key(row: Row) -> str:
    """What a row is known by: all that makes its case."""
    return repr([row[field.name] for field in fields(Case)])


def run(case: Case) -> Row:
    """The row of a case on the usual star."""
    every = _EVERY if case.loss else max(case.updates // 30, 1)
    found = fitted(case, star, Stop(loss=case.loss, updates=case.updates, every=every))
    # The loss goes up and down from one evaluation to the next.
    end_loss = statistics.fmean(point.loss for point in found.points[-3:])
    return asdict(case) | {
        "seconds": found.seconds,
        "updates_made": found.updates,
        "bytes": found.bytes,
        "end_loss": end_loss if math.isfinite(end_loss) else None,
        "reached": found.reached,
        "staleness": found.staleness,
        "largest_batch": found.largest_batch,
    }


def fitted(case: Case, cluster_of: Callable[[int], Cluster], stop: Stop) -> FitRun:
    """The run of a case in virtual time, on the cluster that has so many devices."""
    task, method = task_of(case.problem, case.batch, case.seed), FitMethod.parse(case.method)
    refusal = method.exchange.refuse(method, case.workers)
    if refusal:
        raise ValueError(refusal)
    everyone = case.workers + len(method.exchange.servers(case.workers))
    roles = [
        Role(number, case.workers, task.weights(), task.layout, method, method.learning_rate or 0.1, case.seed)
        for number in range(everyone)
    ]
    participants = [method.exchange.participant(role) for role in roles]
    stragglers = Stragglers.parse(case.stragglers, case.seed)

    def step_s(worker: int, step: int, samples: int) -> float:
        return samples * SAMPLE_S * stragglers.factor(worker, step)

    speeds = Speeds(range(everyone), step_s, lambda _: UPDATE_S)
    engine = VirtualEngine(task, cluster_of(everyone), case.workers, participants, speeds)
    return engine.run(case.method, stop)


@cache
def task_of(problem: str, batch: int, seed: int) -> FitTask:
    """A problem of the examples; the last samples are held out."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import fit_models

    model, data = getattr(fit_models, problem)()
    used, held_out = (tuple(each[part] for each in data) for part in (slice(-HELD_OUT), slice(-HELD_OUT, None)))
    return FitTask(model, used, held_out, batch, loss=lambda value: value, seed=seed)


def star(devices: int, bandwidth: float = BANDWIDTH_BYTES_PER_S, latency_s: float = LATENCY_S) -> Cluster:
    """So many GPUs, each on a port of its own, of so many bytes per second, to one switch."""
    gpu = Cluster.preset("4xV100-pcie", rates="peak").devices[0]
    names = [f"gpu{number}" for number in range(devices)]
    links = [link for name in names for link in both_ways(name, "switch", bandwidth, latency_s)]
    return Cluster("star", tuple(replace(gpu, name=name) for name in names), tuple(links))
