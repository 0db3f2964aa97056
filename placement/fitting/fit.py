"""`fit`: methods of distributed optimisation side by side on one model and one cluster: which reaches a loss first?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from env.cluster import Cluster
from graphs.capture import capture
from graphs.capture.failure import TO_MODULES
from graphs.errors import CaptureError, FitError, PlacementError, UnknownNameError
from graphs.formatting import counted
from graphs.origin import EAGER, STACKS
from graphs.transforms.strategy import Strategy
from placement.fitting.comparison import FitComparison
from placement.fitting.log import CurvePoint, FitRun, Stop
from placement.fitting.methods import FitMethod, check_sizes
from placement.fitting.participants import Role
from placement.fitting.real.engine import RealEngine, check_real, delays_of, is_here, kinds_of, setups_of
from placement.fitting.real.rehearsal import Rehearsal, gradient_times
from placement.fitting.task import fit_task_of, has_no_loss
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import Assignment, Stragglers, most_workers, placed_step, speeds_of
from placement.results.result import versions
from placement.results.stacks import asked_for
from placement.solving.arguments import check_cluster

if TYPE_CHECKING:
    from torch import Tensor, nn

    from graphs.opgraph import OpGraph
    from placement.fitting.real.torchrun import Ranks
    from placement.fitting.task import FitTask


@dataclass(frozen=True, eq=False)
class Engines:
    """Common inputs of the methods of a comparison.

    Attributes:
        name: of the model.
        workers: that compute gradients.
        strategy: how a worker's step lies on its own devices.
        delays: how much longer gradients take.
        lr: learning rate of methods that name none.
        stack: how ops of a simulated step become kernels; None: eager.
        is_real: in processes, among `ranks` where ``torchrun`` has started some.
    """

    task: FitTask
    name: str
    cluster: Cluster
    workers: int
    strategy: Strategy
    delays: Stragglers
    lr: float
    is_real: bool = False
    ranks: Ranks | None = None
    stack: str | None = None

    def engine_of(self, method: FitMethod) -> VirtualEngine | RealEngine:
        """The engine that runs a method once.

        Raises:
            FitError, StrategyError, CaptureError: what model, cluster and method do not allow.
        """
        task, cluster, workers, strategy = self.task, self.cluster, self.workers, self.strategy
        assignment = Assignment.of(cluster, workers, strategy.devices, method.exchange.servers(workers))
        participants = participants_of(method, task, workers, self.lr)
        if self.is_real:
            delay_s = delays_of(self._undelayed_s(assignment), self.delays)
            setups = setups_of(task, self.graph_of(task.batch), cluster, assignment, strategy, self.ranks)
            return RealEngine(task, workers, participants, delay_s, self.ranks, setups, kinds_of(cluster, assignment))
        speeds = speeds_of(self.graph_of, task.batch, cluster, assignment, strategy, self.delays)
        if is_here(cluster, strategy):
            rehearsal = Rehearsal(task, self._gradients_s, workers, len(participants) - workers, task.seed)
            speeds = speeds.timed(self._gradients_s, rehearsal, self.delays, task.seed)
        return VirtualEngine(task, cluster, workers, participants, speeds)

    @cached_property
    def graph_of(self) -> Callable[[int], OpGraph]:
        """(samples) -> the captured step of a worker; by module, with a warning, where its ops cannot be traced.

        Raises:
            CaptureError: the model cannot be captured, or a strategy needs its ops.
        """

        @cache
        def graph_of(samples: int) -> OpGraph:
            task = self.task
            rows = [number % len(task.data[0]) for number in range(samples)]
            arguments = tuple(each[rows] for each in task.data)
            finest = "auto" if self.strategy.is_none and task.precision is None else "op"
            try:
                graph = capture(
                    task.model,
                    arguments,
                    None,
                    True,
                    granularity=finest,
                    loss=task.loss,
                    optimizer="sgd",
                    precision=task.precision,
                    name=self.name,
                )
            except CaptureError as error:
                way_out = "leave out the strategy" if error.way_out == TO_MODULES else error.way_out
                raise CaptureError(error.reason, way_out) from error
            return asked_for(graph, self.stack)

        return graph_of

    @cached_property
    def _gradients_s(self) -> Callable[[int], list[float]]:
        # Each of several ranks measures its own.
        return gradient_times(self.task, self.workers if self.ranks is None else 1)

    def _undelayed_s(self, assignment: Assignment) -> list[float]:
        """Seconds of a gradient, which stragglers take longer than: measured on cores, as simulated on GPUs."""
        if self.delays.text == "none":  # nobody sleeps, and nothing need be known
            return [0.0]
        if set(kinds_of(self.cluster, assignment)) == {"cpu"}:
            return self._gradients_s(self.task.batch)
        graph = self.graph_of(self.task.batch)
        return [placed_step(graph, self.cluster, own, self.strategy).gradient_s for own in assignment.workers]


def participants_of(method: FitMethod, task: FitTask, workers: int, lr: float) -> list[Any]:
    """The generators of a method's participants, workers before servers."""
    rate = lr if method.learning_rate is None else method.learning_rate
    total = workers + len(method.exchange.servers(workers))
    return [
        method.exchange.participant(Role(number, workers, task.weights(), task.layout, method, rate, task.seed))
        for number in range(total)
    ]


