"""One step of a model, plain or this process's share: its first runs, which are compared, and its timed run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import thread_time
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from graphs.capture.record import Loss, output_tensors
from placement.measuring.models.repeats import Repeats, run_steps, seconds_of
from placement.measuring.runs.differences import (
    BUFFER,
    EPS,
    GRADIENT,
    LARGEST,
    LOSS,
    OUTPUT,
    RATES,
    WEIGHT,
    Compared,
    largest,
)
from placement.processes.processes import Usage, peak_bytes
from placement.runtime.ranks.launch import tell
from placement.runtime.states import gradient_format, optimizer_of, with_masters

STEPS = 3  # that are compared: a fault of the second one is seen in the third, at the latest
_MOVE = 3e-4  # of a weight in a step, at most, but for momentum
_EPS = 0.01  # of the largest gradient: Adam then moves a weight by noise no more than by noise
_BUILT_UP = {"momentum": 5.61}  # moves in `STEPS` steps, where a step has something of those before: 1 + 1.9 + 2.71


@dataclass(eq=False)
class ModelStep:
    """A step: both passes and the update of a training step, the forward pass of inference.

    Attributes:
        model: plain, or this process's share.
        args, kwargs: of one step.
        loss: of the model's output; None of a share (`placement.apply` on several devices), which has its own.
        train: a training step.
        optimizer_name: as in `placement.runtime.states.OPTIMIZERS`.
        optimizer: of that name, once `first_steps` has made it; None where nothing is to be trained here.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    train: bool
    loss: Loss | None
    optimizer_name: str = "adam"
    optimizer: Any = None

    @property
    def is_share(self) -> bool:
        """True if other processes have the rest of the model."""
        return self.loss is None

    def passes(self) -> Any:
        """Run the step but for the update; the loss, or the outputs of inference."""
        if not self.train:
            with torch.no_grad():
                return self.model(*self.args, **self.kwargs)
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self.loss is None:
            share: Any = self.model
            return share.step(*self.args, **self.kwargs)
        value = self.loss(self.model(*self.args, **self.kwargs))
        value.backward()  # type: ignore[no-untyped-call]
        return value

    def update(self) -> None:
        """Change the weights by what the passes gave."""
        if self.optimizer is not None:
            self.optimizer.step()

    def __call__(self) -> None:
        self.passes()
        self.update()

    # -- the first steps --------------------------------------------------------------------------------------

    def first_steps(self, reference: Mapping[str, Tensor] | None, told: Callable[[int], None]) -> dict[str, Tensor]:
        """Run the steps that are compared, after which weights stay what they are, however often a step is run.

        Args:
            reference: what these steps gave of the plain model; None for that itself.
            told: called with the number of each step that is done.

        Returns:
            By name, on the CPU: losses, and of training gradients of the first step, and weights and buffers after the
            last one; on another rank than the first only losses.
        """
        found: dict[str, Tensor] = {}
        named = {name for name, _ in self.model.named_buffers(remove_duplicate=False)}
        if reference is not None:  # by the model's own names
            named = {name.removeprefix(BUFFER) for name in reference if name.startswith(BUFFER)}
        for number in range(1, STEPS + 1):
            given = self.passes()
            if not self.train:
                outputs = enumerate(output_tensors(given))
                found |= {f"{OUTPUT}{number}/{place}": _kept(tensor) for place, tensor in outputs}
            else:
                found[f"{LOSS}{number}"] = _kept(given)
                if number == 1:
                    gradients = {f"{GRADIENT}{name}": each for name, each in self._gradients().items()}
                    found |= gradients
                    if reference is None:
                        most = max(map(largest, gradients.values()), default=0.0)
                        # SGD moves by its rate times the gradient, as Adam by its own over this does.
                        eps = (_EPS * most or 1e-8) if self._is_adam else (most or 1.0)
                        moves = _BUILT_UP.get(self.optimizer_name, STEPS)
                        facts = {LARGEST: most, EPS: eps, RATES: moves * _MOVE}
                        found |= {name: torch.tensor(value) for name, value in facts.items()}
                    self.optimizer = self._optimizer(float((reference or found)[EPS]))
                self.update()
            told(number)
        if self.train:
            found |= self._states(named)
            for group in self.optimizer.param_groups if self.optimizer is not None else ():
                group["lr"] = 0.0  # a step takes as long as with any other rate
        return found

    @property
    def _is_adam(self) -> bool:
        return self.optimizer_name.startswith("adam")

    def _optimizer(self, eps: float) -> Any:
        settings: dict[str, Any] = {"lr": _MOVE, "eps": eps} if self._is_adam else {"lr": _MOVE / eps}
        made = optimizer_of(self.model, self.optimizer_name, foreach=False, **settings)
        is_own = isinstance(made, torch.optim.Optimizer) and not hasattr(type(self.model), "optimizer")
        if is_own and any(
            gradient_format(p) not in (None, p.dtype) for p in self.model.parameters() if p.requires_grad
        ):
            return with_masters(made)  # of a precision whose gradients are wider
        return made

    def _gradients(self) -> dict[str, Tensor]:
        if self.is_share:
            share: Any = self.model
            gathered: dict[str, Tensor] = share.gathered_gradients()
            return gathered
        named = self.model.named_parameters(remove_duplicate=False)  # as gathered_gradients() has what is tied
        return {name: _kept(p.grad) for name, p in named if p.grad is not None}

    def _states(self, buffers: set[str]) -> dict[str, Tensor]:
        """Weights and buffers, on the first rank; ``buffers``: the names of these."""
        model: Any = self.model
        states = model.gathered_state_dict() if self.is_share else model.state_dict()
        return {
            f"{BUFFER if name in buffers else WEIGHT}{name}": tensor if self.is_share else _kept(tensor)
            for name, tensor in states.items()
            if isinstance(tensor, Tensor)
        }


