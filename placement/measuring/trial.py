"""`try_out`: a placement run for real on this machine, beside the plain model on one device of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from env.lanes import without_lanes
from env.problem import Problem
from env.simulation.simulator import Score
from graphs.disk import temporary_folder
from graphs.errors import MismatchError
from graphs.origin import COMPILED, EAGER
from graphs.records import ANY_DEVICE
from placement.measuring.figures import relative_spread
from placement.measuring.profiling import check_gradients
from placement.measuring.repeats import Repeats, beforehand
from placement.processes.processes import orderly_end, usable_cores
from placement.processes.progress import StepProgress
from placement.runtime.application import places_of
from placement.runtime.ranks.launch import launch
from placement.solving.result import Result

_STDERR = 2  # where what a model prints goes
_RECORDED = 3  # steps of which a trace shows the median one
_WORK = "placement.measuring.trial_work:"
GRADIENT = "gradient/"  # what the names of gradients begin with; those of outputs, or the loss, do not


@dataclass(frozen=True)
class DeviceTrial:
    """The part of one device in a step.

    Attributes:
        name: of the device.
        ops: how many it runs.
        busy_s: median time of a step in which it did not wait for others; None where one process drives several.
        predicted_busy_s: the same as predicted.
        peak_bytes: most memory that its process ever had, Python and libraries with it; None where one process drives
            several.
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
class Span:
    """A stretch of a measured step.

    Attributes:
        what: ``"op"``; ``"receive"``, ``"send"`` or ``"expect"`` (getting ready to receive); ``"update"``, that of the
            optimizer.
        op: its number; of a transfer that of the op which made the tensor; -1 for none.
        start_s, end_s: since the first process began the step.
        peer: device at the other end of a transfer.
    """

    what: str
    op: int
    start_s: float
    end_s: float
    peer: str = ""


