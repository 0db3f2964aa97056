"""`Bench`: processes that stay, one for each device, and run one placement of a model after the other.

They are forked, so that each has the whole model and its captured program without a file or a copy: any placement can
be tried without moving a weight.
"""

from __future__ import annotations

import gc
import linecache
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import fx, nn

from graphs.capture.record import Loss, default_loss
from graphs.errors import MismatchError, PlacementError, RankError
from placement.measuring.machine import measure_step
from placement.measuring.workers import begin_on_core
from placement.runtime.program.functional import Functional
from placement.runtime.program.layout import Layout
from placement.runtime.program.named_tensors import States
from placement.runtime.ranks.launch import met_store, new_store, reason_of
from placement.runtime.ranks.passes import CompiledPass, Pass
from placement.runtime.ranks.process_group import Crew
from placement.runtime.ranks.ranks import add_gradients
from placement.runtime.ranks.shares import keepers

_START_S = 120.0  # until all processes have met
_CPU = torch.device("cpu")
# Adam's step takes as long as with any other rate, and the weights stay what they are, however often it is run.
_RATE = 0.0


@dataclass(frozen=True, eq=False)
class Subject:
    """The model on the bench, and how its steps are timed.

    Attributes:
        model: whole, with data.
        step: its captured program.
        args, kwargs: of one step.
        inputs: tensors among them by path.
        loss: of a training step.
        steps, dropped: how many to run, and how many of them warm up.
    """

    model: nn.Module
    step: Functional
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: Mapping[str, torch.Tensor]
    loss: Loss | None
    steps: int
    dropped: int


@dataclass(frozen=True)
class Arrangement:
    """Where and in which order ops run, on devices 0 to k - 1, all of which are used; fields as in `Layout`."""

    device: list[int]
    order: list[list[int]]
    start_s: list[float]


@dataclass(frozen=True)
class _Worker:
    """A process that was started, and the way to it."""

    process: Any
    pipe: Connection


class Bench:
    """Processes that are started when first needed, and anew after one of them has failed.

    Args:
        cores: the core that each is pinned to, D of them.
    """

    def __init__(self, subject: Subject, cores: Sequence[int]) -> None:
        self._subject, self._cores = subject, list(cores)
        self._workers: list[_Worker] = []
        self._store: Any = None
        self._owner = os.getpid()

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
        if self._workers and all(worker.process.is_alive() for worker in self._workers):
            return
        self.close()
        try:
            self._fork()
            self._store = new_store()  # after the forks, so that no process holds its sockets for another
            self._ask(self._store.port, _START_S)
        except BaseException:
            self.close()
            raise

    def run(self, arrangement: Arrangement, limit_s: float) -> list[float]:
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
        if os.getpid() != self._owner:
            return  # in a fork they are not this one's to end
        workers, self._workers, self._store = self._workers, [], None
        for worker in workers:
            worker.process.kill()
        for worker in workers:
            worker.process.join()
            worker.pipe.close()

    def _fork(self) -> None:
        context = multiprocessing.get_context("fork")
        for rank, core in enumerate(self._cores):
            ours, theirs = context.Pipe()
            task = (self._subject, rank, len(self._cores), core, theirs, os.getpid())
            process = context.Process(target=_live, args=task, daemon=True)
            with warnings.catch_warnings():
                # Python warns of forking beside other threads, which may hold locks; a worker needs none of theirs.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _ask(self, question: Any, limit_s: float) -> list[Any]:
        """What each process answers, by rank."""
        deadline = time.monotonic() + limit_s
        answers: dict[int, Any] = {}
        for rank, worker in enumerate(self._workers):
            try:
                worker.pipe.send(question)
            except OSError:
                raise self._ended(rank) from None
        rank_of = {worker.pipe: rank for rank, worker in enumerate(self._workers)}
        while len(answers) < len(self._workers):
            ready = wait([pipe for pipe, rank in rank_of.items() if rank not in answers], deadline - time.monotonic())
            if not ready:
                raise RankError(f"the run was not done after {limit_s:g} s; allow more with limit_s, or run less.")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = rank_of[pipe]
                try:
                    is_done, found = pipe.recv()
                except (EOFError, OSError):
                    raise self._ended(rank) from None
                if not is_done:
                    raise RankError(found)
                answers[rank] = found
        return [answers[rank] for rank in range(len(self._workers))]

    def _ended(self, rank: int) -> RankError:
        process = self._workers[rank].process
        process.join(1.0)
        code = process.exitcode if process.exitcode is not None else -signal.SIGKILL
        return RankError(f"rank {rank} ended early." if self._store is None else reason_of(self._store, rank, code))


