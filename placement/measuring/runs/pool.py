"""`WorkerPool`: processes that stay, one for each device, and run one placement of a model after the other.

They are forked, so that each has the whole model and its captured program without a file or a copy: any placement can
be tried without moving a weight.
"""

from __future__ import annotations

import copy
import gc
import linecache
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx, nn

from graphs.capture.fake import set_mode
from graphs.capture.record import Loss, default_loss
from graphs.disk import temporary_folder
from graphs.errors import MismatchError, PlacementError, RankError
from placement.measuring.machine.workers import begin_on_core
from placement.measuring.models.repeats import Repeats
from placement.measuring.runs.steps import ModelStep, TimedRun, timed_run, together_s
from placement.processes.processes import keep_to_loopback
from placement.processes.starting import NoAnswerError, NoResultError, Parent, Workers
from placement.runtime.modules.placed_ranks import PlacedRanks
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import Functional
from placement.runtime.ranks.group import LostRankError, RankGroup
from placement.runtime.ranks.launch import met_store
from placement.runtime.states import optimizer_of

if TYPE_CHECKING:
    from env.cluster import Cluster

_START_S = 120.0  # until all processes have met
_LAST_WORDS_S = 1.0  # a rank that has lost another one leaves the reason to that one
_CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class TimedModel:
    """The model that the processes of a pool run, and how its steps are timed.

    Attributes:
        module: whole, with data.
        step: its captured program.
        args, kwargs: of one step.
        cluster: that has a device for each process.
        loss: of a training step.
        repeats: how often they are run.
    """

    module: nn.Module
    step: Functional
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    cluster: Cluster
    loss: Loss | None
    repeats: Repeats


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


class WorkerPool:
    """Processes that are started when first needed, and anew after one of them has failed.

    Args:
        cores: the core that each is pinned to, D of them.
    """

    def __init__(self, model: TimedModel, cores: Sequence[int]) -> None:
        self._model, self._cores = model, list(cores)
        self._workers = Workers()
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
            self._ask(path, _START_S)
        except BaseException:
            self.close()
            raise

    def run(self, arrangement: Arrangement | str, limit_s: float) -> list[float]:
        """Seconds of each step that counts; a step is over when the last process has ended it.

        Raises:
            RankError: a process has failed or died, or ``limit_s`` were not enough; all have ended.
        """
        self.start()
        try:
            found = self._ask(arrangement, limit_s)
        except BaseException:
            self.close()  # on Ctrl-C, too: they are in the middle of it
            raise
        return together_s([run for run in found if run is not None])

    def close(self) -> None:
        """End all processes."""
        if os.getpid() == self._owner:  # in a fork they are not this one's to end
            self._workers.end()
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
        except NoResultError as error:
            raise RankError(str(error)) from None


# -- in the process --------------------------------------------------------------------------------------------------


def _live(model: TimedModel, rank: int, size: int, core: int, parent: Parent) -> None:
    """Main function of a worker."""
    begin_on_core(core)
    try:
        keep_to_loopback()
        dist.init_process_group("gloo", store=met_store(parent.hear()), rank=rank, world_size=size)
        everybody = RankGroup.of()
        set_mode(model.module, model.step.program.train)
        parent.answer(None)
        while True:
            parent.answer(timed(model, parent.hear(), everybody))
    except EOFError:
        return
    except LostRankError as error:
        time.sleep(_LAST_WORDS_S)
        parent.fail(str(error))
    except PlacementError as error:
        parent.fail(str(error))
    except Exception as error:
        parent.fail(f"rank {rank} failed with {type(error).__name__}: {error}")


def timed(model: TimedModel, work: Arrangement | str, everybody: RankGroup) -> TimedRun | None:
    """A timed run of this rank's share; None where the work does not use this rank.

    As `placement.apply` runs it: on one device the plain model, on several the share of each.
    """
    _forget_code()
    torch.manual_seed(0)
    n_ranks = everybody.size if isinstance(work, str) else work.n_ranks
    if n_ranks == 1:
        if everybody.rank:
            return None
        return timed_run(_step(model, model.module, model.loss or default_loss), model.repeats)
    if everybody.rank >= n_ranks:
        timed_run(lambda: None, model.repeats, everybody=everybody.group)
        return None
    ranks = _first(everybody, n_ranks)
    if isinstance(work, str):
        share = strategy_share(model, work)
    else:
        share = PlacedRanks(_twin(model.module), _layout(model, work), ranks, _CPU, model.loss)
    return timed_run(_step(model, share, None), model.repeats, ranks.group, everybody=everybody.group)


def _first(everybody: RankGroup, size: int) -> RankGroup:
    """The first processes, of which this is one."""
    if size == everybody.size:
        return everybody
    if size not in _smaller:
        _smaller[size] = RankGroup.of(range(size))
    return _smaller[size]


_smaller: dict[int, RankGroup] = {}  # that a worker has made, by size


def strategy_share(model: TimedModel, strategy: str) -> nn.Module:
    """This process's share of a model under a strategy, given as text, as `placement.apply` gives it.

    Raises:
        PlacementError: it is not run, says why.
    """
    from placement.optimization import optimize
    from placement.runtime.application import apply

    found = optimize(model.step.program.graph, model.cluster, strategy=strategy)
    return apply(_twin(model.module), found, model.args, model.kwargs, loss=model.loss)


def _step(model: TimedModel, module: nn.Module, loss: Loss | None) -> ModelStep:
    """A step that leaves the weights what they are, however often it is run: an update takes as long at any rate."""
    train, name = model.step.program.train, model.step.program.graph.origin.optimizer or "adam"
    optimizer = optimizer_of(module, name, lr=0.0, foreach=False) if train else None
    return ModelStep(module, model.args, model.kwargs, train, loss, name, optimizer)


def _layout(model: TimedModel, work: Arrangement) -> DeviceLayout:
    orders = [[op for op in work.order if work.row[op] == rank] for rank in range(work.n_ranks)]
    start_s = [0.0] * len(work.row)
    for place, op in enumerate(work.order):
        start_s[op] = float(place)
    return DeviceLayout(model.step, work.row, orders, start_s, [_CPU] * work.n_ranks)


def _twin(own: nn.Module) -> nn.Module:
    """A model of modules and parameters of its own, whose memory is that of another one."""
    twins: dict[int, Any] = {id(buffer): buffer.detach() for buffer in own.buffers()}
    twins |= {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in own.parameters()}
    return copy.deepcopy(own, twins)


def _forget_code() -> None:
    """Free the code of the placement before; fx keeps the text of all that it has ever generated, for tracebacks."""
    linecache.clearcache()
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).clear()
    gc.collect()
