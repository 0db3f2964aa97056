"""`WorkerPool`: processes that stay, one for each device, and run one placement of a model after the other.

They are forked, so that each has the whole model and its captured program without a file or a copy: any placement can
be tried without moving a weight.
"""

from __future__ import annotations

import copy
import gc
import linecache
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from graphs.capture.record import Loss, default_loss
from graphs.disk import temporary_folder
from graphs.errors import MismatchError, PlacementError, RankError
from placement.measuring.machine import measure_step
from placement.measuring.workers import begin_on_core
from placement.processes.starting import NoAnswerError, Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.runtime.program.functional import Functional
from placement.runtime.program.named_tensors import NamedTensors
from placement.runtime.ranks.launch import met_store, reason_of
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.states.gradients import add_gradients

if TYPE_CHECKING:
    from env.cluster import Cluster

_START_S = 120.0  # until all processes have met
_CPU = torch.device("cpu")
# Adam's step takes as long as with any other rate, and the weights stay what they are, however often it is run.
_RATE = 0.0


@dataclass(frozen=True, eq=False)
class TimedModel:
    """The model that the processes of a pool run, and how its steps are timed.

    Attributes:
        module: whole, with data.
        step: its captured program.
        args, kwargs: of one step.
        inputs: tensors among them by path.
        cluster: that has a device for each process.
        loss: of a training step.
        steps, dropped: how many to run, and how many of them warm up.
    """

    module: nn.Module
    step: Functional
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, torch.Tensor]
    cluster: Cluster
    loss: Loss | None
    steps: int
    dropped: int


@dataclass(frozen=True)
class Arrangement:
    """A placement that processes are to run.

    Attributes:
        row: of each op the process that runs it: 0 to k - 1, all of which run some.
        order: the ops in the order in which they are to start.
    """

    row: list[int]
    order: list[int]

    @property
    def n_ranks(self) -> int:
        """How many processes take part."""
        return max(self.row, default=0) + 1


@dataclass(frozen=True)
class Rewriting:
    """A strategy that processes are to run; as text."""

    strategy: str


class WorkerPool:
    """Processes that are started when first needed, and anew after one of them has failed.

    Args:
        cores: the core that each is pinned to, D of them.
    """

    def __init__(self, model: TimedModel, cores: Sequence[int]) -> None:
        self._model, self._cores = model, list(cores)
        self._workers = Workers()
        self._store: Any = None
        self._held = ExitStack()  # the folder that the store is in
        self._owner = os.getpid()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return self._workers.pids

    def start(self) -> None:
        """Have all processes there, and none that has ended since it was last asked for anything.

        Raises:
            RankError: they could not be started.
            MismatchError: this process has been forked from the one that the bench is in.
        """
        if os.getpid() != self._owner:
            raise MismatchError(
                "an Executor runs placements in the process that made it; make one in each, or step environments in "
                "one process (env.gym.vector.PlacementVecEnv)."
            )
        if self._workers.all_alive:
            return
        self.close()
        try:
            size = len(self._cores)
            self._workers = Workers.forked(
                [partial(_live, self._model, rank, size, core) for rank, core in enumerate(self._cores)]
            )
            path = str(self._held.enter_context(temporary_folder()) / "store")
            self._store = met_store(path)
            self._ask(path, _START_S)
        except BaseException:
            self.close()
            raise

    def run(self, arrangement: Arrangement | Rewriting, limit_s: float) -> list[float]:
        """Seconds of each step that counts; a step is over when the last process has ended it.

        Raises:
            RankError: a process has failed or died, or ``limit_s`` were not enough; all have ended.
        """
        self.start()
        try:
            samples = self._ask(arrangement, limit_s)
        except BaseException:
            self.close()  # on Ctrl-C, too: they are in the middle of it
            raise
        return [max(times) for times in zip(*(rank for rank in samples if rank), strict=True)]

    def close(self) -> None:
        """End all processes."""
        if os.getpid() == self._owner:  # in a fork they are not this one's to end
            self._workers.end()
            self._store = None
            self._held.close()

    def _ask(self, question: Any, limit_s: float) -> list[Any]:
        """The answer of each process, by rank."""
        try:
            self._workers.tell(question)
            return self._workers.collect(limit_s)
        except NoAnswerError:
            raise RankError(
                f"the run was not done after {limit_s:g} s; allow more with limit_s, or run less."
            ) from None
        except WorkerFailedError as error:
            raise RankError(str(error)) from None
        except WorkerEndedError as error:
            if self._store is None:
                raise RankError(f"rank {error.rank} ended early.") from None
            raise RankError(reason_of(self._store, error.rank, error.code)) from None