# -- in the process --------------------------------------------------------------------------------------------------


def _live(subject: Subject, rank: int, size: int, core: int, pipe: Connection, parent: int) -> None:
    """The life of a worker."""
    begin_on_core(core, parent)
    gc.freeze()  # what came with the fork is nobody's garbage here
    try:
        port = pipe.recv()
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        crew = Crew.start(met_store(port), rank, size, is_quiet=True) if size > 1 else None
        subject.model.train(subject.step.program.train)
        pipe.send((True, []))
        while True:
            pipe.send((True, samples_s(subject, pipe.recv(), rank, crew)))
    except (EOFError, BrokenPipeError):
        return
    except PlacementError as error:
        found = str(error)
    except Exception as error:
        found = f"rank {rank} failed with {type(error).__name__}: {error}"
    with suppress(BrokenPipeError):
        pipe.send((False, found))


def samples_s(subject: Subject, arrangement: Arrangement, rank: int, crew: Crew | None) -> list[float]:
    """Seconds of each step that counts on this rank; none where the placement does not use it.

    As `placement.apply` runs it: on one device the plain model, on several the share of each.
    """
    _forget_code()
    torch.manual_seed(0)
    n_used = len(arrangement.order)
    if n_used == 1:
        return _plain(subject) if rank == 0 else []
    assert crew is not None
    if rank >= n_used:
        for _ in range(subject.steps):
            crew.exchange("")
        return []
    found = _placed(subject, arrangement, crew)
    crew.drain()
    return found


def _forget_code() -> None:
    """Free the code of the placement before; fx keeps the text of all that it has ever generated, for tracebacks."""
    linecache.clearcache()
    getattr(getattr(fx.graph_module, "_loader", None), "eval_cache", {}).clear()
    gc.collect()


def _plain(subject: Subject) -> list[float]:
    model, loss = subject.model, subject.loss or default_loss
    if not subject.step.program.train:
        with torch.no_grad():
            times = measure_step(
                lambda: model(*subject.args, **subject.kwargs), steps=subject.steps, dropped=subject.dropped
            )
        return list(times.samples_s)
    optimizer = _optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])

    def step() -> None:
        model.zero_grad()
        loss(model(*subject.args, **subject.kwargs)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    times = measure_step(step, steps=subject.steps, dropped=subject.dropped)
    model.zero_grad()
    return list(times.samples_s)


def _placed(subject: Subject, arrangement: Arrangement, crew: Crew) -> list[float]:
    model, train = subject.model, subject.step.program.train
    places = [_CPU] * len(arrangement.order)
    layout = Layout(subject.step, arrangement.device, arrangement.order, arrangement.start_s, places)
    compiled, states = CompiledPass(layout, "step" if train else "forward"), States(model)
    own = []
    if train:
        home = {name: ranks[0] for name, ranks in keepers(model, layout).items()}
        own = [p for name, p in model.named_parameters() if p.requires_grad and home[name] == crew.rank]
    optimizer = _optimizer(own) if own else None

    def step() -> None:
        run = Pass(crew, compiled, states, subject.inputs)
        if not train:
            run.forward()
            return
        for parameter in own:
            parameter.grad = None
        add_gradients(model, run.step()[1])
        if optimizer is not None:
            optimizer.step()

    times = measure_step(step, steps=subject.steps, dropped=subject.dropped, together=lambda: _meet(crew))
    model.zero_grad()
    return list(times.samples_s)


def _optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=_RATE, foreach=False)


def _meet(crew: Crew) -> None:
    crew.exchange("")