Progress = Callable[[str, CurvePoint], None]
_SEEDS = 1 << 32
BATCH_NORM = (
    "batch norm: each worker normalizes by its own mini-batch, evaluations by the held-out samples; running statistics "
    "are not exchanged"
)

ONE_WORKER = "one worker"  # instead of a method's text

NO_LOSS = "no loss: the mean of the model's output is made small; let forward return the loss, or pass loss in Python"


def fit(
    model: nn.Module,
    data: Any,
    cluster: Cluster,
    methods: str | FitMethod | Sequence[str | FitMethod],
    *,
    until: float | None = None,
    updates: int = 1_000,
    seconds: float | None = None,
    workers: int | None = None,
    batch: int | None = None,
    lr: float = 0.05,
    loss: Callable[[Any], Tensor] | None = None,
    strategy: str = "none",
    stragglers: str = "none",
    every: int = 10,
    seed: int = 0,
    real: bool = False,
    progress: Progress | None = None,
    beside_one_worker: bool = True,
    stack: str | None = None,
    precision: str | None = None,
) -> FitComparison:
    """Train a model by several methods on a simulated cluster, in virtual time: gradients are real, seconds simulated.

    With `real`, each worker and server is a process of this host, and seconds are those of the wall. Under ``torchrun``
    each lives beside one of its ranks, which all make this call and get the same answer; rank 0 alone tells progress.

    Ctrl-C ends it with the methods that are done, if any is. An error has them as its ``finished``.

    Args:
        model: its own parameters are the start of every run; it is not changed.
        data: tensors with a row for each sample, the model's arguments, or a torch Dataset of such samples. The last
            tenth is held out: losses are those over it.
        methods: texts such as ``"local_sgd:period=8"``, docs/distributed_training.md lists them.
        until: a run ends at this loss.
        updates, seconds: or else after so many updates of the model, or so many simulated seconds.
        workers: replicas; as many as the cluster has devices, or groups of them for a strategy, by default, and under
            ``torchrun`` no more than leave a rank for each server.
        batch: samples of a worker's mini-batch; 32, or all if there are fewer, by default.
        lr: learning rate that is right for the batch of one worker, of methods that name none.
        loss: function from the model's output to a scalar, a mean over samples; by default as of `placement.capture`.
        strategy: how each worker's step lies on devices of its own, e.g. ``"tp2"``; one device by default.
        stragglers: how much longer gradients take than simulated, e.g. ``"exponential:mean=0.5"``.
        every: updates between two evaluations.
        seed: of everything random.
        real: run it in processes of this host; the cluster's workers are then CPU cores or GPUs, such as those of
            ``Cluster.local()``. Stragglers sleep for what they take longer.
        progress: called with a method's text and each point of its curve.
        beside_one_worker: simulate a single worker, too.
        stack: how ops of a simulated step become kernels, as of `placement.optimize`. Gradients that are run and timed,
            with `real` or on the cores of this machine, are eager.
        precision: number formats in which gradients are computed, as of `placement.capture`; of those with float32
            weights and gradients, which is what workers exchange.

    Raises:
        UnknownNameError: a method, a distribution of stragglers or a stack that there is not.
        FitError: what model, data, cluster and methods do not allow; the message says what to do.
        ValueError: what is no cluster.
        RankError: a process was lost, and the method does not go on without it; ``finished`` has the methods before it.
        CaptureError, StrategyError: the model cannot be captured, or not be rewritten so.
    """
    check_cluster(cluster)
    given = [methods] if isinstance(methods, str | FitMethod) else list(methods)
    asked = [FitMethod.parse(each) if isinstance(each, str) else each for each in given]
    if not asked:
        raise FitError("no method is named; give at least one, such as 'sync'.")
    stop = checked_stop(until, updates, seconds, every)
    if not isinstance(lr, int | float) or not 0 < lr < math.inf:
        raise FitError(f"lr is {lr!r}; expected a number above 0.")
    if not isinstance(seed, int) or not 0 <= seed < _SEEDS:
        raise FitError(f"seed is {seed!r}; expected a whole number from 0 to {_SEEDS - 1}.")
    placed = Strategy.parse(strategy)
    _check_stack(stack, cluster, placed, real)
    ranks = _ranks() if real else None
    several = len(cluster.compute_devices) // placed.devices if workers is None else workers
    if ranks is not None:
        several = _fitting_workers(asked, several, placed.devices, ranks.size, is_fixed=workers is not None)
    most_workers(cluster, several, placed.devices)
    delays = Stragglers.parse(stragglers, seed, several)
    for method in asked:
        refused = method.exchange.refuse(method, several)
        if refused is not None:
            raise FitError(refused if refused.startswith(method.name) else f"{method.name}: {refused}")
    task = fit_task_of(model, data, batch=batch, loss=loss, seed=seed, precision=precision)
    for method in asked:
        check_sizes(method, several, updates, len(task.data[0]))
    if real:
        check_real(cluster, several * placed.devices)
    engines = Engines(task, type(model).__name__, cluster, several, placed, delays, lr, real, ranks, stack)
    runs: list[FitRun] = []
    alone: list[FitRun] = []

    def comparison() -> FitComparison:
        return FitComparison(
            graph=engines.graph_of(task.batch),
            cluster=cluster,
            runs=tuple(runs),
            until=until,
            workers=several,
            batch=task.batch,
            learning_rate=lr,
            strategy=strategy,
            stragglers=stragglers,
            seed=seed,
            is_real=real,
            versions=versions(),
            interrupted=len(runs) < len(asked),
            one_worker=alone[0] if alone else None,
        )

    try:
        for method in asked:
            run = engines.engine_of(method).run(method.name, stop, _telling(progress, method.name))
            notes = [NO_LOSS if has_no_loss(task) else "", BATCH_NORM if task.batch_norms and several > 1 else ""]
            runs.append(replace(run, note="; ".join(filter(None, [run.note, *notes]))))
        if beside_one_worker and several > 1 and not real:
            single = replace(engines, workers=1, delays=Stragglers.parse(stragglers, seed, 1))
            alone.append(
                single.engine_of(FitMethod.parse("sync")).run(ONE_WORKER, stop, _telling(progress, ONE_WORKER))
            )
    except KeyboardInterrupt:
        if ranks is not None or not runs:
            raise
    except PlacementError as error:
        error.finished = comparison() if runs else None
        raise
    return comparison()


