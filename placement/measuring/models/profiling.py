"""`profile`: the graph of a model with op times measured on this machine."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from env.cluster import Cluster, Device
from env.problem import Problem
from graphs.capture import Program, capture_program, example_inputs
from graphs.capture.program import captured_step
from graphs.capture.record import Loss
from graphs.errors import ClusterError, MismatchError
from graphs.kept import precision_named
from graphs.op_kinds import op_kind
from graphs.opgraph import FloatArray, OpGraph
from graphs.origin import keep_step
from placement.inputs.call_arguments import bound, check_states
from placement.measuring.machine.figures import spread
from placement.measuring.machine.workers import Worker, cores_for, run_workers
from placement.measuring.models.op_clock import PartOfStep
from placement.measuring.models.op_times import REPEATS, MeasuredStep, StepToMeasure, Times, op_times
from placement.measuring.models.repeats import Repeats, beforehand
from placement.processes.starting import Report, tell_nobody
from placement.runtime.states import accept_gradients, convert

_CPU = torch.device("cpu")
_OF_DENSE = ("adam", "adamw")  # optimizers of torch that take no sparse gradient


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured op times (n ops, k models or kinds of devices).

    Attributes:
        graph: with the medians in ``time_s``, and in ``fixed_s`` what of it every part of an op takes in full.
        spread_s: float64 [n, k] like ``graph.time_s``: the middle half of an op's times lies within this much.
        step_s: by key of ``graph.time_keys`` the measured time of the whole step on one such device, without updates.
        steps: by key, how many times each median is of.
        alone: float64 [n, k]: an op's time while the other devices of its kind rest, over that while they compute; 1
            where that was not measured.
        drawing_s: float64 [n, k]: of an op's time the drawing of its random numbers. A process that runs a part of the
            model draws those of the whole, so that it draws the same.
    """

    graph: OpGraph
    spread_s: FloatArray
    step_s: Mapping[str, float]
    steps: Mapping[str, int]
    alone: FloatArray
    drawing_s: FloatArray

    def typical_spread(self, key: str) -> float:
        """Median over the ops of their spread, relative to their time."""
        column = self.graph.time_keys.index(key)
        time_s, spread_s = self.graph.time_s[:, column], self.spread_s[:, column]
        return float(np.median(spread_s[time_s > 0] / time_s[time_s > 0])) if (time_s > 0).any() else 0.0


def profile(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | None = None,
    train: bool = False,
    *,
    loss: Loss | None = None,
    optimizer: str = "adam",
    precision: str | None = None,
    name: str | None = None,
) -> OpGraph:
    """The graph of a model, as `placement.capture` gives it, with every op's time measured on this machine.

    Each kind of device of the cluster runs the whole step, in the code that a placement runs. CPU devices are worker
    processes pinned to a core each, and all of them measure at the same time, as they will compute at the same time.

    Args:
        model, args, kwargs, train, loss, optimizer, precision, name: as for `placement.capture`, but model and inputs
            have data. The model is not changed.
        cluster: whose devices this machine has; `Cluster.local` by default.

    Raises:
        CaptureError: the model cannot be captured.
        ClusterError: a device of the cluster is not there, or a worker failed.
        MismatchError: the model is on ``meta``.
    """
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "precision": precision, "name": name}
    step = step_to_measure(model, args, kwargs, train, **how)
    return measured_profile(step, cluster).graph