@dataclass(frozen=True)
class Track:
    """One process's part of a measured step.

    Attributes:
        name: of its device.
        start_s, end_s: when it began, and when it was done.
        spans: in the order that they began; what an op sends in its midst lies within the op.
    """

    name: str
    start_s: float
    end_s: float
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Timeline:
    """A measured step, to be drawn beside the predicted one.

    Attributes:
        step_s: median over the steps that were timed.
        tracks: of one more step, which looking at the clock after every op makes a little longer.
    """

    step_s: float
    tracks: tuple[Track, ...]


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from the plain model's.

    Attributes:
        name: ``"loss"``, ``"output/0"``, or ``"gradient/"`` and a parameter's name.
        share: the largest difference of an entry, relative to the largest entry; infinite for another shape.
    """

    name: str
    share: float


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
        outputs_equal: whether the outputs, or the loss of a training step, are those of the plain model but for
            rounding; None where the plain model itself ran.
        gradients_equal: the same of all gradients; None, too, where there are none, as in inference.
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
    outputs_equal: bool | None
    gradients_equal: bool | None
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
        """Whether something was compared with the plain model and is not equal."""
        return False in (self.outputs_equal, self.gradients_equal)

    @property
    def is_plain(self) -> bool:
        """Whether the placement runs the plain model, on one device."""
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
        train: training steps with Adam, else inference.
        dims: ``"batch"``, the samples of a built-in model.
        steps: how many to run, half of which warm up; by default as many as their median needs
            (`placement.measuring.repeats.Repeats`).
        recorded: called with the timeline of a further step; without it none is recorded.
        report: told what is being run, and how far that is.

    Raises:
        MismatchError: the result is for another model, for training where inference is asked or the other way round,
            there are more devices than this machine has, or Adam cannot read a gradient.
        RankError: a process failed, with its reason.
    """
    names = _device_names(result)
    places = {name: str(place) for name, place in places_of(result, ranks=names).items()}
    places = {name: places[name] for name in names}
    by_module = result.graph.origin.granularity == "module"
    _check_training(result, train)
    check_gradients(result.graph, "adam")
    if not by_module:
        _check_places(list(places.values()))
    stack = COMPILED if result.stack == COMPILED and not by_module else EAGER
    is_single = len(names) == 1 and not by_module and result.strategy.is_none
    repeats = Repeats() if steps is None else Repeats.exactly(steps, steps // 2)
    score, _ = result.schedule()
    with orderly_end(), temporary_folder() as folder:
        description = {
            "model": model,
            "train": train,
            "is_plain": is_single and stack == EAGER,
            "is_compiled": stack == COMPILED,
            "dims": dict(dims or {}),
            "seed": seed,
            "repeats": asdict(repeats),
            # Ops that share a kernel have no times of their own.
            "recorded": 0 if recorded is None or stack == COMPILED else _RECORDED,
            "devices": places,
            "halves": _halves(result),
            "place": places[names[0]],
        }
        single, ranks = _measured(description, result, folder, partial(_run, repeats, report), score.step_time_s)
    trial = _trial(result, score, names, single, ranks, stack)
    if recorded is not None:
        recorded(_timeline(trial, ranks))
    return trial


def _device_names(result: Result) -> list[str]:
    """The devices of a placement, or of a strategy, in the order of their processes."""
    if result.strategy.is_none:
        return [result.cluster.devices[device].name for device in sorted(set(result.device_numbers().tolist()))]
    from baselines.strategies.folding import grid_of  # loads all transforms

    cluster = without_lanes(result.cluster)
    devices = grid_of(cluster, result.strategy).reshape(-1).tolist()
    return [cluster.devices[device].name for device in devices]


def _measured(
    settings: Mapping[str, Any], result: Result, folder: Path, run: Callable[..., list[dict[str, Any]]], step_s: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run the plain model and the placement; the measurements of the one process and of the others.

    Args:
        settings: of `trial_work`, but for the files.
        folder: for the files: the placement, and what the plain model computed.
        run: as `_run` from its third argument on.
        step_s: predicted of a step of the placement.
    """
    path = folder / "placement.json"
    result.save(path)
    description = {**settings, "placement": str(path), "reference": str(folder / "reference.safetensors")}
    places = list(settings["devices"].values())
    op_s = Problem(result.graph, result.cluster).op_s
    single_s = float(op_s[:, result.cluster.device_index[next(iter(settings["devices"]))]].sum())
    (single,) = run("plain", "the plain model", description, places[:1], single_s)
    if settings["is_plain"]:
        return single, [single]
    if result.graph.origin.granularity == "module":  # one process drives all devices
        return single, run("by_module", "the placement", description, places[:1], single_s)
    if len(places) == 1 and result.strategy.is_none:
        return single, run("compiled", "the compiled model", description, places, step_s)
    return single, run("ranked", "the placement", description, places, step_s)


def _run(
    repeats: Repeats,
    report: Callable[[str, StepProgress], None],
    kind: str,
    what: str,
    description: Mapping[str, Any],
    places: Sequence[str],
    predicted_s: float,
) -> list[dict[str, Any]]:
    """Run ``kind`` of `trial_work` on some places; the measurements of each process. ``report`` is told as ``what``."""
    told = partial(report, what)
    told(beforehand(repeats, predicted_s))
    # The host's CPU beside GPUs is one device: it was measured with all its cores.
    pinned = all(place == "cpu" for place in description["devices"].values())
    return launch(_WORK + kind, description, places, pinned=pinned, stdout=_STDERR, report=told)


def _trial(
    result: Result, score: Score, names: list[str], single: dict[str, Any], ranks: list[dict[str, Any]], stack: str
) -> Trial:
    numbers, by_module = result.device_numbers(), result.graph.origin.granularity == "module"
    # A step is over when the last process has ended it.
    step_s = [max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True)]
    median_s, single_s = statistics.median(step_s), statistics.median(single["step_s"])
    is_plain = ranks[0] is single
    index = result.cluster.device_index
    measured = _in_one_process(names, ranks[0]) if by_module else [_in_own_process(rank) for rank in ranks]
    devices = tuple(
        DeviceTrial(
            name=name,
            ops=int((numbers == index[name]).sum()),
            predicted_busy_s=float(score.busy_s[index[name]]),
            predicted_peak_bytes=int(score.peak_bytes[index[name]]),
            **own,
        )
        for name, own in zip(names, measured, strict=True)
    )
    return Trial(
        predicted_step_s=score.step_time_s,
        op_times=_op_times(result, names),
        measured_step_s=median_s,
        measured_single_step_s=single_s,
        spread=relative_spread(step_s),
        single_spread=relative_spread(single["step_s"]),
        speedup=None if is_plain else single_s / median_s,
        outputs_equal=None if is_plain else _equal(single["computed"], ranks, False),
        gradients_equal=None if is_plain else _equal(single["computed"], ranks, True),
        largest_difference=None if is_plain else _largest_difference(ranks),
        halves=_halves(result),
        steps=ranks[0]["dropped"] + len(step_s),
        dropped=ranks[0]["dropped"],
        single_steps=single["dropped"] + len(single["step_s"]),
        single_dropped=single["dropped"],
        kept_memory=_kept_memory(single),
        by_module=by_module,
        stack=stack,
        devices=devices,
    )


def _op_times(result: Result, names: list[str]) -> str:
    devices = [device for device in result.cluster.devices if device.name in names]
    known = set(result.graph.time_keys)
    is_measured = all(known & {device.name, device.model, device.kind, ANY_DEVICE} for device in devices)
    return "measured" if is_measured else "cost model"


def _equal(computed: list[str], ranks: list[dict[str, Any]], of_gradients: bool) -> bool | None:
    """Whether all that the plain model computed, gradients or the rest, is the same on the ranks that have it.

    None where it has computed nothing of the kind, or no finite number.
    """
    numberless = {name for rank in ranks for name, (_, share) in rank["compared"].items() if math.isnan(share)}
    expected = {name for name in computed if name.startswith(GRADIENT) == of_gradients} - numberless
    found = [
        (name, is_equal)
        for rank in ranks
        for name, (is_equal, _) in rank["compared"].items()
        if name not in numberless and name.startswith(GRADIENT) == of_gradients
    ]
    if not expected and not found:
        return None
    return all(is_equal for _, is_equal in found) and expected <= {name for name, _ in found}


def _largest_difference(ranks: list[dict[str, Any]]) -> Difference | None:
    """The largest difference of all tensors that were compared; None where there are none."""
    compared = (pair for rank in ranks for pair in rank["compared"].items())
    off = [(share, name) for name, (_, share) in compared if not math.isnan(share)]
    return None if not off else Difference(*max(off)[::-1])


def _halves(result: Result) -> tuple[str, ...]:
    return tuple(sorted({"bfloat16", "float16"} & set(result.graph.dtypes)))


def _kept_memory(single: dict[str, Any]) -> KeptMemory | None:
    if "given_back" not in single:
        return None
    kept, given_back = single["usage"], single["given_back"]
    return KeptMemory(kept["faults"], kept["system_s"], given_back["faults"], given_back["system_s"])


def _in_own_process(rank: dict[str, Any]) -> dict[str, Any]:
    """Measurements of a device with a process of its own."""
    busy = [total - waited for total, waited in zip(rank["step_s"], rank["waited_s"], strict=True)]
    return {
        "busy_s": statistics.median(busy),
        "peak_bytes": rank["peak_bytes"],
        "kept_bytes": rank.get("kept_bytes", 0),
    }


def _in_one_process(names: list[str], ran: dict[str, Any]) -> list[dict[str, Any]]:
    """Measurements of each of several devices that one process drives, which does not tell them apart."""
    return [{"busy_s": None, "peak_bytes": None, "kept_bytes": ran["kept_bytes"][name]} for name in names]


def _timeline(trial: Trial, ranks: list[dict[str, Any]]) -> Timeline:
    """The timeline of the recorded step of median length; where none was recorded, the median step as a whole."""
    names = [device.name for device in trial.devices]
    if "recorded" not in ranks[0]:
        return Timeline(trial.measured_step_s, (Track(", ".join(names), 0.0, trial.measured_step_s),))
    steps = list(zip(*(rank["recorded"] for rank in ranks), strict=True))
    lengths = [max(own["end_s"] - own["start_s"] for own in step) for step in steps]
    chosen = steps[lengths.index(statistics.median_low(lengths))]
    zero_s = min(own["start_s"] for own in chosen)  # they leave the barrier almost at once
    tracks = []
    for name, own in zip(names, chosen, strict=True):
        spans = (
            Span(what, op, start_s - zero_s, end_s - zero_s, names[peer] if peer >= 0 else "")
            for what, op, start_s, end_s, peer in own["rows"]
        )
        tracks.append(Track(name, own["start_s"] - zero_s, own["end_s"] - zero_s, tuple(spans)))
    return Timeline(trial.measured_step_s, tuple(tracks))


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
