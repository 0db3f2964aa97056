"""`try_out`: a placement run for real on this machine, beside the plain model on one device of it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graphs.errors import MismatchError
from placement.application import places_of
from placement.result import Result
from placement.runtime.launch import launch


@dataclass(frozen=True)
class DeviceTrial:
    """What one device did in a step.

    Attributes:
        name: of the device.
        ops: how many it runs.
        busy_s: median time of a step in which it did not wait for others.
        predicted_busy_s: the same as predicted.
        peak_bytes: most memory that its process ever had, Python and libraries with it.
        predicted_peak_bytes: of tensors and what is kept, as predicted.
        kept_bytes: of the parameters and buffers that are really there.
    """

    name: str
    ops: int
    busy_s: float
    predicted_busy_s: float
    peak_bytes: int
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
) -> Trial:
    """Run a placement with one process for each device it uses, and before that the plain model in one process.

    Args:
        model: a built-in model or ``file.py:function``, which every process makes anew under the seed.
        result: a placement of it.
        train: training steps with Adam, else inference.
        dims: ``"batch"``, the samples of a built-in model.
        steps: how many to run; ``dropped`` of them, half by default, warm up.

    Raises:
        MismatchError: the result is for another model, for training where inference is asked or the other way round,
            or there are more devices than this machine has.
        RankError: a process failed, with its reason.
    """
    numbers = result.device_numbers()
    used = sorted(set(numbers.tolist()))
    places = places_of(result)
    names = [result.cluster.devices[device].name for device in used]
    _check_places([str(places[name]) for name in names])
    with tempfile.TemporaryDirectory(prefix="placement-") as folder:
        path = Path(folder, "placement.json")
        result.save(path)
        description = {
            "model": model,
            "train": train,
            "dims": dict(dims or {}),
            "seed": seed,
            "steps": steps,
            "dropped": steps // 2 if dropped is None else dropped,
            "placement": str(path),
            "reference": str(Path(folder, "reference.safetensors")),
            "devices": {name: str(place) for name, place in places.items()},
        }
        (single,) = launch("placement.runtime.trial_work:plain", description, [str(places[names[0]])])
        kind = "plain" if len(used) == 1 else "placed"
        ranks = launch(f"placement.runtime.trial_work:{kind}", description, [str(places[name]) for name in names])
    return _trial(result, names, single, ranks, description)


def _trial(
    result: Result, names: list[str], single: dict[str, Any], ranks: list[dict[str, Any]], description: dict[str, Any]
) -> Trial:
    from env.problem import Problem
    from env.simulator import Simulator

    numbers = result.device_numbers()
    score = Simulator(Problem(result.graph, result.cluster)).score(
        numbers, order=result.order_numbers(), transfer_order=result.transfer_numbers()
    )
    # A step is over when the last process has ended it.
    step_s = statistics.median(max(times) for times in zip(*(rank["step_s"] for rank in ranks), strict=True))
    single_s = statistics.median(single["step_s"])
    index = result.cluster.device_index
    devices = tuple(
        DeviceTrial(
            name=name,
            ops=int((numbers == index[name]).sum()),
            busy_s=statistics.median(
                total - waited for total, waited in zip(rank["step_s"], rank["waited_s"], strict=True)
            ),
            predicted_busy_s=float(score.busy_s[index[name]]),
            peak_bytes=rank["peak_bytes"],
            predicted_peak_bytes=int(score.peak_bytes[index[name]]),
            kept_bytes=rank.get("kept_bytes", 0),
        )
        for name, rank in zip(names, ranks, strict=True)
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
        devices=devices,
    )


def _check_places(places: list[str]) -> None:
    import os

    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_cpus = sum(place == "cpu" for place in places)
    if n_cpus > n_cores:
        raise MismatchError(
            f"the placement uses {n_cpus} CPU devices and this machine has {n_cores} cores; place the model on "
            "--cluster local."
        )