def step_to_measure(
    model: nn.Module,
    args: tuple[Any, ...] | torch.Tensor = (),
    kwargs: Mapping[str, Any] | None = None,
    train: bool = False,
    *,
    loss: Loss | None = None,
    optimizer: str = "adam",
    precision: str | None = None,
    name: str | None = None,
) -> StepToMeasure:
    """Capture the step that `measured_profile` runs; arguments and errors as for `profile`."""
    positional, keywords = example_inputs(args, kwargs)
    check_states(model)
    how: dict[str, Any] = {"loss": loss, "optimizer": optimizer, "precision": precision, "name": name}

    def captured(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Program:
        return capture_program(model, args, kwargs, train, **how)

    program = captured(positional, keywords)
    check_gradients(program.graph, optimizer)
    part = PartOfStep.of(model, program, (positional, keywords), captured)
    if precision is not None:
        model = copy.deepcopy(model)
        convert(model, precision_named(precision))
        accept_gradients(model, precision_named(precision))
    return StepToMeasure(model, program, bound(model, program, positional, keywords), optimizer, part)


def check_gradients(graph: OpGraph, optimizer: str) -> None:
    """Raises: MismatchError: the optimizer cannot read a gradient of the step."""
    sparse = next((op for op, kind in zip(graph.op_names, graph.kinds, strict=True) if op_kind(kind).is_sparse), None)
    if optimizer in _OF_DENSE and sparse is not None:
        raise MismatchError(
            f"op {sparse!r} makes a sparse gradient, and {optimizer}, with which the step is measured, reads dense "
            "ones alone; make the embedding with sparse=False."
        )


def measured_profile(
    step: StepToMeasure, cluster: Cluster | None = None, repeats: Repeats = REPEATS, report: Report = tell_nobody
) -> Profile:
    """As `profile`, with the spread of the times; ``repeats``: how often the step is run; ``report`` is told."""
    machine = Cluster.local() if cluster is None else cluster
    places = {device.name: _place(machine, device) for device in machine.devices}
    op_s = Problem(step.program.graph, machine).op_s
    measured: dict[str, list[MeasuredStep]] = {}
    for key, devices in _by_key(machine).items():
        first = beforehand(repeats, float(op_s[:, machine.device_index[devices[0].name]].sum()))
        report(dataclasses.replace(first, expected=2 * first.expected))  # as `op_times` counts them
        if all(place.type == "cpu" for place in places.values()):
            cores = cores_for(None)[: len(devices)]
            measured[key] = run_workers(partial(_on_core, step=step, repeats=repeats), cores, report=report)
        else:
            measured[key] = [op_times(step, places[devices[0].name], repeats, report=report)]
    found = _profile(step.program.graph, measured)
    keep_step(found.graph, captured_step(step.program))
    return found


def _on_core(worker: Worker, step: StepToMeasure, repeats: Repeats) -> MeasuredStep:
    return op_times(step, _CPU, repeats, worker, worker.report)


def _profile(graph: OpGraph, measured: Mapping[str, list[MeasuredStep]]) -> Profile:
    """The graph with the medians over all steps of all devices of a key.

    Clock readings disturb a little, and medians of skewed times add up to less than the median of their sum: so the
    times are scaled by one factor, such that they add up to the step as it is without readings.
    """
    keys = tuple(sorted(measured))
    time_s, spread_s = (np.full((graph.n_ops, len(keys)), np.nan) for _ in range(2))
    fixed_s, drawing_s, alone = np.zeros(time_s.shape), np.zeros(time_s.shape), np.ones(time_s.shape)
    step_s, steps = {}, {}
    for column, key in enumerate(keys):
        whole = [seconds for part in measured[key] for seconds in part.step_s]
        step_s[key], steps[key] = statistics.median(whole), len(whole)
        own = _pooled([part.ops for part in measured[key]])
        sum_s = sum(statistics.median(samples) for samples in own.values())
        scale = step_s[key] / sum_s if sum_s else 1.0
        drawing, updates = (_pooled([getattr(part, name) for part in measured[key]]) for name in ("drawing", "updates"))
        drawing_s[list(drawing), column] = [statistics.median(samples) for samples in drawing.values()]
        for op in sorted({*own, *drawing, *updates}):
            every = (own, scale), (drawing, 1.0), (updates, 1.0)
            parts = [(times[op], factor) for times, factor in every if op in times]
            time_s[op, column] = round(sum(statistics.median(samples) * factor for samples, factor in parts), 10)
            spread_s[op, column] = round(sum(spread(samples) * factor for samples, factor in parts), 10)
        for op, samples in measured[key][0].alone.items():
            together_s = statistics.median(measured[key][0].ops[op])
            alone[op, column] = statistics.median(samples) / together_s if together_s else 1.0
        fixed = _pooled([part.fixed for part in measured[key]]), _pooled([part.updates_fixed for part in measured[key]])
        for times, factor in zip(fixed, (scale, 1.0), strict=True):
            for op, samples in times.items():
                seconds = round(statistics.median(samples) * factor, 10)
                fixed_s[op, column] = min(max(0.0, seconds), time_s[op, column])
    found = dataclasses.replace(graph, time_keys=keys, time_s=time_s, fixed_s=fixed_s)
    return Profile(found, spread_s, step_s, steps, alone, drawing_s)


def _pooled(parts: Sequence[Times]) -> Times:
    """The samples of all devices, op by op."""
    return {op: [seconds for part in parts for seconds in part[op]] for op in parts[0]}


def _by_key(cluster: Cluster) -> dict[str, list[Device]]:
    """The devices by what their times are kept under: the model, which says more, or else the kind."""
    found: dict[str, list[Device]] = {}
    for device in cluster.devices:
        found.setdefault(device.model or device.kind, []).append(device)
    return found


def _place(cluster: Cluster, device: Device) -> torch.device:
    """The torch device that a device of the cluster stands for, as `placement.apply` has it."""
    if device.kind == "cpu":
        return _CPU
    gpus = [other.name for other in cluster.devices if other.kind == "gpu"]
    if device.name not in gpus[: torch.cuda.device_count()]:
        raise ClusterError(
            f"device {device.name!r} of cluster {cluster.name!r} is a {device.kind}, and this machine has "
            f"{torch.cuda.device_count()} GPUs; profile on the cluster 'local', or on one of devices that are here."
        )
    return torch.device("cuda", gpus.index(device.name))
