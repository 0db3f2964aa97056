"""`Engines`: what runs a method, in virtual time or in real processes, all of one comparison on equal terms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from graphs.capture import capture
from graphs.capture.failure import TO_MODULES
from graphs.errors import CaptureError
from placement.fitting.real.devices import delays_of, is_here, kinds_of, setups_of
from placement.fitting.real.engine import RealEngine
from placement.fitting.real.rehearsal import Rehearsal, gradient_times
from placement.fitting.role import Role
from placement.fitting.virtual.assignment import Assignment
from placement.fitting.virtual.engine import VirtualEngine
from placement.fitting.virtual.speeds import placed_step, speeds_of
from placement.results.stacks import asked_for

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.fitting.methods import FitMethod
    from placement.fitting.real.torchrun import Ranks
    from placement.fitting.stragglers import Stragglers
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