def _kept(tensor: Tensor) -> Tensor:
    """A copy on the CPU, which later steps leave alone."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class TimedRun:
    """Measurements of one process.

    Attributes:
        step_s: seconds of each step that counts.
        waited_s: of these, seconds in which the thread that runs the steps had no processor, since it waited.
        dropped: steps before them, which warmed up.
        usage: mean work of the system in a step.
        peak_bytes: most memory that the process ever had.
    """

    step_s: tuple[float, ...]
    waited_s: tuple[float, ...]
    dropped: int
    usage: Usage
    peak_bytes: int


def timed_run(
    step: Callable[[], object],
    repeats: Repeats,
    group: ProcessGroup | None = None,
    places: Sequence[torch.device] = (),
    everybody: ProcessGroup | None = None,
) -> TimedRun:
    """Run a step until that is enough, in all processes of a group together.

    Args:
        group: of gloo; None of one process.
        places: devices whose work is waited for.
        everybody: a larger group that keeps step with this one; its others call this with a step of nothing.
    """
    waited_s: list[float] = []  # within the steps: waiting for the others between two of them is no part of either
    usage = [Usage.now()]  # before the first step, and after each
    met = everybody or group

    def timed() -> float:
        computed_s = thread_time()
        seconds = seconds_of(step, places)
        waited_s.append(max(0.0, seconds - (thread_time() - computed_s)))
        usage.append(Usage.now())
        return seconds

    def all_gather(seconds: float) -> list[float]:
        if met is None:
            return [seconds]
        mine = torch.tensor([seconds], dtype=torch.float64, device="cpu")
        found = [torch.empty_like(mine) for _ in range(met.size())]
        dist.all_gather(found, mine, group=met)
        return [float(each) for each in found]

    times_s, warm_up = run_steps(timed, repeats, all_gather, tell)
    return TimedRun(
        step_s=tuple(times_s[warm_up:]),
        waited_s=tuple(waited_s[warm_up:]),
        dropped=warm_up,
        usage=usage[-1].since(usage[warm_up], len(times_s) - warm_up),
        peak_bytes=peak_bytes(),
    )


def together_s(runs: Sequence[TimedRun]) -> list[float]:
    """Seconds of each step of several processes, which is over when the last of them has ended it."""
    return [max(times) for times in zip(*(run.step_s for run in runs), strict=True)]


# -- a trial ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A stretch of a measured step.

    Attributes:
        what: ``"op"``; ``"receive"``, ``"send"`` or ``"expect"`` (getting ready to receive); ``"update"``, that of the
            optimizer.
        op: its number; of a transfer that of the op which made the tensor; -1 for none.
        start_s, end_s: since the first process began the step; of one process, by the host's clock.
        peer: rank at the other end of a transfer; None of all else.
    """

    what: str
    op: int
    start_s: float
    end_s: float
    peer: int | None = None


