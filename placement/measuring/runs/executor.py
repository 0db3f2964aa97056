"""`Executor`: scores placements of a model by really running them on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import nn

from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import BatchScores, Schedule, Simulator
from graphs.capture import capture_program, example_inputs
from graphs.errors import ClusterError, MismatchError, RankError, StrategyError
from graphs.transforms.strategy import Strategy
from placement.inputs.call_arguments import bound, check_states
from placement.measuring.machine.workers import cores_for
from placement.measuring.models.repeats import Repeats
from placement.measuring.runs.pool import Arrangement, TimedModel, WorkerPool
from placement.processes.processes import usable_cores
from placement.runtime.application import check_same
from placement.runtime.program.functional import functional

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.gym.batch import BatchScorer
    from graphs.capture.record import Loss
    from graphs.opgraph import OpGraph


@dataclass(frozen=True)
class Execution:
    """The outcome of running a placement.

    Attributes:
        step_time_s: median of the samples; infinite where it could not be run.
        samples_s: each step that counts.
        reason: None, or the sentence that says why it could not be run.
    """

    step_time_s: float
    samples_s: tuple[float, ...]
    reason: str | None = None


class Executor:
    """A model that waits to be placed: one process for each device of a cluster, each with the whole model.

        with placement.Executor(model, args, cluster=placement.Cluster.local(), train=True) as executor:
            result = placement.optimize(executor.graph, executor.cluster, scorer=executor.scorer)

    A placement runs as `placement.apply` runs it under ``torchrun``: a process for each device, each in the order of
    its own ops, the optimizer at the end of a training step; on one device it is the plain model. The model of the
    caller stays as it is. Every placement is run once, in the order its ops have on each device; asked again, `run`
    answers from memory, also for one that failed. The processes start with the first run; ``close``, or the end of the
    ``with``, ends them.

    Args:
        model, args, kwargs, train, loss, optimizer, name: as for `placement.capture`, but model and inputs have data.
        cluster: of CPU devices, no more than the cores that this process may use; each gets one and one thread.
        steps, dropped: how often a placement is run, and how many of these steps warm up.
        limit_s: a placement that takes longer, its code and all steps together, is infeasible.

    Attributes:
        graph: as captured, with no times measured; a profiled one of the same model will do where graphs are asked for.
        cluster: as given.
        n_runs: how many placements were really run.

    Raises:
        CaptureError: the model cannot be captured.
        ClusterError: a device is not there.
        MismatchError: nothing is left of the steps, or no time; the model has no data.
    """

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...] | torch.Tensor = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        cluster: Cluster,
        train: bool = False,
        loss: Loss | None = None,
        steps: int = 10,
        dropped: int = 5,
        limit_s: float = 60.0,
        optimizer: str = "adam",
        name: str | None = None,
    ) -> None:
        if not 0 <= dropped < steps:
            raise MismatchError(
                f"got steps = {steps} and dropped = {dropped}; expected to drop fewer steps than are run."
            )
        if not 0 < limit_s < np.inf:
            raise MismatchError(f"got limit_s = {limit_s!r}; expected a finite number of seconds above 0.")
        cores = cores_of(cluster)
        check_states(model)
        positional, keywords = example_inputs(args, kwargs)
        program = capture_program(model, positional, keywords, train, loss=loss, optimizer=optimizer, name=name)
        bound(model, program, positional, keywords)  # refuses other arguments
        self.graph: OpGraph = program.graph
        self.cluster = cluster
        self.n_runs = 0
        self._problem = Problem(self.graph, cluster)
        self._limit_s = float(limit_s)
        self._pool = WorkerPool(
            TimedModel(
                model, functional(program), positional, keywords, cluster, loss, Repeats.exactly(steps, dropped)
            ),
            cores,
        )
        self._known: dict[tuple[bytes, ...], Execution] = {}

    def run(self, device: ArrayLike, order: ArrayLike | None = None) -> Execution:
        """Run a placement, or remember how it ran.

        Args:
            device: int [n], number of the device of each op.
            order: float [n], lower first, as in `env.plan.Plan`; by default the longest remaining path of the graph as
                captured comes first.

        Raises:
            MismatchError: no placement of this graph on this cluster, or ops apart that stay together.
            RankError: the processes cannot be started.
        """
        problem = self._problem
        plan = Plan(np.asarray(device), None if order is None else np.asarray(order))
        _, schedule = Simulator(problem).schedule(plan)
        first = np.array([members[0] for members in problem.units])
        apart = np.flatnonzero(schedule.device != schedule.device[first[problem.unit_of]])
        if len(apart):
            one, other = self.graph.op_names[first[problem.unit_of[apart[0]]]], self.graph.op_names[apart[0]]
            raise MismatchError(f"ops {one!r} and {other!r} must stay together, and the placement has them apart.")
        return self.run_schedule(schedule)

    def run_schedule(self, schedule: Schedule) -> Execution:
        """As `run`, a placement whose ops start in the order of a schedule of a problem with these ops."""
        arrangement = _arrangement(schedule)
        return self._run(_key(arrangement), arrangement)

    def _run(self, key: tuple[bytes, ...], work: Arrangement | str) -> Execution:
        if key not in self._known:
            self._pool.start()
            self.n_runs += 1
            try:
                samples_s = tuple(self._pool.run(work, self._limit_s))
                self._known[key] = Execution(statistics.median(samples_s), samples_s)
            except RankError as error:
                self._known[key] = Execution(np.inf, (), str(error))
        return self._known[key]

    def run_strategy(self, strategy: Strategy | str) -> Execution:
        """Run the model under a strategy, or remember how it ran.

        Args:
            strategy: that uses as many devices as the cluster has; ``"none"`` runs the plain model on one.

        Raises:
            StrategyError: the strategy cannot be read, or graph and cluster do not allow it.
            MismatchError: it uses another number of devices than there are processes.
            RankError: the processes cannot be started.
        """
        from baselines.strategies.allowed import check_allowed  # loads all transforms

        asked = strategy if isinstance(strategy, Strategy) else Strategy.parse(strategy)
        if asked.is_none:
            return self.run(np.zeros(self.graph.n_ops, dtype=np.int64))
        if asked.devices != self.cluster.n_devices:
            raise MismatchError(
                f"strategy {asked.text!r} uses {asked.devices} devices and the executor has a process for each of "
                f"{self.cluster.n_devices}; make an Executor on a cluster of {asked.devices}."
            )
        check_allowed(self.graph, self.cluster, asked)
        return self._run((b"strategy", asked.text.encode()), asked.text)

    def scorer(self, problem: Problem) -> BatchScorer:
        """The `env.gym.batch.ScorerFactory` of this executor: give ``executor.scorer`` wherever there is a ``scorer=``.

        Raises:
            MismatchError: the problem is of another model or cluster.
        """
        check_same(self.graph, problem.graph)
        if problem.cluster.hash != self.cluster.hash:
            raise MismatchError(
                f"the executor runs on cluster {self.cluster.name!r}, and the problem is for "
                f"{problem.cluster.name!r}, another one; make an Executor for that."
            )
        return Executed(self, problem, self._limit_s)

    def close(self) -> None:
        """End the processes; a later `run` starts new ones."""
        self._pool.close()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self.close()


class Executed:
    """`env.gym.batch.BatchScorer`: memory as simulated, step times as measured of what fits; and of strategies.

    Placements that do not fit are not run. One that fits but could not be run is infeasible, its step time the time it
    was given; `Executor.run` says why at once.
    """

    def __init__(self, executor: Executor, problem: Problem, failed_s: float) -> None:
        self._executor, self._failed_s = executor, failed_s
        self._simulator = Simulator(problem)

    def strategy_s(self, strategy: str) -> float:
        """Seconds of a step under a strategy; infinite where it could not be run."""
        try:
            return self._executor.run_strategy(strategy).step_time_s
        except (StrategyError, MismatchError):
            return np.inf

    def batch(self, devices: ArrayLike, *, orders: ArrayLike | None = None) -> BatchScores:
        """Score k placements, one after the other; see `env.gym.batch.BatchScorer`."""
        placed = np.asarray(devices)
        wanted = [None] * len(placed) if orders is None else list(np.asarray(orders))
        rows = []
        for device, order in zip(placed, wanted, strict=True):
            score, schedule = self._simulator.schedule(Plan(device, order))
            if score.feasible:
                found = self._executor.run_schedule(schedule)
                is_run = found.reason is None
                step_time_s = found.step_time_s if is_run else self._failed_s
                score = replace(score, step_time_s=step_time_s, feasible=is_run)
            rows.append(score)
        return BatchScores(*(np.array([getattr(row, field.name) for row in rows]) for field in fields(BatchScores)))


def _arrangement(schedule: Schedule) -> Arrangement:
    """On as many devices as are used, the first of them used first: as `placement.apply` numbers its processes."""
    row = np.unique(schedule.device, return_inverse=True)[1]
    return Arrangement(row.tolist(), schedule.order.tolist())


def _key(arrangement: Arrangement) -> tuple[bytes, ...]:
    """The same for placements that run alike. On one device the plain model runs, in its own order."""
    if arrangement.n_ranks == 1:
        return ()
    order, row = np.array(arrangement.order, dtype=np.int64), np.array(arrangement.row)
    return tuple(order[row[order] == rank].tobytes() for rank in range(arrangement.n_ranks))


def cores_of(cluster: Cluster) -> list[int]:
    """The core of each device of a cluster on which placements are tried out.

    Raises:
        ClusterError: a device is no CPU, or there are not as many cores.
    """
    for device in cluster.devices:
        if device.kind != "cpu":
            sentence = (
                f"device {device.name!r} of cluster {cluster.name!r} is a {device.kind}; placements are tried out on "
                "CPU cores, for example those of "
            )
            raise ClusterError(f"{sentence}Cluster.local(devices=2).").but_on_command_line(
                f"{sentence}--cluster local after `placement calibrate --devices 2`."
            )
    n_cores = len(usable_cores())
    if cluster.n_devices > n_cores:
        sentence = f"cluster {cluster.name!r} has {cluster.n_devices} devices and this process may use {n_cores} cores"
        raise ClusterError(f"{sentence}; take Cluster.local(devices={n_cores}).").but_on_command_line(
            f"{sentence}; take --cluster local after `placement calibrate --devices {n_cores}`."
        )
    return cores_for(cluster.n_devices)