# -- in the process --------------------------------------------------------------------------------------------------


def _live(model: TimedModel, rank: int, size: int, core: int, parent: Parent) -> None:
    """The life of a worker."""
    begin_on_core(core)
    try:
        store = met_store(parent.hear())
        group = ProcessGroup.start(store, rank, size, is_quiet=True) if size > 1 else None
        model.module.train(model.step.program.train)
        parent.answer([])
        while True:
            parent.answer(samples_s(model, parent.hear(), rank, group))
    except EOFError:
        return
    except PlacementError as error:
        parent.fail(str(error))
    except Exception as error:
        parent.fail(f"rank {rank} failed with {type(error).__name__}: {error}")


def samples_s(
    model: TimedModel, arrangement: Arrangement | Rewriting, rank: int, group: ProcessGroup | None
) -> list[float]:
    """Seconds of each step that counts on this rank; none where the placement does not use it.

    As `placement.apply` runs it: on one device the plain model, on several the share of each.
    """
    _forget_code()
    torch.manual_seed(0)
    if isinstance(arrangement, Rewriting):
        assert group is not None
        found = _rewritten(model, arrangement, group)
        group.drain()
        return found
    n_used = arrangement.n_ranks
    if n_used == 1:
        return _plain(model) if rank == 0 else []
    assert group is not None
    if rank >= n_used:
        for _ in range(model.steps):
            group.barrier()
        return []
    found = _placed(model, arrangement, group.of_first(n_used), group)
    group.drain()
    return found


def _forget_code() -> None:
    """Free the code of the placement before; fx keeps the text of all that it has ever generated, for tracebacks."""
    linecache.clearcache()
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).clear()
    gc.collect()


def _plain(model: TimedModel) -> list[float]:
    module, loss = model.module, model.loss or default_loss
    if not model.step.program.train:
        with torch.no_grad():
            times = measure_step(lambda: module(*model.args, **model.kwargs), steps=model.steps, dropped=model.dropped)
        return list(times.samples_s)
    optimizer = _optimizer([parameter for parameter in module.parameters() if parameter.requires_grad])

    def step() -> None:
        module.zero_grad()
        loss(module(*model.args, **model.kwargs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    times = measure_step(step, steps=model.steps, dropped=model.dropped)
    module.zero_grad()
    return list(times.samples_s)


def _placed(model: TimedModel, arrangement: Arrangement, ranks: ProcessGroup, everybody: ProcessGroup) -> list[float]:
    """A rank's share of a placement, run on the whole model, of which it reads and changes its own parameters alone."""
    from placement.runtime.modules.rank_program import RankProgram
    from placement.runtime.planning.placement_plan import placement_plan  # these load all transforms

    module, train = model.module, model.step.program.train
    plan = placement_plan(model.step, model.cluster, range(arrangement.n_ranks), arrangement.row, arrangement.order)
    program = RankProgram(plan, ranks, _CPU, NamedTensors(module).get)
    own = [module.get_parameter(state.name) for state in plan.states[ranks.rank] if state.trained]
    optimizer = _optimizer(own) if own else None

    def step() -> None:
        if not train:
            program.run(model.inputs)
            return
        for parameter in own:
            parameter.grad = None
        given = program.run(model.inputs)
        add_gradients(module, {key[1]: value for key, value in given.items() if key[0] == "gradient"})
        if optimizer is not None:
            optimizer.step()

    times = measure_step(step, steps=model.steps, dropped=model.dropped, barrier=everybody.barrier)
    module.zero_grad()
    return list(times.samples_s)


def _rewritten(model: TimedModel, rewriting: Rewriting, group: ProcessGroup) -> list[float]:
    """A rank's share under a strategy; the model itself stays whole."""
    from baselines.strategies.applied import applied  # these load all transforms
    from graphs.transforms.strategy import Strategy
    from placement.runtime.modules.strategy_module import StrategyModule
    from placement.runtime.planning.strategy_plan import StrategyPlan
    from placement.runtime.planning.values import Values

    program, train = model.step.program, model.step.program.train
    values = Values(model.step, applied(program.graph, model.cluster, Strategy.parse(rewriting.strategy)))
    module = StrategyModule(copy.deepcopy(model.module), StrategyPlan(values), group, _CPU)
    own = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = _optimizer(own) if train and own else None

    def step() -> None:
        if not train:
            module(*model.args, **model.kwargs)
            return
        module.zero_grad()
        module.step(*model.args, **model.kwargs)
        if optimizer is not None:
            optimizer.step()

    return list(measure_step(step, steps=model.steps, dropped=model.dropped, barrier=group.barrier).samples_s)


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=_RATE, foreach=False)
