"""`try_out`: a placement run for real on this machine, beside the plain model on one device of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from env.problem import Problem
from env.simulation.simulator import Score
from graphs.disk import temporary_folder
from graphs.errors import MismatchError
from graphs.origin import COMPILED, EAGER
from graphs.records import ANY_DEVICE
from placement.measuring.machine.figures import relative_spread
from placement.measuring.models.profiling import check_gradients
from placement.measuring.models.repeats import Repeats, beforehand
from placement.measuring.runs.differences import (
    BUFFER,
    GRADIENT,
    LOSS,
    OUTPUT,
    ROUNDINGS,
    ROUNDINGS_OF_HALVES,
    WEIGHT,
    Compared,
    Difference,
    all_equal,
    largest_difference,
    rounded,
)
from placement.measuring.runs.steps import STEPS, ProcessOutcome, TimedRun, Timeline, TrialTask, timeline, together_s
from placement.processes.processes import orderly_end, usable_cores
from placement.processes.starting import StepProgress
from placement.results.result import Result
from placement.runtime.application import places_of
from placement.runtime.backends import strategy_devices
from placement.runtime.ranks.launch import launch

_STDERR = 2  # where what a model prints goes
_RECORDED = 3  # steps of which a trace shows the median one
_WORK = "placement.measuring.runs.trial_work:"
# Few, since people wait: what is measured for later use is measured longer. Those that are compared have warmed up.
_REPEATS = Repeats(dropped=0, least=2, settled=5, most=50, budget_s=3.0, precision=0.02)
_PATIENCE_S, _PATIENCE_STEPS = 300.0, 100.0  # without a step, before a run is given up


@dataclass(frozen=True)
class DeviceTrial:
    """The part of one device in a step.

    Attributes:
        name: of the device.
        ops: how many it runs.
        busy_s: median time of a step in which it did not wait for others; None where one process drives several.
        predicted_busy_s: the same as predicted.
        peak_bytes: most memory that its process had in a step, Python and libraries with it; None where one process
            drives several.
        predicted_peak_bytes: of tensors and what is kept, as predicted.
        kept_bytes: of the parameters and buffers that are really there.
    """

    name: str
    ops: int
    busy_s: float | None
    predicted_busy_s: float
    peak_bytes: int | None
    predicted_peak_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class KeptMemory:
    """The cost, in a step of the plain model, of memory that an earlier step has freed.

    Attributes:
        faults, system_s: page faults and processor time inside the system, as everything is measured: freed memory is
            kept for the next step.
        given_back_faults, given_back_system_s: the same where freed memory goes back to the system, as it does without
            being told; of one step.
    """

    faults: float
    system_s: float
    given_back_faults: float
    given_back_system_s: float


@dataclass(frozen=True)
class Trial:
    """Predicted and measured.

    Attributes:
        predicted_step_s: of the placement.
        op_times: what that is made of: ``"measured"``, or ``"cost model"`` where the graph has no times of its own for
            some of the devices.
        measured_step_s: median over the steps that count.
        measured_single_step_s: of the plain model in one process on one such device, measured in the same run; where
            the placement uses one device, it is the plain model, and the two are one measurement.
        spread, single_spread: of each of these, interquartile range by median.
        speedup: measured_single_step_s / measured_step_s; None where both are the plain model.
        compared_steps: how many steps, the first ones, were compared.
        outputs_equal: whether the outputs, or the losses, of each of these are those of the plain model but for
            rounding; None where the plain model itself ran.
        gradients_equal: the same of all gradients of the first one; None, too, where there are none, as in inference.
        buffers_equal, weights_equal: the same of all buffers and parameters after the last one, and its update.
        optimizer: that updated them, by name; None in inference.
        largest_difference: of all that was compared; None where the plain model itself ran.
        halves: number formats of two bytes in the step, within whose rounding it was compared.
        steps, dropped: how many were run, and how many of them did not count.
        single_steps, single_dropped: the same of the plain model.
        kept_memory: None where the system keeps memory as it likes (not Linux, or a GPU).
        by_module: whether it was placed by module, and so ran module by module in one process.
        stack: that it ran on: ``"compiled"``, of a result on that stack whose ops are placed; else ``"eager"``.
        devices: of those that the placement uses.
    """

    predicted_step_s: float
    op_times: str
    measured_step_s: float
    measured_single_step_s: float
    spread: float
    single_spread: float
    speedup: float | None
    compared_steps: int
    outputs_equal: bool | None
    gradients_equal: bool | None
    buffers_equal: bool | None
    weights_equal: bool | None
    optimizer: str | None
    largest_difference: Difference | None
    halves: tuple[str, ...]
    steps: int
    dropped: int
    single_steps: int
    single_dropped: int
    kept_memory: KeptMemory | None
    by_module: bool
    stack: str
    devices: tuple[DeviceTrial, ...]

    @property
    def differs(self) -> bool:
        """True if something was compared with the plain model and is not equal."""
        return False in (self.outputs_equal, self.gradients_equal, self.buffers_equal, self.weights_equal)

    @property
    def is_plain(self) -> bool:
        """True if the placement runs the plain model, on one device."""
        return len(self.devices) == 1 and not self.by_module and self.stack == EAGER

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self)


def try_out(
    model: str,
    result: Result,
    *,
    train: bool,
    dims: Mapping[str, int] | None = None,
    steps: int | None = None,
    seed: int = 0,
    recorded: Callable[[Timeline], None] | None = None,
    report: Callable[[str, StepProgress], None] = lambda what, progress: None,
) -> Trial:
    """Run the plain model in one process, and after that a placement with one process for each device it uses.

    A placement by module runs in one process, as `placement.apply` does it; one on a single device is the plain model.
    A result on the stack compiled runs under torch.compile, beside the plain model, which does not.

    Args:
        model: a built-in model or ``file.py:function``, which every process makes anew under the seed.
        result: a placement of it.
        train: training steps, with the optimizer of the result, else inference.
        dims: ``"batch"``, the samples of a built-in model.
        steps: how many to run, half of which warm up; by default as many as their median needs
            (`placement.measuring.models.repeats.Repeats`).
        recorded: called with the timeline of a further step; without it none is recorded.
        report: told what is being run, and how far that is.

    Raises:
        MismatchError: the result is for another model, for training where inference is asked or the other way round,
            there are more devices than this machine has, or the optimizer cannot read a gradient.
        RankError: a process failed, with its reason.
    """
    names = _device_names(result)
    places = {name: str(place) for name, place in places_of(result, ranks=names).items()}
    by_module = result.graph.origin.granularity == "module"
    _check_training(result, train)
    optimizer = result.graph.origin.optimizer or "adam"
    check_gradients(result.graph, optimizer)
    if not by_module:
        _check_places([places[name] for name in names])
    stack = COMPILED if result.stack == COMPILED and not by_module else EAGER
    score, _ = result.schedule()
    with orderly_end(), temporary_folder() as folder:
        task = TrialTask(
            model=model,
            train=train,
            optimizer=optimizer,
            dims=dict(dims or {}),
            seed=seed,
            repeats=_REPEATS if steps is None else Repeats.exactly(steps, steps // 2),
            way=_way(result, names, stack),
            is_compiled=stack == COMPILED,
            is_calm=not result.strategy.is_none,
            # Ops that share a kernel have no times of their own.
            recorded=0 if recorded is None or stack == COMPILED else _RECORDED,
            devices={name: places[name] for name in names},
            halves=_halves(result),
            placement=str(folder / "placement.json"),
            reference=str(folder / "reference.safetensors"),
        )
        result.save(task.placement)
        single, ranks, compared = _measured(task, result, score.step_time_s, report)
    trial = _trial(result, score, names, single, ranks, compared, stack)
    if recorded is not None:
        recorded(timeline(names, trial.measured_step_s, [rank.recorded for rank in ranks]))
    return trial


def _way(result: Result, names: Sequence[str], stack: str) -> Literal["plain", "compiled", "by_module", "ranked"]:
    """The way in which the placement runs, as of `TrialTask.way`."""
    if result.graph.origin.granularity == "module":
        return "by_module"
    if len(names) > 1 or not result.strategy.is_none:
        return "ranked"
    return "plain" if stack == EAGER else "compiled"


def _device_names(result: Result) -> list[str]:
    """The devices of a placement, or of a strategy, in the order of their processes."""
    if result.strategy.is_none:
        return [result.cluster.devices[device].name for device in sorted(set(result.device_numbers().tolist()))]
    return strategy_devices(result)


def _measured(
    task: TrialTask, result: Result, step_s: float, report: Callable[[str, StepProgress], None]
) -> tuple[ProcessOutcome, list[ProcessOutcome], list[Compared]]:
    """Run the plain model and the placement.

    Args:
        step_s: predicted of a step of the placement.

    Returns:
        The outcomes of the one process and of the others, and how far the first steps of these are off.
    """
    places = list(task.devices.values())
    # The host's CPU beside GPUs is one device: it was measured with all its cores.
    pinned = all(place == "cpu" for place in places)
    op_s = Problem(result.graph, result.cluster).op_s
    single_s = float(op_s[:, result.cluster.device_index[next(iter(task.devices))]].sum())

    def run(kind: str, what: str, places: Sequence[str], predicted_s: float = single_s) -> list[Any]:
        told = partial(report, what)
        told(replace(first := beforehand(task.repeats, predicted_s), expected=STEPS + first.expected))
        limit_s = _PATIENCE_S + _PATIENCE_STEPS * predicted_s
        return launch(_WORK + kind, task, places, limit_s=limit_s, pinned=pinned, stdout=_STDERR, report=told)

    (single,) = run("plain", "the plain model", places[:1])
    if task.way == "plain":
        return single, [single], []
    if task.way == "ranked":
        ranks = run("placed", "the placement", places, step_s)
    elif task.way == "compiled":
        ranks = run("placed", "the compiled model", places, step_s)
    else:  # by module: one process drives all devices
        ranks = run("placed", "the placement", places[:1])
    compared = [rank.compared for rank in ranks]
    if all(off.is_equal for rank in compared for off in rank.values()):
        return single, ranks, compared
    (moved,) = run("rounding", "the plain model with other roundings, since results differ", places[:1])
    return single, ranks, rounded(compared, moved, ROUNDINGS_OF_HALVES if task.halves else ROUNDINGS)


def _trial(
    result: Result,
    score: Score,
    names: list[str],
    single: ProcessOutcome,
    ranks: list[ProcessOutcome],
    compared: list[Compared],
    stack: str,
) -> Trial:
    numbers, by_module = result.device_numbers(), result.graph.origin.granularity == "module"
    step_s = together_s([rank.timed for rank in ranks])
    median_s, single_s = statistics.median(step_s), statistics.median(single.timed.step_s)
    is_plain = ranks[0] is single
    index = result.cluster.device_index
    devices = tuple(
        DeviceTrial(
            name=name,
            ops=int((numbers == index[name]).sum()),
            busy_s=None if by_module else _busy_s(ranks[rank].timed),
            predicted_busy_s=float(score.busy_s[index[name]]),
            peak_bytes=None if by_module else ranks[rank].timed.peak_bytes,
            predicted_peak_bytes=int(score.peak_bytes[index[name]]),
            kept_bytes=ranks[0 if by_module else rank].kept_bytes[name],
        )
        for rank, name in enumerate(names)
    )
    return Trial(
        predicted_step_s=score.step_time_s,
        op_times=_op_times(result, names),
        measured_step_s=median_s,
        measured_single_step_s=single_s,
        spread=relative_spread(step_s),
        single_spread=relative_spread(single.timed.step_s),
        speedup=None if is_plain else single_s / median_s,
        compared_steps=0 if is_plain else STEPS,
        outputs_equal=None if is_plain else all_equal(single.computed, compared, (LOSS, OUTPUT)),
        gradients_equal=None if is_plain else all_equal(single.computed, compared, (GRADIENT,)),
        buffers_equal=None if is_plain else all_equal(single.computed, compared, (BUFFER,)),
        weights_equal=None if is_plain else all_equal(single.computed, compared, (WEIGHT,)),
        optimizer=(result.graph.origin.optimizer or "adam") if result.graph.is_training else None,
        largest_difference=None if is_plain else largest_difference(compared),
        halves=_halves(result),
        steps=ranks[0].timed.dropped + len(step_s),
        dropped=ranks[0].timed.dropped,
        single_steps=single.timed.dropped + len(single.timed.step_s),
        single_dropped=single.timed.dropped,
        kept_memory=_kept_memory(single),
        by_module=by_module,
        stack=stack,
        devices=devices,
    )


def _busy_s(timed: TimedRun) -> float:
    return statistics.median(total - waited for total, waited in zip(timed.step_s, timed.waited_s, strict=True))


def _op_times(result: Result, names: list[str]) -> str:
    devices = [device for device in result.cluster.devices if device.name in names]
    known = set(result.graph.time_keys)
    is_measured = all(known & {device.name, device.model, device.kind, ANY_DEVICE} for device in devices)
    return "measured" if is_measured else "cost model"


def _halves(result: Result) -> tuple[str, ...]:
    return tuple(sorted({"bfloat16", "float16"} & set(result.graph.dtypes)))


def _kept_memory(single: ProcessOutcome) -> KeptMemory | None:
    kept, given_back = single.timed.usage, single.given_back
    if given_back is None:
        return None
    return KeptMemory(kept.faults, kept.system_s, given_back.faults, given_back.system_s)


def _check_training(result: Result, train: bool) -> None:
    """Before processes are started and the model is captured.

    Raises:
        MismatchError: the placement is for training and not asked for, or the other way round.
    """
    if result.graph.is_training != train:
        kinds = {True: "a training step", False: "inference"}
        raise MismatchError(
            f"the placement is for {kinds[not train]} and asked for is {kinds[train]}; "
            + ("leave out --train or place the training step." if train else "add --train or place the inference.")
        )


def _check_places(places: list[str]) -> None:
    n_cores = len(usable_cores())
    n_cpus = sum(place == "cpu" for place in places)
    if n_cpus > n_cores:
        raise MismatchError(
            f"the placement uses {n_cpus} CPU devices and this machine has {n_cores} cores; place the model on "
            "--cluster local."
        )
