"""`try_out`: a placement run for real on this machine, beside the plain model on one device of it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphs.errors import MismatchError
from placement.application import is_by_module, is_training, places_of
from placement.report.trace import Measured, Span, Track, write_trace
from placement.result import Result
from placement.runtime.launch import launch
from placement.runtime.processes import orderly_end, usable_cores

_STDERR = 2  # where what a model prints goes
_RECORDED = 3  # steps of which a trace shows the median one
_WORK = "placement.runtime.trial_work:"


@dataclass(frozen=True)
class DeviceTrial:
    """What one device did in a step.

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
class Trial:
    """Predicted and measured.

    Attributes:
        predicted_step_s: of the placement.
        measured_step_s: median over the steps that count.
        measured_single_step_s: of the plain model in one process on one such device, measured in the same run.
        speedup: measured_single_step_s / measured_step_s.
        outputs_equal, gradients_equal: to those of the plain model, but for rounding; for inference there are no
            gradients to differ.
        steps, dropped: how many were run, and how many of them did not count.
        by_module: whether it was placed by module, and so ran module by module in one process.
        devices: of those that the placement uses.
    """

    predicted_step_s: float
    measured_step_s: float
    measured_single_step_s: float
    speedup: float
    outputs_equal: bool
    gradients_equal: bool
    steps: int
    dropped: int
    by_module: bool
    devices: tuple[DeviceTrial, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self)


def try_out(
    model: str,
    result: Result,
    *,
    train: bool,
    dims: Mapping[str, int] | None = None,
    steps: int = 10,
    dropped: int | None = None,
    seed: int = 0,
    trace: Path | None = None,
) -> Trial:
    """Run a placement with one process for each device it uses, and before that the plain model in one process.

    A placement by module runs in one process, as `placement.apply` does it.

    Args:
        model: a built-in model or ``file.py:function``, which every process makes anew under the seed.
        result: a placement of it.
        train: training steps with Adam, else inference.
        dims: ``"batch"``, the samples of a built-in model.
        steps: how many to run; ``dropped`` of them, half by default, warm up.
        trace: file for the predicted and a measured timeline; the measured one is of further steps.

    Raises:
        MismatchError: the result is for another model, for training where inference is asked or the other way round,
            or there are more devices than this machine has.
        RankError: a process failed, with its reason.
    """
    names = [result.cluster.devices[device].name for device in sorted(set(result.device_numbers().tolist()))]
    places = {name: str(place) for name, place in places_of(result).items()}
    by_module = is_by_module(result.graph)
    if by_module:
        _check_training(result, train)
    else:
        _check_places(list(places.values()))
    with orderly_end(), tempfile.TemporaryDirectory(prefix="placement-") as folder:
        path = Path(folder, "placement.json")
        result.save(path)
        description = {
            "model": model,
            "train": train,
            "dims": dict(dims or {}),
            "seed": seed,
            "steps": steps,
            "dropped": steps // 2 if dropped is None else dropped,
            "recorded": _RECORDED if trace is not None else 0,
            "placement": str(path),
            "reference": str(Path(folder, "reference.safetensors")),
            "devices": places,
            "place": places[names[0]],
        }
        # The host's CPU beside GPUs is one device: it was measured with all its cores.
        pinned = all(place == "cpu" for place in places.values())
        (single,) = launch(f"{_WORK}plain", description, [places[names[0]]], pinned=pinned, stdout=_STDERR)
        if by_module:  # one process drives all devices
            ran_on, kind = [places[names[0]]], "by_module"
        else:
            ran_on, kind = [places[name] for name in names], "plain" if len(names) == 1 else "placed"
        ranks = launch(_WORK + kind, description, ran_on, pinned=pinned, stdout=_STDERR)
    trial = _trial(result, names, single, ranks, description)
    if trace is not None:
        write_trace(result, trace, _measured(trial, ranks))
    return trial


def _trial(
    result: Result, names: list[str], single: dict[str, Any], ranks: list[dict[str, Any]], description: dict[str, Any]
) -> Trial:
    from env.problem import Problem
    from env.simulator import Simulator

    numbers, by_module = result.device_numbers(), is_by_module(result.graph)
    score = Simulator(Problem(result.graph, result.cluster)).score(
        numbers, order=result.order_numbers(), transfer_order=result.transfer_numbers()
    )
    # A step is over when the last process has ended it.
    step_s = statistics.median(max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True))
    single_s = statistics.median(single["step_s"])
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
        measured_step_s=step_s,
        measured_single_step_s=single_s,
        speedup=single_s / step_s,
        outputs_equal=all(rank.get("outputs_equal", True) for rank in ranks),
        gradients_equal=all(rank.get("gradients_equal", True) for rank in ranks),
        steps=description["steps"],
        dropped=description["dropped"],
        by_module=by_module,
        devices=devices,
    )


def _in_own_process(rank: dict[str, Any]) -> dict[str, Any]:
    """What was measured of a device with a process of its own."""
    busy = [total - waited for total, waited in zip(rank["step_s"], rank["waited_s"], strict=True)]
    return {
        "busy_s": statistics.median(busy),
        "peak_bytes": rank["peak_bytes"],
        "kept_bytes": rank.get("kept_bytes", 0),
    }


def _in_one_process(names: list[str], ran: dict[str, Any]) -> list[dict[str, Any]]:
    """What was measured of each of several devices that one process drives, which does not tell them apart."""
    return [{"busy_s": None, "peak_bytes": None, "kept_bytes": ran["kept_bytes"][name]} for name in names]


def _measured(trial: Trial, ranks: list[dict[str, Any]]) -> Measured:
    """The timeline of the recorded step of median length; where none was recorded, the median step as a whole."""
    names = [device.name for device in trial.devices]
    if "recorded" not in ranks[0]:
        return Measured(trial.measured_step_s, (Track(", ".join(names), 0.0, trial.measured_step_s),))
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
    return Measured(trial.measured_step_s, tuple(tracks))


def _check_training(result: Result, train: bool) -> None:
    """Raises: MismatchError: the placement is for training and not asked for, or the other way round."""
    if is_training(result.graph) != train:
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
