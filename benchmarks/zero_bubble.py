"""Zero Bubble (Qi et al., ICLR 2024): bubble rates of named orders, from a file of settings with published rates.

Every setting is a chunked graph of measured times whose blocks run in a named order in the ordinary simulator, on
devices that each have a link to each other. The bubble rate is (time - m (F + B + W)) / time for m micro-batches; time
is the step's, for ZB-H2, ZB-1p and ZB-2p the longest time from a device's own first forward pass.

The published rates of interleaved 1F1B come from a program in which a transfer from the last device back to the first
is waited for only by the first micro-batch of every group. One row repeats that, another waits for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from checks import Found, Row, Summary

from baselines.strategies.costs import PipelineCosts
from baselines.strategies.memory_order import MEMORY_ORDER, memory_order
from baselines.strategies.orders import PipelineOrder, pipeline_order
from env.cluster import UNLIMITED_BYTES, Cluster
from env.device import Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Schedule, Simulator
from graphs.opgraph import Op, OpGraph, Phase, Tensor
from graphs.transforms.derived import Derived
from graphs.transforms.sequencing import WHOLE_BACKWARD, sequenced

_PARTS = ("forward", "backward_input", "backward_weight")
_LIMIT = 1e-4
_ROUNDED = 0.5e-4  # what is lost of a published rate, which has four decimals
_PLAIN = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2"}
_INTERLEAVED = "1F1B-interleaved"
_WITHIN_MEMORY = {"ZB-1p": 1, "ZB-2p": 2}  # times p micro-batches
_SIZES = ("hidden", "heads", "sequence")
_OWN_CLOCK = ("zb-h2", MEMORY_ORDER)  # whose time counts from a device's own first forward pass


def check(path: Path, content: Any) -> Found | None:
    """All settings of a file; None where it holds none."""
    if not (isinstance(content, list) and content and all(_is_setting(entry) for entry in content)):
        return None
    rows: list[Row] = []
    searched: list[Row] = []  # ours are found by a search of our own, and may be better
    for setting in content:
        rates = setting["bubble_rate"]
        p, m = setting["stages"], setting["micro_batches"]
        name = f"{setting.get('model', 'model')} p{p} m{m}"
        seconds = tuple(setting[f"t_{part}_ms"] / 1e3 for part in _PARTS)
        transfer_s = setting["t_comm_ms"] / 1e3
        for published, plain in _PLAIN.items():
            if published in rates:
                ours = bubble_rate(pipeline_order(plain, p, m), seconds, transfer_s)
                rows.append(Row(f"{name} {published}", rates[published], ours))
        if _INTERLEAVED in rates and m % p == 0 and (setting.get("layers", -1) + 2) % p == 0:
            order = pipeline_order("interleaved", p, m, (setting["layers"] + 2) // p)
            relaxed = bubble_rate(order, seconds, transfer_s, relaxed=True)
            rows.append(Row(f"{name} {_INTERLEAVED}", rates[_INTERLEAVED], relaxed))
            rows.append(Row(f"{name} {_INTERLEAVED}, all waits", None, bubble_rate(order, seconds, transfer_s)))
        for published, factor in _WITHIN_MEMORY.items():
            if published in rates and all(key in setting for key in _SIZES):
                order = memory_order(_costs(setting, seconds, transfer_s, factor), m, own_clocks=True)
                ours = bubble_rate(order, seconds, transfer_s)
                searched.append(Row(f"{name} {published}, ours by list scheduling", rates[published], ours))
    worst = max((abs(row.ours - row.published) for row in rows if row.published is not None), default=0.0)
    excess = [row.ours - row.published for row in searched if row.published is not None]
    return Found(
        "Zero Bubble pipelines: bubble rate of each setting and order",
        [*rows, *searched],
        Summary("largest difference of a bubble rate of a named order", worst, _LIMIT),
        note="Published rates of interleaved 1F1B let only the first micro-batch of a group wait for the transfer from "
        "the last device to the first; 'all waits' is what the order takes when every micro-batch does. ZB-1p and "
        "ZB-2p are no named orders but what the paper's heuristic finds in the memory of p and 2p micro-batches; ours "
        "is the order `memory` in the same memory, where less is better; more by less than the published rounding is "
        "as good.",
        further=(Summary("largest excess of an order that is found", max(excess), _ROUNDED),) if excess else (),
    )


def _is_setting(entry: Any) -> bool:
    needed = ("bubble_rate", "stages", "micro_batches", "t_comm_ms", *(f"t_{part}_ms" for part in _PARTS))
    return isinstance(entry, dict) and all(key in entry for key in needed)


def _costs(setting: Any, seconds: tuple[float, float, float], transfer_s: float, factor: int) -> PipelineCosts:
    """Of a setting with the memory of `factor` times p micro-batches; sizes as in the paper, per token and layer."""
    p, hidden = setting["stages"], setting["hidden"]
    forward = 34.0 * hidden + 5.0 * setting["heads"] * setting["sequence"]
    weights = -32.0 * hidden
    held = (forward, -(forward + weights), weights)
    return PipelineCosts(
        tuple(range(p)), (seconds,) * p, (held,) * p, (transfer_s,) * (p - 1), (factor * p * forward,) * p
    )


def bubble_rate(
    order: PipelineOrder, seconds: tuple[float, float, float], transfer_s: float, relaxed: bool = False
) -> float:
    """The share of its time that a device is idle; `seconds` are F, B and W of one micro-batch on one device."""
    p, v = len(order.sequences), len(order.devices)
    derived, stage = chunked_chain(order, [tuple(part * p / v for part in seconds)] * v, transfer_s, relaxed)
    ordered, numbers = sequenced(derived, stage, order.sequences)
    device = np.array(order.devices)[stage[ordered.origin]]
    simulator = Simulator(Problem(ordered.graph, meshed(len(order.sequences))))
    score, schedule = simulator.schedule(Plan(device, numbers))
    time_s = _longest_clock(schedule, device) if order.name in _OWN_CLOCK else score.step_time_s
    return (time_s - order.micro_batches * sum(seconds)) / time_s


def chunked_chain(
    order: PipelineOrder, seconds: Sequence[tuple[float, ...]], transfer_s: float, relaxed: bool = False
) -> tuple[Derived, np.ndarray]:
    """A chain of stages, chunked as the order says, and the virtual stage of each op of its source.

    Where the order runs whole backward passes, each is one op, whose results leave at its end, as autograd's do.

    Args:
        seconds: F, B and W of one micro-batch, for each virtual stage.
        transfer_s: of any tensor from one device to another.
        relaxed: only the first micro-batch of each group of p waits for the last device on the first, or back.
    """
    v, p, m = len(order.devices), len(order.sequences), order.micro_batches
    whole = any(block.kind == WHOLE_BACKWARD for block in order.sequences[0])
    letters = "FB" if whole else "FBW"
    ops, tensors = [], []
    for i in range(m):
        for stage in range(v):
            parts = seconds[stage] if not whole else (seconds[stage][0], sum(seconds[stage][1:]))
            for kind, time_s in zip(letters, parts, strict=True):
                phase = Phase.FORWARD if kind == "F" else Phase.BACKWARD
                ops.append(Op(f"{kind}{stage}.{i}", time_s={"*": time_s}, phase=phase))
            f, b, w = (f"{kind}{stage}.{i}" for kind in "FBW")
            tensors.append(Tensor(f, 0, (b,), 0.0))
            tensors += [] if whole else [Tensor(b, 0, (w,), 0.0)]
            waits = not (relaxed and i % p)  # for the transfer from the last device to the first, or back
            if stage + 1 < v and (waits or (stage + 1) % p):
                tensors.append(Tensor(f, 0, (f"F{stage + 1}.{i}",), transfer_s))
            if stage and (waits or stage % p):
                tensors.append(Tensor(b, 0, (f"B{stage - 1}.{i}",), transfer_s))
    graph = OpGraph.build(ops, tensors, "chain of stages")
    each = len(letters) * v
    source = OpGraph.build(ops[:each], (t for t in tensors if t.producer.endswith(".0")), "chain of stages")
    n = graph.n_ops
    origins = np.arange(n) % each
    none = np.zeros(n, np.int64)
    derived = Derived(graph, source, np.arange(n + 1), origins, none, np.arange(n) // each, none - 1, (), m)
    return derived, np.arange(each) // len(letters)


def meshed(devices: int) -> Cluster:
    """Devices that each have a link to each other, for graphs of measured times."""
    names = [f"device{d}" for d in range(devices)]
    links = [link for a in range(devices) for b in range(a) for link in both_ways(names[a], names[b], 1e12, 0.0)]
    made = (Device(name, "accelerator", UNLIMITED_BYTES, {"float32": 1e12}, 1e12) for name in names)
    return Cluster("meshed", tuple(made), tuple(links))


def _longest_clock(schedule: Schedule, device: np.ndarray) -> float:
    """The longest time from a device's first op to the end of its last."""
    each = (device == d for d in range(int(device.max()) + 1))
    return float(max(schedule.op_end_s[here].max() - schedule.op_start_s[here].min() for here in each))