def checked_stop(until: float | None, updates: int, seconds: float | None, every: int) -> Stop:
    """The end of runs.

    Raises:
        FitError: a number that makes no sense.
    """
    if until is not None and not math.isfinite(until):
        raise FitError(f"the loss to be reached is {until}; expected a number.")
    for name, value in (("updates", updates), ("every", every)):
        if not isinstance(value, int) or value < 1:
            raise FitError(f"{name} is {value!r}; expected a whole number, 1 or more.")
    if seconds is not None and not 0 < seconds < math.inf:
        raise FitError(f"seconds is {seconds:g}; expected a number above 0.")
    return Stop(
        -math.inf if until is None else until, updates, math.inf if seconds is None else seconds, min(every, updates)
    )


def _check_stack(stack: str | None, cluster: Cluster, strategy: Strategy, real: bool) -> None:
    """Refuse a stack that does not exist, and one where gradients are timed as they are.

    Raises:
        UnknownNameError, FitError: says which.
    """
    if stack is not None and stack not in STACKS:
        raise UnknownNameError("stack", str(stack), STACKS)
    if stack not in (None, EAGER) and (real or is_here(cluster, strategy)):
        raise FitError(
            f"gradients are run here and timed, which is eager, and not on stack {stack}; leave out the stack, or "
            "simulate another cluster."
        )


def _ranks() -> Ranks | None:
    from placement.fitting.real.torchrun import ranks  # loads torch.distributed

    return ranks()


def _fitting_workers(
    methods: Sequence[FitMethod], workers: int, devices_each: int, ranks: int, *, is_fixed: bool
) -> int:
    """How many workers there are among so many ranks: those asked for, else as many as leave room for servers.

    Raises:
        FitError: too few ranks.
    """
    most = {method: workers * devices_each + len(method.exchange.servers(workers)) for method in methods}
    method = max(methods, key=most.__getitem__)
    if most[method] <= ranks:
        return workers
    if workers > 1 and not is_fixed:
        return _fitting_workers(methods, workers - 1, devices_each, ranks, is_fixed=False)
    theirs = f"{workers * devices_each} of them for {counted(workers, 'worker')}"
    fewer = ", or take fewer workers" if workers > 1 else ""
    raise FitError(
        f"{method.name} takes {most[method]} processes, {theirs}, and torchrun started {ranks}; start it with "
        f"--nproc-per-node {most[method]}{fewer}."
    )


def _telling(progress: Progress | None, method: str) -> Callable[[CurvePoint], None]:
    return lambda point: None if progress is None else progress(method, point)