@dataclass(frozen=True)
class RecordedStep:
    """One process's part of a measured step.

    Attributes:
        start_s, end_s: when it began, and when it was done.
        spans: in the order that they began; what an op sends in its midst lies within the op.
    """

    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A measured step, to be drawn beside the predicted one.

    Attributes:
        step_s: median over the steps that were timed.
        tracks: by name of a device, its process's part of one more step, which looking at the clock after every op
            makes a little longer; where none was recorded, the median step as a whole.
    """

    step_s: float
    tracks: tuple[tuple[str, RecordedStep], ...]


def timeline(names: Sequence[str], step_s: float, ranks: Sequence[Sequence[RecordedStep]]) -> Timeline:
    """The recorded step of median length.

    Args:
        names: devices in the order of ranks.
        ranks: the same steps as each rank has recorded them; none where nothing was recorded.
    """
    steps = list(zip(*ranks, strict=True))
    if not steps:
        return Timeline(step_s, ((", ".join(names), RecordedStep(0.0, step_s)),))
    lengths = [max(own.end_s - own.start_s for own in step) for step in steps]
    chosen = steps[lengths.index(statistics.median_low(lengths))]
    zero_s = min(own.start_s for own in chosen)  # they leave the barrier almost at once

    def moved(own: RecordedStep) -> RecordedStep:
        spans = (replace(span, start_s=span.start_s - zero_s, end_s=span.end_s - zero_s) for span in own.spans)
        return RecordedStep(own.start_s - zero_s, own.end_s - zero_s, tuple(spans))

    return Timeline(step_s, tuple(zip(names, map(moved, chosen), strict=True)))


@dataclass(frozen=True)
class TrialTask:
    """The task of the processes of a trial.

    Attributes:
        model, train, dims, seed: as of `placement.measuring.runs.trial.try_out`.
        optimizer: of training steps, by name.
        repeats: how often.
        way: of the placement: ``"plain"`` is the model on one device, ``"compiled"`` the same under torch.compile,
            ``"by_module"`` module by module in one process, ``"ranked"`` a share for each device.
        is_compiled: shares run under torch.compile.
        is_calm: the steps that are compared drop nothing: under a strategy each rank draws its own random numbers.
        recorded: steps to be recorded after those that are timed.
        devices: torch device of each device, by name, in the order of ranks.
        halves: number formats of two bytes in the step.
        placement, reference: files of the result and of what the first steps of the plain model compute.
    """

    model: str
    train: bool
    optimizer: str
    dims: Mapping[str, int]
    seed: int
    repeats: Repeats
    way: Literal["plain", "compiled", "by_module", "ranked"]
    is_compiled: bool
    is_calm: bool
    recorded: int
    devices: Mapping[str, str]
    halves: tuple[str, ...]
    placement: str
    reference: str

    @property
    def places(self) -> list[torch.device]:
        """Torch devices in the order of ranks."""
        return [torch.device(place) for place in self.devices.values()]


@dataclass(frozen=True)
class ProcessOutcome:
    """One process's part of a trial.

    Attributes:
        timed: its steps.
        kept_bytes: of parameters and buffers that it has, by device.
        computed: names of the tensors that the plain model computed.
        compared: how far those of the placement are off them.
        given_back: work of the system in a step of the plain model where freed memory goes back to the system; None
            where it always does, or never.
        recorded: steps that were recorded.
    """

    timed: TimedRun
    kept_bytes: Mapping[str, int]
    computed: tuple[str, ...] = ()
    compared: Compared = field(default_factory=dict)
    given_back: Usage | None = None
    recorded: tuple[RecordedStep, ...] = ()
